"""Where a request's time goes: parts that sum to it, and the true reason of every wait."""

from __future__ import annotations

import random

import pytest

from ropeway.cache.keys import root_key
from ropeway.request import Request, Timeline
from ropeway.scheduling.lifecycle import MAX_PREEMPTIONS
from ropeway.scheduling.waits import REASONS, WaitAccounts
from ropeway.tiers import Tier
from tests.support.fake_device import HostBlock
from tests.support.fake_store import FakeStore
from tests.support.line import Line


def parts(timeline: Timeline) -> dict[str, float]:
    """What is not zero."""
    names = ("queued", "prefill", "decode", "preempted", "swapped")
    return {name: seconds for name in names if (seconds := getattr(timeline, f"{name}_s"))}


def waits(line: Line, request: Request) -> dict[str, float]:
    return {reason: pytest.approx(seconds) for reason, seconds in line.explain(request).waits.items()}


# ---------------------------------------------------------------------- phases


def test_a_request_is_queued_until_its_seat_in_prefill_until_its_first_token_and_then_decodes() -> None:
    line = Line(budget=8, seats=1)
    blocker = line.add(4, 2)
    line.step()
    line.now = 1.0
    request = line.add(20, 4)
    line.now = 3.0
    line.step()
    assert blocker.finish is not None
    assert request.slot < 0
    line.now = 4.0
    for _ in range(3):  # three chunks
        line.step()
        line.now += 0.5
    line.now = 7.0
    line.run()
    timeline = line.timeline(request)
    assert parts(timeline) == {"queued": 3.0, "prefill": 1.0, "decode": 2.0}
    assert timeline.total_s == 6.0
    assert (timeline.phase, timeline.tier, timeline.output_tokens) == ("finished", "standard", 4)


def test_time_before_the_engine_heard_of_it_counts_as_queued() -> None:
    line = Line()
    line.now = 2.0
    request = line.add(4, 1, arrival_s=0.5)
    line.run()
    assert parts(line.timeline(request)) == {"queued": 1.5}


@pytest.mark.parametrize(("mode", "phase"), [("swap", "swapped"), ("recompute", "preempted")])
def test_time_without_a_seat_after_a_preemption_is_told_by_its_kind(mode: str, phase: str) -> None:
    line = Line(seats=1, host_blocks=16, preemption=mode)
    request = line.add(6, 9, tier="batch")
    line.step()
    line.now = 1.0
    line.add(4, 1, tier="interactive")
    line.step()
    assert line.explain(request).phase == phase
    line.now = 5.0
    line.step()
    assert line.explain(request).phase == "decode"
    line.now = 6.0
    line.run()
    timeline = line.timeline(request)
    assert parts(timeline) == {"decode": 2.0, phase: 4.0}
    assert timeline.preemptions == {mode: 1}


def test_after_a_preemption_a_request_is_in_prefill_until_its_next_token() -> None:
    line = Line(seats=1, budget=8)
    request = line.add(16, 9, tier="batch")
    line.step(), line.step()
    line.add(4, 1, tier="interactive")
    line.step()
    line.now = 1.0
    line.step()
    assert line.explain(request).phase == "prefill"
    line.now = 3.0
    line.step(), line.step()
    assert line.explain(request).phase == "decode"
    line.run()
    assert parts(line.timeline(request)) == {"preempted": 1.0, "prefill": 2.0}


def test_the_cached_tokens_and_the_output_so_far_are_told() -> None:
    line = Line()
    prompt = list(range(100, 112))
    line.add(prompt, 1, keys=[root_key()])
    line.run()
    request = line.add(prompt, 9, keys=[root_key()])
    for _ in range(3):
        line.step()
    timeline = line.explain(request)
    assert (timeline.cached_tokens, timeline.output_tokens, timeline.phase) == (8, 3, "decode")


def test_explaining_changes_nothing() -> None:
    line = Line(seats=1)
    line.add(4, 3)
    request = line.add(4, 1)
    line.step()
    line.now = 1.0
    first, second = line.explain(request), line.explain(request)
    assert first == second
    assert first.waits is not request.timeline.waits
    line.run()
    assert line.timeline(request).waits == first.waits


