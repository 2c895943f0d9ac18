"""The engine on a real model: exact text, one result whatever the batch, in place, and nothing compiled after start."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
from judge import check_output, disagreements
from reference_llama import STORIES, ReferenceLlama
from tokenizers import Tokenizer

from pagedjax.engine import Engine
from pagedjax.errors import UserError
from pagedjax.host.prefix_cache import Content
from pagedjax.host.request import Request, SamplingParams, TokenEvent

BOS = 1


def run(engine: Engine, requests: Iterable[Request]) -> dict[tuple[str, int], list[TokenEvent]]:
    """Adds the requests and steps until all is done; checks the pool after every step."""
    for request in requests:
        engine.add(request)
    events: dict[tuple[str, int], list[TokenEvent]] = {}
    while engine.has_work():
        for event in engine.step():
            events.setdefault((event.request_id, event.index), []).append(event)
        engine.scheduler.check()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.capacity
    return events


def tokens_of(events: list[TokenEvent]) -> tuple[int, ...]:
    return tuple(t for e in events for t in e.tokens)


def greedy(name: str, prompt: Iterable[int], max_tokens: int, **params) -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, temperature=0, **params))


def published_text() -> str:
    text = (STORIES / "published.md").read_text()
    return text.split("-t 0.0\n")[1].split("\n```")[0]


@pytest.fixture(scope="module")
def long_engine(stories_engine: Callable[..., Engine]) -> Engine:
    return stories_engine(max_model_len=512, max_num_seqs=2, **{"buckets.decode_rows": (1, 2)})


def test_the_published_text(long_engine: Engine) -> None:
    """Greedy from BOS: the text that the model's author published, as far as 200 tokens reach."""
    events = run(long_engine, [greedy("a", [BOS], 200)])
    text = Tokenizer.from_file(str(STORIES / "tokenizer.json")).decode(list(tokens_of(events["a", 0])))
    assert len(tokens_of(events["a", 0])) == 200
    assert len(text) > 400 and published_text().startswith(text)


def test_logprobs_are_those_of_the_raw_distribution(stories_engine: Callable[..., Engine]) -> None:
    """Of prompt and output, under penalties, bias and temperature, against float64."""
    prompt = [BOS, 403, 407, 261, 378, 432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426, 338, 401, 396, 267, 337, 300] * 2
    params = SamplingParams(
        max_tokens=6, temperature=0.7, top_k=40, repetition_penalty=1.3, logit_bias={5: 2.0}, logprobs=5, prompt_logprobs=3
    )
    own = run(stories_engine(), [Request("a", tuple(prompt), params, seed=7), greedy("b", prompt[:9], 20)])["a", 0]
    tokens = tokens_of(own)
    logits = ReferenceLlama().logits([*prompt, *tokens])
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    found = [*own[0].prompt_logprobs, *(p for e in own for p in e.logprobs)]
    assert [p.token for p in found] == [*prompt[1:], *tokens]
    for i, p in enumerate(found):
        best = np.argsort(-logprobs[i], kind="stable")[: 3 if i < len(prompt) - 1 else 5]
        assert p.logprob == pytest.approx(logprobs[i, p.token], abs=1e-4)
        assert [t for t, _ in p.top] == best.tolist()
        assert [v for _, v in p.top] == pytest.approx(logprobs[i, best].tolist(), abs=1e-4)
        assert p.rank == 1 + int((logprobs[i] > logprobs[i, p.token]).sum())


def test_stop_ids_and_min_tokens(stories_engine: Callable[..., Engine]) -> None:
    free = tokens_of(run(stories_engine(), [greedy("a", [BOS], 30)])["a", 0])
    stop = free[10]
    first = free.index(stop)
    request = Request("a", (BOS,), SamplingParams(max_tokens=30, temperature=0), stop_ids=(stop,))
    own = run(stories_engine(), [request])["a", 0]
    assert tokens_of(own) == free[: first + 1]
    assert own[-1].finish == "stop" and own[-1].stop_id == stop and own[-1].usage.generated == first + 1
    late = replace(request, params=replace(request.params, min_tokens=first + 2))
    own = run(stories_engine(), [late])["a", 0]
    assert stop not in tokens_of(own)[: first + 2] and tokens_of(own)[:first] == free[:first]


