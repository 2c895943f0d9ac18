"""What Prometheus reads: `vllm:` names where dashboards and routers know them, `pagedjax:` for what only this engine has.

Nothing is counted for each token. The engine's thread counts steps, and is asked for a copy of its counters once a scrape; the rest
is heard from the Frontend on the event loop, once a request and once for each of its steps.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from pagedjax.engine import Engine
from pagedjax.host.histogram import Histogram
from pagedjax.host.sequence import Stats
from serving.events import Advanced, Ended, Event, Refused

# Edges as vLLM has them, with finer ones below for small models.
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
    *(640.0, 2560.0),
)
BETWEEN_TOKENS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0),
)
WHOLE_REQUEST = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
SAMPLES = (1, 2, 5, 10, 20)
VLLM = "vllm"  # prefix of the names that are vLLM's
FINISHED = {"cancelled": "abort"} | {name: name for name in ("stop", "length", "deadline", "constraint")}  # and "error"


def one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, … up to `most`."""
    edges = [m * 10**e for e in range(len(str(most))) for m in (1, 2, 5)]
    return tuple(edge for edge in edges if edge <= most)


@dataclass(frozen=True)
class Blocks:
    """The pool, in blocks. `used` includes `shared`; `cached` ones are free, but hold something."""

    total: int
    size: int  # tokens a block
    used: int
    shared: int
    cached: int
    states: bytes  # of each, as BlockPool.states has them

    @property
    def free(self) -> int:
        return self.total - self.used - self.cached


@dataclass(frozen=True)
class Snapshot:
    """The engine's counters between two steps."""

    stats: Stats
    running: int
    queued: int  # sequences that wait for room
    deferred: int  # samples that wait for the first one to compute their prompt
    lanes: int
    blocks: Blocks
    padding: int  # tokens computed for nothing, and
    computed: int  # those that were wanted
    compile_seconds: Mapping[str, float]  # of each program that was compiled at start
    compilations_after_start: int
    weight_bytes: int


def snapshot(engine: Engine) -> Snapshot:
    """To be called by the engine's thread."""
    scheduler = engine.scheduler
    queued = len(scheduler.entrance.queue)
    states = scheduler.pool.states()
    shared = states.count(3)
    blocks = Blocks(scheduler.pool.capacity, scheduler.block_size, states.count(2) + shared, shared, states.count(1), states)
    return Snapshot(
        stats=copy.deepcopy(scheduler.stats),
        running=len(scheduler.running),
        queued=queued,
        deferred=scheduler.num_waiting - queued,
        lanes=scheduler.entrance.num_lanes,
        blocks=blocks,
        padding=engine.padding.padding,
        computed=engine.padding.computed,
        compile_seconds={_name(bucket): compiled.seconds for bucket, compiled in engine.executables.items()},
        compilations_after_start=engine.compilations_after_start,
        weight_bytes=engine.weight_bytes,
    )


@dataclass
class Requests:
    """What is known from requests that have ended, and of those that were refused."""

    longest: int = 1 << 20  # tokens: the last edge
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys([*FINISHED.values(), "error"], 0))
    refused: dict[str, int] = field(default_factory=dict)  # by the code of the refusal
    histograms: dict[str, Histogram] = field(init=False)

    def __post_init__(self):
        tokens = one_two_five(self.longest)
        edges: dict[str, tuple[float, ...]] = {
            "time_to_first_token_seconds": FIRST_TOKEN,
            "inter_token_latency_seconds": BETWEEN_TOKENS,
            "request_time_per_output_token_seconds": BETWEEN_TOKENS,
            "e2e_request_latency_seconds": WHOLE_REQUEST,
            "request_queue_time_seconds": WHOLE_REQUEST,
            "request_prefill_time_seconds": WHOLE_REQUEST,
            "request_decode_time_seconds": WHOLE_REQUEST,
            "request_inference_time_seconds": WHOLE_REQUEST,
            "request_prompt_tokens": tokens,
            "request_prefill_kv_computed_tokens": tokens,
            "request_generation_tokens": tokens,
            "request_max_num_generation_tokens": tokens,
            "request_params_max_tokens": tokens,
            "request_params_n": SAMPLES,
        }
        self.histograms = {name: Histogram(each) for name, each in edges.items()}

    def observe(self, event: Event) -> None:
        """An Observer of a Frontend."""
        match event:
            case Refused(refusal=refusal):
                self.refused[refusal.code] = self.refused.get(refusal.code, 0) + 1
            case Advanced(first=False):
                seconds = event.seconds * event.request.params.n / event.tokens  # of one sample's token
                self.histograms["inter_token_latency_seconds"].observe(seconds, event.tokens)
            case Ended():
                self._end(event)

    def _end(self, event: Ended) -> None:
        params, usages, seen = event.request.params, event.usages, self.histograms
        for finish in event.finishes:
            self.finished[FINISHED[finish]] += 1
        if event.refusal is not None:
            failed = event.refusal.code in ("engine_failed", "internal")
            self.finished["error" if failed else "abort"] += params.n - len(event.finishes)
        prompt, cached = len(event.request.prompt), min((usage.cached for usage in usages), default=0)
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        seen["request_prompt_tokens"].observe(prompt)
        seen["request_params_n"].observe(params.n)
        if params.max_tokens is not None:
            seen["request_params_max_tokens"].observe(params.max_tokens)
        for usage in usages:
            seen["request_generation_tokens"].observe(usage.generated)
        if event.refusal is None:
            seen["request_max_num_generation_tokens"].observe(max(usage.generated for usage in usages))
            seen["request_prefill_kv_computed_tokens"].observe(prompt - cached)
            self._time(event)

    def _time(self, event: Ended) -> None:
        """Of a request that came to its end. As users see it, it begins when it comes, before its prompt is tokenized."""
        seen, waited = self.histograms, min(usage.waited for usage in event.usages)
        seen["e2e_request_latency_seconds"].observe(event.prepared + event.seconds)
        seen["request_queue_time_seconds"].observe(waited)
        if event.first_token is not None:
            decode = max(0.0, event.seconds - event.first_token)
            seen["time_to_first_token_seconds"].observe(event.prepared + event.first_token)
            seen["request_prefill_time_seconds"].observe(max(0.0, event.first_token - waited))
            seen["request_inference_time_seconds"].observe(max(0.0, event.seconds - waited))
            seen["request_decode_time_seconds"].observe(decode)
            longest = max(usage.generated for usage in event.usages)
            if longest > 1:
                seen["request_time_per_output_token_seconds"].observe(decode / (longest - 1))


