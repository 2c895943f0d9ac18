"""The core of the server on stories260K: replies, slow readers, aborts, deadlines, limits, failure. No sockets."""

import asyncio
import contextlib
import io
import json
import logging
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from loopback import SMALL, STORIES, slow_steps

from pagedjax import LLM, SamplingParams
from pagedjax.errors import EngineStopped, UserError
from pagedjax.host.constraint import StructuredOutputsParams
from pagedjax.host.request import Logprobs
from pagedjax.stream import Delta
from serving.auth import Caller
from serving.call import known_ids
from serving.config import ServeConfig
from serving.errors import Refusal
from serving.events import Ended, Event
from serving.frontend import Call, Frontend
from serving.gather import merge
from serving.limits import Limits
from serving.log import LOG, TextLines, requests, setup
from serving.reply import Pieces, Reply, weight
from serving.server import drain, ends
from serving.trace_context import TraceContext

GREEDY = SamplingParams(max_tokens=60, temperature=0)
LONG = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)


@contextlib.asynccontextmanager
async def frontend_of(llm: LLM, **options) -> AsyncIterator[Frontend]:
    """Nothing may be open or held when it is left."""
    frontend = Frontend(ServeConfig(**options), "stories")
    await frontend.start(llm)
    try:
        yield frontend
        async with asyncio.timeout(30):
            await frontend.idle()
            while llm.engine.has_work():
                await asyncio.sleep(0.01)
    finally:
        frontend.close()
    pool = llm.engine.scheduler.pool
    assert pool.num_free == pool.capacity


def form(**kind: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**kind))


def nested(depth: int) -> dict[str, Any]:
    """A JSON schema of so many levels."""
    return {} if depth == 1 else {"items": nested(depth - 1)}


def abyss() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(200_000):
        schema = {"items": schema}
    return schema


async def text_of(reply: Reply) -> str:
    return "".join([delta.text async for update in reply for delta in update])


def test_updates_joined_are_the_offline_answer(llm: LLM) -> None:
    async def main() -> None:
        async with frontend_of(llm) as frontend:
            texts = await asyncio.gather(*[text_of(await frontend.submit(Call(p, GREEDY))) for p in ("Once upon a time", "Tom")])
            assert texts == [o.outputs[0].text for o in llm.generate(["Once upon a time", "Tom"], GREEDY)]
            ids = await frontend.tokenize("Once upon a time")
            assert (
                ids == llm.tokenizer.encode("Once upon a time")
                and await text_of(await frontend.submit(Call(ids, GREEDY))) == texts[0]
            )
            assert await frontend.detokenize(ids[1:]) == "Once upon a time"

    asyncio.run(main())


def test_a_reader_that_is_behind_gets_one_update(llm: LLM) -> None:
    """A reader that keeps up gets an update for each step, with one delta for each sample; one that comes late gets all in one."""

    async def main() -> None:
        params = replace(GREEDY, n=2, temperature=1.0, seed=3, logprobs=1, max_tokens=30, ignore_eos=True)
        async with frontend_of(llm) as frontend:
            quick = [update async for update in await frontend.submit(Call("Once", params))]
            late = await frontend.submit(Call("Once", params))
            while not late.ended:
                await asyncio.sleep(0.005)
            assert late.unread == 2 * 30 * 3  # a token, its logprob, one alternative
            (update,) = [update async for update in late]
        assert len(quick) >= 10 and all(len({d.index for d in u}) == len(u) for u in quick)
        for index, delta in enumerate(update):
            pieces = [d for u in quick for d in u if d.index == index]
            assert delta.index == index and delta.tokens == tuple(t for d in pieces for t in d.tokens)
            assert delta.text == "".join(d.text for d in pieces) and len(delta.logprobs) == 30
            assert delta.finish == "length" == pieces[-1].finish and delta.usage == pieces[-1].usage

    asyncio.run(main())


