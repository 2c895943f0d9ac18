"""What the tables of backends say is what the ops do."""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import OPS, kv_write
from pallas_kernels.common import targets
from pallas_kernels.common.dispatch import PLATFORMS, Backend, Op, choose, run
from pallas_kernels.common.layout import PoolShape
from pallas_kernels.common.spec import WriteSpec
from pallas_kernels.common.targets import CHIPS, CPUS, chip, chip_for, chip_of_kind, cpu
from pallas_kernels.kv_write import OP as KV_WRITE
from pallas_kernels.workload import Attention
from pallas_kernels.workload_matmul import Grouped, Quantized


@pytest.mark.parametrize(
    ("platform", "width", "name"),
    [("cpu", 128, "xla_tokens"), ("cuda", 128, "mosaic_gpu"), ("tpu", 8, "xla_blocks"), ("tpu", 128, "mosaic_tpu")],
)
def test_kv_write_lowers_to_the_backend_that_is_chosen(platform: str, width: int, name: str):
    pool = jax.ShapeDtypeStruct((1, 4, 2, 1, 8, width), jnp.float32)
    new, slots = jax.ShapeDtypeStruct((4, 1, width), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)
    traced = jax.jit(lambda kv, k, slots: kv_write(kv, k, k, 0, slots, num_rows=2)).trace(pool, new, slots)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    spec = WriteSpec(4, 2, width, PoolShape(1, 4, 1, 8, width), "float32")
    assert choose(KV_WRITE, spec, platform).name == name
    assert ("stablehlo.dynamic_update_slice" in text) == (name == "xla_blocks")
    assert ("tpu_custom_call" in text) == (name == "mosaic_tpu")


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_op_takes_every_call_on_every_platform(op: Op):
    last = op.backends[-1]
    assert not last.platforms and last.supports(None, None) is None
    assert len({backend.name for backend in op.backends}) == len(op.backends)
    assert {choose(op, op.typical, platform).name for platform in PLATFORMS} <= {backend.name for backend in op.backends}


ADD = Op(
    "add",
    (
        Backend("small", ("tpu",), "", lambda spec, chip: "takes at most 3" if spec > 3 else None),
        Backend("any", (), ""),
    ),
    typical=1,
)
FUNCTIONS = {"small": lambda x, chip: x + 1, "any": lambda x, chip: x * 7 + 2}


def call(spec: int, backend: str | None = None, platform: str | None = None):
    return run(ADD, FUNCTIONS, spec, (jnp.int32(0),), backend=backend, platform=platform)


def test_the_first_backend_that_takes_the_call_runs():
    assert call(1) == 2  # on this machine, which is no TPU
    assert call(1, platform="tpu") == 1
    assert call(4, platform="tpu") == 2
    assert call(1, backend="small") == 1
    texts = [
        jax.jit(lambda x: run(ADD, FUNCTIONS, 1, (x,), backend=None, platform=None))
        .trace(jnp.int32(0))
        .lower(lowering_platforms=(p,))
        .as_text()
        for p in ("cpu", "tpu")
    ]
    assert ["stablehlo.multiply" in text for text in texts] == [True, False]


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ({"spec": 4, "backend": "small"}, "add cannot run as small: it takes at most 3"),
        ({"spec": 1, "backend": "small", "platform": "cpu"}, "add cannot run as small: it is for tpu"),
        ({"spec": 1, "backend": "none"}, "backend of add must be small or any; got none"),
        ({"spec": 1, "platform": "gpu"}, "platform must be one of cpu, cuda, rocm, tpu; got gpu"),
    ],
)
def test_what_run_refuses(args: dict, match: str):
    with pytest.raises(ValueError, match=match):
        call(**args)


