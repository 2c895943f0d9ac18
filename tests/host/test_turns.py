"""Whose prompt a step computes, through the scheduler and the model of tests/fake_device.py."""

from dataclasses import replace
from typing import Any

from fake_device import drive, expected, make_request, make_scheduler, tokens_of

from pagedjax.host.entrance import ServiceRules
from pagedjax.host.plan import Plan
from pagedjax.host.policy import PolicyOptions
from pagedjax.host.request import Request, Service
from pagedjax.host.scheduler import Scheduler


def served(name: str, prompt: int, max_tokens: int, **service: Any) -> Request:
    """With a prompt that shares nothing with others of another length or name."""
    tokens = [(7 * i + prompt + ord(name)) % 97 for i in range(prompt)]
    return replace(make_request(name, tokens, max_tokens), service=Service(**service))


def rows_of(scheduler: Scheduler, arrivals: dict[int, list[Request]]) -> list[dict[str, int]]:
    """The tokens of each row, in each plan; every request gets the tokens that it gets alone, and one row of a plan."""
    seen: list[dict[str, int]] = []

    def look(step: int, plan: Plan | None) -> None:
        if plan is not None:
            seen.append({row.request_id: row.count for row in plan.rows})
            assert len(seen[-1]) == len(plan.rows), f"two rows of one sequence: {plan.rows}"

    events = drive(scheduler, arrivals, 0, look)
    for request in (request for requests in arrivals.values() for request in requests):
        assert tokens_of(events[request.id, 0]) == expected(request, scheduler.max_model_len)
    return seen


def test_what_started_before_there_were_tenants_goes_on() -> None:
    """The scheduler counts from the first request on that names a tenant."""
    before, tenant = served("b", 5, 8), served("t", 5, 3, tenant="a")
    assert len(rows_of(make_scheduler(), {0: [before], 2: [tenant]})) == 8


def test_what_batch_work_cannot_use_goes_to_the_row_that_is_there() -> None:
    """The batch request finds no blocks. It owns 4 of a step's 16 tokens; the interactive one gets them all, in one row."""
    batch = served("b", 40, 2, pool="batch")
    seen = rows_of(make_scheduler(num_blocks=17), {0: [served("i", 50, 2), batch]})
    assert seen[:4] == [{"i": 16}, {"i": 16}, {"i": 16}, {"i": 2}]


def test_an_enormous_prompt_goes_on_after_the_prompts_of_tenants_that_got_less() -> None:
    """Also where the light tenant's own prompt, which has begun, needs more than one step."""
    heavy, light = served("h", 60, 2, tenant="heavy"), served("l", 20, 2, tenant="light")
    seen = rows_of(make_scheduler(), {0: [heavy], 2: [light]})
    assert seen[:6] == [{"h": 16}, {"h": 16}, {"h": 16}, {"l": 16}, {"l": 4, "h": 12}, {"h": 1, "l": 1}]
    one_tenant = rows_of(make_scheduler(), {0: [replace(heavy, service=Service())], 2: [replace(light, service=Service())]})
    assert one_tenant[2:4] == [{"h": 16}, {"h": 12, "l": 4}]


def test_an_enormous_prompt_goes_on_after_what_is_more_urgent() -> None:
    arrivals = {0: [served("l", 60, 2, priority=5)], 1: [served("u", 10, 1, priority=0), served("v", 10, 1, priority=5)]}
    rules = ServiceRules("priority", PolicyOptions(aging=1e6))
    assert rows_of(make_scheduler(service=rules), arrivals)[:2] == [{"l": 16}, {"u": 10, "l": 6}]
    assert rows_of(make_scheduler(), arrivals)[:2] == [{"l": 16}, {"l": 16}]


def test_a_last_token_of_a_prompt_by_itself_is_paid_for_too() -> None:
    """17 tokens in steps of 16: the last one is a row like those of answers."""
    scheduler = make_scheduler()
    rows_of(scheduler, {0: [served("a", 17, 3, tenant="a")]})
    assert scheduler.entrance.tenants.counter("interactive", "a") == 17 + 2.0 * 3