def test_leaving_several_replies_leaves_no_task(llm: LLM) -> None:
    """While they are read, and while their reader waits for the next update."""

    async def main() -> None:
        async with frontend_of(llm) as frontend:
            for waits in (False, True):
                replies = [await frontend.submit(Call(prompt, LONG)) for prompt in ("Once", "Tom")]
                updates = merge(replies)
                await anext(updates)
                if waits:
                    waiting = asyncio.ensure_future(anext(updates))
                    await asyncio.sleep(0)
                    waiting.cancel()
                    await asyncio.wait([waiting])
                await updates.aclose()
                for reply in replies:
                    reply.close()
                async with asyncio.timeout(10):
                    while len(asyncio.all_tasks()) > 1:
                        await asyncio.sleep(0.01)

    asyncio.run(main())


def test_one_call_into_the_event_loop_for_each_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four requests that run together: not one call for each token."""

    async def main() -> None:
        loop, calls, real = asyncio.get_running_loop(), [], asyncio.get_running_loop().call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda f, *a, **k: (calls.append(f.__name__), real(f, *a, **k))[1])
        steps = llm.engine.scheduler.stats.steps
        async with frontend_of(llm) as frontend:
            replies = await asyncio.gather(*[frontend.submit(Call("Once", LONG)) for _ in range(4)])
            await asyncio.gather(*map(text_of, replies))
            steps = llm.engine.scheduler.stats.steps - steps
        assert 120 <= calls.count("_run_each") <= steps + 2 < 2 * 120 < 4 * 120

    asyncio.run(main())


def test_a_reader_that_never_reads(llm: LLM) -> None:
    """It costs what the bound says, its request ends, and others go on meanwhile. Below the bound it may come late."""

    async def main() -> None:
        ended: list[Event] = []
        async with frontend_of(llm, limits=Limits(max_unread=50)) as frontend:
            frontend.observers.append(lambda e: ended.append(e) if isinstance(e, Ended) else None)
            asleep = await frontend.submit(Call("Once", LONG))
            other = await text_of(await frontend.submit(Call("Once", replace(GREEDY, max_tokens=100))))
            assert other == llm.generate("Once", replace(GREEDY, max_tokens=100))[0].outputs[0].text
            assert asleep.ended and asleep.unread == 0
            with pytest.raises(Refusal, match="the reader left more than 50 tokens and logprobs unread") as caught:
                await text_of(asleep)
            assert caught.value.code == "slow_reader" and caught.value.grpc == "RESOURCE_EXHAUSTED"
            late = await frontend.submit(Call("Once", replace(GREEDY, max_tokens=50)))
            while not late.ended:
                await asyncio.sleep(0.005)
            assert await text_of(late)
        assert [e.refusal and e.refusal.code for e in ended] == ["slow_reader", None, None] and ended[1].finishes == ("length",)

    asyncio.run(main())


def test_leaving_early_and_aborting_cancel(llm: LLM) -> None:
    async def main() -> None:
        made, me, you = llm.engine.scheduler.stats, Caller(tenant="me"), Caller(tenant="you")
        before = made.generated_tokens
        async with frontend_of(llm) as frontend:
            async with await frontend.submit(Call("Once", LONG)) as reply:
                async for _ in reply:
                    break
            mine = await frontend.submit(Call("Once", LONG, me, request_id="a"))
            yours = await frontend.submit(Call("Once", replace(GREEDY, max_tokens=5), you, request_id="a"))  # not the same request
            with pytest.raises(Refusal, match="request a is open already"):
                await frontend.submit(Call("Once", LONG, me, request_id="a"))
            assert not frontend.abort("a", Caller(tenant="somebody"))
            assert frontend.abort("a", me) and frontend.abort("a", me) in (True, False)
            assert [d.finish async for u in mine for d in u][-1] == "cancelled" and await text_of(yours)
            assert not frontend.abort("a", me)
            task = asyncio.create_task(text_of(await frontend.submit(Call("Once", LONG))))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert made.generated_tokens - before < 120

    with slow_steps(llm.engine, 0.02):
        asyncio.run(main())


def test_deadlines(llm: LLM) -> None:
    async def main() -> None:
        async with frontend_of(llm) as frontend:
            with pytest.raises(Refusal, match="the deadline was over before the request could be queued") as caught:
                await frontend.submit(Call("Once", LONG, deadline=time.monotonic() - 1))
            assert caught.value.code == "deadline_exceeded"
            with slow_steps(llm.engine, 0.02):
                reply = await frontend.submit(Call("Once", LONG, deadline=time.monotonic() + 1))
                assert [d.finish async for u in reply for d in u][-1] == "deadline"
            reply = await frontend.submit(Call("Once", GREEDY, deadline=time.monotonic() + 60))
            assert [d.finish async for u in reply for d in u][-1] == "length"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("call", "limits", "code", "message"),
    [
        (Call("x" * 11, GREEDY), Limits(max_prompt_chars=10), "prompt_too_long", "a prompt may have 10 characters; got 11"),
        (
            Call([1] * 9, GREEDY),
            Limits(max_prompt_tokens=8),
            "prompt_too_long",
            "a prompt may have 8 tokens where the context is 128",
        ),
        (Call([1] * 128, GREEDY), Limits(), "prompt_too_long", "a prompt may have 127 tokens where the context is 128; got 128"),
        (Call("a b " * 100, GREEDY), Limits(), "prompt_too_long", "a prompt may have 127 tokens where the context is 128; got "),
        (Call("Once", GREEDY), Limits(max_output_tokens=59), "output_too_long", "max_tokens may be 59; got 60"),
        (Call("Once", SamplingParams(n=3)), Limits(max_samples=2), "too_many_samples", "n, best_of and beams may be 2; got 3"),
        (Call("Once", SamplingParams(logprobs=3)), Limits(max_logprobs=2), "too_many_logprobs", "logprobs may be 2; got 3"),
        (Call("Once", SamplingParams(stop=("a", "b"))), Limits(max_stops=1), "too_many_stops", "stop may hold 1 strings; got 2"),
        (Call("Once", GREEDY, model="gpt"), Limits(), "model_not_found", "the model served here is 'stories'; got 'gpt'"),
        (Call("Once", form(json="x" * 99)), Limits(max_form_bytes=98), "form_too_large", "a form may have 98 bytes; got 99"),
        (Call("Once", form(json=nested(9))), Limits(max_form_depth=8), "form_too_deep", "a form may be nested 8 levels; got 9"),
        (
            Call("Once", form(json=nested(900))),
            Limits(max_form_bytes=0),
            "form_too_deep",
            "a form may be nested 64 levels; got 900",
        ),
        (Call("Once", form(json=abyss())), Limits(), "form_too_deep", "a form is nested deeper than Python can go"),
        (Call("Once", form(regex="(" * 9)), Limits(max_form_depth=8), "form_too_deep", "a form may be nested 8 levels; got 9"),
        (Call("Once", form(regex="(a")), Limits(), "invalid_argument", "structured_outputs.regex must be one that compiles"),
        (Call("Once", GREEDY, request_id="a\n"), Limits(), "invalid_argument", "a request id must be at most 256 printable"),
        (Call("Once", GREEDY, request_id="é"), Limits(), "invalid_argument", "at most 256 printable ASCII characters"),
        (Call("Once", GREEDY, cache_salt="\ud800"), Limits(), "invalid_argument", "cache_salt must be valid Unicode"),
        (Call([1, 9999], GREEDY), Limits(), "invalid_argument", "must be token ids below 512; got 9999"),
    ],
)
def test_what_is_refused(llm: LLM, call: Call, limits: Limits, code: str, message: str) -> None:
    async def main() -> None:
        async with frontend_of(llm, limits=limits) as frontend:
            with pytest.raises(Refusal, match=message) as caught:
                await frontend.submit(call)
            assert caught.value.code == code and frontend.open_requests == 0

    asyncio.run(main())


def test_states(llm: LLM) -> None:
    async def main() -> None:
        early = Frontend(ServeConfig(), "stories")
        with pytest.raises(Refusal, match="the model is being loaded") as caught:
            await early.submit(Call("Once", GREEDY))
        assert caught.value.code == "not_ready" and early.state == "starting" and early.is_live()
        early.close()
        async with frontend_of(llm, limits=Limits(max_streams=1)) as frontend:
            states: list[str] = []
            frontend.on_state.append(states.append)
            open_one = await frontend.submit(Call("Once", GREEDY))
            with pytest.raises(Refusal, match="1 requests are open, which is as many as there may be") as caught:
                await frontend.submit(Call("Once", GREEDY))
            assert caught.value.http == 429 and caught.value.retry_after == 1.0
            frontend.drain(refuse=False)
            assert frontend.state == "draining" == states[0]
            text = await text_of(open_one)  # which goes on
            assert await text_of(await frontend.submit(Call("Once", GREEDY))) == text
            frontend.drain()
            with pytest.raises(Refusal, match="shutting down and takes no new requests"):
                await frontend.submit(Call("Once", GREEDY))

    asyncio.run(main())


def test_what_does_not_end_in_time_is_cancelled(llm: LLM) -> None:
    async def main() -> None:
        async with frontend_of(llm, drain_seconds=0.05) as frontend:
            reply = await frontend.submit(Call("Once", LONG))
            await drain(frontend, asyncio.Event())
            assert [d.finish async for u in reply for d in u][-1] == "cancelled" and frontend.open_requests == 0

    with slow_steps(llm.engine, 0.02):
        asyncio.run(main())


def test_a_step_that_hangs_does_not_keep_the_process() -> None:
    gate = threading.Event()
    try:
        assert not asyncio.run(ends(gate.wait, 0.05))
    finally:
        gate.set()
    assert asyncio.run(ends(gate.wait, 30))


def test_lines_of_the_log(llm: LLM) -> None:
    """Whose request it was, what it cost and how it ended; token ids of the prompt only where they are asked for."""

    async def main(prompts: bool) -> list[dict]:
        async with frontend_of(llm, limits=Limits(max_stops=1)) as frontend:
            frontend.observers.append(requests(prompts=prompts))
            await text_of(await frontend.submit(Call([1, 403], GREEDY, Caller("key", "tenant"), request_id="mine")))
            with pytest.raises(Refusal):
                await frontend.submit(Call([1], replace(GREEDY, stop=("a", "b")), request_id="other", trace=trace, header_id="h"))
            with pytest.raises(ValueError, match="not read"), frontend.reading(Caller("key", "tenant"), known_ids(trace)):
                raise UserError("not read")
        logging.getLogger("a library").warning("it is late")
        logging.getLogger("a library").info("it is fine")
        return [json.loads(line) for line in lines.getvalue().splitlines()]

    trace = TraceContext(f"00-{'a' * 32}-{'b' * 16}-01")
    root = logging.getLogger()
    handlers, lines = list(root.handlers), io.StringIO()
    try:
        for prompts in (False, True):
            with contextlib.redirect_stderr(lines):
                setup("json")
            lines.seek(0)
            lines.truncate()
            done, refused, unread, library = asyncio.run(main(prompts))
            told = {name: done[name] for name in ("request_id", "tenant", "key", "prompt_tokens", "generated_tokens", "finish")}
            assert list(told.values()) == ["mine", "tenant", "key", 2, 60, "length"] and done["seconds"] > 0
            assert done.get("prompt") == ([1, 403] if prompts else None)
            assert (refused["message"], refused["code"]) == ("refused", "too_many_stops")
            ids = [refused.get(name) for name in ("request_id", "header_id", "trace_id")]
            assert ids == ["other", "h", "a" * 32] and "trace_id" not in done
            told = [unread.get(name) for name in ("message", "code", "why", "trace_id", "tenant", "key", "request_id")]
            assert told == ["refused", "invalid_argument", "not read", "a" * 32, "tenant", "key", None]
            assert (library["level"], library["message"]) == ("warning", "it is late")
    finally:
        root.handlers[:] = handlers
        logging.captureWarnings(False)
    record = LOG.makeRecord("x", 20, "f", 1, "request", (), None, extra={"fields": {"a": "b c", "n": 1}})
    assert TextLines("%(levelname)s %(message)s").format(record) == "INFO request a='b c' n=1"


async def idle(frontend: Frontend) -> None:
    """Until the engine does nothing."""
    async with asyncio.timeout(60):
        while frontend.step_age():
            await asyncio.sleep(0.01)


def test_loads_and_liveness_while_a_step_hangs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        gate, step = threading.Event(), llm.engine.step
        async with frontend_of(llm, wedged_seconds=0.05) as frontend:
            await idle(frontend)  # of what other tests left
            assert frontend.is_live() and frontend.load.running == 0
            monkeypatch.setattr(llm.engine, "step", lambda: (len(llm.engine.scheduler.running) > 0 and gate.wait(30), step())[1])
            reply = await frontend.submit(Call("Once", GREEDY))
            async with asyncio.timeout(25):  # before the gate opens by itself
                while frontend.is_live() or frontend.load.running == 0:
                    await asyncio.sleep(0.01)
            assert frontend.load.running == 1 and frontend.load.blocks_used > 0 and frontend.step_age() >= 0.05
            gate.set()
            assert await text_of(reply)
            await idle(frontend)
            assert frontend.is_live() and (frontend.load.running, frontend.load.blocks_used) == (0, 0)

    asyncio.run(main())


def test_a_failing_step_ends_its_requests_and_says_so(compile_cache: str) -> None:
    async def main() -> None:
        with LLM(STORIES, **SMALL, compile_cache=compile_cache) as llm:
            frontend = Frontend(ServeConfig(), "stories")
            await frontend.start(llm)
            states: list[str] = []
            frontend.on_state.append(states.append)

            def fail() -> None:
                raise OSError("the device went away")

            with slow_steps(llm.engine, 0.02):
                replies = [await frontend.submit(Call("Once", LONG)) for _ in range(2)]
                llm.engine.step = fail
                for reply in replies:
                    with pytest.raises(Refusal, match="the engine stopped after an error") as caught:
                        await text_of(reply)
                    assert (caught.value.code, caught.value.grpc, caught.value.http) == ("engine_failed", "INTERNAL", 500)
            async with asyncio.timeout(60):
                while not states:
                    await asyncio.sleep(0.01)
            assert states == ["failed"] and isinstance(frontend.failure, OSError) and not frontend.is_live()
            with pytest.raises(Refusal, match="the engine has stopped") as caught:
                await frontend.submit(Call("Once", GREEDY))
            assert caught.value.grpc == "UNAVAILABLE" and frontend.open_requests == 0
            with pytest.raises(EngineStopped):
                await frontend.flush_cache()
            frontend.close()

    asyncio.run(main())


def test_a_long_prompt_holds_up_nobody(llm: LLM) -> None:
    """While a megabyte is tokenized the event loop goes round; done on the event loop itself it would not."""
    text = ("Once upon a time there was a girl. " * 30_000)[:1_000_000]

    async def rounds(work) -> int:
        count, done = 0, asyncio.ensure_future(work)
        while not done.done():
            await asyncio.sleep(0.001)
            count += 1
        await done
        return count

    async def main() -> None:
        async with frontend_of(llm) as frontend:

            async def refused() -> None:
                with pytest.raises(Refusal, match="a prompt may have 127 tokens"):
                    await frontend.submit(Call(text, GREEDY))

            async def inline() -> None:
                llm.tokenizer.encode(text)

            assert await rounds(inline()) <= 2 and await rounds(refused()) > 10

    asyncio.run(main())


def test_pieces_join_as_one_step() -> None:
    entry = Logprobs(5, -1.0, 1, ((5, -1.0),))
    pieces = Pieces(Delta(0, "a", (1,), (entry,), prompt_logprobs=(entry,)))
    pieces.add(Delta(0, "b", (2, 3), (entry, entry), finish="stop", stop=3))
    assert pieces.joined() == Delta(0, "ab", (1, 2, 3), (entry,) * 3, (entry,), "stop", 3)
    assert weight(pieces.joined()) == 3 + 3 * 2
