"""How requests are served, from the library: best_of and beams, pins, the decision trace, deadlines, tenants."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pagedjax import LLM, SamplingParams, Service
from pagedjax.config import QueueConfig
from pagedjax.errors import UserError
from pagedjax.host.tenants import TenantLimits
from pagedjax.service import read_tenants, service_rules

STORIES = Path(__file__).parent / "golden" / "stories260K"
LONG = "Once upon a time there was a little girl who lived in a big house with her mother and her father and a dog"


@pytest.fixture(scope="module")
def llm(compile_cache: str) -> Iterator[LLM]:
    options = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 16}
    options |= {"buckets.decode_rows": (4,), "buckets.prefill_tokens": (64,), "cache.kv_memory": 2 << 20}
    with LLM(STORIES, **options, compile_cache=compile_cache) as made:
        yield made


def test_best_of_returns_the_likeliest(llm: LLM) -> None:
    """The n of best_of samples with the highest mean logprob, which are those that n alone would draw."""
    params = SamplingParams(n=4, max_tokens=12, temperature=1.2, seed=3, logprobs=0)
    (every,) = llm.generate(LONG, params)

    def mean(output) -> float:
        return sum(p.logprob for p in output.logprobs) / len(output.logprobs)

    ranked = sorted(every.outputs, key=mean, reverse=True)
    (best,) = llm.generate(LONG, replace(params, n=2, best_of=4))
    assert [o.token_ids for o in best.outputs] == [o.token_ids for o in ranked[:2]]
    assert [o.index for o in best.outputs] == [0, 1] and [o.text for o in best.outputs] == [o.text for o in ranked[:2]]
    (plain,) = llm.generate(LONG, replace(params, n=2, best_of=4, logprobs=None))
    assert [o.token_ids for o in plain.outputs] == [o.token_ids for o in ranked[:2]] and plain.outputs[0].logprobs is None


def test_beams(llm: LLM) -> None:
    """Best score first; none is below that of greedy decoding, which is one of the hypotheses that were considered."""
    params = SamplingParams(n=3, beam_width=4, max_tokens=10, logprobs=0, length_penalty=0.0)
    (found,) = llm.generate(LONG, params)
    scores = [o.cumulative_logprob for o in found.outputs]
    assert scores == sorted(scores, reverse=True) and len({o.token_ids for o in found.outputs}) == 3
    (greedy,) = llm.generate(LONG, SamplingParams(max_tokens=10, temperature=0, logprobs=0))
    assert scores[0] >= greedy.outputs[0].cumulative_logprob - 1e-4
    (one,) = llm.generate(LONG, SamplingParams(beam_width=1, max_tokens=10))
    assert one.outputs[0].token_ids == greedy.outputs[0].token_ids


def test_pins_and_flush(llm: LLM) -> None:
    """A pinned prefix outlives what comes after it; flush forgets it, and the pin holds what is computed again."""
    greedy = SamplingParams(max_tokens=4, temperature=0)
    llm.flush_cache()
    count = llm.pin_prefix(LONG)
    assert count >= 1
    llm.generate(LONG, greedy)
    pool = llm.engine.scheduler.pool
    assert len(pool.pinned) == count
    others = [list(range(100 + i, 220 + i)) for i in range(0, 290, 5)]  # as many blocks as the pool has, several times over
    llm.generate(others, greedy)
    assert llm.generate(LONG, greedy)[0].outputs[0].usage.cached == count * 16
    assert llm.flush_cache() > 0
    assert llm.generate(LONG, greedy)[0].outputs[0].usage.cached == 0
    assert llm.unpin_prefix(LONG) == count
    with pytest.raises(UserError, match="unpin must name the tokens of a pin"):
        llm.unpin_prefix(LONG)


def test_the_trace_of_a_request(llm: LLM) -> None:
    llm.flush_cache()
    (output,) = llm.generate(LONG, SamplingParams(max_tokens=4, temperature=0))
    said = json.loads(llm.trace(output.request_id))
    whats = [decision["what"] for decision in said["decisions"]]
    assert said["request_id"] == output.request_id
    assert whats == ["queued", "admitted", "chunk", "finished"]
    chunk = said["decisions"][2]
    assert (chunk["start"], chunk["tokens"]) == (0, len(output.prompt_token_ids))
    assert said["decisions"][-1]["reason"] == "length" and said["decisions"][-1]["generated"] == 4
    with pytest.raises(UserError, match="trace must name a request that is known; got 'nobody'"):
        llm.trace("nobody")


def test_a_deadline_ends_a_request(llm: LLM) -> None:
    """One that has passed before the request can start, and says so in the trace."""
    stream = llm.stream(LONG, SamplingParams(max_tokens=200, temperature=0, ignore_eos=True), service=Service(deadline=1e-6))
    (piece,) = list(stream)
    assert piece.finish == "deadline" and piece.tokens == ()
    said = json.loads(llm.trace(stream.request_id))["decisions"]
    assert said[-2]["what"] == "dropped" and "deadline" in said[-2]["because"]


def test_rules_of_a_service() -> None:
    for options, message in (
        ({"tenant": 3}, "tenant must be a string; got 3"),
        ({"priority": 1.5}, "priority must be an integer; got 1.5"),
        ({"pool": "night"}, "pool must be interactive or batch; got 'night'"),
        ({"deadline": -1}, "deadline must be positive seconds; got -1"),
        ({"deadline": "soon"}, "deadline must be seconds; got 'soon'"),
        ({"expected_tokens": 0}, "expected_tokens must be positive; got 0"),
        ({"retention": 11}, "retention must be between 0 and 10; got 11"),
        ({"retention_seconds": 0}, "retention_seconds must be positive; got 0"),
        ({"retention_seconds": "long"}, "retention_seconds must be a number; got 'long'"),
    ):
        with pytest.raises(UserError, match=message):
            Service(**options)


def test_tenants_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    file.write_text(json.dumps({"a": {"weight": 2.5, "max_rows": 3}, "*": {"tokens_per_minute": 1000}}))
    rules = service_rules(QueueConfig(policy="priority", tenants=str(file), max_first_token=2.0))
    assert rules.tenants == {"a": TenantLimits(weight=2.5, max_rows=3)}
    assert rules.other_tenants == TenantLimits(tokens_per_minute=1000)
    assert (rules.policy, rules.max_first_token, rules.max_queued_tokens) == ("priority", 2.0, None)
    for text, message in (
        ("{", "tenants must be a file of JSON; got"),
        ("[1]", "tenants must be an object that has an object for each tenant"),
        ('{"a": {"speed": 3}}', "tenant 'a' may have weight, tokens_per_minute, max_rows, max_blocks; got speed"),
        ('{"a": {"max_rows": "x"}}', "tenant 'a' must have numbers; got"),
        ('{"a": {"max_rows": 1.5}}', "tenant 'a' must have whole numbers beside its weight; got"),
        ('{"a": {"weight": 0}}', "a tenant's weight must be positive"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            read_tenants(str(file))
    with pytest.raises(UserError, match="tenants must be a file of JSON; got nowhere.json: No such file"):
        read_tenants("nowhere.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fair"}, "policy must be one of first_come, priority, longest_prefix, shortest_work, deadline; got 'fair'"),
        ({"aging": 0}, "aging must be positive seconds; got 0"),
        ({"batch_share": 1}, "batch_share must be between 0 and 1; got 1"),
        ({"token_seconds": -1}, "token_seconds must not be negative; got -1"),
    ],
)
def test_rules_of_the_queue(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        QueueConfig(**options)
