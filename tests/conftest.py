"""Tests run on eight simulated CPU devices, so that sharding is real; set before jax is imported."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import load_params, open_checkpoint
from pagedjax.config import EngineConfig, resolve, with_options
from pagedjax.device.sharding import make_mesh
from pagedjax.engine import Engine

STORIES = Path(__file__).parent / "golden" / "stories260K"


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One folder of compiled programs for the whole run, all its processes: an engine of a shape that was built before starts at
    once."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "compile-cache"
    folder.mkdir(exist_ok=True)
    return str(folder)


@functools.cache
def load_stories(model: int, stacked: bool, dtype: str):
    mesh = make_mesh(model)
    checkpoint = open_checkpoint(STORIES)
    return checkpoint, mesh, *load_params(checkpoint, dtype=dtype, mesh=mesh, stacked=stacked)  # pyright: ignore


@pytest.fixture(scope="session")
def stories_engine(compile_cache: str) -> Callable[..., Engine]:
    """Builds (or takes again, when it is idle) an engine for stories260K; few and small buckets unless told otherwise."""

    @functools.cache
    def build(*, stacked: bool = False, **options) -> Engine:
        defaults = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 16}
        defaults |= {"buckets.decode_rows": (4,), "buckets.prefill_tokens": (32,), "cache.kv_memory": 2 << 20}
        config = with_options(EngineConfig(compile_cache=compile_cache), defaults | options)
        checkpoint, mesh, params, layout = load_stories(config.sharding.model, stacked, config.dtype)
        dtype = "float32" if config.dtype == "auto" else config.dtype
        return Engine(checkpoint.config, layout, params, resolve(config, checkpoint.config, "cpu", dtype), mesh)

    return build
