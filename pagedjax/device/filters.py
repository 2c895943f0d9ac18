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


def _bisect_row(key: jax.Array, weight: jax.Array, target: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(threshold f32, last id i32) of one row: of key and weight f32[V].

    The keys above start do not reach the target. First the exact threshold, on the bits of the keys (at most 31 passes over the
    row); then, only where several tokens have that very key, the id of the last one that is kept.
    """
    width = key.shape[0]
    lowest = jnp.min(jnp.where(key == -jnp.inf, jnp.inf, key))
    low = _bits(start) - 1
    high = jnp.where(lowest >= start, low + 1, _bits(lowest))

    def search(phase, found):
        """The smallest n in (low, high] that reaches the target, by bisection. Phase 0: n is the bits of the threshold; phase 1:
        the last id, where minus the id is the key of those that are tied."""
        threshold = _key_of(found[0])
        tied = key == threshold
        among_tied = jnp.where(key > threshold, 1.0, jnp.where(tied, -jnp.arange(width, dtype=jnp.float32), -jnp.inf))
        order = jnp.where(phase == 0, key, among_tied)

        def halve(bounds):
            lo, hi = bounds
            middle = lo + (hi - lo) // 2
            # Kept apart, or it is computed again for every token.
            least = jax.lax.optimization_barrier(jnp.where(phase == 0, _key_of(middle), -middle.astype(jnp.float32)))
            reached = row_sum(jnp.where(order >= least, weight, 0.0)) >= target
            return jnp.where(reached, lo, middle), jnp.where(reached, middle, hi)

        alone = jnp.sum(tied, dtype=jnp.int32) <= 1
        bounds = jnp.where(phase == 0, low, jnp.where(alone, width - 1, -1)), jnp.where(phase == 0, high, width)
        n = jax.lax.while_loop(lambda b: b[1] - b[0] > 1, halve, bounds)[1]
        return jnp.where(phase == 0, n, found[0]), n

    bits, last = jax.lax.fori_loop(0, 2, search, (low, jnp.int32(width)))
    return _key_of(bits), last


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


def _atypical(z: jax.Array, top: jax.Array, total: jax.Array) -> jax.Array:
    """Minus the distance of a token's information -log p from the entropy, f32[S, V]; -inf for p = 0.

    Meister et al. 2022, Locally Typical Sampling (arXiv 2202.00666).
    """
    information = jnp.log(jnp.maximum(total, 1.0))[:, None] - (z - top)
    p = jnp.exp(-information)
    entropy = row_sum(jnp.where(p > 0, p * information, 0.0))[:, None]
    return -jnp.abs(information - entropy)


TYPICAL, TOP_K, TOP_P = range(3)


def filtered(z: jax.Array, rows: LaneState, active: jax.Array) -> jax.Array:
    """typical, min_p, top_k, top_p in this order, each on what the one before left; rows not active bool[S] are unchanged.

    typical: the most typical tokens, as few as have typical_p of the mass. top_k: the likeliest ones; of equal ones the lower ids.
    top_p: the fewest, likeliest first, that have top_p of the mass that is left; at least one. The three are one loop, so that
    `keep_prefix` is compiled once.
    """
    share = jnp.stack([rows.typical_p, rows.top_k.astype(jnp.float32), rows.top_p])  # top_k is exact up to 2^24
    wanted = jnp.stack([rows.typical_p < 1, rows.top_k > 0, rows.top_p < 1]) & active
    min_p = active & (rows.min_p > 0)
    anyone = jnp.any(wanted, axis=1)

    def drop(stage, z, best):
        top = _finite_max(z)

        def weigh(values):
            return jnp.where(stage == TOP_K, (values > -jnp.inf).astype(jnp.float32), jnp.exp(values - top))

        total = jax.lax.cond(stage == TOP_K, lambda: jnp.ones(z.shape[0]), lambda: row_sum(jnp.exp(z - top)))
        key = jax.lax.cond(stage == TYPICAL, lambda: _atypical(z, top, total), lambda: z)
        # What top_k looked at stays in order for top_p: it only drops from its end.
        best = jax.lax.cond((stage == TOP_P) & anyone[TOP_K], lambda: best, lambda: candidates(key))
        keep = keep_prefix(z, key, weigh, share[stage] * total, best, wanted[stage])
        return jnp.where(keep | ~wanted[stage][:, None], z, -jnp.inf), best

    def step(stage, carry):
        z, best = carry
        z = jax.lax.cond((stage == TOP_K) & jnp.any(min_p), lambda z: keep_min_p(z, rows.min_p, min_p), lambda z: z, z)
        return jax.lax.cond(anyone[stage], drop, lambda _, *carry: carry, stage, z, best)

    none = jnp.zeros((z.shape[0], min(NUM_CANDIDATES, z.shape[1])), jnp.int32)
    return jax.lax.fori_loop(TYPICAL, TOP_P + 1, step, (z, none))[0]