def test_samples_of_one_request_differ_and_repeat(stories_engine: Callable[..., Engine]) -> None:
    request = Request("a", (BOS, 403), SamplingParams(n=3, max_tokens=12, temperature=1.0), seed=2**63 + 5)
    once = {key: tokens_of(own) for key, own in run(stories_engine(), [request]).items()}
    again = {key: tokens_of(own) for key, own in run(stories_engine(), [greedy("x", [BOS], 5), request]).items()}
    assert len(set(once.values())) == 3
    assert once == {key: again[key] for key in once}
    other = run(stories_engine(), [replace(request, seed=2**31 + 5)])
    assert tokens_of(other["a", 0]) != once["a", 0]


def test_cancel_frees_blocks_before_the_next_step(stories_engine: Callable[..., Engine]) -> None:
    engine = stories_engine()
    engine.add(greedy("a", [BOS] * 40, 50))
    for _ in range(4):
        engine.step()
    assert engine.scheduler.pool.num_free < engine.scheduler.pool.capacity
    (event,) = engine.cancel("a")
    assert event.finish == "cancelled" and event.usage.generated >= 1
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.capacity
    assert engine.step() == [] and not engine.has_work()


def test_what_leaves_a_token_is_taken(stories_engine: Callable[..., Engine]) -> None:
    """A longer bad word and stop ids without min_tokens ban nothing at first."""
    request = replace(greedy("a", [BOS], 3, allowed_token_ids=(5, 6)), bad_words=((6,), (5, 9)), stop_ids=(5,))
    own = run(stories_engine(), [request])["a", 0]
    assert tokens_of(own) == (5,) and own[-1].finish == "stop"


def test_an_id_used_again_gets_its_own_tokens(stories_engine: Callable[..., Engine]) -> None:
    """While a step of the one before is in flight."""
    engine = stories_engine()
    request = greedy("a", [BOS, 403], 6)
    alone = tokens_of(run(engine, [request])["a", 0])
    engine.add(greedy("a", [BOS] * 5, 20, logprobs=2))
    engine.step()
    engine.cancel("a")
    assert tokens_of(run(engine, [request])["a", 0]) == alone


def test_padding_counts_every_pass(stories_engine: Callable[..., Engine]) -> None:
    engine = stories_engine(**{"schedule.decode_steps": 16})
    padding, stats = replace(engine.padding), replace(engine.scheduler.stats)
    run(engine, [greedy("a", [BOS], 33)])
    now = engine.scheduler.stats
    assert now.steps - stats.steps >= 33
    computed = engine.padding.computed - padding.computed
    assert computed == now.scheduled_tokens - stats.scheduled_tokens
    assert computed + engine.padding.padding - padding.padding == 4 * (now.steps - stats.steps), "every pass has four rows"


def test_the_pool_is_written_in_place(stories_engine: Callable[..., Engine]) -> None:
    """Every bucket aliases the whole state; what it needs beside is less than one layer's K and V."""
    engine = stories_engine(max_model_len=512, max_num_seqs=16, **{"buckets.decode_rows": (1, 16), "cache.kv_memory": 32 << 20})
    state = sum(x.nbytes for x in [engine.state.kv, *vars(engine.state.lanes).values()])
    layer = engine.state.kv.nbytes // engine.model.num_layers
    for bucket, compiled in engine.executables.items():
        assert compiled.alias_bytes >= state, bucket
        assert compiled.temp_bytes < layer, bucket


