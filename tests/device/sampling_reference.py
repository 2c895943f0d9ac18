"""Sampling in NumPy float64, one row at a time and with sorts: what device/{adjust,filters,sample}.py are compared with.

A row's settings are a dict with the names of LaneState's fields (absent: off), except that `allowed` is a set of ids, `bias` a
dict and `bad_words` a list of tuples.
"""

import numpy as np

from pagedjax.limits import BAD_WORD_TOKENS, NUM_BAD_WORDS, NUM_BIASES, NUM_STOP_IDS
from pagedjax.state import LaneState

ROUNDING = 1e-5  # relative; where a decision in float64 is closer than this, float32 may decide otherwise


def softmax(z):
    z = np.asarray(z, np.float64)
    best = z.max()
    if best == -np.inf:
        return np.zeros_like(z)
    e = np.where(z == best, 1.0, np.exp(np.minimum(z - best, 0, where=z != best, out=np.zeros_like(z))))
    return e / e.sum()


def scale(x, temperature):
    """float32, as on the device: filters order tokens by these very values."""
    x = np.asarray(x, np.float32)
    best = x.max()
    with np.errstate(invalid="ignore", over="ignore"):
        z = np.where(x == best, np.float32(0), (x - best) * (np.float32(1) / np.float32(temperature)))
    return np.where(x == -np.inf, -np.inf, z).astype(np.float32)


def prefix(z, key, weight, target):
    """bool[V]: the shortest prefix by descending key, then id, with at least the target's weight."""
    order = np.lexsort((np.arange(len(key)), -key))
    enough = np.cumsum(weight[order]) >= target
    count = int(np.argmax(enough)) + 1 if enough.any() else len(key)
    keep = np.zeros(len(key), bool)
    keep[order[:count]] = True
    return keep & (z > -np.inf)


def _clear(z, key, weight, target):
    """Whether float32 must find the same prefix: not when the sum or the keys at its end are too close to call."""
    low, keep, high = (prefix(z, key, weight, target * f) for f in (1 - ROUNDING, 1, 1 + ROUNDING))
    if (low != keep).any() or (high != keep).any():
        return False
    dropped = (z > -np.inf) & ~keep
    if not keep.any() or not dropped.any():
        return True
    last = np.flatnonzero(keep)[np.argmin(key[keep])]
    next_ = np.flatnonzero(dropped)[np.argmax(key[dropped])]
    return bool(z[last] == z[next_] or key[last] - key[next_] > ROUNDING * (1 + abs(key[last])))


def top_k(z, k):
    return prefix(z, z, np.ones(len(z)), k), True


def top_p(z, p):
    left = z > -np.inf
    if len(np.unique(z[left])) == 1:  # all weights 1: float32 sums are exact, and only the target is rounded
        return prefix(z, z, left.astype(float), float(np.float32(p) * np.float32(left.sum()))), True
    p = float(np.float32(p))
    return prefix(z, z, softmax(z), p), _clear(z, z.astype(np.float64), softmax(z), p)


def min_p(z, share):
    p, share = softmax(z), float(np.float32(share))
    return p >= share * p.max(), bool((np.abs(p - share * p.max()) > ROUNDING * p).all() or share in (0.0, 1.0))


def typical(z, mass):
    p, mass = softmax(z), float(np.float32(mass))
    information = np.where(p > 0, -np.log(np.where(p > 0, p, 1)), np.inf)
    key = -np.abs(information - np.sum(np.where(p > 0, p * np.where(p > 0, information, 0), 0)))
    key = np.where((z > -np.inf) & ~np.isfinite(key), -1e300, key)
    return prefix(z, key, p, mass), _clear(z, key, p, mass)


def filtered(z, settings):
    """(z with -inf for dropped tokens, whether every decision was clear)."""
    clear = True
    for name, f, off in (("typical_p", typical, 1), ("min_p", min_p, 0), ("top_k", top_k, 0), ("top_p", top_p, 1)):
        value = settings.get(name, off)
        if value != off:
            keep, sure = f(z, value)
            z, clear = np.where(keep, z, -np.inf).astype(np.float32), clear and sure
    return z, clear


