"""Every number that shapes the engine, as frozen dataclasses that are validated once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import batched
from typing import Any, Literal, cast, get_args

from pagedjax.errors import check

Dtype = Literal["float32", "bfloat16"]
KvDtype = Literal["auto", "float32", "bfloat16", "int8", "float8_e4m3fn"]
LayerKind = Literal["full", "window"]
Reserve = Literal["paged", "oracle", "pow2", "max"]  # see host/reserve.py
Preemption = Literal["auto", "recompute", "swap"]
Policy = Literal["first_come", "priority", "longest_prefix", "shortest_work", "deadline"]  # see host/policy.py


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. The scalings are those of Hugging Face's `rope_scaling`; formulas in device/layers.py."""

    theta: float = 10_000.0
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_max_positions: int = 0  # llama3, yarn: the context the model was first trained for
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cos and sin

    def __post_init__(self):
        check(self.theta > 0, f"rope theta must be positive; got {self.theta}")
        check(self.factor >= 1, f"rope scaling factor must be at least 1; got {self.factor}")
        if self.scaling in ("llama3", "yarn"):
            check(
                self.original_max_positions > 0,
                f"rope scaling {self.scaling} needs original_max_position_embeddings; got {self.original_max_positions}",
            )


@dataclass(frozen=True)
class LayerGroups:
    """G groups of J layers. The layers of a group share a block table, so all of them see as many tokens; a block holds the keys
    and values of one group, and any group may have any block of the pool."""

    size: int  # J; a group may have fewer layers, and leaves the rest of its blocks unused
    windows: tuple[int | None, ...]  # of each of the G groups: the tokens its layers see; None: all, of full layers
    places: tuple[tuple[int, int], ...]  # of each of the L layers: its group and its place there

    @property
    def count(self) -> int:
        return len(self.windows)


