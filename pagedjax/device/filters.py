"""Which tokens may still be sampled: typical, min_p, top_k and top_p, exact and without a sort over the vocabulary.

Every filter takes z f32[S, V], at most 0: the logits less their maximum, divided by the temperature (`scaled`). It gives z with
-inf where a token was dropped. Each is "the shortest prefix of an order whose weight reaches a target", where equal keys are
ordered by id: so a filter is one call of `keep_prefix`, which looks at the best NUM_CANDIDATES keys first and bisects only for
the rows whose prefix is longer. A row's result never depends on the other rows, on S, or on columns of -inf added behind.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pagedjax.state import LaneState

NUM_CANDIDATES = 128  # keys looked at before a row is bisected; [32, 32000] on two cores: 3 ms for 128, 5 to 8 ms for a bisection


def row_sum(x: jax.Array) -> jax.Array:
    """f32[..., V] -> f32[...]: the sum over the last axis, in an order that zeros added behind do not change.

    Padded to 128 times a power of two and folded in halves: a longer padding only adds folds that add zero. (XLA rearranges a plain
    sum depending on its length.) Also more precise than one running sum.
    """
    width = x.shape[-1]
    size = 128 << (-(-width // 128) - 1).bit_length()
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - width)])
    while x.shape[-1] > 128:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x.sum(axis=-1)


def scaled(x: jax.Array, temperature: jax.Array) -> jax.Array:
    """(x - max) * (1 / temperature), f32[S, V], at most 0. temperature f32[S] is positive.

    +inf logits share the whole mass. A row of nothing but -inf stays as it is. The reciprocal is taken in the open because XLA
    may or may not take it by itself, depending on what it fuses, and the last bit would depend on that.
    """
    best = jnp.max(x, axis=-1, keepdims=True)
    z = jnp.where(x == best, 0.0, (x - best) * (1 / temperature)[:, None])
    return jnp.where(x == -jnp.inf, -jnp.inf, z)


def _finite_max(z: jax.Array) -> jax.Array:
    """f32[S, 1]: the best of a row, 0 where nothing is left, so that z - max has no NaN."""
    best = jnp.max(z, axis=-1, keepdims=True)
    return jnp.where(best == -jnp.inf, 0.0, best)


def _bits(x: jax.Array) -> jax.Array:
    """i32 whose order is that of |x|, for f32 x. (The bits of floats that are not negative are in the order of the floats.)"""
    return jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)


def _key_of(bits: jax.Array) -> jax.Array:
    """The f32 key, at most 0, of `_bits`."""
    return -jax.lax.bitcast_convert_type(bits, jnp.float32)


def _smallest(low: jax.Array, high: jax.Array, reached: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """i32: the smallest n in (low, high] with reached(n), by bisection; high if there is none below it. reached is monotone."""

    def body(bounds):
        lo, hi = bounds
        middle = lo + (hi - lo) // 2
        ok = reached(middle)
        return jnp.where(ok, lo, middle), jnp.where(ok, middle, hi)

    return jax.lax.while_loop(lambda bounds: bounds[1] - bounds[0] > 1, body, (low, high))[1]


def _bisect_row(key: jax.Array, weight: jax.Array, target: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(threshold f32, last id i32) of one row: of key and weight f32[V].

    The keys above start do not reach the target. First the exact threshold, on the bits of the keys (at most 31 passes over the
    row); then, only where several tokens have that very key, the id of the last one that is kept.
    """
    width = key.shape[0]
    ids = jnp.arange(width, dtype=jnp.int32)

    def mass(keep):
        return row_sum(jnp.where(keep, weight, 0.0))

    lowest = jnp.min(jnp.where(key == -jnp.inf, jnp.inf, key))
    low = _bits(start) - 1
    high = jnp.where(lowest >= start, low + 1, _bits(lowest))
    threshold = _key_of(_smallest(low, high, lambda n: mass(key >= _key_of(n)) >= target))
    tied = key == threshold

    def split_ties():
        end = jnp.int32(width)
        return _smallest(jnp.int32(-1), end, lambda n: mass((key > threshold) | (tied & (ids <= n))) >= target)

    return threshold, jax.lax.cond(jnp.sum(tied, dtype=jnp.int32) > 1, split_ties, lambda: jnp.int32(width))


def _bisect(key, weight, target, start, found, first_last):
    """`_bisect_row` of the rows not found; first_last (f32[S], i32[S]) of the others.

    On CPU row by row: a row stays in the cache through all passes (5 instead of 14 ms for [32, 32000]). Elsewhere all at once.
    """

    def row(args):
        key, weight, target, start, found, first_last = args
        return jax.lax.cond(found, lambda: first_last, lambda: _bisect_row(key, weight, target, start))

    args = (key, weight, target, start, found, first_last)
    return jax.lax.platform_dependent(args, cpu=lambda a: jax.lax.map(row, a), default=jax.vmap(row))


def candidates(key: jax.Array) -> jax.Array:
    """i32[S, min(NUM_CANDIDATES, V)]: the ids of the best keys, best first, the lower id first among equals."""
    return jax.lax.top_k(key, min(NUM_CANDIDATES, key.shape[1]))[1]


