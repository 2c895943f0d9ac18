"""pagedjax.v1 on a loopback port: text and ids, batches, streams, scores, tokens, and what the owner asks."""

import json
import math
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from loopback import Server, serving, until

from pagedjax import LLM, SamplingParams
from serving.proto.pagedjax.v1 import admin_pb2, admin_pb2_grpc
from serving.proto.pagedjax.v1 import inference_pb2 as pb
from serving.proto.pagedjax.v1.inference_pb2_grpc import InferenceStub

PROMPTS = ("Once upon a time", "Tom and Lily", "The")
GREEDY = {"temperature": 0.0, "max_tokens": 40}


@pytest.fixture(scope="module")
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as made:
        yield made


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> Any:
    return InferenceStub(channel)


@pytest.fixture(autouse=True)
def leaves_nothing(server: Server) -> Iterator[None]:
    yield
    until(server.is_free)


def request(*prompts: Any, **params: Any) -> Any:
    kinds = [pb.Prompt(text=p) if isinstance(p, str) else pb.Prompt(tokens=pb.TokenIds(ids=p)) for p in prompts]
    return pb.GenerateRequest(prompts=kinds, params=pb.SamplingParams(**{**GREEDY, **params}))


def test_streams_joined_are_the_unary_and_the_offline_answer(server: Server, stub: Any) -> None:
    asked = request(*PROMPTS, n=2, temperature=0.9, seed=4, logprobs=1, prompt_logprobs=0)
    params = SamplingParams(n=2, temperature=0.9, seed=4, logprobs=1, prompt_logprobs=0, max_tokens=40)
    offline, unary = server.llm.generate(PROMPTS, params), stub.Generate(asked).completions
    texts: dict[tuple[int, int], str] = {}
    ids: dict[tuple[int, int], list[int]] = {}
    ends: dict[tuple[int, int], Any] = {}
    messages = list(stub.GenerateStream(asked))
    for message in messages:
        for sample in message.samples:
            key = message.prompt_index, sample.index
            texts[key] = texts.get(key, "") + sample.text
            ids.setdefault(key, []).extend(sample.token_ids)
            if sample.finish_reason:
                ends[key] = sample
    for i, (output, completion) in enumerate(zip(offline, unary, strict=True)):
        assert tuple(completion.prompt_token_ids) == output.prompt_token_ids
        assert [p.token for p in completion.prompt_logprobs] == list(output.prompt_token_ids[1:])
        for sample, wanted in zip(completion.samples, output.outputs, strict=True):
            key = i, sample.index
            assert sample.text == wanted.text == texts[key] and tuple(sample.token_ids) == wanted.token_ids == tuple(ids[key])
            assert sample.finish_reason == ends[key].finish_reason and sample.usage.generated_tokens == len(wanted.token_ids)
            expected = [p.logprob for p in wanted.logprobs]
            assert [p.logprob for p in sample.logprobs] == pytest.approx(expected, abs=1e-3)
            assert [len(p.top) for p in sample.logprobs] == [1] * len(expected)
    firsts = [m.prompt_index for m in messages if m.prompt_token_ids]
    assert sorted(firsts) == [0, 1, 2] and len(messages) > 40


def test_ids_and_stops(server: Server, stub: Any) -> None:
    ids = server.llm.tokenizer.encode(PROMPTS[0])
    (text,), (same,) = (stub.Generate(request(p)).completions for p in (PROMPTS[0], ids))
    assert text.samples[0].text == same.samples[0].text and text.request_id != same.request_id
    (stopped,) = stub.Generate(request(ids, stop=["little girl"])).completions[0].samples
    assert stopped.stop_string == "little girl" and stopped.finish_reason == pb.FINISH_REASON_STOP
    assert text.samples[0].text.startswith(stopped.text + "little girl")
    token = text.samples[0].token_ids[5]
    (stopped,) = stub.Generate(request(ids, stop_token_ids=[token])).completions[0].samples
    assert stopped.stop_token == token and stopped.token_ids[-1] == token
    beams = (
        stub.Generate(request(ids, beam_width=3, n=2, max_tokens=8, early_stopping=pb.EARLY_STOPPING_NEVER)).completions[0].samples
    )
    (offline,) = server.llm.generate([ids], SamplingParams(beam_width=3, n=2, max_tokens=8, early_stopping="never"))
    assert [tuple(s.token_ids) for s in beams] == [o.token_ids for o in offline.outputs]


def test_output_of_a_form(stub: Any) -> None:
    asked = request("Once")
    for constraint, allowed in (
        (pb.Constraint(choice=pb.Choice(texts=["yes", "no"])), ("yes", "no")),
        (pb.Constraint(regex="(ab|ba)"), ("ab", "ba")),
        (pb.Constraint(structural_tag='{"format": {"type": "const_string", "value": "ab"}}'), ("ab",)),
        (pb.Constraint(json_schema='{"enum": [1, 2]}'), ("1", "2")),
    ):
        asked.constraint.CopyFrom(constraint)
        (sample,) = stub.Generate(asked).completions[0].samples
        assert sample.text in allowed and sample.finish_reason == pb.FINISH_REASON_STOP
    (free,) = stub.Generate(request("Once")).completions[0].samples
    assert free.text not in ("yes", "no", "ab", "ba", "1", "2")


def test_one_bad_prompt_ends_the_call_and_leaves_nothing(server: Server, stub: Any) -> None:
    before = server.llm.engine.scheduler.stats.generated_tokens
    with server.slow_steps(0.02), pytest.raises(grpc.RpcError, match="must be token ids below 512; got 600"):
        stub.Generate(request(PROMPTS[0], [600], PROMPTS[1], max_tokens=100))
    until(server.is_free)
    assert server.llm.engine.scheduler.stats.generated_tokens - before < 100


