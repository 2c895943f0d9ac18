"""The judgements of bench.faults: pure functions of what was recorded. Each gives a Verdict with its figures."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.errors import OURS
from bench.faults.records import Answer, End, Outcome, Poll, Rest, Sample, Usage
from serving.errors import ANSWERS

MIB = 1 << 20
SHOWN = 5  # things that are wrong, of as many as there are
MAY_REFUSE = {"queue_full", "too_many_streams"}  # any request, where there is too much
MAY_END = {  # and what else may become of a kind of request
    "late": {"deadline_exceeded"},
    "slow": {"slow_reader"},
    "abort": {"cancelled"},
    "drain": {"draining"},
    "malformed": {code for code, answer in ANSWERS.items() if 400 <= answer.http < 429 or answer.http == 501},
}


@dataclass(frozen=True)
class Verdict:
    name: str
    ok: bool
    figures: Mapping[str, Any] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()  # the first things that are wrong


def verdict(name: str, wrong: Sequence[str], **figures: Any) -> Verdict:
    return Verdict(name, not wrong, figures, tuple(wrong[:SHOWN]))


# --- tokens ---------------------------------------------------------------------------------------------------------


def wrong_with(sample: Sample, *, ended: bool) -> str:
    """What is lost, doubled or out of order in one sample; "" for nothing. `ended`: the request was answered to its end."""
    if sample.after_end:
        return f"{sample.after_end} messages after its end"
    if ended and sample.finish is None:
        return "it has no end"
    if sample.finish is not None and sample.final is not None and sample.final != sample.tokens:
        return f"pieces have {len(sample.tokens)} tokens, the whole has {len(sample.final)}, and they differ"
    if sample.finish is not None and sample.counted is not None and sample.counted != len(sample.tokens):
        return f"{len(sample.tokens)} tokens came, {sample.counted} were counted"
    return ""


def whole_streams(outcomes: Sequence[Outcome]) -> Verdict:
    """No token is lost or doubled: pieces joined are the whole, each sample is there once, and nothing comes after its end."""
    wrong, samples, tokens = [], 0, 0
    for outcome in outcomes:
        for (prompt, index), sample in sorted(outcome.samples.items()):
            samples, tokens = samples + 1, tokens + len(sample.tokens)
            if says := wrong_with(sample, ended=outcome.accepted):
                wrong.append(f"{outcome.kind} by {outcome.way}, prompt {prompt}, sample {index}: {says}")
        came = sum(len(sample.tokens) for sample in outcome.samples.values())
        if outcome.accepted and outcome.counted not in (None, came):
            wrong.append(f"{outcome.kind} by {outcome.way}: {came} tokens came, {outcome.counted} were counted")
        asked = {(prompt, index) for prompt in range(len(outcome.jobs)) for index in range(outcome.expected)}
        extra, missing = set(outcome.samples) - asked, asked - set(outcome.samples)
        if extra or (outcome.accepted and missing):
            wrong.append(f"{outcome.kind} by {outcome.way}: {sorted(missing)} are missing and {sorted(extra)} too many")
    return verdict("no lost or doubled token", wrong, samples=samples, tokens=tokens)


def differs(sample: Sample, answer: Answer) -> str:
    """How a sample is another than the offline answer, as far as that is determined; "" for not at all. One that was cut short must
    be a beginning of it."""
    got, right = sample.tokens, answer.tokens
    if sample.finish in ("stop", "length") and answer.tie is None and (len(got) < len(right) or sample.finish != answer.finish):
        return f"it ended after {len(got)} tokens by {sample.finish}, the answer after {len(right)} by {answer.finish}"
    until = min(len(got), len(right) if answer.tie is None else answer.tie)
    at = next((i for i in range(until) if got[i] != right[i]), None)
    if at is not None:
        return f"token {at} is {got[at]}, and {right[at]} in the answer"
    if len(got) > len(right) and answer.tie is None:
        return f"{len(got)} tokens came, the answer has {len(right)}"
    if sample.text is not None:
        same = sample.text == answer.text if got == right and sample.finish is not None else answer.text.startswith(sample.text)
        if not same and answer.tie is None:
            return f"its text is {sample.text!r:.60}, and {answer.text!r:.60} in the answer"
    return ""


def offline_answers(outcomes: Sequence[Outcome], answers: Mapping[str, Answer]) -> Verdict:
    """Every answer, and every part of one, is the offline answer's (architecture.md: up to a near tie)."""
    wrong, compared, tokens = [], 0, 0
    for outcome in outcomes:
        for (prompt, index), sample in sorted(outcome.samples.items()):
            if prompt < len(outcome.jobs) and outcome.jobs[prompt] in answers:
                compared, tokens = compared + 1, tokens + len(sample.tokens)
                if says := differs(sample, answers[outcome.jobs[prompt]]):
                    wrong.append(f"{outcome.kind} by {outcome.way}, {outcome.jobs[prompt]}, sample {index}: {says}")
    near = sum(answer.tie is not None for answer in answers.values())
    figures = {"samples": compared, "tokens": tokens, "jobs": len(answers), "jobs_with_a_near_tie": near}
    return verdict("answers are the offline ones", wrong if compared else ["nothing was compared"], **figures)


