"""The one interface between the engine and everything that speaks to clients."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Literal

from pagedjax.errors import EngineStopped
from pagedjax.host.request import Request, Service
from pagedjax.llm import LLM
from pagedjax.loop import Load
from serving.auth import Caller
from serving.call import LONGEST_ID, Call
from serving.config import ServeConfig
from serving.errors import Refusal, refusal
from serving.events import Accepted, Advanced, Ended, Event, Observer, Refused
from serving.kv_events import KvFeed
from serving.limits import check_params, check_prompt, check_text
from serving.log import FIELDS, LOG
from serving.reply import Reply
from serving.totals import Totals

State = Literal["starting", "ready", "draining", "failed"]
VERSION = version("pagedjax")


class Frontend:
    """Lives on one event loop. `start` gives it a model; until then, and after `drain` or a failure, it refuses requests."""

    def __init__(self, config: ServeConfig, model: str):
        """`model`: as it was given to the server, which is its name unless the configuration has another."""
        self.config, self.model_name = config, config.served_model_name or model
        self.started = self.last_received = time.time()
        self.totals, self.kv_feed = Totals(), KvFeed()
        self.observers: list[Observer] = [self.totals.observe]
        self.on_state: list[Callable[[State], None]] = []
        self.failure: BaseException | None = None
        self._state: State = "starting"
        self._refuses = False
        self._llm: LLM | None = None
        self._replies: dict[str, Reply] = {}  # by the engine's id
        self._idle = asyncio.Event()
        self._idle.set()
        self._pool = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenizer")

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self._state

    @property
    def llm(self) -> LLM:
        """Refusal while there is none."""
        if self._llm is None:
            raise Refusal("not_ready", "the model is being loaded")
        return self._llm

    @property
    def load(self) -> Load:
        return Load() if self._llm is None else self._llm.loop.load

    @property
    def open_requests(self) -> int:
        return len(self._replies)

    def is_live(self) -> bool:
        """Whether the engine moves: no step takes longer than the configuration allows, and none has failed. Loading counts as
        moving."""
        return self._state != "failed" and self.step_age() < self.config.wedged_seconds

    def step_age(self) -> float:
        """Seconds that the engine has been in its current step; 0 while it is idle."""
        return 0.0 if self._llm is None else self._llm.loop.seconds_busy()

    async def start(self, llm: LLM) -> None:
        """The model is there, and every shape compiled: requests are taken from now on."""
        await llm.loop.watch_cache(self.kv_feed.publish)
        self._llm = llm
        event_loop = asyncio.get_running_loop()

        def ended(future: "Future[None]") -> None:
            error = future.exception()
            if error is not None:
                event_loop.call_soon_threadsafe(self._fail, error)

        llm.loop.ended.add_done_callback(ended)
        self._enter("ready")

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self._enter("failed")

    def _enter(self, state: State) -> None:
        if state != self._state and self._state != "failed":
            self._state = state
            for call in self.on_state:
                call(state)

    def drain(self, *, refuse: bool = True) -> None:
        """Health says no from now on, and new requests are refused, unless they are to be taken for a while still. Those that are
        open go on."""
        self._refuses = refuse
        self._enter("draining")

    async def idle(self) -> None:
        """Waits until no request is open."""
        await self._idle.wait()

    def abort_all(self) -> None:
        for reply in list(self._replies.values()):
            reply.abort()

    def close(self) -> None:
        """Ends the worker pool. The model is closed by whoever made it."""
        self._pool.shutdown(cancel_futures=True)

    # --- requests ---------------------------------------------------------------------------------------------------

    async def submit(self, call: Call) -> Reply:
        """Takes a request. Refusal where it is not taken; cancelled meanwhile, nothing stays behind."""
        begin, call = time.perf_counter(), replace(call, request_id=call.request_id or uuid.uuid4().hex)
        try:
            return await self._submit(call)
        except Exception as error:
            refused = refusal(error)
            if refused.code == "internal":
                LOG.exception("a request failed", extra={FIELDS: call.ids})
            self._tell(Refused(call.caller, refused, call.ids, call, time.perf_counter() - begin))
            raise refused from error

    @contextlib.contextmanager
    def reading(self, caller: Caller, ids: Mapping[str, str]) -> Iterator[None]:
        """Around what makes a Call of a message: what goes wrong there refuses a request, too, and observers hear of it."""
        try:
            yield
        except Exception as error:
            self.refuse(error, caller, ids)
            raise

    def refuse(self, error: Exception, caller: Caller, ids: Mapping[str, str]) -> None:
        """Observers hear of a request that was refused before it was a Call."""
        self._tell(Refused(caller, refusal(error), ids))

    async def _submit(self, call: Call) -> Reply:
        llm = self._take(call)
        reply = self._register(call)
        try:
            request = await self.run(self._prepare, llm, call, self._engine_id(call.caller, reply.request_id))
            check_prompt(self.config.limits, request.prompt, llm.engine.config.schedule.max_model_len)
            request = replace(request, service=self._service(call))
            try:
                stream = await llm.loop.submit_async(request)
            except EngineStopped as error:
                raise Refusal("engine_down", "the engine has stopped") from error
            self._tell(Accepted(call.caller, request))
            reply.begin(request, stream)
        except BaseException:
            self._forget(call.caller, reply)
            raise
        return reply

    def _take(self, call: Call) -> LLM:
        """What can be said of a request before its prompt is looked at."""
        self.last_received = time.time()
        if self._refuses:
            raise Refusal("draining", "the server is shutting down and takes no new requests")
        if self._state == "failed":
            raise Refusal("engine_down", "the engine has stopped")
        llm = self.llm
        if call.model not in ("", self.model_name):
            raise Refusal("model_not_found", f"the model served here is {self.model_name!r}; got {call.model!r}", param="model")
        if len(call.request_id) > LONGEST_ID or not (call.request_id.isascii() and call.request_id.isprintable()):
            rule = f"a request id must be at most {LONGEST_ID} printable ASCII characters"  # it becomes a header
            raise Refusal("invalid_argument", rule, param="request_id")
        limits = self.config.limits
        if limits.max_streams and len(self._replies) >= limits.max_streams:
            raise Refusal("too_many_streams", f"{limits.max_streams} requests are open, which is as many as there may be")
        check_params(limits, call.params)
        if isinstance(call.prompt, str):
            check_text(limits, call.prompt)
        else:
            check_prompt(limits, call.prompt, llm.engine.config.schedule.max_model_len)
        return llm

    def _register(self, call: Call) -> Reply:
        key = self._engine_id(call.caller, call.request_id)
        if key in self._replies:
            raise Refusal("duplicate_request", f"request {call.request_id} is open already", param="request_id")
        last = [time.perf_counter()]

        def step(reply: Reply, tokens: int) -> None:
            assert reply.request is not None
            first, now = last[0] == reply.submitted, time.perf_counter()
            self._tell(Advanced(reply.request, tokens, now - last[0], first))
            last[0] = now

        reply = Reply(
            call.request_id, max_unread=self.config.limits.max_unread, on_step=step, on_end=lambda reply: self._ended(call, reply)
        )
        last[0] = reply.submitted
        self._replies[key] = reply
        self._idle.clear()
        return reply

    def _ended(self, call: Call, reply: Reply) -> None:
        self._forget(call.caller, reply)
        if reply.request is not None:
            stream = reply.stream
            first = None if stream.first_token is None else stream.first_token - stream.submitted
            seconds, prepared = time.perf_counter() - stream.submitted, stream.submitted - reply.submitted
            finishes, usages = tuple(reply.finishes.values()), tuple(reply.usages.values())
            self._tell(Ended(call, reply.request, finishes, usages, reply.tokens, prepared, seconds, first, reply.error))

    def _forget(self, caller: Caller, reply: Reply) -> None:
        self._replies.pop(self._engine_id(caller, reply.request_id), None)
        if not self._replies:
            self._idle.set()

    def _tell(self, event: Event) -> None:
        for observer in self.observers:
            observer(event)

    @staticmethod
    def _engine_id(caller: Caller, request_id: str) -> str:
        """Two tenants may use the same id. A tenant's name has no @."""
        return f"{request_id}@{caller.tenant}" if caller.tenant else request_id

    @staticmethod
    def _prepare(llm: LLM, call: Call, engine_id: str) -> Request:
        """Runs in the pool: everything that takes as long as the prompt is."""
        ids = call.prompt
        if isinstance(ids, str):
            ids = need_tokenizer(llm).encode(ids, add_special=call.add_special)
        salt = f"{call.caller.salt}/{call.cache_salt}" if call.cache_salt else call.caller.salt
        return replace(llm.request({"prompt_token_ids": ids, "cache_salt": salt}, call.params), id=engine_id, shown=call.shown)

    @staticmethod
    def _service(call: Call) -> Service:
        left = None if call.deadline is None else call.deadline - time.monotonic()
        if left is not None and left <= 0:
            raise Refusal("deadline_exceeded", "the deadline was over before the request could be queued")
        caller = call.caller
        return Service(tenant=caller.tenant, priority=caller.priority, pool=call.pool, deadline=left, retention=call.retention)

    def abort(self, request_id: str, caller: Caller) -> bool:
        """Ends a request of the same tenant: its reply ends with finish "cancelled", its blocks are free before the next step.
        False for one that is not open, which may just have ended."""
        reply = self._replies.get(self._engine_id(caller, request_id))
        if reply is not None:
            reply.abort()
        return reply is not None

    # --- text -------------------------------------------------------------------------------------------------------

    async def run[**P, T](self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """In the worker pool, so that a long text holds up nobody on the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))

    async def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        check_text(self.config.limits, text)
        return await self._text(lambda: need_tokenizer(self.llm).encode(text, add_special=add_special))

    async def detokenize(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        return await self._text(lambda: need_tokenizer(self.llm).decode(ids, skip_special=skip_special))

    async def chat_ids(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> tuple[int, ...]:
        """A conversation in the model's template; `options` as of LLM.chat_prompt."""
        llm = self.llm
        return await self._text(lambda: llm.chat_prompt(messages, **options))

    async def _text[T](self, work: Callable[[], T]) -> T:
        try:
            return await self.run(work)
        except Exception as error:
            raise refusal(error) from error

    # --- what only the owner asks -----------------------------------------------------------------------------------

    async def flush_cache(self) -> int:
        """Forgets all cached blocks that no sequence holds; how many."""
        return await self.llm.loop.call_async(lambda engine: engine.scheduler.tables.flush())

    async def trace(self, request_id: str, caller: Caller) -> str:
        """Why a request of the same tenant was served as it was, as JSON (LLM.trace)."""
        llm, engine_id = self.llm, self._engine_id(caller, request_id)
        try:
            return await asyncio.to_thread(llm.trace, engine_id)
        except ValueError:
            raise Refusal("request_not_found", f"request {request_id} is not known, or ended too long ago") from None


def need_tokenizer(llm: LLM) -> Any:
    if llm.tokenizer is None:
        raise Refusal("unsupported", "the model has no tokenizer: prompts are token ids, and so are answers", param="prompt")
    return llm.tokenizer
