"""vllm.grpc.engine.VllmEngine by the stubs of the independent package smg-grpc-proto, on a loopback port."""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loopback import Server, serving, until
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common

from pagedjax import LLM, SamplingParams
from pagedjax.text.grammar import Grammar
from serving import tokenizer_files

GREEDY = {"temperature": 0.0, "max_tokens": 40}
ONCE = "Once upon a time"


@pytest.fixture(scope="module")
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as made:
        yield made


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(channel)


@pytest.fixture(autouse=True)
def leaves_nothing(server: Server) -> Iterator[None]:
    yield
    until(server.is_free)


def request(ids: list[int], stream: bool = False, name: str = "", **params: Any) -> Any:
    return pb.GenerateRequest(
        request_id=name,
        tokenized=pb.TokenizedInput(input_ids=ids),
        sampling_params=pb.SamplingParams(**{**GREEDY, **params}),
        stream=stream,
    )


def error_of(answers: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        list(answers)
    return caught.value.code().name, caught.value.details()


def test_chunks_joined_are_the_whole_and_the_offline_answer(server: Server, stub: Any) -> None:
    ids = server.llm.tokenizer.encode(ONCE)
    (offline,) = server.llm.generate([ids], SamplingParams(temperature=0, max_tokens=40, logprobs=2, prompt_logprobs=0))
    (unary,) = stub.Generate(request(ids, logprobs=2, prompt_logprobs=0))
    *chunks, last = list(stub.Generate(request(ids, stream=True, logprobs=2, prompt_logprobs=0)))
    whole, end = unary.complete, last.complete
    assert tuple(whole.output_ids) == offline.outputs[0].token_ids == tuple(end.output_ids)
    assert [t for c in chunks for t in c.chunk.token_ids] == list(whole.output_ids) and len(chunks) > 20
    assert (whole.finish_reason, whole.prompt_tokens, whole.completion_tokens) == ("length", len(ids), 40)
    assert sum(c.chunk.completion_tokens for c in chunks) == 40 and whole.WhichOneof("matched_stop") is None
    expected = [p.logprob for p in offline.outputs[0].logprobs]
    assert list(whole.output_logprobs.token_logprobs) == pytest.approx(expected, abs=1e-4)
    assert [x for c in chunks for x in c.chunk.output_logprobs.token_logprobs] == list(whole.output_logprobs.token_logprobs)
    assert [len(t.values) for t in whole.output_logprobs.top_logprobs] == [2] * 40
    assert list(whole.input_logprobs.token_ids) == ids and not whole.input_logprobs.token_logprobs[0].HasField("value")
    assert [e.value for e in whole.input_logprobs.token_logprobs[1:]] == pytest.approx([p.logprob for p in offline.prompt_logprobs])
    assert chunks[0].chunk.input_logprobs == whole.input_logprobs and not chunks[1].chunk.HasField("input_logprobs")


def test_each_sample_has_an_end_of_its_own(server: Server, stub: Any) -> None:
    ids = server.llm.tokenizer.encode("Tom")
    offline = server.llm.generate([ids], SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=12))[0]
    for stream in (False, True):
        answers = list(stub.Generate(request(ids, stream, n=3, seed=5, temperature=1.0, max_tokens=12)))
        ends = {a.complete.index: tuple(a.complete.output_ids) for a in answers if a.HasField("complete")}
        assert ends == {o.index: o.token_ids for o in offline.outputs} and len(set(ends.values())) == 3


def test_what_matched(server: Server, stub: Any) -> None:
    ids = server.llm.tokenizer.encode(ONCE)
    (whole,) = stub.Generate(request(ids))
    (stopped,) = stub.Generate(request(ids, stop=["little girl"]))
    assert (stopped.complete.finish_reason, stopped.complete.matched_stop_str) == ("stop", "little girl")
    assert list(stopped.complete.output_ids) == list(whole.complete.output_ids)[: len(stopped.complete.output_ids)]
    token = whole.complete.output_ids[6]
    (stopped,) = stub.Generate(request(ids, stop_token_ids=[token]))
    assert (stopped.complete.finish_reason, stopped.complete.matched_token_id) == ("stop", token)
    stop = server.llm.defaults.stop_ids
    server.llm.defaults = replace(server.llm.defaults, stop_ids=(token,))
    try:
        (ended,) = stub.Generate(request(ids))  # by the model's own end: no match of the client's
    finally:
        server.llm.defaults = replace(server.llm.defaults, stop_ids=stop)
    assert ended.complete.finish_reason == "stop" and ended.complete.WhichOneof("matched_stop") is None