def same_offline(before: Mapping[str, Answer], after: Mapping[str, Answer]) -> Verdict:
    """What the offline engine says is the same before the run and after it, or there would be nothing to compare with."""
    wrong = [name for name in before if after.get(name) != before[name]]
    return verdict("offline answers before and after agree", wrong, jobs=len(before))


# --- errors ---------------------------------------------------------------------------------------------------------


def every_end(outcomes: Sequence[Outcome]) -> Verdict:
    """Every request has an end, in time."""
    hung = [f"{o.kind} by {o.way}: nothing for {o.seconds:.0f} s" for o in outcomes if o.end == "hung"]
    ends = Counter(o.end or ("answered" if o.error is None else "refused") for o in outcomes)
    return verdict("every request ends", hung, requests=len(outcomes), **ends)


def documented_errors(outcomes: Sequence[Outcome]) -> Verdict:
    """Every failure is one of the documented ones, in the documented shape, that this kind of request may have; none is ours."""
    wrong, seen = [], Counter[str]()
    for outcome in outcomes:
        error = outcome.error
        if error is None:
            if outcome.kind == "malformed" and not outcome.end:
                wrong.append(f"malformed by {outcome.way} was answered")
            continue
        seen[error.label] += 1
        where = f"{outcome.kind} by {outcome.way} after {outcome.began:.1f} s: {error.label}: {error.message[:120]}"
        if error.wrong:
            wrong.append(f"{where} ({error.wrong})")
        elif error.code in OURS or error.status in ("INTERNAL", "UNKNOWN", "500"):
            wrong.append(f"{where} (the server is to blame)")
        elif error.code not in MAY_REFUSE | MAY_END.get(outcome.kind, set()) and not _by_a_library(outcome):
            wrong.append(f"{where} (which such a request must not get)")
    return verdict("failures are documented ones", wrong, **dict(seen.most_common()))


