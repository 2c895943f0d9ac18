"""The ops under a mesh wrap themselves in shard_map: the same results as on one device, and nothing is gathered."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import grouped_matmul, kv_write, paged_attention, paged_decode, quant_matmul, quantize_int4, quantize_int8
from pallas_kernels.quant_matmul import Int4Weight, Int8Weight

RNG = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


KV, Q, NEW = normal(2, 7, 2, 4, 4, 16), normal(3, 8, 16), normal(3, 4, 16)
INT8, SCALES = jnp.asarray(RNG.integers(-127, 128, KV.shape), jnp.int8), jnp.abs(normal(2, 7, 2, 4, 4)) / 50
TABLES, LENS = jnp.asarray(RNG.integers(1, 7, (3, 4)), jnp.int32), jnp.array([16, 3, 0], jnp.int32)
SLOTS = jnp.array([5, 9, 24], jnp.int32)
STARTS, DECODES = jnp.array([0, 2, 3, 3], jnp.int32), jnp.array([0], jnp.int32)
SINKS = normal(8)
X, W, X512, W512 = normal(6, 64), normal(32, 64), normal(6, 512), normal(32, 512)
ROWS, EXPERTS, SIZES = normal(40, 24), normal(8, 16, 24), jnp.array([3, 0, 9, 1, 0, 7, 12, 2], jnp.int32)
HEADS = P(None, None, None, "x")


class Call(NamedTuple):
    f: Callable[..., Any]  # of args, and sharding=
    args: tuple[Any, ...]
    specs: tuple[Any, ...]  # of args, trees as they are
    main: P  # of the array that decides
    wanted: Any  # how the results are sharded


def decode(q, kv, sinks, kv_scales=None, **options):
    more = {"sinks": sinks, "kv_scales": kv_scales, "return_lse": True}
    return paged_decode(q, kv, 1, TABLES, LENS, scale=0.25, window=9, **more, **options)


def attention(q, kv, sinks, **options):
    return paged_attention(q, kv, 1, TABLES, LENS, STARTS, DECODES, scale=0.25, sinks=sinks, soft_cap=3.0, **options)


def write(kv, new, **options):
    return kv_write(kv, new, -new, 1, SLOTS, num_rows=3, **options)[:, 1:]


def write_int8(kv, scales, new, **options):
    kv, scales = kv_write(kv, new, -new, 1, SLOTS, num_rows=3, kv_scales=scales, **options)
    return kv[:, 1:].astype(jnp.int32), scales[:, 1:]


def multiply(x, weight, **options):
    return quant_matmul(x, weight, **options)


def multiply_int8(x, weight, **options):
    return quant_matmul(x, weight, int8_activations=True, **options)


def grouped(lhs, rhs, **options):
    return grouped_matmul(lhs, rhs, SIZES, **options)


by_head, column, row = P(None, "x"), P("x"), P(None, "x")
CALLS = {
    "decode": Call(decode, (Q, KV, SINKS), (by_head, HEADS, column), HEADS, (by_head, by_head)),
    "decode int8": Call(decode, (Q, INT8, SINKS, SCALES), (by_head, HEADS, column, HEADS), HEADS, (by_head, by_head)),
    "attention": Call(attention, (Q, KV, SINKS), (by_head, HEADS, column), HEADS, by_head),
    "write": Call(write, (KV, NEW), (HEADS, by_head), HEADS, HEADS),
    "write int8": Call(write_int8, (INT8, SCALES, NEW), (HEADS, HEADS, by_head), HEADS, (HEADS, HEADS)),
    "int8 by outputs": Call(multiply, (X, quantize_int8(W)), (P(), Int8Weight(column, column)), column, row),  # pyright: ignore[reportArgumentType]
    "int8 by inputs": Call(multiply, (X, quantize_int8(W)), (row, Int8Weight(row, P())), row, P()),  # pyright: ignore[reportArgumentType]
    "int8 activations": Call(multiply_int8, (X, quantize_int8(W)), (P(), Int8Weight(column, column)), column, row),  # pyright: ignore[reportArgumentType]
    "int4 by outputs": Call(
        multiply,
        (X512, quantize_int4(W512, group=64, zeros=True)),
        (P(), Int4Weight(column, P(None, None, "x"), P(None, None, "x"))),  # pyright: ignore[reportArgumentType]
        column,
        row,
    ),
    "int4 by inputs": Call(multiply, (X512, quantize_int4(W512, group=64)), (row, Int4Weight(row, row, None)), row, P()),  # pyright: ignore[reportArgumentType]
    "grouped by outputs": Call(grouped, (ROWS, EXPERTS), (P(), row), row, row),
    "grouped by inputs": Call(grouped, (ROWS, EXPERTS), (row, P(None, None, "x")), P(None, None, "x"), P()),
    "grouped by experts": Call(grouped, (ROWS, EXPERTS), (P(), column), column, P()),
}


def mesh_of(kind: AxisType) -> Mesh:
    return jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])


def placed(call: Call, mesh: Mesh) -> tuple[Any, ...]:
    place = lambda spec, x: None if x is None else jax.device_put(x, NamedSharding(mesh, spec))
    return tuple(jax.tree.map(place, call.specs, call.args, is_leaf=lambda x: x is None or isinstance(x, P)))


@pytest.mark.parametrize("how", ["explicit axes", "told", "outside of jit", "explicit, outside of jit"])
@pytest.mark.parametrize("name", CALLS)
def test_is_as_on_one_device(name: str, how: str):
    """Explicit axes say how arrays are sharded, and so does an array outside of jit; inside, on other meshes, the op is told."""
    call, mesh = CALLS[name], mesh_of(AxisType.Explicit if "explicit" in how else AxisType.Auto)
    options = {"sharding": NamedSharding(mesh, call.main)} if how == "told" else {}
    f = lambda *args: call.f(*args, **options)
    args = placed(call, mesh)
    if "outside" in how:
        got = f(*args)
    else:
        compiled = jax.jit(f).lower(*args).compile()
        got = compiled(*args)
        assert not any(word in compiled.as_text() for word in ("all-gather", "all-to-all", "collective-permute"))
    want = call.f(*call.args)
    for a, b, spec in zip(*(jax.tree.leaves(x) for x in (got, want, call.wanted)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=3e-5)
        assert a.sharding.is_equivalent_to(NamedSharding(mesh, spec), a.ndim)


def test_nothing_told_is_gathered():
    """The control of the words that the test above looks for."""
    call, mesh = CALLS["decode"], mesh_of(AxisType.Auto)
    assert "all-gather" in jax.jit(call.f).lower(*placed(call, mesh)).compile().as_text()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_copies_everywhere_and_a_mesh_of_one(kind: AxisType):
    for mesh in (mesh_of(kind), jax.make_mesh((1,), ("x",), axis_types=(kind,), devices=jax.devices()[:1])):
        args = jax.device_put((Q, KV, SINKS), NamedSharding(mesh, P()))
        jax.tree.map(np.testing.assert_array_equal, jax.jit(decode)(*args), decode(Q, KV, SINKS))


def test_two_axes_of_a_mesh_may_share_the_heads():
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)
    got = jax.jit(lambda *args: decode(*args, sharding=NamedSharding(mesh, P(None, None, None, ("x", "z")))))(Q, KV, SINKS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, decode(Q, KV, SINKS))


@pytest.mark.parametrize("spec", [HEADS, P("one", None, None, "x")])
@pytest.mark.parametrize("compiled", [jax.jit, lambda f: f])
def test_axes_of_both_kinds_and_one_of_a_single_device(compiled, spec: P):
    kinds = AxisType.Explicit, AxisType.Auto, AxisType.Auto
    mesh = jax.make_mesh((2, 4, 1), ("data", "x", "one"), axis_types=kinds)
    call = CALLS["decode"]
    args = [jax.device_put(x, NamedSharding(mesh, P())) for x in call.args]
    got = compiled(lambda *args: decode(*args, sharding=NamedSharding(mesh, spec)))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, decode(*call.args))


OLD = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="needs JAX 0.12: before, even x + 1 is refused there")


@pytest.mark.parametrize(
    ("compiled", "axes"),
    [
        (jax.jit, {"x", "y"}),
        (jax.jit, {"y"}),
        (lambda f: f, {"x", "y"}),
        pytest.param(lambda f: f, {"y"}, marks=OLD),
    ],
)
def test_inside_of_a_shard_map(compiled, axes):
    """Over all axes of the mesh or one of them: what stands there is a shard, or a copy."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    specs = (by_head, HEADS, column) if "x" in axes else (P(), P(), P())
    out = (by_head, by_head) if "x" in axes else (P(), P())
    wrap = lambda f: compiled(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, axis_names=axes, check_vma=False))
    want = decode(Q, KV, SINKS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), wrap(decode)(Q, KV, SINKS), want)
    if "x" in axes:
        with pytest.raises(
            ValueError, match="sharding must not be given inside of a shard_map over x, where kv is a shard already"
        ):
            wrap(lambda *args: decode(*args, sharding=NamedSharding(mesh, HEADS)))(Q, KV, SINKS)