LOADS = (
    Attention(2, 40, kv_heads=1, dtype="float32"),
    Attention(2, 40, kv_heads=1, dtype="float32", new=9),
    Quantized(3, 1024, 2048, "float32"),
    Grouped(80, 64, 1024, "float32", 8),
)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.op)
@pytest.mark.parametrize("backend", [None, "xla"])
def test_xla_is_for_the_platform_that_a_program_is_lowered_for(load, backend: str | None):
    """Products of f32 are f32 on every one, and blocks that fit a CPU's caches are for CPUs alone."""
    traced = jax.jit(load.function(backend)).trace(*load.shapes())
    for platform in ("rocm", *(["cpu", "tpu", "cuda"] if backend else [])):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
        assert products and all("HIGHEST" in line for line in products)
        if load.op == "quant_matmul":
            assert ("stablehlo.while" in text) == (platform == "cpu")


def test_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """By the widest instructions, and the largest cache, that Linux tells of."""
    assert cpu().name in ("cpu", *(f"cpu {name}" for name in CPUS)) and chip_for("cpu") is cpu()
    info, caches = tmp_path / "cpuinfo", tmp_path / "cache"
    monkeypatch.setattr(targets, "CPU_INFO", info)
    monkeypatch.setattr(targets, "CPU_CACHES", caches)
    told = lambda: (cpu.__wrapped__().name, cpu.__wrapped__().fast_memory)
    assert told() == ("cpu", 0)
    info.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\n\nprocessor\t: 1\nflags\t\t: fpu avx2 avx512f\n")
    for number, size in enumerate(("48K\n", "32768K\n", "1024K\n")):
        (caches / f"index{number}").mkdir(parents=True)
        (caches / f"index{number}" / "size").write_text(size)
    assert told() == ("cpu avx512f", 32 << 20)
    info.write_text("processor\t: 0\nFeatures\t: fp sve\n")
    assert told() == ("cpu", 32 << 20)
    info.unlink()
    info.mkdir()  # what cannot be read
    (caches / "index1" / "size").unlink()
    (caches / "index1" / "size").mkdir()
    assert told() == ("cpu", 1 << 20)


def test_chips(monkeypatch: pytest.MonkeyPatch):
    assert chip_for("rocm") is None
    assert chip_for("tpu") == chip("v5e") and chip_for("cuda") == chip("sm_90a")
    device = AbstractDevice(device_kind="TPU v6e", num_cores=1, platform="tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        assert chip_for("tpu") == chip("v6e")
    for kind, capability, wanted in (
        ("NVIDIA L4", "8.9", chip("sm_80")),
        ("NVIDIA H20", "9.0", chip("sm_90a")),
        ("TPU v99", None, None),
    ):
        platform = "cuda" if capability else "tpu"
        own = SimpleNamespace(device_kind=kind, compute_capability=capability, platform="gpu" if capability else "tpu", client=None)
        monkeypatch.setattr(jax, "devices", lambda own=own: [own])
        assert chip_for(platform) == wanted
        mesh = AbstractMesh((), (), abstract_device=AbstractDevice(kind, 1, "gpu" if capability else "tpu"))
        with use_abstract_mesh(mesh):
            assert chip_for(platform) == wanted, "under a mesh, whose devices do not tell it, as without one"
    amd = SimpleNamespace(
        device_kind="MI300X", compute_capability="gfx942", platform="gpu", client=SimpleNamespace(platform_version="rocm 7")
    )
    monkeypatch.setattr(jax, "devices", lambda: [amd])
    assert chip_for("cuda") == chip("sm_90a") and chip_for("rocm") is None
    assert all(chip_of_kind(kind) == c for c in CHIPS for kind in c.kinds)
    assert chip_of_kind("NVIDIA L4", "8.9") == chip("sm_80") and chip_of_kind("NVIDIA T4", "7.5") is None
    assert chip_of_kind("NVIDIA H800", "9.0") == chip("sm_90a") and chip_of_kind("NVIDIA RTX 6000", "12.0") is None
    with pytest.raises(ValueError, match="chip must be one of v5e, .*; got v4"):
        chip("v4")