def adjusted(logits, settings, history, prompt_len):
    """history: the tokens known so far."""
    x = np.array(logits, np.float64)
    if "allowed" in settings:
        x[[i for i in range(len(x)) if i not in settings["allowed"]]] = -np.inf
    for word in settings.get("bad_words", ()):
        if list(history[len(history) - len(word) + 1 :]) == list(word[:-1]) and len(history) >= len(word) - 1:
            x[word[-1]] = -np.inf
    if len(history) < settings.get("min_len", 0):
        x[list(settings.get("stop_ids", ()))] = -np.inf
    for token, value in settings.get("bias", {}).items():
        x[token] += value
    penalty = settings.get("repetition", 1.0)
    for token in set(history):
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    output = list(history[prompt_len:])
    for token in set(output):
        x[token] -= settings.get("frequency", 0.0) * output.count(token) + settings.get("presence", 0.0)
    return x


def distribution(logits, settings, history=(), prompt_len=0):
    """(probabilities f64[V] that the next token is drawn from, whether float32 must keep the same tokens)."""
    x = adjusted(logits, settings, list(history), prompt_len)
    temperature = settings.get("temperature", 0.0)
    if temperature == 0:
        return np.eye(len(x))[int(np.argmax(x))], True
    z, clear = filtered(scale(x, temperature), settings)
    return softmax(z), clear


def lanes(rows, vocab_size, capacity=32, *, histories=None, prompt_lens=None, mask_words=None):
    """A LaneState of NumPy arrays: one lane for each dict of settings in `rows`, seeds (0, lane) unless set."""
    n = len(rows)
    full = {
        name: np.full(n, value, dtype)
        for name, value, dtype in (
            ("last_tokens", 0, "i4"), ("stopped", False, "?"), ("prompt_len", 0, "i4"), ("min_len", 0, "i4"),
            ("max_len", capacity, "i4"), ("temperature", 0, "f4"), ("top_k", 0, "i4"), ("top_p", 1, "f4"), ("min_p", 0, "f4"),
            ("typical_p", 1, "f4"),
            ("presence", 0, "f4"), ("frequency", 0, "f4"), ("repetition", 1, "f4"), ("sample", 0, "i4"), ("num_logprobs", -1, "i4"),
            ("masked", 0, "i4"),
        )
    }  # fmt: skip
    full["seed"] = np.stack([np.zeros(n), np.arange(n)], 1).astype(np.uint32)
    full["history"] = np.full((n, capacity), 7_777_777, np.int32)  # undefined past the length: a token no vocabulary has
    full["stop_ids"] = np.full((n, NUM_STOP_IDS), -1, np.int32)
    full["bias_ids"] = np.full((n, NUM_BIASES), -1, np.int32)
    full["bias_values"] = np.zeros((n, NUM_BIASES), np.float32)
    full["bad_words"] = np.full((n, NUM_BAD_WORDS, BAD_WORD_TOKENS), -1, np.int32)
    full["mask"] = np.zeros((n, mask_words or -(-vocab_size // 32)), np.uint32)
    for i, settings in enumerate(rows):
        for name, value in settings.items():
            if name == "allowed":
                full["masked"][i] = 1
                for t in value:
                    full["mask"][i, t // 32] |= np.uint32(1 << t % 32)
            elif name == "bias":
                full["bias_ids"][i, : len(value)], full["bias_values"][i, : len(value)] = list(value), list(value.values())
            elif name == "bad_words":
                for j, word in enumerate(value):
                    full["bad_words"][i, j, BAD_WORD_TOKENS - len(word) :] = word
            elif name == "stop_ids":
                full["stop_ids"][i, : len(value)] = list(value)
            else:
                full[name][i] = value
        if histories is not None:
            full["history"][i, : len(histories[i])] = histories[i]
        if prompt_lens is not None:
            full["prompt_len"][i] = prompt_lens[i]
    return LaneState(**full)
