"""Says whether an output of the engine is what a full recomputation in NumPy float64 gives: teacher-forced over what the engine
said, with its own filters and the published random bits.

A position where the judge's two best final scores are closer than 1e-4, or where float32 cannot be expected to keep the same
set of tokens, is a near tie: either answer is right there. They are counted.
"""

import jax
import numpy as np
import pytest
from device.sampling_reference import adjusted, filtered, scale
from reference_llama import ReferenceLlama

from pagedjax.host.request import Request, TokenEvent

TIE = 1e-4
REFERENCE = ReferenceLlama()
VOCAB = 512


class Count:
    positions = 0
    ties = 0


def noise(seed: int, sample: int, position: int) -> np.ndarray:
    """Gumbel noise of each token, from JAX's own threefry2x32."""
    key = jax.random.wrap_key_data(np.asarray([seed >> 32, seed & 0xFFFFFFFF], np.uint32), impl="threefry2x32")
    bits = np.asarray(jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, sample), position), (VOCAB,), np.uint32))
    u = np.minimum((bits.astype(np.float64) + 0.5) / 2**32, 1 - 2**-24)
    return -np.log(-np.log1p(-u))


def settings_of(request: Request) -> dict:
    p = request.params
    return {
        "min_len": len(request.prompt) + p.min_tokens,
        "stop_ids": request.stop_ids,
        "bias": p.logit_bias,
        "bad_words": request.bad_words,
        "repetition": p.repetition_penalty,
        "presence": p.presence_penalty,
        "frequency": p.frequency_penalty,
        "typical_p": p.typical_p,
        "min_p": p.min_p,
        "top_k": p.top_k,
        "top_p": p.top_p,
        **({"allowed": p.allowed_token_ids} if p.allowed_token_ids is not None else {}),
    }


def disagreements(request: Request, index: int, tokens: list[int]) -> list[int]:
    """Positions of the output where the judge chose another token and it was not a near tie."""
    known, logits = list(request.prompt), REFERENCE.logits([*request.prompt, *tokens])
    chosen, wrong = settings_of(request), []
    for i, token in enumerate(tokens):
        scores, clear = adjusted(logits[len(known) - 1], chosen, known, len(request.prompt)), True
        if request.params.temperature > 0:
            kept, clear = filtered(scale(scores, request.params.temperature), chosen)
            scores = kept + noise(request.seed, index, len(known))
        best = np.sort(scores)[-2:]
        tie = not clear or best[1] - best[0] < TIE
        Count.positions += 1
        Count.ties += tie
        if int(np.argmax(scores)) != token and not tie:
            wrong.append(i)
        known.append(token)
    return wrong


def check_output(request: Request, index: int, events: list[TokenEvent]) -> None:
    tokens = [t for e in events for t in e.tokens]
    assert disagreements(request, index, tokens) == []
    last = events[-1]
    stops = [i for i, t in enumerate(tokens) if t in request.stop_ids and i >= request.params.min_tokens]
    if last.finish == "stop":
        assert stops == [len(tokens) - 1]
    else:
        assert last.finish == "length" and not stops and len(tokens) == request.params.max_tokens
    allowed = request.params.allowed_token_ids
    assert allowed is None or set(tokens) <= set(allowed)
    if request.params.logprobs is not None:
        logits = REFERENCE.logits([*request.prompt, *tokens])[len(request.prompt) - 1 :]
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        found = [p for e in events for p in e.logprobs]
        assert [p.token for p in found] == tokens
        for i, p in enumerate(found):
            assert p.logprob == pytest.approx(logprobs[i, p.token], abs=1e-4)
            np.testing.assert_allclose([v for _, v in p.top], np.sort(logprobs[i])[::-1][: len(p.top)], atol=1e-4)