def test_only_requests_that_have_not_ended_are_explained() -> None:
    line = Line()
    done = line.add(4, 1)
    line.step()
    running = line.add(4, 9)
    assert list(line.scheduler.explain([done.id, running.id, 99], line.now)) == [running.id]


@pytest.mark.parametrize("seed", range(6))
def test_the_parts_sum_to_the_time_from_arrival_to_end_and_the_reasons_to_the_time_without_a_seat(seed: int) -> None:
    rng = random.Random(seed)
    line = Line(blocks=14, seats=4, budget=16, host_blocks=(0, 12)[seed % 2], preemption="swap", aging_s=1.0)
    requests: list[Request] = []
    ends: dict[int, float] = {}
    while len(requests) < 25 or line.scheduler.has_work:
        if len(requests) < 25 and rng.random() < 0.4:
            deadline = line.now + rng.uniform(0, 20) if rng.random() < 0.2 else None
            tier = rng.choice(["interactive", "standard", "batch"])
            requests.append(line.add(rng.randint(1, 20), rng.randint(1, 24), tier=tier, deadline_s=deadline))
        line.now += rng.choice([0.0, 0.03, 0.7])
        ends |= {finished.id: line.now for finished in line.expire()}
        plan = line.scheduler.plan(line.now)
        line.now += rng.choice([0.01, 0.2])
        if plan is not None:
            ends |= {finished.id: line.now for finished in line.settle(plan).finished}
    assert line.scheduler.preemptions > 0
    for request in requests:
        timeline = line.timeline(request)
        assert timeline.total_s == pytest.approx(ends[request.id] - request.arrival_s)
        unseated = timeline.queued_s + timeline.preempted_s + timeline.swapped_s
        assert sum(timeline.waits.values()) == pytest.approx(unseated)
        assert set(timeline.waits) <= set(REASONS)


# ---------------------------------------------------------------------- reasons


def test_a_request_waits_for_slots_when_all_are_taken() -> None:
    line = Line(seats=1, step_s=1.0)
    line.add(4, 4)
    line.step()
    request = line.add(4, 1)
    line.run()
    assert line.timeline(request).waits == {"slots": 3.0}


def test_a_request_waits_for_blocks_when_a_seat_is_free_and_they_are_not() -> None:
    line = Line(blocks=6, seats=4, step_s=1.0)
    line.add(15, 4)
    line.step()
    request = line.add(15, 1)
    line.run()
    assert line.timeline(request).waits == {"blocks": 3.0}


def test_a_protected_request_waits_for_blocks_while_another_one_s_life_has_them() -> None:
    line = Line(blocks=6, seats=4, step_s=1.0)
    line.add(15, 4, preemptions=MAX_PREEMPTIONS)
    line.step()
    request = line.add(4, 8, preemptions=MAX_PREEMPTIONS)
    line.run()
    assert line.timeline(request).waits == {"blocks": 3.0}


def test_a_moment_that_is_told_late_counts_no_second_twice() -> None:
    waits = WaitAccounts(1)
    waits.waits_for(0, "slots")
    for now in (1.0, 3.0, 2.0, 4.0):
        waits.advance(now)
    assert sum(waits.read(0)) == 3.0


def test_a_request_waits_for_the_budget_while_prompts_ahead_fill_the_steps() -> None:
    line = Line(budget=10, step_s=1.0)
    line.add(40, 1)
    line.step()
    request = line.add(4, 1)
    line.run()
    assert line.timeline(request).waits == {"budget": 3.0}


def test_a_request_waits_for_a_tier_when_a_higher_one_is_first_in_need() -> None:
    line = Line(seats=1, step_s=1.0)
    line.add(4, 4, tier="interactive")
    line.step()
    urgent, request = line.add(4, 2, tier="interactive"), line.add(4, 1, tier="batch")
    line.run()
    assert line.timeline(urgent).waits == {"slots": 3.0}
    assert line.timeline(request).waits == {"tier": 3.0, "slots": 2.0}


