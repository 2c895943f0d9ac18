"""What bench/kernels.py and bench/gpu_checks.py run on an H200 compiles for one: nobody wants to find out there."""

import functools

import pytest

from bench.gpu_checks import LOADS
from bench.kernels import SERVING, repeated
from pallas_kernels import OPS
from pallas_kernels.aot.compile import compile_for
from pallas_kernels.aot.targets import missing
from pallas_kernels.common.targets import chip

pytestmark = [
    pytest.mark.aot_gpu,
    pytest.mark.kernels_full,
    pytest.mark.skipif(missing("sm_90a") is not None, reason=str(missing("sm_90a"))),
]
CALLS = [
    pytest.param(load, backend.name, times, id=f"{load.op} {load.name} {backend.name}")
    for loads, times in ((SERVING, 16), (LOADS, 1))
    for load in loads
    for backend in next(op for op in OPS if op.name == load.op).backends
    if backend.refuses(load.spec, "cuda", chip("sm_90a")) is None
]


@pytest.mark.parametrize(("load", "backend", "times"), CALLS)
def test_compiles(load, backend: str, times: int):
    f = load.function(backend)
    if times > 1:
        f = functools.partial(repeated(f, 0 if load.donate else 1, times, bool(load.donate)))
    report = compile_for("sm_90a", f, *load.shapes(), donate=load.donate)
    assert report.temp_bytes < 1 << 30 or backend.startswith("xla")