def test_a_sharding_is_a_named_one():
    with pytest.raises(ValueError, match="sharding of kv must be a NamedSharding; got P"):
        decode(Q, KV, SINKS, sharding=HEADS)


@pytest.mark.parametrize(
    ("f", "args", "spec", "match"),
    [
        (decode, (Q, KV, SINKS), P("x"), r"kv must be sharded over kv heads \(axis 3\) alone; got P\('x'"),
        (decode, (Q[:, :6], KV[:, :, :, :3], SINKS[:6]), HEADS, "kv heads of kv must be a multiple of the 4 shards; got 3"),
        (write, (KV, NEW), P(None, "x"), r"kv must be sharded over kv heads \(axis 3\) alone"),
        (multiply, (X[:, :62], quantize_int8(W[:, :62])), row, "inputs of values of the weight must be a multiple of the 4 shards"),
        (
            multiply,
            (X512, quantize_int4(W512, group=128)),
            row,
            "pairs of groups of the weight must be a multiple of the 4 .* got 2",
        ),
        (grouped, (ROWS, EXPERTS), P("x", None, "y"), r"experts \(axis 0\) or outputs \(axis 1\) or inputs \(axis 2\) alone"),
        (grouped, (ROWS, EXPERTS[:, :15]), row, "outputs of rhs must be a multiple of the 4 shards; got 15"),
    ],
)
def test_what_is_refused(f, args, spec, match):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match=match):
        f(*args, sharding=NamedSharding(mesh, spec))