def test_a_request_that_gave_its_seat_to_a_higher_tier_waits_for_slots() -> None:
    line = Line(seats=1, step_s=1.0)
    request = line.add(4, 4, tier="batch")
    line.step()
    line.add(4, 3, tier="interactive")
    line.run()
    timeline = line.timeline(request)
    assert timeline.waits == {"slots": 3.0}
    assert parts(timeline) == {"prefill": 2.0, "preempted": 3.0, "decode": 2.0}


def test_a_sibling_waits_for_the_gate_that_its_leader_s_prefill_is() -> None:
    line = Line(budget=4, step_s=1.0)
    _, sibling = line.add_group(list(range(100, 110)), 2, prefix_cache=True)
    for _ in range(3):
        line.step()
    assert waits(line, sibling) == {"gate": 3.0}
    line.run()
    assert line.timeline(sibling).waits == {"gate": 3.0}


def test_a_gate_that_opens_is_followed_by_what_is_true_from_then_on() -> None:
    line = Line(seats=1, step_s=1.0)
    _, sibling = line.add_group(list(range(100, 110)), 2, prefix_cache=True)
    line.run()
    assert line.timeline(sibling).waits == {"gate": 1.0, "slots": 3.0}


def test_a_prefix_on_its_way_from_disk_is_a_gate() -> None:
    contents: list[HostBlock | None] = [[[0]] for _ in range(16)]
    store = FakeStore(contents)
    line = Line(host_blocks=16, store=store)
    prompt = list(range(100, 114))
    line.add(prompt, 1, keys=[root_key()])
    line.run()
    store.work()
    line = Line(host_blocks=16, store=FakeStore(list(contents), held=store.held))
    request = line.add(prompt, 1, keys=[root_key()])
    for _ in range(3):
        line.now += 0.5
        assert line.scheduler.plan(line.now) is None
    assert waits(line, request) == {"gate": 1.5}


def test_until_the_next_plan_a_new_request_waits_for_the_step() -> None:
    line = Line()
    line.add(4, 9)
    plan = line.plan()
    request = line.add(4, 1)
    line.now = 0.4
    line.settle(plan)
    line.run()
    assert line.timeline(request).waits == {"step": 0.4}


def test_what_the_line_waited_for_long_ago_is_not_the_reason_of_a_newcomer() -> None:
    line = Line(seats=1, step_s=1.0)
    line.add(4, 3)
    line.step()
    gone = line.add(4, 1)
    line.step()
    assert waits(line, gone) == {"slots": 1.0}
    line.scheduler.abort(gone.id, "cancel", line.now)
    line.run()
    line.now += 100.0
    request = line.add(4, 1)
    line.now += 0.25
    line.run()
    assert line.timeline(request).waits == {"step": 0.25}


def test_a_request_whose_step_is_in_flight_waits_for_it() -> None:
    line = Line()
    request = line.add(7, 5)
    line.step()
    flying = line.plan()
    line.scheduler.preemption.preempt(request.slot, line.now)
    assert line.scheduler.plan(line.now) is None
    line.now = 2.0
    line.settle(flying)
    line.run()
    assert line.timeline(request).waits == {"step": 2.0}


def test_one_that_still_waits_is_told_what_for_so_far() -> None:
    line = Line(seats=1, step_s=1.0)
    line.add(4, 50)
    line.step()
    request = line.add(4, 1)
    for _ in range(4):
        line.step()
    line.now += 0.5
    assert waits(line, request) == {"slots": 4.5}
    assert line.explain(request).queued_s == 4.5


def test_one_that_is_refused_while_it_waits_is_told_what_it_waited_for() -> None:
    line = Line(seats=1, tiers=(Tier(name="only", queue_limit_s=2.5),), step_s=1.0)
    line.add(4, 50, tier="only")
    line.step()
    request = line.add(4, 1, tier="only")
    for _ in range(2):
        line.step()
    line.now = 3.5
    line.expire()
    timeline = line.timeline(request)
    assert (parts(timeline), timeline.waits) == ({"queued": 2.5}, {"slots": 2.5})


def test_a_static_batch_s_newcomers_wait_for_slots() -> None:
    line = Line(seats=4, batching="static", step_s=1.0)
    line.add(4, 4)
    line.step()
    request = line.add(4, 1)
    line.run()
    assert line.timeline(request).waits == {"slots": 3.0}
