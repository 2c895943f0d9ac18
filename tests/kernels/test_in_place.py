"""The three ops inside a step: the pool is written in place, in every kind of loop, with no temporary the size of a layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import kv_write, paged_attention, paged_decode
from pallas_kernels.common.testing import make_context
from pallas_kernels.kv_write import reference as write_reference
from pallas_kernels.paged_attention import reference

LAYERS, KV_HEADS, GROUP, WIDTH, BLOCK = 3, 2, 2, 16, 8
SCALE = WIDTH**-0.5


def layer_of_step(q, kv, layer, batch, *, decode: bool, backend: str | None = None):
    """Writes keys and values made of q, attends, and gives the next layer's q."""
    rows = batch["lens"].shape[0]
    k, v = q[:, :KV_HEADS] + 1, q[:, KV_HEADS:] - 1
    kv = kv_write(kv, k, v, layer, batch["slots"], num_rows=rows, backend=backend)
    if decode:
        out = paged_decode(q, kv, layer, batch["tables"], batch["lens"], scale=SCALE)
    else:
        rest = batch["tables"], batch["lens"], batch["query_start"], batch["num_decode"]
        out = paged_attention(q, kv, layer, *rest, scale=SCALE)
    return q + out.astype(q.dtype), kv


def unrolled(layer, q, kv):
    for j in range(LAYERS):
        q, kv = layer(q, kv, j)
    return q, kv


def scanned(layer, q, kv):
    return lax.scan(lambda c, j: (layer(*c, j), None), (q, kv), jnp.arange(LAYERS))[0]


def looped(layer, q, kv):
    """A while loop whose body is a scan, as a dispatch of several decode steps is; here of one."""
    body = lambda c: (c[0] + 1, *scanned(layer, c[1], c[2]))
    return lax.while_loop(lambda c: c[0] < 1, body, (jnp.int32(0), q, kv))[1:]


def make_step(loop, **options):
    def step(kv, q, batch):
        return loop(lambda q, kv, j: layer_of_step(q, kv, j, batch, **options), q, kv)

    return step


def make_batch(rows: tuple[tuple[int, int], ...], *, dtype: str, tokens: int, blocks: int = 0):
    """(kv, q, batch) of rows (context length, new tokens); every layer holds the context, the new tokens' slots hold NaN.
    `blocks` more in the pool, so that it is far larger than anything else."""
    rng = np.random.default_rng(3)
    lens = tuple(n for n, _ in rows)
    context = make_context(rng, lens, kv_heads=KV_HEADS, block_size=BLOCK, width=WIDTH, layers=LAYERS, dtype=dtype)
    kv = np.stack([context.kv[1] * x for x in (1, 0.5, 2)]).astype(context.kv.dtype)
    kv = np.concatenate([kv, np.full((LAYERS, blocks, *kv.shape[2:]), np.nan, kv.dtype)], 1)
    slots = np.zeros(tokens, np.int32)
    starts = np.cumsum([0, *(n for _, n in rows)]).astype(np.int32)
    for s, (length, n) in enumerate(rows):
        at = length - n + np.arange(n)
        slots[starts[s] : starts[s] + n] = context.block_tables[s, at // BLOCK] * BLOCK + at % BLOCK
    kv[:, slots // BLOCK, :, :, slots % BLOCK] = np.nan
    q = rng.standard_normal((tokens, KV_HEADS * GROUP, WIDTH)).astype(np.float32)
    batch = {"slots": slots, "tables": context.block_tables, "lens": context.context_lens, "query_start": starts}
    return kv, q, batch | {"num_decode": np.array([sum(n == 1 for _, n in rows)], np.int32)}


def numpy_step(kv, q, batch):
    for j in range(LAYERS):
        k, v = (q[:, :KV_HEADS] + 1).astype(kv.dtype), (q[:, KV_HEADS:] - 1).astype(kv.dtype)
        kv, _ = write_reference(kv, k, v, j, batch["slots"])
        out = reference(q.astype(kv.dtype), kv, j, batch["tables"], batch["lens"], batch["query_start"], scale=SCALE)
        q = (q + out).astype(np.float32)
    return q, kv


DECODE = ((9, 1), (30, 1), (8, 1))
MIXED = ((9, 1), (30, 1), (17, 12), (0, 0))


@pytest.mark.parametrize("loop", [unrolled, scanned, looped], ids=lambda loop: loop.__name__)
@pytest.mark.parametrize(
    ("rows", "tokens", "decode"), [(DECODE, 3, True), (((9, 1),), 1, True), (MIXED, 16, False), (((9, 1), (0, 0)), 1, False)]
)
def test_a_step_in_place(rows, tokens, decode, loop):
    kv, q, batch = make_batch(rows, dtype="float32", tokens=tokens, blocks=400)
    step = jax.jit(make_step(loop, decode=decode), donate_argnums=0).lower(kv, q, batch).compile()
    memory = step.memory_analysis()
    assert memory.alias_size_in_bytes == kv.nbytes
    assert memory.temp_size_in_bytes < kv.nbytes / LAYERS / 2
    want_q, want_kv = numpy_step(kv, q, batch)
    got_q, got_kv = step(jnp.asarray(kv), q, batch)
    np.testing.assert_allclose(np.asarray(got_q), want_q, rtol=0, atol=1e-4)
    np.testing.assert_allclose(np.asarray(got_kv)[:, 1:], want_kv[:, 1:], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("rows", "tokens", "decode"), [(DECODE, 3, True), (((9, 1),), 1, True), (MIXED, 16, False)])
def test_bf16_makes_no_f32_pool(rows, tokens, decode):
    kv, q, batch = make_batch(rows, dtype="bfloat16", tokens=tokens, blocks=400)
    memory = jax.jit(make_step(scanned, decode=decode), donate_argnums=0).lower(kv, q, batch).compile().memory_analysis()
    assert memory.alias_size_in_bytes == kv.nbytes
    assert memory.temp_size_in_bytes < kv.nbytes / LAYERS / 2


@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
def test_blocks_and_tokens_write_the_same(rows):
    tokens = sum(n for _, n in rows) + 1
    kv, q, batch = make_batch(rows, dtype="float32", tokens=tokens)
    results = []
    for backend in ("xla_tokens", "xla_blocks"):
        step = jax.jit(make_step(scanned, decode=False, backend=backend))
        results.append([np.asarray(x) for x in step(kv, q, batch)])
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1][:, 1:], results[1][1][:, 1:])