def exposition(
    model: str, requests: Requests, engine: Snapshot | None, *, more: Iterable[Metric] = (), prefix: str = VLLM
) -> bytes:
    """The page that Prometheus reads. Without a snapshot (the engine is down, or long in a step) its part is left out. `more`: of
    the port. `prefix`: in the place of vllm."""
    labels = {"model_name": model, "engine": "0"}
    metrics = [*request_metrics(labels, requests), *(engine_metrics(labels, engine) if engine else ())]
    return generate_latest(_Page([*(_renamed(metric, prefix) for metric in metrics), *more]))


def _renamed(metric: Metric, prefix: str) -> Metric:
    if prefix != VLLM and metric.name.startswith(f"{VLLM}:"):
        metric.name = prefix + metric.name.removeprefix(VLLM)
        metric.samples = [sample._replace(name=prefix + sample.name.removeprefix(VLLM)) for sample in metric.samples]
    return metric


class _Page:
    """What generate_latest asks for metrics; those of the process come with it."""

    def __init__(self, metrics: list[Metric]):
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics
        yield from ProcessCollector(registry=None).collect()


def request_metrics(labels: dict[str, str], seen: Requests) -> Iterator[Metric]:
    yield _counter("vllm:prompt_tokens", "Tokens of prompts of ended requests.", labels, seen.prompt_tokens)
    yield _counter("vllm:prompt_tokens_cached", "Of them, those found in the prefix cache.", labels, seen.cached_tokens)
    sources = {"local_compute": seen.prompt_tokens - seen.cached_tokens, "local_cache_hit": seen.cached_tokens}
    yield _counters("vllm:prompt_tokens_by_source", "The same, by where they came from.", labels, "source", sources)
    yield _counters("vllm:request_success", "Ended samples.", labels, "finished_reason", seen.finished)
    yield _counter("vllm:admission_rejections", "Requests refused by a full queue.", labels, seen.refused.get("queue_full", 0))
    yield _counters("pagedjax:refused_requests", "Requests refused, by why.", labels, "code", seen.refused)
    for name, histogram in seen.histograms.items():
        what = f"{name.removesuffix('_seconds').replace('_', ' ')}{', seconds' if name.endswith('_seconds') else ''}."
        yield histogram_metric(f"vllm:{name}", what.capitalize(), [(labels, histogram)])