def test_output_of_a_form(stub: Any, server: Server) -> None:
    """Each kind of it; without one the model says something else."""
    decode = server.llm.tokenizer.decode

    def answer(**form: Any) -> tuple[str, str]:
        (made,) = stub.Generate(request([1, 403], **form))
        return decode([403, *made.complete.output_ids])[len(decode([403])) :], made.complete.finish_reason

    assert answer(regex="(ab|ba){3}")[0] in {a + b + c for a in ("ab", "ba") for b in ("ab", "ba") for c in ("ab", "ba")}
    assert answer(choice=pb.ChoiceConstraint(choices=["yes", "no"]))[0] in ("yes", "no")
    assert answer(grammar='start: "x" "y"+ "z"', max_tokens=9)[0].startswith("xy")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(answer(json_schema=json.dumps(schema))[0])["a"] in (1, 2)
    assert answer(json_object=True)[0].lstrip().startswith("{")
    assert answer(json_object=False) == answer() and not answer()[0].lstrip().startswith("{")


def test_output_that_cannot_go_on_in_its_form(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A status, with the trailer by which smg knows it."""
    mask, left = Grammar.mask, iter(range(4))
    monkeypatch.setattr(Grammar, "mask", lambda self: mask(self) if next(left, None) is not None else np.zeros(1, np.uint32))
    with pytest.raises(grpc.RpcError, match="an output must be able to go on in its form") as caught:
        list(stub.Generate(request([1, 403], regex="[0-9]{9}", stream=True)))
    error: Any = caught.value
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert dict(error.trailing_metadata())["smg-constraint-failed"] == "engine"


def test_text_and_truncated_prompts(server: Server, stub: Any) -> None:
    ids = server.llm.tokenizer.encode(ONCE)
    params = pb.SamplingParams(**GREEDY)
    (text,) = stub.Generate(pb.GenerateRequest(text=ONCE, sampling_params=params))
    (whole,) = stub.Generate(request(ids))
    (cut,) = stub.Generate(request([9] * 200 + ids, truncate_prompt_tokens=len(ids)))
    assert list(text.complete.output_ids) == list(whole.complete.output_ids) == list(cut.complete.output_ids)
    (longest,) = stub.Generate(request([9] * 200 + ids, truncate_prompt_tokens=-1, max_tokens=None))
    assert (longest.complete.prompt_tokens, longest.complete.completion_tokens) == (127, 1)


@pytest.mark.parametrize("how", ["cancel", "abort", "deadline"])
@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_frees_blocks(server: Server, stub: Any, how: str, stream: bool) -> None:
    """Let run, it would be 120 tokens. Where steps have been measured, a deadline that cannot be met ends a request at once."""
    stats, ids = server.llm.engine.scheduler.stats, server.llm.tokenizer.encode("Once")
    before, name = stats.generated_tokens, f"{how}-{stream}"
    asked = request(ids, stream, name, max_tokens=120, ignore_eos=True)
    with server.slow_steps(0.02):
        answers = stub.Generate(asked, timeout=0.5 if how == "deadline" else None)
        until(lambda: stats.generated_tokens > before or how == "deadline")
        if how == "cancel":
            answers.cancel()
            assert error_of(answers)[0] == "CANCELLED"
        elif how == "abort":
            stub.Abort(pb.AbortRequest(request_ids=[name, "nobody"]))
            end = list(answers)[-1].complete
            assert end.finish_reason == "abort" and 0 < end.completion_tokens < 120
            stub.Abort(pb.AbortRequest(request_ids=[name]))
        else:
            assert error_of(answers)[0] == "DEADLINE_EXCEEDED"
        until(server.is_free)
    assert (how != "deadline") <= stats.generated_tokens - before < 100


def test_health_and_what_it_is(server: Server, stub: Any, channel: grpc.Channel) -> None:
    assert stub.HealthCheck(pb.HealthCheckRequest()) == pb.HealthCheckResponse(healthy=True, message="ready")
    info = stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.served_model_name, info.max_context_length, info.vocab_size) == ("stories", 128, 512)
    assert info.architectures == ["LlamaForCausalLM"] and info.bos_token_id == 1 and info.max_req_input_len == 127
    assert list(info.eos_token_ids) == list(server.llm.defaults.stop_ids) and info.is_generation
    about = stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (about.data_parallel_size, about.block_size, about.max_num_seqs) == (1, 16, 4)
    assert (about.model_dtype, about.kv_cache_dtype, about.is_paused) == ("float32", "float32", False)
    assert about.uptime_seconds > 0 and about.active_requests == 0
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "vllm.grpc.engine.VllmEngine", "pagedjax.v1.Inference", "pagedjax.v1.Admin"):
        assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == health_pb2.HealthCheckResponse.SERVING


def test_every_method_is_served(stub: Any) -> None:
    """All that the protocol has, but Embed."""
    asked = {
        "Generate": request([1], stream=True, max_tokens=1),
        "SubscribeKvEvents": common.SubscribeKvEventsRequest(load_records_before_first_batch=True),
    }
    missing = []
    for name, method in pb.DESCRIPTOR.services_by_name["VllmEngine"].methods_by_name.items():
        call = getattr(stub, name)
        given = asked.get(name) or message_factory.GetMessageClass(method.input_type)()
        try:
            if method.server_streaming:
                answers = call(given)
                next(answers)
                answers.cancel()
            else:
                call(given)
        except grpc.RpcError as error:
            refused: Any = error
            if refused.code() is grpc.StatusCode.UNIMPLEMENTED:
                missing.append(name)
    assert missing == ["Embed"]


def test_loads(server: Server, stub: Any) -> None:
    def load() -> Any:
        return stub.GetLoads(pb.GetLoadsRequest()).loads[0]

    idle = load()
    assert (idle.num_running_reqs, idle.num_used_tokens, idle.max_running_requests) == (0, 0, 4)
    with server.slow_steps(0.02):
        answers = [stub.Generate(request([1, 300 + i], True, max_tokens=100, ignore_eos=True)) for i in range(6)]
        until(lambda: load().num_running_reqs == 4 and load().num_waiting_reqs == 2)
        busy = load()
        assert 0 < busy.num_used_tokens < busy.max_total_num_tokens and 0 < busy.token_usage < 1 == busy.utilization
        assert busy.num_total_reqs == 6 and busy.num_waiting_uncached_tokens > 0 and busy.gen_throughput > 0
        for answer in answers:
            answer.cancel()
        until(server.is_free)
    assert load().num_running_reqs == 0
    with pytest.raises(grpc.RpcError, match="dp_rank must be 0"):
        stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))


def test_the_tokenizer_travels(server: Server, stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files, "CHUNK", 1000)
    *first, last = list(stub.GetTokenizer(common.GetTokenizerRequest()))
    data = b"".join(c.data for c in (*first, last))
    assert len(first) > 2 and not any(c.sha256 for c in first) and last.sha256 == hashlib.sha256(data).hexdigest()
    files = zipfile.ZipFile(io.BytesIO(data))
    assert files.namelist() == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert files.read("tokenizer.json") == (server.llm.tokenizer_source / "tokenizer.json").read_bytes()


def test_the_tokenizer_of_a_gguf_file_is_made(server: Server, stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.llm, "tokenizer_source", {"tokenizer.ggml.model": "llama"})
    (only,) = list(stub.GetTokenizer(common.GetTokenizerRequest()))
    files = zipfile.ZipFile(io.BytesIO(only.data))
    assert json.loads(files.read("tokenizer.json"))["model"]["vocab"] and json.loads(files.read("tokenizer_config.json"))


@pytest.mark.parametrize(
    ("asked", "code", "message"),
    [
        (request([1], temperature=-1), "INVALID_ARGUMENT", "temperature must be 0 or more"),
        (request([1], logprobs=-1), "INVALID_ARGUMENT", "logprobs must be between 0 and"),
        (
            request([1], structural_tag="{}"),
            "INVALID_ARGUMENT",
            "structured_outputs.structural_tag must have a JSON object as format",
        ),
        (request([1], json_schema="{"), "INVALID_ARGUMENT", "structured_outputs.json must be"),
        (request([1], n=17), "INVALID_ARGUMENT", "n, best_of and beams may be 16; got 17"),
        (request([]), "INVALID_ARGUMENT", "the prompt must hold at least one token; got 0"),
        (request([600]), "INVALID_ARGUMENT", "must be token ids below 512; got 600"),
        (request([1] * 128), "INVALID_ARGUMENT", "a prompt may have 127 tokens where the context is 128; got 128"),
        (request([1], truncate_prompt_tokens=-2), "INVALID_ARGUMENT", "truncate_prompt_tokens must be positive, or -1"),
        (pb.GenerateRequest(), "INVALID_ARGUMENT", "a request must hold tokenized or text; got neither"),
        (
            pb.GenerateRequest(text="a", kv_transfer_params_json="{}"),
            "INVALID_ARGUMENT",
            "kv_transfer_params_json is not supported",
        ),
        (pb.GenerateRequest(text="a", mm_inputs={}), "INVALID_ARGUMENT", "mm_inputs is not supported: images and video"),
        (pb.GenerateRequest(text="a", data_parallel_rank=2), "INVALID_ARGUMENT", "data_parallel_rank must be 0"),
    ],
)
def test_what_is_refused(stub: Any, asked: Any, code: str, message: str) -> None:
    found, details = error_of(stub.Generate(asked))
    assert found == code and message in details


def test_events_of_the_cache(server: Server, stub: Any) -> None:
    """What a subscriber is told adds up to what is cached, whether it was there from the start, joins late or resumes."""
    assert stub.FlushCache(common.FlushCacheRequest()).success
    start = server.frontend.kv_feed.sequence
    early = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=start + 1))
    assert early.initial_metadata() is not None  # at once, before any event
    ids = [1, *range(270, 270 + 50)]
    list(stub.Generate(request(ids, max_tokens=20, ignore_eos=True)))
    stored: list[Any] = []
    for batch in early:
        stored += [block for e in batch.events for block in e.stored.blocks]
        if len(stored) == 4:
            break
    assert [list(b.token_ids) for b in stored[:3]] == [ids[0:16], ids[16:32], ids[32:48]]
    cache = server.llm.engine.scheduler.tables.cache
    assert len(stored) == len(cache) and batch.load.max_running_requests == 4
    second = [e.stored.parent_block_hash for e in batch.events if e.HasField("stored")]
    assert second[-1] == stored[-2].block_hash
    assert stub.FlushCache(common.FlushCacheRequest()).success and len(cache) == 0
    gone = next(b for b in early if b.events)
    assert gone.events[0].HasField("cleared") and gone.sequence_number == server.frontend.kv_feed.sequence
    again = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=gone.sequence_number))
    assert next(again) == gone or next(again).load.load_only
    late = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=10**6))
    snapshot = next(late)
    assert (snapshot.snapshot.count, snapshot.snapshot.blocks) == (1, 0) and snapshot.events[0].HasField("cleared")
    for stream in (early, again, late):
        stream.cancel()


def test_a_profile_has_our_steps(llm: LLM, tmp_path: Path) -> None:
    with serving(llm, profile_folder=str(tmp_path)) as server, grpc.insecure_channel(server.address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        for asked, message in (
            ({"output_dir": "../elsewhere"}, "a trace must be written below"),
            ({"num_steps": 3}, "num_steps is not supported"),
        ):
            with pytest.raises(grpc.RpcError, match=message):
                stub.StartProfile(common.StartProfileRequest(**asked))
        assert stub.StartProfile(common.StartProfileRequest(output_dir="one")).success
        with pytest.raises(grpc.RpcError, match="a trace is running already"):
            stub.StartProfile(common.StartProfileRequest())
        list(stub.Generate(request([1, 403], max_tokens=4)))
        assert stub.StopProfile(common.StopProfileRequest()).success
    (trace,) = (tmp_path / "one").rglob("*.xplane.pb")
    assert b"step 32x4" in trace.read_bytes() and b"step 4x4" in trace.read_bytes()


def test_profiles_need_a_folder(stub: Any) -> None:
    with pytest.raises(grpc.RpcError, match="profiling needs a folder: start the server with --profile-folder"):
        stub.StartProfile(common.StartProfileRequest())
    with pytest.raises(grpc.RpcError, match="no trace is running"):
        stub.StopProfile(common.StopProfileRequest())
