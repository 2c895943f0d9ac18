"""What is asked of the server, and what is noted of it: plain values, which bench/faults/checks.py judges."""

from dataclasses import dataclass, field

from bench.errors import Told

LOCAL = ("left", "hung")  # ends that are no answer: the client left by itself; nothing came for too long


@dataclass(frozen=True)
class Job:
    """What is asked for one prompt. Where it is greedy its answer is known beforehand, and every sample says the same."""

    name: str
    prompt: tuple[int, ...]
    text: str | None = None  # the same prompt, where it is sent as a text
    max_tokens: int = 16
    n: int = 1
    ignore_eos: bool = True
    temperature: float = 0.0
    logprobs: int | None = None
    schema: str | None = None  # JSON, of the form that the answer has


@dataclass(frozen=True)
class Manner:
    """How a client behaves while it waits for an answer."""

    deadline: float | None = None  # seconds, which the server is told
    leave_after: float | None = None  # seconds, when it goes away, or has the request aborted
    messages: int | None = None  # after so many it goes away
    pause: float = 0.0  # seconds, after the first message


@dataclass(frozen=True)
class Answer:
    """What the engine says offline. `tie`: the first position whose two best tokens are as good as equal; from there on another
    answer is as right. None: there is none."""

    tokens: tuple[int, ...]
    text: str
    finish: str
    tie: int | None = None


@dataclass
class Sample:
    """One sample as it came. `pieces`: the token ids of each message, in order."""

    pieces: list[tuple[int, ...]] = field(default_factory=list)
    text: str | None = None  # the pieces of text, joined; None: this service has no text
    finish: str | None = None
    final: tuple[int, ...] | None = None  # all token ids once more, where the service says them at the end
    counted: int | None = None  # the server's own count of them
    after_end: int = 0  # messages that came when it had ended

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for piece in self.pieces for token in piece)


@dataclass
class Outcome:
    """What became of a request, which may have several prompts."""

    kind: str  # of the mix
    way: str  # by which service, and how
    jobs: tuple[str, ...] = ()  # by name; none: the request is not to be answered
    expected: int = 1  # samples of each prompt
    samples: dict[tuple[int, int], Sample] = field(default_factory=dict)  # by (prompt, sample)
    counted: int | None = None  # the server's own count of all tokens
    error: Told | None = None
    end: str = ""  # "" for an answer or an error; else one of LOCAL
    began: float = 0.0  # seconds since the run began
    seconds: float = 0.0

    @property
    def accepted(self) -> bool:
        """It was answered to its end."""
        return self.error is None and not self.end

    def sample(self, prompt: int, index: int) -> Sample:
        return self.samples.setdefault((prompt, index), Sample())


@dataclass(frozen=True)
class Poll:
    """One question after health."""

    at: float  # seconds since the run began
    name: str  # "grpc live", "grpc ready", "http live", "http ready"
    says: bool | None  # None: no answer
    seconds: float


@dataclass(frozen=True)
class Usage:
    """What the server's process holds."""

    at: float
    rss: int  # bytes
    threads: int
    files: int


@dataclass(frozen=True)
class Rest:
    """What the server says of itself when nothing is asked of it: all of it must be 0 but for `blocks` and `free`."""

    running: int
    waiting: int
    open_requests: int
    used_tokens: int
    held: int  # blocks in use
    blocks: int  # that the pool has
    free: int  # of them
    compiled: int  # programs, after start


@dataclass(frozen=True)
class End:
    """How the process ended after SIGTERM."""

    exit_code: int | None
    last_line: str
    signalled: float  # seconds since the run began
    ended: float
    errors: tuple[str, ...] = ()  # lines of its log that say error or worse