def keep_prefix(
    z: jax.Array,
    key: jax.Array,
    weigh: Callable[[jax.Array], jax.Array],
    target: jax.Array,
    best: jax.Array,
    wanted: jax.Array,
) -> jax.Array:
    """bool[S, V]: the shortest prefix, by descending key f32[S, V], then ascending id, whose weight reaches target f32[S].

    Keys are at most 0, and -inf for tokens that are -inf in z. weigh maps values of z (f32[S, n], any n) to weights, 0 for -inf.
    A target above the sum keeps all, one of 0 the first token. best: `candidates(key)`, of which the last may have become -inf
    since. Rows that are not wanted bool[S] are not bisected; what is kept of them is meaningless.
    """
    best_keys = jnp.take_along_axis(key, best, axis=1)
    weights = weigh(jnp.take_along_axis(z, best, axis=1))
    upto = jnp.tril(jnp.ones((best.shape[1], best.shape[1]), bool))  # a sum each: compiles faster than cumsum
    reached = jnp.sum(jnp.where(upto, weights[:, None], 0.0), axis=-1) >= target[:, None]
    any_reached = jnp.any(reached, axis=1)
    at = jnp.where(any_reached, jnp.argmax(reached, axis=1), best.shape[1] - 1)[:, None]
    first_last = jnp.take_along_axis(best_keys, at, axis=1)[:, 0], jnp.take_along_axis(best, at, axis=1)[:, 0]
    complete = (best_keys[:, -1] == -jnp.inf) | (best.shape[1] == z.shape[1])  # nothing is left behind the candidates
    found = any_reached | complete | ~wanted

    def bisect():
        return _bisect(key, weigh(z), target, best_keys[:, -1], found, first_last)

    threshold, last = jax.lax.cond(jnp.all(found), lambda: first_last, bisect)
    threshold, last = threshold[:, None], last[:, None]
    ids = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
    return (key > threshold) | ((key == threshold) & (ids <= last))


def keep_min_p(z: jax.Array, min_p: jax.Array, active: jax.Array) -> jax.Array:
    """The tokens at least min_p f32[S] times as likely as the best one (Nguyen et al. 2024, arXiv 2407.01082)."""
    keep = jnp.exp(z - _finite_max(z)) >= min_p[:, None]
    return jnp.where(keep | ~active[:, None], z, -jnp.inf)


def keep_typical(z: jax.Array, mass: jax.Array, active: jax.Array) -> jax.Array:
    """The tokens whose information -log p is nearest to the entropy, as few as have `mass` f32[S].

    Meister et al. 2022, Locally Typical Sampling (arXiv 2202.00666).
    """
    top = _finite_max(z)
    total = row_sum(jnp.exp(z - top))
    information = jnp.log(jnp.maximum(total, 1.0))[:, None] - (z - top)
    p = jnp.exp(-information)
    entropy = row_sum(jnp.where(p > 0, p * information, 0.0))[:, None]
    key = -jnp.abs(information - entropy)  # -inf for p = 0
    keep = keep_prefix(z, key, lambda v: jnp.exp(v - top), mass * total, candidates(key), active)
    return jnp.where(keep | ~active[:, None], z, -jnp.inf)


TOP_K, TOP_P = range(2)


def filtered(z: jax.Array, rows: LaneState, active: jax.Array) -> jax.Array:
    """typical, min_p, top_k, top_p in this order, each on what the one before left; rows not active bool[S] are unchanged.

    top_k: the likeliest tokens; of equal ones the lower ids. top_p: the fewest, likeliest first, that have top_p of the mass that
    is left; at least one. The two are one loop, so that their `keep_prefix` is compiled once. typical is not in it: its keys are an
    array of their own, which on TPU is more than the temporaries of a step may have.
    """
    share = jnp.stack([rows.top_k.astype(jnp.float32), rows.top_p])  # top_k is exact up to 2^24
    wanted = jnp.stack([rows.top_k > 0, rows.top_p < 1]) & active
    typical, min_p = active & (rows.typical_p < 1), active & (rows.min_p > 0)

    def either(flag, f, x):
        return jax.lax.cond(jnp.any(flag), f, lambda v: v, x)

    def drop(stage, z, best):
        top = _finite_max(z)

        def weigh(values):
            return jnp.where(stage == TOP_K, (values > -jnp.inf).astype(jnp.float32), jnp.exp(values - top))

        total = jax.lax.cond(stage == TOP_K, lambda: jnp.ones(z.shape[0]), lambda: row_sum(jnp.exp(z - top)))
        keep = keep_prefix(z, z, weigh, share[stage] * total, best, wanted[stage])
        return jnp.where(keep | ~wanted[stage][:, None], z, -jnp.inf)

    def prefixes(z):
        best = candidates(z)  # stays in order: top_k only drops from its end
        return jax.lax.fori_loop(TOP_K, TOP_P + 1, lambda i, z: either(wanted[i], lambda z: drop(i, z, best), z), z)

    z = either(typical, lambda z: keep_typical(z, rows.typical_p, typical), z)
    z = either(min_p, lambda z: keep_min_p(z, rows.min_p, min_p), z)
    return either(jnp.any(wanted, axis=0), prefixes, z)
