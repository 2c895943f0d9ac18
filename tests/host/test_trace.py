"""What a request's trace says, and that it stays short however long the request waits."""

import json

from fake_device import drive, make_request, make_scheduler

from pagedjax.host.plan import Plan
from pagedjax.host.trace import Trace


def test_a_long_wait_is_a_few_lines() -> None:
    """The blocks that are free change with nearly every step; the reason does not."""
    scheduler = make_scheduler(34, num_lanes=8)
    made = [make_request(f"r{i}", [i] * 9, 50) for i in range(5)]
    steps = 0

    def each_step(step: int, _: Plan | None) -> None:
        nonlocal steps
        steps += "r4" in {s.request.id for s in scheduler.entrance.queue}

    drive(scheduler, {0: made}, 1, each_step)
    waits = [d for d in scheduler.trace.of("r4") if d.what == "waits"]
    assert steps > 40 and 1 <= len(waits) <= 4
    assert any("blocks are needed" in d.why["because"] for d in waits)


def test_another_reason_is_noted() -> None:
    trace = Trace()
    for reason in (
        "6 blocks are needed; 2 are free",
        "6 blocks are needed; 1 are free",
        "all lanes are taken",
        "all lanes are taken",
    ):
        trace.waits("a", 0, 0.0, reason)
    assert [d.why["because"] for d in trace.of("a")] == ["6 blocks are needed; 2 are free", "all lanes are taken"]


def test_the_line_is_one_line_of_json() -> None:
    """Of a request that is preempted and comes back: every decision with its time and sample, and the numbers that belong to it."""
    scheduler = make_scheduler(17)
    drive(scheduler, {0: [make_request(f"r{i}", [i, 2, 3], 40) for i in range(4)]}, 1)
    line = scheduler.trace.line("r3")
    said = json.loads(line)["decisions"]
    assert "\n" not in line and all({"time", "index", "what"} <= row.keys() for row in said)
    (first, *_), by = [row for row in said if row["what"] == "preempted"], {f"r{i}" for i in range(3)}
    assert first["by"] in by and first["how"] == "recompute"
    found = {row["what"]: row for row in said}
    assert set(found) >= {"queued", "waits", "admitted", "chunk", "preempted", "resumed", "finished"}
    assert (found["queued"]["ahead"], found["queued"]["prompt"]) == (3, 3)
    assert {"lane", "cached", "blocks"} <= found["admitted"].keys() & found["resumed"].keys()
    assert sum(row["tokens"] for row in said if row["what"] == "chunk") >= 3 and found["finished"]["generated"] == 40


def test_only_the_last_ones_are_kept() -> None:
    trace = Trace(kept=2)
    for name in "abc":
        trace.note(name, 0, 0.0, "queued")
        trace.end(name)
    assert [len(trace.of(name)) for name in "abc"] == [0, 1, 1]