@pytest.mark.parametrize(
    ("rows", "tokens", "decode", "shards"), [(DECODE, 3, True, 2), (MIXED, 16, False, 4)], ids=["decode on 2", "mixed on 4"]
)
def test_kv_heads_over_devices(rows, tokens, decode, shards):
    """Each device holds K / shards heads of the pool and writes and attends on its own."""
    kv, q, batch = make_batch(rows, dtype="float32", tokens=tokens)
    times = 2  # 4 kv heads in all
    kv, wide = np.concatenate([kv, kv * 0.5], 3), np.concatenate([q, q[:, ::-1] * 0.5], 1)
    mesh = jax.make_mesh((shards,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    heads, pool = jax.P(None, "model"), jax.P(None, None, None, "model")

    def local(kv, q, k, v, batch):
        for j in range(LAYERS):
            kv = kv_write(kv, k, v, j, batch["slots"], num_rows=len(rows))
            if decode:
                q = q + paged_decode(q, kv, j, batch["tables"], batch["lens"], scale=SCALE)
            else:
                rest = batch["tables"], batch["lens"], batch["query_start"], batch["num_decode"]
                q = q + paged_attention(q, kv, j, *rest, scale=SCALE)
        return q, kv

    k, v = wide[:, : KV_HEADS * times], wide[:, KV_HEADS * times :]
    specs = (pool, heads, heads, heads, jax.P())
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(heads, pool), check_vma=False)
    got_q, got_kv = jax.jit(sharded)(kv, wide, k, v, batch)
    want_q, want_kv = jax.jit(local)(kv, wide, k, v, batch)
    assert len(got_kv.sharding.device_set) == shards
    np.testing.assert_allclose(np.asarray(got_q), np.asarray(want_q), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(got_kv)[:, 1:], np.asarray(want_kv)[:, 1:])


def test_a_wrong_block_table_changes_the_result():
    """The control of every comparison above: each row reads its own blocks."""
    kv, q, batch = make_batch(((30, 1), (30, 1)), dtype="float32", tokens=2)
    step = jax.jit(make_step(scanned, decode=True))
    right, _ = step(kv, q, batch)
    wrong, _ = step(kv, q, batch | {"tables": batch["tables"][::-1]})
    want, _ = numpy_step(kv, q, batch)
    np.testing.assert_allclose(np.asarray(right), want, rtol=0, atol=1e-4)
    assert np.isfinite(np.asarray(wrong)).all()
    assert np.abs(np.asarray(wrong) - want).max() > 0.1