def test_scores(server: Server, stub: Any) -> None:
    text = "Once upon a time, there was a little girl named Lily."
    (score,) = stub.Score(pb.ScoreRequest(prompts=[pb.Prompt(text=text)], top_logprobs=2)).scores
    (offline,) = server.llm.score(text)
    assert tuple(score.token_ids) == offline.token_ids and score.total == pytest.approx(math.fsum(offline.logprobs))
    assert [p.logprob for p in score.logprobs] == pytest.approx(offline.logprobs, abs=1e-5)
    assert [len(p.top) for p in score.logprobs] == [2] * (len(offline.token_ids) - 1)


def test_tokens_and_text(server: Server, stub: Any) -> None:
    texts = ["Once upon a time", "", "🙂 né 漢字"]
    ids = stub.Tokenize(pb.TokenizeRequest(texts=texts)).tokens
    assert [list(each.ids) for each in ids] == [server.llm.tokenizer.encode(text) for text in texts]
    bare = stub.Tokenize(pb.TokenizeRequest(texts=texts, without_special=True)).tokens
    assert [list(each.ids) for each in bare] == [server.llm.tokenizer.encode(t, add_special=False) for t in texts]
    back = stub.Detokenize(pb.DetokenizeRequest(tokens=ids, skip_special=True)).texts
    assert list(back) == texts
    with pytest.raises(grpc.RpcError, match="a call must hold at least one prompt"):
        stub.Tokenize(pb.TokenizeRequest())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (pb.GenerateRequest(), "a call must hold at least one prompt; got 0"),
        (pb.GenerateRequest(prompts=[pb.Prompt()]), "a prompt must hold text or tokens; got neither"),
        (pb.GenerateRequest(prompts=[pb.Prompt(text="a")] * 65), "a call may hold 64 prompts; got 65"),
        (pb.GenerateRequest(prompts=[pb.Prompt(text="a")], model="gpt"), "the model served here is 'stories'; got 'gpt'"),
        (pb.GenerateRequest(prompts=[pb.Prompt(text="a")], pool=7), "pool must be one of its names; got 7"),
        (pb.GenerateRequest(prompts=[pb.Prompt(text="a")], retention=11), "retention must be between 0 and 10; got 11"),
        (pb.GenerateRequest(prompts=[pb.Prompt(text="a")], constraint={}), "a constraint must hold a schema"),
        (pb.GenerateRequest(prompts=[pb.Prompt(text="a")], params={"top_p": 2}), r"top_p must be in \(0, 1\]; got 2.0"),
        (
            pb.GenerateRequest(prompts=[pb.Prompt(text="a")], params={"early_stopping": 9}),
            "early_stopping must be one of its names",
        ),
    ],
)
def test_what_is_refused(stub: Any, asked: Any, message: str) -> None:
    with pytest.raises(grpc.RpcError, match=message):
        stub.Generate(asked)
    with pytest.raises(grpc.RpcError, match=message):
        list(stub.GenerateStream(asked))


def test_what_the_owner_asks(server: Server, channel: grpc.Channel, stub: Any) -> None:
    admin = admin_pb2_grpc.AdminStub(channel)
    asked = request("Once", max_tokens=4)
    asked.request_id = "traced"
    stub.Generate(asked)
    decisions = admin.Trace(admin_pb2.TraceRequest(request_id="traced")).decisions
    assert [d.what for d in decisions] == ["queued", "admitted", "chunk", "finished"] and decisions[0].seconds == 0
    assert json.loads(decisions[-1].why_json)["reason"] == "length"
    with pytest.raises(grpc.RpcError, match="request nobody is not known"):
        admin.Trace(admin_pb2.TraceRequest(request_id="nobody"))
    shapes = admin.GetBuckets(admin_pb2.GetBucketsRequest())
    assert [(b.tokens, b.rows, b.decode) for b in shapes.buckets] == [(4, 4, True), (32, 4, False)]
    assert shapes.computed_tokens == server.llm.engine.padding.computed > 0 == shapes.compilations_after_start
    report = admin.GetShardingReport(admin_pb2.GetShardingReportRequest())
    assert {a.name: a.size for a in report.axes} == {"data": 1, "model": 1} and len(report.devices) == 1
    assert sum(w.bytes for w in report.weights) == server.llm.engine.weight_bytes
    assert report.pool.bytes == report.pool.bytes_per_device == server.llm.engine.state.kv.nbytes


def test_drain(llm: LLM) -> None:
    """What is open goes on, nothing new is taken, and health says so."""
    with serving(llm) as server, grpc.insecure_channel(server.address) as channel:
        stub, admin = InferenceStub(channel), admin_pb2_grpc.AdminStub(channel)
        with server.slow_steps(0.01):
            answers = stub.GenerateStream(request("Once", max_tokens=60))
            first = next(answers)
            assert admin.Drain(admin_pb2.DrainRequest()).open_requests == 1
            with pytest.raises(grpc.RpcError, match="shutting down") as caught:
                stub.Generate(request("Once"))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            text = "".join(s.text for m in (first, *answers) for s in m.samples)
        assert text == llm.generate("Once", SamplingParams(temperature=0, max_tokens=60))[0].outputs[0].text
        assert admin.Drain(admin_pb2.DrainRequest(wait_seconds=10)).open_requests == 0


def test_reflection_names_what_there_is(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert set(database.get_services()) == {
        *("vllm.grpc.engine.VllmEngine", "pagedjax.v1.Inference", "pagedjax.v1.Admin"),
        *("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"),
    }
    assert database.FindFileContainingSymbol("pagedjax.v1.GenerateRequest").package == "pagedjax.v1"
