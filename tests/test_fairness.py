"""What requests that compete are promised, through the real scheduler (bench/fairness.py): each bound holds, and without what
keeps it, it is broken."""

import json
import math

import pytest

from bench.fairness import Crowd, backlog, flood, light_beside_heavy, main, overload, starving, urgent


def test_the_services_of_backlogged_tenants_stay_within_the_bound() -> None:
    """Over any time in which both have work waiting, counted anew from the plans; the work is done as fast as first-come."""
    fair, unfair = backlog(fair=True), backlog(fair=False)
    assert fair["steps_both_wait"] > 1000 and fair["gap"] <= fair["bound"] < unfair["gap"]
    assert fair["steps"] <= 1.02 * unfair["steps"]


def test_a_light_tenant_waits_as_if_it_were_alone_beside_enormous_prompts() -> None:
    said = light_beside_heavy()
    assert {name: len(steps) for name, steps in said["waits"].items()} == {"alone": 110, "tenants": 110, "first_come": 110}
    assert said["p99"]["tenants"] <= 2 * said["p99"]["alone"] + 3 < 50 < said["p99"]["first_come"]
    assert said["throughput"] >= 0.98


def test_at_twice_the_capacity_what_is_taken_is_in_time() -> None:
    crowd = Crowd(count=1500)
    capacity = crowd.capacity()
    taken = overload(crowd, capacity, 2.0, 60.0, admission=True)
    assert taken["attained"] >= 0.9 and taken["longest_queue"] < 100
    assert taken["requests_a_step"] >= 0.95 * capacity  # and no more is refused than must be
    everything = overload(crowd, capacity, 2.0, 60.0, admission=False)
    assert everything["taken"] == 1 and everything["attained"] < 0.1 and everything["longest_queue"] > 400


@pytest.mark.parametrize("lanes", [64, 8])
def test_what_is_taken_is_in_time_where_blocks_or_lanes_are_short(lanes: int) -> None:
    """Of prompts alone a step could compute more than twice as many."""
    crowd = Crowd(count=500, lanes=lanes, slots=1 << 13)
    capacity = crowd.capacity()
    taken = overload(crowd, capacity, 2.0, 60.0, admission=True)
    assert taken["attained"] >= 0.9 and taken["requests_a_step"] >= 0.9 * capacity


def test_a_flood_of_batch_work_does_not_move_the_interactive_tail() -> None:
    said = flood()
    assert {name: len(steps) for name, steps in said["waits"].items()} == {"idle": 200, "pools": 200, "one_pool": 200}
    assert said["p99"]["pools"] <= 2 * said["p99"]["idle"] + 3 < 50 < said["p99"]["one_pool"]
    assert said["batch_done"] == 200 and said["batch_done_meanwhile"] > 50
    assert said["batch_tokens_a_step"] >= 0.25 * 512  # what batch work owns, at least


@pytest.mark.parametrize("short", ["lanes", "blocks", "tokens"])
def test_nobody_waits_for_what_is_less_urgent(short: str) -> None:
    """Whatever there is too little of. A step that is dispatched is not called back: that is one more to the first token."""
    said = urgent(short)
    assert said["longest_inversion"] == 0 and said["p99"] <= said["alone_p99"] + 1
    assert urgent(short, "first_come")["longest_inversion"] > 100


def test_waiting_makes_urgent() -> None:
    """What is 5 levels behind is passed by nothing that comes 5 * 20 steps later; without aging by all there is."""
    said = starving(20.0, levels=5)
    assert 90 <= said["passed_until"] <= 100 and said["waited"] < 0.15 * said["steps"]
    assert starving(math.inf)["waited"] > 0.9 * said["steps"]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["tenants"])
    (line,) = capsys.readouterr().out.splitlines()
    said = json.loads(line)
    assert said["scenario"] == "tenants" and said["p99"]["tenants"] <= said["bound"]
    with pytest.raises(SystemExit):
        main(["nothing"])
    assert "a scenario must be one of" in capsys.readouterr().err
