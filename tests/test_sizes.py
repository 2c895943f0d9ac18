"""What is decided before anything is compiled: buckets, the size of the pool, the rules of the configuration."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.buckets import Bucket, make_buckets, pick, within
from pagedjax.config import BucketConfig, CacheConfig, EngineConfig, ModelConfig, ScheduleConfig, resolve, with_options
from pagedjax.device.compile import open_compile_cache
from pagedjax.device.sharding import make_mesh
from pagedjax.errors import UserError
from pagedjax.memory import CPU_LIMIT, available_memory, pool_blocks, pool_shape, rounded_down

MODEL = ModelConfig("llama", 512, 64, 5, 8, 4, 8, 172, 512)


def sized(lanes: int, budget: int, **options) -> EngineConfig:
    return with_options(EngineConfig(), {"max_num_seqs": lanes, "max_num_batched_tokens": budget, **options})


@pytest.mark.parametrize("lanes", [1, 2, 32])
@pytest.mark.parametrize("one_row", [True, False])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_every_plan_has_a_bucket(lanes: int, one_row: bool, on_cpu: bool) -> None:
    for budget in range(lanes + 1, 81):
        buckets = make_buckets(sized(lanes, budget), on_cpu=on_cpu, one_row=one_row)
        for tokens in range(1, budget + 1):
            for rows in range(1, min(lanes, tokens) + 1):
                bucket = pick(buckets, tokens, rows)
                assert bucket.tokens >= tokens and bucket.rows >= rows
                assert tokens == rows or not bucket.is_decode


def test_several_steps_take_a_decode_bucket() -> None:
    """Whatever else is smaller: the others run one pass."""
    buckets = (Bucket(32, 16), Bucket(64, 64), Bucket(128, 64))
    assert pick(buckets, 10, 10) == Bucket(32, 16)
    assert pick(buckets, 10, 10, steps=4) == Bucket(64, 64)


@pytest.mark.parametrize("budget", range(2, 12))
def test_fewer_buckets_where_a_start_may_compile_few(budget: int) -> None:
    config = sized(32, 512, **{"buckets.compile_budget": budget})
    buckets = make_buckets(config, on_cpu=False, one_row=False)
    whole = make_buckets(sized(32, 512), on_cpu=False, one_row=False)
    assert len(whole) == 8 and len(buckets) == min(budget, 8)
    assert set(buckets) <= set(whole) and Bucket(32, 32) in buckets and Bucket(512, 32) in buckets
    assert all(pick(buckets, tokens, 32) for tokens in range(32, 513)) and all(pick(buckets, rows, rows) for rows in range(1, 33))


def test_sizes_that_help_least_go_first() -> None:
    """Without 6 a plan is rounded up by less than 2, without any of the others by 4 or more."""
    assert within(5, (1, 4, 6, 8, 32), (128,)) == ((1, 4, 8, 32), (128,))
    assert within(0, (1, 4), (128,)) == within(3, (1, 4), (128,)) == ((1, 4), (128,))
    assert within(2, (1, 4), (32, 128)) == ((4,), (128,))


def test_one_row_is_a_bucket_only_where_it_is_worth_one() -> None:
    config = sized(1, 2)
    assert min(make_buckets(config, on_cpu=True, one_row=True)).rows == 1
    assert all(b.rows >= 2 for b in make_buckets(config, on_cpu=True, one_row=False))
    assert all(b.rows >= 2 for b in make_buckets(sized(4, 8, **{"buckets.prefill_tokens": (2, 8)}), on_cpu=True, one_row=False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets.decode_rows": (1, 4)}, "decode_rows must start at 2 or more .* got 1"),
        ({"buckets.prefill_tokens": (1, 8)}, "prefill_tokens must start at 2 or more .* got 1"),
        ({"buckets.decode_rows": (2,)}, "the largest of decode_rows must be at least max_num_seqs 4; got 2"),
        ({"buckets.prefill_tokens": (7,)}, "the largest of prefill_tokens must be at least max_num_batched_tokens 8; got 7"),
    ],
)
def test_buckets_that_will_not_do(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_buckets(sized(4, 8, **options), on_cpu=True, one_row=False)


def test_a_prefill_bucket_is_above_its_rows() -> None:
    with pytest.raises(UserError, match="the largest of prefill_tokens must be above 2, the rows it holds; got 2"):
        make_buckets(sized(1, 2, **{"buckets.prefill_tokens": (2,)}), on_cpu=True, one_row=False)


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.sampled_from([2, 16]))
def test_rounding_down(count: int, most: int, parts: int) -> None:
    """Never above count or most, at most 1 / (parts + 1) below, and its own fixed point."""
    rounded = rounded_down(count, most, parts=parts)
    assert rounded <= min(count, most)
    assert rounded == most or rounded * (parts + 1) > count * parts - (parts + 1)
    assert rounded_down(rounded, most, parts=parts) == rounded


def test_rounding_is_coarse() -> None:
    assert sorted({rounded_down(n, 1000, parts=2) for n in range(64)}) == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]
    assert {rounded_down(n, 1000, parts=16) for n in range(512, 544)} == {512}


def test_starts_with_about_the_same_memory_have_the_same_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks(memory: int, to_load: int = 0, **options) -> int:
        monkeypatch.setattr("pagedjax.memory.available_memory", lambda: memory)
        config = resolve(with_options(EngineConfig(), options), MODEL, "cpu", "float32")
        return pool_blocks(config, MODEL, make_mesh(1), to_load=to_load, temp_bytes=lambda: 0)

    per_block = 5 * 2 * 4 * 64 * 8 * 4
    assert {blocks(4 * per_block * n + 77) for n in range(48, 64)} == {48}
    assert blocks(4 * per_block * 100, to_load=4 * per_block * 50) == 48, "weights that are on their way have their room"
    assert blocks(1 << 40) == 32 * 512 // 64 + 1, "all lanes at full length"
    assert blocks(1 << 40, **{"cache.kv_memory": 50 * per_block}) == 50, "what is asked for is not rounded"
    many = {"max_num_seqs": 10_000, "max_num_batched_tokens": 10_001}
    assert blocks(1 << 40, **many) == CPU_LIMIT // per_block
    with pytest.raises(UserError, match="kv_memory must hold at least 2 blocks"):
        blocks(4 * per_block)


def test_a_block_holds_the_layers_of_one_group() -> None:
    """Gemma 3 1B: 4 full and 22 window layers make 7 groups of 4, so that a block is 4 / 26 of one of all layers."""
    uniform = replace(MODEL, num_layers=26)
    gemma = replace(uniform, layer_pattern=("window", "window", "window", "window", "window", "full"), window=64)
    models = {"uniform": uniform, "gemma": gemma}
    config = resolve(with_options(EngineConfig(), {"max_num_seqs": 2, "cache.kv_memory": 26 * 1000 << 10}), MODEL, "cpu", "float32")
    shapes = {name: pool_shape(config, model, "cpu", 9) for name, model in models.items()}
    assert shapes == {"uniform": (26, 9, 2, 4, 64, 8), "gemma": (4, 9, 2, 4, 64, 8)}
    small = with_options(config, {"cache.kv_memory": 4 * 26 * 2 * 4 * 64 * 8 * 4})
    blocks = {name: pool_blocks(small, model, make_mesh(1), to_load=0, temp_bytes=lambda: 0) for name, model in models.items()}
    assert blocks == {"uniform": 4, "gemma": 26}
    most = {name: pool_blocks(config, model, make_mesh(1), to_load=0, temp_bytes=lambda: 0) for name, model in models.items()}
    assert most == {"uniform": 2 * 512 // 64 + 1, "gemma": 2 * 512 // 64 * 7 + 1}, "all lanes at full length, in every group"


def test_available_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    built_in = available_memory(meminfo)
    assert built_in > 1 << 28
    meminfo.write_text("MemTotal:  9999 kB\nMemFree:  12 kB\nMemAvailable:   4321 kB\n")
    assert available_memory(meminfo) == 4321 * 1024
    meminfo.write_text("MemTotal:  9999 kB\n")
    assert available_memory(meminfo) == built_in


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EngineConfig(dtype="half"), "dtype must be one of auto, float32, bfloat16; got 'half'"),  # pyright: ignore
        (lambda: CacheConfig(kv_dtype="fp8"), "kv_dtype must be one of auto, float32, bfloat16, int8, float8_e4m3fn; got 'fp8'"),  # pyright: ignore
        (lambda: BucketConfig(decode_rows=(4, 2)), r"decode_rows must be positive and ascending; got \(4, 2\)"),
        (lambda: BucketConfig(prefill_tokens=(2.5,)), r"prefill_tokens must be integers; got \(2.5,\)"),  # pyright: ignore
        (lambda: BucketConfig(compile_budget=1), "compile_budget must be 2 or more .* or 0; got 1"),
        (lambda: BucketConfig(decode_rows=4), "decode_rows must be integers; got 4"),  # pyright: ignore
        (
            lambda: ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=4),
            "max_num_batched_tokens must be above max_num_seqs .* got 4 and 4",
        ),
        (
            lambda: resolve(with_options(EngineConfig(), {"max_num_batched_tokens": 32}), MODEL, "cpu", "float32"),
            "max_num_batched_tokens must be above max_num_seqs .* got 32 and 32",
        ),
    ],
)
def test_rules_of_the_configuration(make, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_lists_of_sizes_become_tuples() -> None:
    config = BucketConfig(decode_rows=[1, 4], prefill_tokens=[32])  # pyright: ignore[reportArgumentType]
    assert config == BucketConfig(decode_rows=(1, 4), prefill_tokens=(32,)) == replace(config)
    assert hash(config) == hash(BucketConfig(decode_rows=(1, 4), prefill_tokens=(32,)))


def test_a_compile_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="compile_cache must be a folder that can be made and written; got .*file"):
        open_compile_cache(str(tmp_path / "file" / "cache"), "cpu")