def engine_metrics(labels: dict[str, str], now: Snapshot) -> Iterator[Metric]:
    stats, blocks = now.stats, now.blocks
    yield _gauge("vllm:num_requests_running", "Sequences that run.", labels, now.running)
    yield _gauge("vllm:num_requests_waiting", "Sequences that wait.", labels, now.queued + now.deferred)
    reasons = {"capacity": now.queued, "deferred": now.deferred}
    yield _gauges("vllm:num_requests_waiting_by_reason", "Sequences that wait, by what for.", labels, "reason", reasons)
    yield _gauge("vllm:kv_cache_usage_perc", "Blocks in use, as a part of 1.", labels, blocks.used / blocks.total)
    asleep = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}  # where this is missing, vLLM's board says that we are down
    yield _gauges("vllm:engine_sleep_state", "There is no sleep here.", labels, "sleep_state", asleep)
    config = {**labels, "block_size": str(blocks.size), "num_gpu_blocks": str(blocks.total)}
    yield _gauge("vllm:cache_config_info", "The size of the KV cache, as labels.", config, 1)
    yield _counter("vllm:generation_tokens", "Tokens of answers.", labels, stats.generated_tokens)
    yield _counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", labels, stats.entered_tokens)
    yield _counter("vllm:prefix_cache_hits", "Tokens found in it.", labels, stats.cached_tokens)
    yield _counter("vllm:num_preemptions", "Sequences that had to leave for others.", labels, stats.preemptions)
    yield histogram_metric("vllm:iteration_tokens_total", "Tokens of a dispatch, padding apart.", [(labels, stats.step_tokens)])
    yield from own_metrics(labels, now)


def own_metrics(labels: dict[str, str], now: Snapshot) -> Iterator[Metric]:
    stats, blocks = now.stats, now.blocks
    compiled = {"start": len(now.compile_seconds), "after_start": now.compilations_after_start}
    yield _counters("pagedjax:compilations", "Buckets compiled; after start it must stay 0.", labels, "phase", compiled)
    yield _gauges("pagedjax:compile_seconds", "That a bucket took at start.", labels, "bucket", now.compile_seconds)
    yield _counter("pagedjax:computed_tokens", "Tokens that were asked for.", labels, now.computed)
    yield _counter("pagedjax:padding_tokens", "Tokens computed for nothing.", labels, now.padding)
    share = now.padding / (now.padding + now.computed) if now.padding else 0.0
    yield _gauge("pagedjax:bucket_padding_ratio", "Their part of all tokens since start.", labels, share)
    phases = [({**labels, "phase": phase}, histogram) for phase, histogram in stats.step_seconds.items()]
    yield histogram_metric("pagedjax:step_seconds", "Of one step, by what its rows do.", phases)
    yield _counter("pagedjax:steps", "Steps that were dispatched.", labels, stats.steps)
    states = {"used": blocks.used - blocks.shared, "shared": blocks.shared, "cached": blocks.cached, "free": blocks.free}
    yield _gauges("pagedjax:blocks", "Of the pool, by what they are.", labels, "state", states)
    yield _gauge("pagedjax:peak_blocks", "Most blocks that were ever in use.", labels, stats.peak_blocks)
    yield _gauge("pagedjax:waste_slots", "Held, and without a token that is computed or scheduled.", labels, stats.waste)
    yield _gauge("pagedjax:worst_waste_slots", "Of one sequence, ever; below the block size.", labels, stats.worst_waste)
    yield _gauges("pagedjax:slot_share", "Where slots went, of slots times steps.", labels, "class", stats.slot_steps.shares())
    kinds = {"swap": stats.swaps, "recompute": stats.preemptions - stats.swaps}
    yield _counters("pagedjax:preemptions", "By what happened to the sequence.", labels, "kind", kinds)
    yield _counter("pagedjax:recomputed_tokens", "Computed again after a preemption.", labels, stats.recomputed_tokens)
    yield _counter("pagedjax:copied_blocks", "Copied because two sequences parted.", labels, stats.copies)
    yield _gauge("pagedjax:lanes", "Sequences that can run at once.", labels, now.lanes)
    yield _gauge("pagedjax:weight_bytes", "Of the parameters, over all devices.", labels, now.weight_bytes)


def _name(bucket: object) -> str:
    return str(bucket).replace("\n", " ")


def _gauge(name: str, what: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, what, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _gauges(name: str, what: str, labels: dict[str, str], by: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, what, labels=[*labels, by])
    for key, value in values.items():
        family.add_metric([*labels.values(), key], value)
    return family


def _counter(name: str, what: str, labels: dict[str, str], value: float) -> Metric:
    family = CounterMetricFamily(name, what, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counters(name: str, what: str, labels: dict[str, str], by: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, what, labels=[*labels, by])
    for key, value in values.items():
        family.add_metric([*labels.values(), key], value)
    return family


def histogram_metric(name: str, what: str, series: Iterable[tuple[dict[str, str], Histogram]]) -> Metric:
    """`series`: (labels, what was seen) of each, which all have the same labels' names."""
    series = list(series)
    family = HistogramMetricFamily(name, what, labels=list(series[0][0]))
    for labels, histogram in series:
        below, buckets = 0, []
        for edge, count in zip((*histogram.edges, None), histogram.counts, strict=True):
            below += count
            buckets.append(("+Inf" if edge is None else str(float(edge)), below))
        family.add_metric(list(labels.values()), buckets, histogram.total)
    return family