def group_layers(kinds: Sequence[LayerKind], window: int | None) -> LayerGroups:
    """One group where all layers are of one kind; else groups as large as the kind with fewer layers, the full ones first."""
    by_kind = [[i for i, kind in enumerate(kinds) if kind == wanted] for wanted in ("full", "window")]
    size = min(len(layers) for layers in by_kind) or len(kinds)
    groups = [group for layers in by_kind for group in batched(layers, size)]
    places = {layer: (g, j) for g, group in enumerate(groups) for j, layer in enumerate(group)}
    return LayerGroups(
        size=size,
        windows=tuple(window if kinds[group[0]] == "window" else None for group in groups),
        places=tuple(places[i] for i in range(len(kinds))),
    )


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model: what its file says, nothing about how it is run.

    `layer_pattern` is the repeating unit of layer kinds: ("full",) for a uniform model, five "window" and one "full" for
    Gemma 3. Layer i is of kind layer_pattern[i % len(layer_pattern)].
    """

    architecture: str  # a module of pagedjax.models
    vocab_size: int  # V
    model_width: int  # M
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # K
    head_width: int  # D
    ffn_width: int  # F
    max_positions: int
    norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    local_rope: RopeConfig | None = None  # of window layers; None: the same as `rope`
    layer_pattern: tuple[LayerKind, ...] = ("full",)
    window: int | None = None  # tokens a window layer sees, the current one included
    attention_bias: bool = False  # on q, k and v
    attention_scale: float | None = None  # multiplies the scores; None: 1/sqrt(D)
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_scale: float = 1.0
    activation: Literal["silu", "gelu_tanh"] = "silu"
    tied_embeddings: bool = False

    def __post_init__(self):
        sizes = ("vocab_size", "model_width", "num_layers", "num_heads", "num_kv_heads", "head_width", "ffn_width", "max_positions")
        for name in sizes:
            value = getattr(self, name)
            check(isinstance(value, int) and value > 0, f"model {name} must be a positive integer; got {value!r}")
        check(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads must be a multiple of num_kv_heads; got {self.num_heads} and {self.num_kv_heads}",
        )
        check(self.head_width % 2 == 0, f"head_width must be even (rotary pairs); got {self.head_width}")
        check(len(self.layer_pattern) > 0, "layer_pattern must name at least one layer kind; got ()")
        if "window" in self.layer_pattern:
            check(self.window is not None and self.window > 0, f"window layers need a positive window; got {self.window}")

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each of the L layers."""
        unit = self.layer_pattern
        return tuple(unit[i % len(unit)] for i in range(self.num_layers))

    @property
    def layer_groups(self) -> LayerGroups:
        return group_layers(self.layer_kinds, self.window)

    @property
    def score_scale(self) -> float:
        return 1 / math.sqrt(self.head_width) if self.attention_scale is None else self.attention_scale


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache. Zero means: decided at start from the device and printed."""

    block_size: int = 0  # P, tokens in a block; 0: 64 on CPU and GPU, 128 on TPU
    kv_memory: int = 0  # bytes of the pool; 0: what the device has left (on CPU at most 4 GiB)
    # auto: as the weights; those of 8 bits: with a scale for each token and head
    kv_dtype: KvDtype = "auto"
    prefix_caching: bool = True  # start from blocks that already hold the beginning of a prompt
    reserve: Reserve = "paged"  # block by block, or one contiguous run from the start, of the size that older engines reserved
    swap_memory: int = 0  # bytes of host memory, over all devices, that blocks may be moved to; 0: none

    def __post_init__(self):
        p = self.block_size
        check(p >= 0 and p & (p - 1) == 0, f"block_size must be a power of two (or 0: chosen by device); got {p}")
        _check_one_of("kv_dtype", self.kv_dtype, get_args(KvDtype))
        check(self.reserve in get_args(Reserve), f"reserve must be one of {', '.join(get_args(Reserve))}; got {self.reserve!r}")
        check(self.kv_memory >= 0, f"kv_memory must be a number of bytes (or 0: chosen by device); got {self.kv_memory}")
        check(self.swap_memory >= 0, f"swap_memory must be a number of bytes (or 0: none); got {self.swap_memory}")


@dataclass(frozen=True)
class ScheduleConfig:
    """What one step may hold, and how far the host runs ahead of the device."""

    max_model_len: int = 0  # longest prompt plus output, tokens; 0: the model's own limit, at most 4096 on CPU
    max_num_seqs: int = 0  # R, lanes; 0: 32 on CPU, 256 elsewhere
    max_num_batched_tokens: int = 0  # the token budget of a step, above max_num_seqs; 0: 512 on CPU, 2048 elsewhere
    max_queued: int = 4096  # sequences that may wait (a request counts n times); more are refused
    preemption: Preemption = "auto"  # what a preempted sequence costs: tokens computed again, or blocks swapped; auto: the cheaper
    async_steps: int = 1  # steps dispatched before the oldest one is committed; 0: wait for each
    decode_steps: int = 0  # most decode steps in one dispatch; 0: 1 on CPU, 8 elsewhere

    def __post_init__(self):
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "decode_steps"):
            check(getattr(self, name) >= 0, f"{name} must not be negative; got {getattr(self, name)}")
        check(self.max_queued >= 1, f"max_queued must be at least 1; got {self.max_queued}")
        check(
            self.preemption in get_args(Preemption),
            f"preemption must be one of {', '.join(get_args(Preemption))}; got {self.preemption!r}",
        )
        check(self.async_steps in (0, 1), f"async_steps must be 0 or 1; got {self.async_steps}")
        rows, tokens = self.max_num_seqs, self.max_num_batched_tokens
        check(
            not (rows and tokens) or tokens > rows,
            f"max_num_batched_tokens must be above max_num_seqs (prompts move on while all lanes decode); got {tokens} and {rows}",
        )


@dataclass(frozen=True)
class QueueConfig:
    """How requests that compete are served; beside it stands what each request asks for (host/request.py, Service)."""

    policy: Policy = "first_come"  # who is next of one tenant's waiting requests
    aging: float = 30.0  # seconds of waiting that are worth one level of priority, or 1024 tokens of work or cached prefix
    batch_share: float = 0.25  # of lanes, blocks and tokens, for requests of the batch pool while interactive ones wait, too
    max_queued_tokens: int = 0  # prompt tokens that may wait in each pool; more are refused; 0: no bound
    max_first_token: float = 0.0  # seconds; an interactive request whose first token is predicted later is refused; 0: no bound
    token_seconds: float = 0.0  # time between two tokens that prefill may not exceed, as predicted; 0: it takes the whole budget
    tenants: str = ""  # a JSON file: of each tenant (* of all others) weight, tokens_per_minute, max_rows and max_blocks

    def __post_init__(self):
        check(self.policy in get_args(Policy), f"policy must be one of {', '.join(get_args(Policy))}; got {self.policy!r}")
        check(self.aging > 0, f"aging must be positive seconds; got {self.aging}")
        check(0 < self.batch_share < 1, f"batch_share must be between 0 and 1; got {self.batch_share}")
        for name in ("max_queued_tokens", "max_first_token", "token_seconds"):
            check(getattr(self, name) >= 0, f"{name} must not be negative; got {getattr(self, name)}")


@dataclass(frozen=True)
class BucketConfig:
    """The shapes that are compiled at start. Empty means: chosen in buckets.py from the schedule and the device."""

    decode_rows: tuple[int, ...] = ()  # rows of the decode buckets
    prefill_tokens: tuple[int, ...] = ()  # tokens of the buckets that hold prefill
    compile_budget: int = 0  # most buckets, 2 or more: a start with fewer is shorter, its steps are padded more; 0: no bound

    def __post_init__(self):
        budget = self.compile_budget
        check(budget == 0 or budget >= 2, f"compile_budget must be 2 or more (one to decode, one for prompts), or 0; got {budget}")
        for name in ("decode_rows", "prefill_tokens"):
            sizes = getattr(self, name)
            integers = isinstance(sizes, list | tuple) and all(type(size) is int for size in sizes)
            check(integers, f"{name} must be integers; got {sizes!r}")
            sizes = tuple(sizes)
            object.__setattr__(self, name, sizes)
            check(
                all(size > 0 for size in sizes) and tuple(sorted(set(sizes))) == sizes,
                f"{name} must be positive and ascending; got {sizes}",
            )


@dataclass(frozen=True)
class ShardingConfig:
    """Devices along each mesh axis."""

    model: int = 1  # tensor parallel

    def __post_init__(self):
        check(self.model >= 1, f"the model axis needs at least one device; got {self.model}")


@dataclass(frozen=True)
class EngineConfig:
    """All of it. `LLM`, the command line and the server build one of these."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the weights; auto: as in the file on TPU and GPU, float32 on CPU
    seed: int = 0  # seeds of requests that bring none are drawn from it
    debug: bool = False  # slow: fresh blocks are poisoned, a guard block and who owns what are checked after every step
    compile_cache: str = "~/.cache/pagedjax"  # folder of the persistent compilation cache; "" for none
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    buckets: BucketConfig = field(default_factory=BucketConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)

    def __post_init__(self):
        _check_one_of("dtype", self.dtype, ("auto", *get_args(Dtype)))


