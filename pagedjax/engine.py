"""The engine: the only holder of device arrays. Turns requests into token events, one dispatch after another."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from pagedjax.buckets import Bucket, make_buckets, pick
from pagedjax.config import EngineConfig, ModelConfig
from pagedjax.debug import PoolWatch
from pagedjax.device.compile import (
    Compiled,
    Lower,
    all_kept,
    compilations_of_this_thread,
    compile_all,
    lower_read_block,
    lower_set_lane,
    lower_set_mask,
    lower_step,
    lower_write_block,
    lower_zero_state,
)
from pagedjax.device.lanes import abstract_lanes
from pagedjax.device.params import ShardLayout
from pagedjax.device.sharding import state_shardings
from pagedjax.device.step import StepSpec
from pagedjax.errors import check
from pagedjax.host.plan import Entry, Plan, Row, RowResult, Swap
from pagedjax.host.request import Logprobs, Request, SamplingParams, TokenEvent, Usage
from pagedjax.host_tier import HostTier
from pagedjax.limits import BAD_WORD_TOKENS, NUM_BAD_WORDS, NUM_STOP_IDS
from pagedjax.memory import abstract_pool, pool_blocks, release_freed, swap_places
from pagedjax.models import model_for
from pagedjax.pack import pack, pack_lane, pack_mask
from pagedjax.service import make_scheduler
from pagedjax.state import DeviceState, StepOutput
from pagedjax.wire import lane_fields, step_fields

Progress = Callable[[str, int, int], None]  # what is being done, done so far, of how many


@dataclass(frozen=True)
class InFlight:
    """A dispatched step that is not committed."""

    plan: Plan
    output: StepOutput
    dispatched: float  # seconds of the host's clock


@dataclass
class Padding:
    """Tokens that were asked for, and tokens computed for nothing since a plan is rounded up to a bucket; in each pass of a
    dispatch of several decode steps."""

    computed: int = 0
    padding: int = 0


class Engine:
    """add, cancel, finish, step, has_work. Not thread-safe: one thread owns it (see loop.EngineLoop)."""

    def __init__(
        self,
        model: ModelConfig,
        layout: ShardLayout,
        params: Any,
        config: EngineConfig,
        mesh: Mesh,
        *,
        load: Callable[[], Any] | None = None,
        progress: Progress = lambda *_: None,
    ):
        """`config` is resolved (config.resolve) and names the dtype; `params` are placed on `mesh` in `layout`. With `load` they
        are abstract, and it gives the arrays: it is called in another thread, while the steps are compiled."""
        self.model, self.config, self.mesh = model, config, mesh
        schedule, size = config.schedule, config.cache.block_size
        self.params, self._vocab = params, layout.vocab
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        one_row = on_cpu and config.dtype == "float32" and mesh.size == 1
        self.buckets = make_buckets(config, on_cpu=on_cpu, one_row=one_row)
        self._table_width = -(-schedule.max_model_len // size)
        self._fields = {b: step_fields(b, model.layer_groups.count, self._table_width) for b in self.buckets}
        self._lane_fields = lane_fields(schedule.max_model_len, layout.vocab)
        spec = StepSpec(model_for(model.architecture), layout.cfg, mesh, schedule.decode_steps)
        to_load = self.weight_bytes if load else 0
        num_blocks = pool_blocks(config, layout.cfg, mesh, to_load=to_load, temp_bytes=partial(self._largest_temp, spec))
        places = swap_places(config, layout.cfg, mesh.devices.flat[0].platform)
        state = self._abstract_state(spec, num_blocks)
        with ThreadPoolExecutor(2, "start") as threads:
            start = time.perf_counter()
            loading = threads.submit(_timed, load or (lambda: params))
            zero, *programs = self._programs(spec, state, places > 0 or config.debug)
            # The pool takes a second for 2 to 4 GiB; it need not wait where nothing is compiled, whose memory is given back first.
            early = all_kept([zero, *programs], mesh, config.compile_cache)
            zeros = threads.submit(lambda: self._one(zero).call()).result if early else None
            compiled = self._compile(programs, progress)
            self.compile_seconds = time.perf_counter() - start
            self.params, self.load_seconds = loading.result()
        self.executables = {bucket: compiled[bucket] for bucket in self.buckets}
        others: dict[str, Compiled] = {name: program for name, program in compiled.items() if isinstance(name, str)}
        self._write_lane, self._write_mask = others["set_lane"], others["set_mask"]
        self.host_tier = HostTier(others["read_block"].call, others["write_block"].call, places) if places else None
        moves = (others["read_block"].call, others["write_block"].call) if config.debug else None
        zeros = zeros or self._one(zero).call
        release_freed()
        self.state: DeviceState = zeros()
        self._watch = PoolWatch(*moves, self.state.kv, mesh) if moves else None
        if self._watch is not None:
            num_blocks -= 1  # the guard
            self.state = replace(self.state, kv=self._watch.start(self.state.kv))
        self.scheduler = make_scheduler(
            config, num_blocks, windows=model.layer_groups.windows, host_blocks=places, swap_seconds=self._measure_swap()
        )
        self.padding = Padding()
        self.compilations_after_start = 0
        self._in_flight: deque[InFlight] = deque()
        self._ready = 0.0  # when the last step's results were there
        self._seeds = random.Random(config.seed)

    # --- requests ---------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request. UserError for what cannot be honoured, QueueFull at the queue's bound."""
        self._check(request)
        self.scheduler.add(request)

    def new_seed(self) -> int:
        """A seed for a request that brings none, from the engine's own generator."""
        return self._seeds.getrandbits(64)

    def cancel(self, request_id: str) -> list[TokenEvent]:
        """Ends a request; its blocks are free in the next schedule."""
        return self.scheduler.cancel(request_id)

    def finish(self, request_id: str, index: int, num_tokens: int) -> Usage | None:
        """Ends one sequence after its first num_tokens output tokens."""
        return self.scheduler.finish(request_id, index, num_tokens)

    @property
    def pool_bytes(self) -> int:
        """Of the KV pool, over all devices."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.state.kv))

    @property
    def weight_bytes(self) -> int:
        """Of the parameters, padding for shards included, over all devices (what each holds of its own)."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.params))

    def has_work(self) -> bool:
        return self.scheduler.has_work() or bool(self._in_flight)

    # --- one step ---------------------------------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Dispatches the next step and commits the one before it, which has run meanwhile."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self._dispatch(plan)
        keep = self.config.schedule.async_steps if plan is not None else 0
        events: list[TokenEvent] = self.scheduler.take_ended()
        while len(self._in_flight) > keep:
            done = self._in_flight.popleft()
            results = self._results(done)
            now = time.perf_counter()
            seconds = now - max(done.dispatched, self._ready)  # the device runs one step after the other
            self._ready = now
            events += self.scheduler.commit(done.plan, results, seconds)
        if self._watch is not None:
            self._watch.check(self.state.kv)
            self.scheduler.check()
        return events

    def seconds_idle(self) -> float:
        """How long `step` has nothing to do although requests wait: until a tenant may start again. 0 while there is work."""
        if self._in_flight or self.scheduler.running:
            return 0.0
        return self.scheduler.seconds_idle()

    def _measure_swap(self) -> float | None:
        """Seconds that a block takes to host memory, or back, on average; None where there is no host memory."""
        if self.host_tier is None:
            return None
        there = (Swap(0, 0),)  # the scrap block, and the place that is never given out
        self._move(Plan((), (), 1, swap_out=there, swap_in=there))
        jax.block_until_ready(self.state.kv)
        start = time.perf_counter()
        self._move(Plan((), (), 1, swap_out=there, swap_in=there))
        jax.block_until_ready(self.state.kv)
        return (time.perf_counter() - start) / 2

    def _dispatch(self, plan: Plan) -> None:
        before = compilations_of_this_thread()
        if plan.swap_out or plan.swap_in or plan.fresh:
            self._move(plan)
        for entry in plan.entries:
            self._set_lane(entry)
        for row in plan.rows:
            if row.mask is not None:
                self._set_mask(row.lane, row.mask)
        scores = any(row.targets for row in plan.rows)
        bucket = pick(self.buckets, plan.num_tokens, len(plan.rows), steps=plan.steps, scores=scores)
        buffer = pack(plan, bucket, self._fields[bucket], self.config.schedule.max_num_seqs)
        with jax.profiler.StepTraceAnnotation(f"step {bucket}", step_num=self.scheduler.stats.steps):
            self.state, output = self.executables[bucket].call(self.params, self.state, buffer)
        output.tokens.copy_to_host_async()
        self._in_flight.append(InFlight(plan, output, time.perf_counter()))
        wanted = sum(max(row.count, row.steps) for row in plan.rows)
        self.padding.computed += wanted
        self.padding.padding += bucket.tokens * plan.steps - wanted
        self.compilations_after_start += compilations_of_this_thread() - before
        if self.compilations_after_start:
            raise RuntimeError(f"bucket {bucket} was compiled after start; every shape must be compiled before")

    def _move(self, plan: Plan) -> None:
        """Moves blocks out, then back; neither waits for the device. In debug mode fresh blocks are poisoned in between."""
        swaps, tier, kv = plan.swap_out or plan.swap_in, self.host_tier, self.state.kv
        assert tier is not None or not swaps, "a plan swaps, but there is no host memory for it"
        if tier is not None:
            tier.swap_out(kv, plan.swap_out)
        if self._watch is not None:
            kv = self._watch.poison(kv, plan.fresh)
        if tier is not None:
            kv = tier.swap_in(kv, plan.swap_in)
        self.state = replace(self.state, kv=kv)

    def _set_lane(self, entry: Entry) -> None:
        buffer = pack_lane(entry, self._lane_fields)
        self.state = self._write_lane.call(self.state, np.asarray([entry.lane], np.int32), buffer)

    def _set_mask(self, lane: int, mask: np.ndarray) -> None:
        words = pack_mask(mask, self.state.lanes.mask.shape[1])
        self.state = self._write_mask.call(self.state, np.asarray([lane], np.int32), words)

    def _results(self, done: InFlight) -> list[RowResult]:
        """The step's output by row; waits for the device. Logprobs are fetched only where a row asked for them."""
        out, rows = done.output, done.plan.rows
        tokens = np.asarray(out.tokens)
        params = [self._params_of(row) for row in rows]
        wants = any(p is not None and p.logprobs_needed is not None for p in params)
        scores = any(row.targets for row in rows)
        top = [np.asarray(a) for a in (out.logprob, out.rank, out.top_ids, out.top_logprobs)] if wants else None
        prompt = (
            [np.asarray(a) for a in (out.prompt_logprob, out.prompt_rank, out.prompt_top_ids, out.prompt_top_logprobs)]
            if scores
            else None
        )
        results, at = [], 0
        for s, (row, p) in enumerate(zip(rows, params, strict=True)):
            sampled = tuple(int(t) for t in tokens[s, : row.steps] if t >= 0)
            logprobs = None
            if p is not None and p.logprobs_needed is not None and top is not None:
                best = p.logprobs_needed
                logprobs = tuple(_logprobs([a[s, i] for a in top], token, best) for i, token in enumerate(sampled))
            scored: tuple[Logprobs, ...] = ()
            if row.targets and prompt is not None and p is not None:
                best = p.prompt_logprobs or 0
                scored = tuple(_logprobs([a[at + i] for a in prompt], token, best) for i, token in enumerate(row.targets))
            results.append(RowResult(sampled, logprobs, scored))
            at += row.count
        return results

    def _params_of(self, row: Row) -> SamplingParams | None:
        """None where the results of the row will be dropped."""
        sequence = self.scheduler.find(row.request_id, row.index)
        return None if sequence is None or sequence.epoch != row.epoch else sequence.request.params

    # --- start ------------------------------------------------------------------------------------------------------

    def _abstract_state(self, spec: StepSpec, num_blocks: int) -> DeviceState:
        schedule = self.config.schedule
        platform = self.mesh.devices.flat[0].platform
        kv = abstract_pool(self.config, spec.cfg, platform, num_blocks)
        lanes = abstract_lanes(schedule.max_num_seqs, schedule.max_model_len, self._vocab)
        state = DeviceState(kv=kv, lanes=lanes)
        return jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), state, state_shardings(state, self.mesh)
        )

    def _largest_temp(self, spec: StepSpec) -> int:
        """Bytes of temporaries of the largest bucket; they do not depend on the size of the pool, so two blocks will do."""
        lowered = lower_step(spec, self.buckets[-1], self.params, self._abstract_state(spec, 2), self._table_width)
        memory = lowered.compile().memory_analysis()
        return memory.temp_size_in_bytes if memory else 0

    def _programs(self, spec: StepSpec, state: DeviceState, swaps: bool) -> list[tuple[Bucket | str, Lower]]:
        """The small programs by name, zero_state first, and the steps by bucket."""
        max_model_len = self.config.schedule.max_model_len
        programs: list[tuple[Bucket | str, Lower]] = [
            ("zero_state", partial(lower_zero_state, state)),
            ("set_lane", partial(lower_set_lane, spec, state, max_model_len, self._vocab)),
            ("set_mask", partial(lower_set_mask, spec, state)),
        ]
        if swaps:
            programs.append(("read_block", partial(lower_read_block, state, self.mesh)))
            programs.append(("write_block", partial(lower_write_block, state, self.mesh)))
        steps = ((bucket, partial(lower_step, spec, bucket, self.params, state, self._table_width)) for bucket in self.buckets)
        return [*programs, *steps]

    def _one(self, program: tuple[Bucket | str, Lower]) -> Compiled:
        (compiled,) = self._compile([program]).values()
        return compiled

    def _compile(
        self, programs: Sequence[tuple[Bucket | str, Lower]], progress: Progress = lambda *_: None
    ) -> dict[Bucket | str, Compiled]:
        total, done, lock = len(programs), 0, threading.Lock()
        progress("compile", 0, total)

        def count(key: Any, _: Compiled) -> None:
            """Called by the threads that compile."""
            nonlocal done
            with lock:
                done += 1
                progress(f"compile {key}", done, total)

        return compile_all(programs, self.mesh, self.config.compile_cache, count)

    def _check(self, request: Request) -> None:
        """Everything a request may get wrong that depends on the model."""
        vocab, p = self.model.vocab_size, request.params

        def in_vocab(what: str, ids: Iterable[int]) -> None:
            bad = next((i for i in ids if not 0 <= i < vocab), None)
            check(bad is None, f"request {request.id}: {what} must be token ids below {vocab}; got {bad}")

        in_vocab("the prompt", request.prompt)
        in_vocab("logit_bias", p.logit_bias)
        in_vocab("allowed_token_ids", p.allowed_token_ids or ())
        in_vocab("stop_token_ids", request.stop_ids)
        in_vocab("bad_words", (i for word in request.bad_words for i in word))
        stops, words = len(request.stop_ids), len(request.bad_words)
        check(
            stops <= NUM_STOP_IDS,
            f"request {request.id}: a request may have {NUM_STOP_IDS} stop ids, the model's included; got {stops}",
        )
        check(words <= NUM_BAD_WORDS, f"request {request.id}: bad_words may make {NUM_BAD_WORDS} token sequences; got {words}")
        longest = max((len(word) for word in request.bad_words), default=1)
        check(
            1 <= longest <= BAD_WORD_TOKENS,
            f"request {request.id}: a bad word may be {BAD_WORD_TOKENS} tokens long; got {longest}",
        )
        banned = {word[0] for word in request.bad_words if len(word) == 1} | set(request.stop_ids if p.min_tokens else ())
        allowed = range(vocab) if p.allowed_token_ids is None else p.allowed_token_ids
        check(
            any(i not in banned for i in allowed),
            f"request {request.id}: allowed_token_ids must leave a token beside bad_words and, with min_tokens, the stop ids; "
            f"got {len(set(allowed))} allowed, all of them banned",
        )


def _timed[T](work: Callable[[], T]) -> tuple[T, float]:
    """What it gives, and the seconds it took."""
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def _logprobs(values: Sequence[np.ndarray], token: int, best: int) -> Logprobs:
    logprob, rank, ids, logprobs = values
    top = tuple((int(i), float(v)) for i, v in zip(ids[:best], logprobs[:best], strict=True))
    return Logprobs(token, float(logprob), int(rank), top)