def test_nothing_is_compiled_after_start(stories_engine: Callable[..., Engine]) -> None:
    """A random trace over every bucket, all sampling branches on and off; and a shape that was not compiled is an error."""
    engine = stories_engine()
    requests = [
        greedy("a", [BOS] * 50, 9),
        Request("b", (BOS, 5), SamplingParams(max_tokens=9, top_p=0.9, logprobs=2, prompt_logprobs=1), seed=3),
        Request("c", (7,), SamplingParams(max_tokens=9, bad_words=("x",), frequency_penalty=1), bad_words=((5, 6),), seed=4),
    ]
    run(engine, requests)
    assert engine.compilations_after_start == 0
    lost = engine.executables.pop(max(engine.executables))
    buckets, engine.buckets = engine.buckets, tuple(engine.executables)
    try:
        engine.add(greedy("a", [BOS, *range(300, 319)], 2))  # nothing of it is in the cache
        with pytest.raises(RuntimeError, match="no compiled bucket holds 20 tokens in 1 rows; there are 4x4"):
            engine.step()
    finally:
        engine.buckets = buckets
        engine.executables[max(buckets)] = lost
        engine.cancel("a")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (greedy("x", [512], 5), "the prompt must be token ids below 512; got 512"),
        (greedy("x", [-1], 5), "the prompt must be token ids below 512; got -1"),
        (greedy("x", [1], 5, logit_bias={600: 1.0}), "logit_bias must be token ids below 512; got 600"),
        (greedy("x", [1], 5, allowed_token_ids=(9999,)), "allowed_token_ids must be token ids below 512; got 9999"),
        (replace(greedy("x", [1], 5), stop_ids=(512,)), "stop_token_ids must be token ids below 512; got 512"),
        (replace(greedy("x", [1], 5), stop_ids=tuple(range(17))), "may have 16 stop ids, the model's included; got 17"),
        (replace(greedy("x", [1], 5), bad_words=((1, 2, 3, 4, 5, 6, 7, 8, 9),)), "a bad word may be 8 tokens long; got 9"),
        (replace(greedy("x", [1], 5), bad_words=((1,),) * 49), "bad_words may make 48 token sequences; got 49"),
        (replace(greedy("x", [1], 5), bad_words=((900,),)), "bad_words must be token ids below 512; got 900"),
        (
            replace(greedy("x", [1], 5, allowed_token_ids=(5, 6, 7), min_tokens=1), bad_words=((5,),), stop_ids=(6, 7)),
            "allowed_token_ids must leave a token beside bad_words and, with min_tokens, the stop ids; got 3 allowed",
        ),
        (replace(greedy("x", [1], 5, allowed_token_ids=(5,)), bad_words=((5,),)), "must leave a token .* got 1 allowed"),
        (greedy("x", [1] * 128, 5), "must be shorter than max_model_len 128; got 128 tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused(stories_engine: Callable[..., Engine], request_: Request, message: str) -> None:
    engine = stories_engine()
    with pytest.raises(UserError, match=message):
        engine.add(request_)
    assert not engine.has_work()


def test_a_cached_prefix_changes_no_token(stories_engine: Callable[..., Engine]) -> None:
    """Five requests share 50 tokens: four arrive together, while the leader's prompt takes two steps, one later. What each gets
    is what the judge says; the blocks of 16 that they share are computed once."""
    engine = stories_engine(max_num_seqs=8, **{"buckets.decode_rows": (8,)})
    shared = [BOS, *range(270, 319)]
    made = [greedy(f"p{i}", [*shared, 330 + i, 340 + i], 12) for i in range(5)]
    before = engine.scheduler.stats.scheduled_tokens
    events = run(engine, made[:4]) | run(engine, made[4:])
    for request in made:
        check_output(request, 0, events[request.id, 0])
    assert [events[f"p{i}", 0][-1].usage.cached for i in range(5)] == [0, 48, 48, 48, 48]
    assert engine.scheduler.stats.scheduled_tokens - before == 52 + 4 * 4 + 5 * 11
    assert engine.scheduler.tables.cache is not None
    engine.scheduler.tables.cache.check()


def test_the_judge_notices_a_wrong_prefix(stories_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: blocks found by their place alone, whatever they hold."""
    monkeypatch.setattr("pagedjax.host.prefix_cache.key_of", lambda parent, tokens: parent[:15] + b"x")
    monkeypatch.setattr(Content, "__eq__", lambda self, other: True)
    engine = stories_engine(**{"schedule.max_queued": 7})  # of its own: its cache is no good afterwards
    made = [greedy(f"w{i}", [BOS, *range(270 + 60 * i, 312 + 60 * i)], 12) for i in range(2)]
    events = run(engine, made[:1]) | run(engine, made[1:])
    assert events["w1", 0][-1].usage.cached > 0
    assert disagreements(made[1], 0, [t for e in events["w1", 0] for t in e.tokens])
