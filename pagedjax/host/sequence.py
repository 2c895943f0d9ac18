"""One output of a request as the scheduler follows it, and what it counts."""

from dataclasses import dataclass, field

import numpy as np

from pagedjax.host.constraint import Constraint
from pagedjax.host.histogram import Histogram
from pagedjax.host.prefix_cache import Content
from pagedjax.host.request import FinishReason, Logprobs, Request, Usage

Key = tuple[str, int]  # request id, index of the sequence
PHASES = ("prefill", "decode", "mixed")  # of a step: what its rows do
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(eq=False, slots=True)
class Sequence:
    """One output of a request. Positions below num_committed are in the cache; up to num_scheduled they are, or will be when
    the steps in flight are done."""

    request: Request
    index: int
    max_len: int  # prompt and output
    tokens: list[int]  # prompt and the output the host has seen
    table: np.ndarray  # i32[G, B]: its blocks, then zeros
    blocks: list[list[int]]  # of each group; 0 where a block has left the window
    epoch: int  # of its present life; no other life in this scheduler has the same
    arrival: float = 0.0  # seconds of the scheduler's clock
    order: int = 0  # of arrival
    lane: int = -1
    num_scheduled: int = 0
    num_committed: int = 0
    num_pending: int = 0  # tokens sampled by steps in flight
    recomputed: int = 0
    cached: int = 0  # prompt tokens that were in the cache when it first entered
    waited: float = 0.0  # seconds from its arrival until then
    highest: int = 0  # positions that were in the cache in any life
    named: int = 0  # its first blocks, those that others may share
    hashes: list[list[tuple[bytes, Content]]] = field(
        default_factory=list
    )  # of each group: its tokens' whole blocks, as far as known
    forked: bool = False  # its last block may be another's, too
    borrowed: int = 0  # blocks that others held already when it started from them
    reserved: int = 0  # slots of a contiguous reservation; 0: block by block
    places: list[list[int]] = field(default_factory=list)  # of each group: in host memory, of the blocks behind the named ones
    behind: int = 0  # the first block that has a place
    constraint: Constraint | None = None  # where its output stands
    mask: np.ndarray | None = None  # u32[words]: what that allows next
    scored: list[Logprobs] = field(default_factory=list)  # prompt logprobs so far
    steps_held: dict[int, int] = field(default_factory=dict)  # slots held: for how many steps
    token_steps: int = 0  # tokens in the cache, added up over the steps

    @property
    def key(self) -> Key:
        return self.request.id, self.index

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def length(self) -> int:
        """Tokens of prompt and output, those in flight included."""
        return len(self.tokens) + self.num_pending

    @property
    def held(self) -> list[int]:
        """Its blocks, of all groups."""
        return [block for blocks in self.blocks for block in blocks if block]

    @property
    def num_held(self) -> int:
        """How many those are, counted faster."""
        held = 0
        for blocks in self.blocks:
            held += len(blocks) - blocks.count(0)
        return held

    @property
    def num_added(self) -> int:
        """How many it has added to those in use."""
        return max(0, self.num_held - self.borrowed)

    def take(self, token: int) -> tuple[bool, FinishReason | None, int | None]:
        """One more token, as the device chose it: (whether it belongs to the output, why the sequence ends here if it does,
        and by which stop id)."""
        request = self.request
        if token in request.stop_ids:
            self.tokens.append(token)
            if len(self.tokens) - self.prompt_len > request.params.min_tokens:
                return True, "stop", token
        elif self.constraint is not None and not self.constraint.accept(token):
            return False, "constraint", None
        else:
            self.tokens.append(token)
        if self.constraint is not None and self.constraint.done:
            return True, "stop", None
        if len(self.tokens) >= self.max_len:
            return True, "length", None
        if self.constraint is not None:
            self.mask = self.constraint.mask()
            if not self.mask.any():
                return True, "constraint", None
        return True, None, None

    def usage(self) -> Usage:
        generated = len(self.tokens) - self.prompt_len
        return Usage(self.prompt_len, self.cached, generated, self.recomputed, self.waited)


@dataclass
class Waste:
    """Where the pool's slots went, in slots times steps. `tokens` hold keys and values. `reserved` were held for tokens that came
    later, `internal` for tokens that never came, `external` nobody held. The classes of the PagedAttention paper (Kwon et al.
    2023, figure 2). A sequence is counted when it ends; a shared block counts for each that shares it."""

    tokens: int = 0
    reserved: int = 0
    internal: int = 0
    external: int = 0

    def ended(self, sequence: Sequence) -> None:
        final = len(sequence.tokens) * len(sequence.blocks)
        held = sum(slots * steps for slots, steps in sequence.steps_held.items())
        never = sum(max(0, slots - final) * steps for slots, steps in sequence.steps_held.items())
        self.tokens += sequence.token_steps
        self.internal += never
        self.reserved += held - never - sequence.token_steps

    def shares(self) -> dict[str, float]:
        """Of each class, its part of the whole."""
        parts = {name: getattr(self, name) for name in ("tokens", "reserved", "internal", "external")}
        whole = sum(parts.values())
        return {name: value / whole if whole else 0.0 for name, value in parts.items()}


@dataclass
class Stats:
    """Counters since start, and gauges of the last schedule. `waste`: slots held minus tokens computed or scheduled."""

    steps: int = 0
    scheduled_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0  # preemptions that kept the sequence in host memory
    recomputed_tokens: int = 0
    entered_tokens: int = 0  # that a sequence had when it entered, or came back
    cached_tokens: int = 0  # of them, those it found in the prefix cache, or shared with another sample
    copies: int = 0  # blocks copied on write
    slots_held: int = 0
    waste: int = 0
    worst_waste: int = 0  # of one sequence, the mean over its groups, ever; at most P - 1
    lookahead: int = 0  # tokens of dispatched steps that are not committed
    peak_blocks: int = 0
    running: int = 0
    waiting: int = 0
    slot_steps: Waste = field(default_factory=Waste)
    step_seconds: dict[str, Histogram] = field(default_factory=lambda: {name: Histogram(STEP_SECONDS) for name in PHASES})
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS))  # computed by a dispatch, padding apart

    def took(self, prefill: int, decode: int, seconds: float, steps: int) -> None:
        """A dispatch of so many steps, with tokens of prompts and of answers, took so long."""
        phase = "decode" if not prefill else "mixed" if decode else "prefill"
        self.step_seconds[phase].observe(seconds / steps, steps)