def _check_one_of(name: str, value: object, known: Sequence[str]) -> None:
    check(value in known, f"{name} must be one of {', '.join(known)}; got {value!r}")


def default_block_size(platform: Literal["cpu", "gpu", "tpu"]) -> int:
    """P where none is asked for, tokens."""
    return 128 if platform == "tpu" else 64


def resolve(config: EngineConfig, model: ModelConfig, platform: Literal["cpu", "gpu", "tpu"], dtype: Dtype) -> EngineConfig:
    """The configuration with every zero and "auto" decided, but for the pool's size, which depends on free memory. `dtype` is
    that of the weights, which depends on the file unless it is set."""
    on_cpu = platform == "cpu"
    check(
        config.schedule.max_model_len <= model.max_positions,
        f"max_model_len must be at most the model's {model.max_positions} positions; got {config.schedule.max_model_len}",
    )
    longest = min(model.max_positions, 4096) if on_cpu else model.max_positions
    return replace(
        config,
        dtype=dtype,
        cache=replace(config.cache, block_size=config.cache.block_size or default_block_size(platform)),
        schedule=resolve_schedule(config.schedule, longest, on_cpu=on_cpu),
    )


def resolve_schedule(schedule: ScheduleConfig, longest: int, *, on_cpu: bool) -> ScheduleConfig:
    """The schedule with every zero decided; `longest` is the max_model_len where none is asked for, tokens."""
    lanes = schedule.max_num_seqs or (32 if on_cpu else 256)
    return replace(
        schedule,
        max_model_len=schedule.max_model_len or longest,
        max_num_seqs=lanes,
        max_num_batched_tokens=schedule.max_num_batched_tokens or max(512 if on_cpu else 2048, 2 * lanes),
        decode_steps=schedule.decode_steps or (1 if on_cpu else 8),
    )


# vLLM's names, where the meaning is the same, and the field each one sets.
ALIASES = {
    "dtype": "dtype",
    "seed": "seed",
    "max_model_len": "schedule.max_model_len",
    "max_num_seqs": "schedule.max_num_seqs",
    "max_num_batched_tokens": "schedule.max_num_batched_tokens",
    "block_size": "cache.block_size",
    "kv_cache_memory_bytes": "cache.kv_memory",
    "kv_cache_dtype": "cache.kv_dtype",
    "enable_prefix_caching": "cache.prefix_caching",
    "tensor_parallel_size": "sharding.model",
}


def with_options(config: EngineConfig, options: Mapping[str, Any]) -> EngineConfig:
    """`config` with fields set by their path ("schedule.max_num_seqs") or by an alias of vLLM's. An unknown name is an error."""
    for name, value in options.items():
        section, _, leaf = ALIASES.get(name, name).rpartition(".")
        part = getattr(config, section, None) if section else config
        known = part is not None and leaf in getattr(part, "__dataclass_fields__", {})
        check(known, f"an option must be a field of EngineConfig or one of {', '.join(ALIASES)}; got {name}")
        changed = replace(cast(Any, part), **{leaf: value})
        config = replace(config, **{section: changed}) if section else changed
    return config