def _by_a_library(outcome: Outcome) -> bool:
    """What gRPC says before our code is asked: of methods that there are not, of large messages, of its own deadline."""
    error = outcome.error
    if error is None or error.code:
        return False
    if outcome.kind == "late":
        return error.status == "DEADLINE_EXCEEDED"
    return outcome.kind == "malformed" and error.status in ("UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "404", "405")


def retry_hints(outcomes: Sequence[Outcome], *, overloaded: bool = True) -> Verdict:
    """Who is refused because there is too much is told when to come back, and over gRPC what is full. `overloaded`: some must have
    been, or the run shows nothing."""
    told = [(o, o.error) for o in outcomes if o.error is not None and o.error.code in MAY_REFUSE | {"draining"}]
    wrong = [f"{o.kind} by {o.way}: {e.label} says no time to come back" for o, e in told if not e.retry]
    wrong += [f"{o.kind} by {o.way}: {e.label} says not what is full" for o, e in told if e.code in MAY_REFUSE and not e.quota]
    if overloaded and not any(e.code in MAY_REFUSE for _, e in told):
        wrong.append("nobody was refused: the load was not too much")
    return verdict("who is refused is told when to come back", wrong, refused=len(told))


# --- the process ----------------------------------------------------------------------------------------------------


def nothing_held(rest: Rest) -> Verdict:
    """When all requests have ended, none runs, waits or is open, all blocks are free, and nothing was compiled meanwhile."""
    names = ("running", "waiting", "open_requests", "used_tokens", "held", "compiled")
    wrong = [f"{name} is {getattr(rest, name)}" for name in names if getattr(rest, name)]
    wrong += [f"{rest.free} of {rest.blocks} blocks are free"] if rest.free != rest.blocks else []
    return verdict("no leaked block", wrong, blocks=rest.blocks, free=rest.free)


def nothing_leaked(warm: Usage, end: Usage) -> Verdict:
    """As many threads and open files as there were when the server was warm and nobody was connected, or fewer."""
    wrong = [
        f"{getattr(end, name)} {name}, {getattr(warm, name)} when it was warm"
        for name in ("threads", "files")
        if getattr(end, name) > getattr(warm, name)
    ]
    figures = {"threads": [warm.threads, end.threads], "files": [warm.files, end.files]}
    return verdict("no leaked thread or file", wrong, **figures)


def slope(usage: Sequence[Usage]) -> float:
    """Bytes of memory a second: the median over pairs half of the time apart, which single peaks do not move."""
    half = len(usage) // 2
    pairs = zip(usage[:half], usage[len(usage) - half :], strict=True)
    return statistics.median([(b.rss - a.rss) / (b.at - a.at) for a, b in pairs])


def flat_memory(usage: Sequence[Usage], *, per_minute: float, slack: float) -> Verdict:
    """Memory does not grow by more than `slack` bytes and `per_minute` bytes for every minute that was watched."""
    if len(usage) < 4:
        return verdict("memory is flat", [f"{len(usage)} samples are too few"])
    minutes, grown = (usage[-1].at - usage[0].at) / 60, slope(usage) * (usage[-1].at - usage[0].at)
    bound = slack + per_minute * minutes
    wrong = [f"it grew by {grown / MIB:.1f} MiB in {minutes:.1f} minutes"] if grown > bound else []
    figures = {"grown_mib": round(grown / MIB, 2), "bound_mib": round(bound / MIB, 2), "minutes": round(minutes, 2)}
    peak = max(u.rss for u in usage)
    return verdict("memory is flat", wrong, **figures, first_mib=usage[0].rss // MIB, peak_mib=peak // MIB)


def honest_health(polls: Sequence[Poll], end: End, *, limit: float) -> Verdict:
    """Health is asked all the time, and answers in time. While the server serves, all of it says yes; once it is told to end,
    readiness says no before the port closes, and liveness goes on saying yes."""
    wrong = list(_dishonest(polls, end.signalled, limit))
    serving = [poll for poll in polls if poll.at + poll.seconds < end.signalled]
    seconds = sorted(poll.seconds for poll in serving) or [0.0]
    figures = {"polls": len(polls), "p99_ms": round(1e3 * seconds[int(0.99 * (len(seconds) - 1))], 1)}
    return verdict("health is honest", wrong, **figures, worst_ms=round(1e3 * seconds[-1], 1), limit_ms=round(1e3 * limit))


def _dishonest(polls: Sequence[Poll], signalled: float, limit: float) -> Iterator[str]:
    names = sorted({poll.name for poll in polls})
    if len(names) < 4:
        yield f"only {names} were asked"
    for poll in polls:
        if poll.at + poll.seconds < signalled:  # it serves
            if poll.says is not True:
                yield f"{poll.name} says {poll.says} after {poll.at:.1f} s, while it serves"
            elif poll.seconds > limit:
                yield f"{poll.name} took {poll.seconds:.2f} s after {poll.at:.1f} s"
    for name in names:
        told = [poll.says for poll in polls if poll.name == name and poll.at > signalled and poll.says is not None]
        if name.endswith("ready") and False not in told:
            yield f"{name} did not turn when the server was told to end"
        if name.endswith("live") and False in told:
            yield f"{name} says no while the server drains"


def clean_end(end: End, drained: Sequence[Outcome]) -> Verdict:
    """SIGTERM lets what runs come to its end, and the process ends with 0. Its log has no error."""
    wrong = [] if end.exit_code == 0 else [f"the exit code is {end.exit_code}"]
    wrong += [] if "drained" in end.last_line else [f"the last line is {end.last_line!r:.120}"]
    open_ones = [o for o in drained if o.error is None or o.error.code != "draining"]
    wrong += [f"{o.kind} by {o.way}: {o.error.label if o.error else o.end}" for o in open_ones if not o.accepted]
    wrong += [] if any(o.accepted for o in drained) else ["nothing ran while it drained"]
    wrong += [f"its log says {line[:200]}" for line in end.errors]
    figures = {"exit_code": end.exit_code, "seconds": round(end.ended - end.signalled, 2), "came_to_an_end": len(open_ones)}
    return verdict("SIGTERM drains", wrong, **figures)


def load_was_kept(rate: float, wanted: float, *, share: float = 0.9) -> Verdict:
    """The clients sent as many requests as they were to, or the server was tried with less than is said."""
    wrong = [f"{rate:.1f} requests a second were sent, {wanted:.1f} were to be"] if rate < share * wanted else []
    return verdict("the load was kept up", wrong, sent_per_second=round(rate, 2), wanted_per_second=round(wanted, 2))
