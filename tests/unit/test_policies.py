"""The four orders in which requests get seats, blocks and budget."""

from __future__ import annotations

from typing import Literal

import pytest

from ropeway.scheduling.cost import StepCost
from tests.support.line import Line

Name = Literal["fcfs", "priority", "deadline", "shortest"]
NAMES: tuple[Name, ...] = ("fcfs", "priority", "deadline", "shortest")


def service(line: Line) -> list[int]:
    """Requests in the order of their first rows, until all have ended."""
    order: dict[int, None] = {}
    while line.scheduler.has_work:
        order |= dict.fromkeys(line.order(line.step()))
    return list(order)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", ["batch", "standard", "interactive", "standard", "batch"]),
        ("priority", ["interactive", "standard", "standard", "batch", "batch"]),
        ("deadline", ["interactive", "standard", "standard", "batch", "batch"]),
        ("shortest", ["batch", "standard", "interactive", "standard", "batch"]),
    ],
)
def test_of_alike_requests_of_several_tiers_the_policy_says_who_is_first(policy: Name, expected: list[str]) -> None:
    line = Line(seats=1, policy=policy)
    tiers = {line.add(4, 2, tier=tier).id: tier for tier in ("batch", "standard", "interactive", "standard", "batch")}
    order = service(line)
    assert [tiers[request] for request in order] == expected
    same = [[request for request in order if tiers[request] == tier] for tier in ("standard", "batch")]
    assert same == [sorted(ids) for ids in same], "those alike in everything go as they came"


@pytest.mark.parametrize("policy", NAMES)
def test_only_policy_priority_takes_a_seat_from_anybody(policy: Name) -> None:
    line = Line(seats=1, policy=policy)
    running = line.add(4, 20, tier="batch")
    line.step()
    urgent = line.add(4, 2, tier="interactive")
    line.step()
    assert (urgent.slot >= 0) == (policy == "priority")
    assert running.preemptions == (policy == "priority")


@pytest.mark.parametrize("policy", NAMES)
def test_prompts_share_the_budget_in_the_order_of_the_policy(policy: Name) -> None:
    line = Line(budget=12, policy=policy)
    batch, urgent = line.add(9, 30, tier="batch"), line.add(9, 2, tier="interactive")
    first, second = (batch, urgent) if policy == "fcfs" else (urgent, batch)
    assert line.rows(line.step()) == {first.id: (0, 9), second.id: (0, 3)}


@pytest.mark.parametrize("policy", NAMES)
def test_when_blocks_run_out_the_last_in_the_order_of_the_policy_gives_way(policy: Name) -> None:
    line = Line(blocks=6, policy=policy)
    batch, urgent, third = (line.add(7, 12, tier=tier) for tier in ("batch", "interactive", "interactive"))
    while not line.scheduler.preemptions:
        line.step()
    tiered = policy in ("priority", "deadline")
    assert [request.preemptions for request in (batch, urgent, third)] == ([1, 0, 0] if tiered else [0, 0, 1])


@pytest.mark.parametrize("policy", NAMES)
def test_who_was_preempted_goes_before_those_of_its_line_that_never_had_a_seat(policy: Name) -> None:
    line = Line(seats=2, policy=policy)
    long = line.add(20, 30, tier="standard")
    line.step()
    line.scheduler.preemption.preempt(long.slot, line.now)
    line.add(4, 1, tier="standard"), line.add(4, 1, tier="standard")
    assert next(iter(line.scheduler.waiting)) is long
    line.step()
    assert long.slot >= 0


# ---------------------------------------------------------------------- deadline


@pytest.mark.parametrize(("early_s", "first"), [(49.0, "interactive"), (51.0, "standard")])
def test_deadline_goes_by_arrival_and_target_together(early_s: float, first: str) -> None:
    line = Line(seats=1, policy="deadline")
    tiers = {line.add(4, 2, tier="standard").id: "standard"}  # within 60 s
    line.now = early_s
    tiers[line.add(4, 2, tier="interactive").id] = "interactive"  # within 10 s
    assert tiers[service(line)[0]] == first


def test_deadline_starts_the_longer_prompt_earlier() -> None:
    line = Line(seats=1, policy="deadline", cost=StepCost(0.01, 0.01, 0.0))
    short, long = line.add(4, 2), line.add(40, 2)
    assert service(line) == [long.id, short.id]


def test_deadline_takes_a_tier_without_target_to_promise_five_minutes() -> None:
    line = Line(seats=1, policy="deadline")
    batch = line.add(4, 2, tier="batch")
    line.now = 241.0
    standard = line.add(4, 2, tier="standard")
    assert service(line) == [batch.id, standard.id]


# ---------------------------------------------------------------------- shortest


def test_shortest_takes_the_least_predicted_output_first() -> None:
    line = Line(seats=1, policy="shortest")
    requests = [line.add(4, output) for output in (90, 10, 40)]
    assert sorted(requests, key=lambda request: request.predicted_tokens) == [requests[1], requests[2], requests[0]]
    assert service(line) == [requests[1].id, requests[2].id, requests[0].id]


def test_shortest_predicts_from_the_answers_its_tenant_and_tier_got() -> None:
    line = Line(seats=1, policy="shortest")
    for _ in range(40):
        line.scheduler.lengths.observe("batch", "", 3)
        line.scheduler.lengths.observe("standard", "", 90)
    talkative, terse = line.add(4, 100, tier="standard"), line.add(4, 100, tier="batch")
    assert terse.predicted_tokens < talkative.predicted_tokens
    assert service(line) == [terse.id, talkative.id]


def test_shortest_prefers_the_shorter_of_two_prompts_whose_answers_are_alike() -> None:
    line = Line(seats=1, policy="shortest")
    long, short = line.add(120, 20), line.add(4, 20)
    assert service(line) == [short.id, long.id]


@pytest.mark.parametrize("patience", ["short", "long"])
def test_waiting_makes_up_for_length(patience: str) -> None:
    line = Line(seats=1, policy="shortest", aging_s=10.0)
    long = line.add(4, 128)
    line.now = 0.1 if patience == "short" else 12.0  # 128 predicted tokens weigh ten seconds
    short = line.add(4, 1)
    assert service(line)[0] == (short.id if patience == "short" else long.id)
