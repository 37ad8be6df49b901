"""The door: queue bounds, shedding, deadlines and time limits."""

from __future__ import annotations

import pytest

from ropeway.cache.keys import root_key
from ropeway.outcome import Refusal
from ropeway.request import FinishReason, Request
from ropeway.scheduling.cost import StepCost
from ropeway.scheduling.fairness import OUTPUT_WEIGHT, PROMPT_WEIGHT
from ropeway.tiers import Tier
from tests.support.line import TOKEN, Line

TOKEN_S = 0.002
"""What a prompt token takes on a line whose cost is known."""


def timed_line(ttft_s: float | None = 1.0, **settings: object) -> Line:
    """A line with one promising tier above another without targets, that knows what its steps take."""
    tiers = (Tier(name="fast", weight=2.0, ttft_s=ttft_s), Tier(name="slow", weight=1.0))
    fields = {"blocks": 4000, "budget": 100, "max_len": 4096, "cost": StepCost(0.001, TOKEN_S, 0.0), **settings}
    return Line(tiers=tiers, **fields)  # type: ignore[arg-type]


def error(refusal: Refusal | None) -> str | None:
    return None if refusal is None else refusal.error


# ---------------------------------------------------------------------- queue bounds


def test_a_tier_s_queue_holds_so_many_requests_and_refuses_the_next() -> None:
    line = Line(seats=1, tiers=(Tier(name="bounded", max_queue=2), Tier(name="free")))
    line.add(4, 3, tier="bounded")
    line.step()
    assert [line.offer(4, tier="bounded") for _ in range(2)] == [None, None]
    refusal = line.offer(4, tier="bounded")
    assert refusal is not None
    assert refusal.error == "QueueFull"
    assert "2 requests of tier bounded are waiting, and its queue holds 2" in refusal.message
    assert refusal.retry_after_s is not None
    assert refusal.retry_after_s >= 1
    assert len(line.scheduler.waiting) == 2
    assert line.offer(4, tier="free") is None, "other tiers have queues of their own"
    assert [dict(ledger.refused) for ledger in line.scheduler.lifecycle.ledgers] == [{"queue_full": 1}, {}]
    line.run()
    assert line.offer(4, tier="bounded") is None


def test_a_tier_s_queue_holds_so_many_prompt_tokens() -> None:
    line = Line(seats=1, tiers=(Tier(name="bounded", max_queue_tokens=30),))
    line.add(4, 3, tier="bounded")
    line.step()
    assert line.offer(25, tier="bounded") is None
    refusal = line.offer(6, tier="bounded")
    assert refusal is not None
    assert refusal.error == "QueueFull"
    for number in ("25 tokens", "6 more", "30"):
        assert number in refusal.message
    assert line.offer(5, tier="bounded") is None


def test_bounds_are_for_those_that_wait_so_a_free_seat_takes_any_request() -> None:
    line = Line(seats=1, tiers=(Tier(name="bounded", max_queue=0, max_queue_tokens=1),))
    assert line.offer(20, tier="bounded") is None
    line.step()
    assert error(line.offer(20, tier="bounded")) == "QueueFull"


def test_what_is_refused_costs_nothing_and_is_forgotten() -> None:
    line = Line(seats=1, tiers=(Tier(name="bounded", max_queue=0),))
    line.add(4, 2, tier="bounded")
    line.step()
    refused = line.request(4, tier="bounded", deadline_s=0.5)
    assert line.scheduler.offer(refused, line.now) is not None
    assert line.scheduler.find(refused.id) is None
    line.now = 1.0
    assert line.expire() == []
    line.run()
    assert list(line.outputs) == [1]


# ---------------------------------------------------------------------- shedding


def test_a_request_that_would_miss_its_target_by_waiting_is_shed_with_a_time_to_come_back() -> None:
    line = timed_line(seats=2)
    answers = [line.offer(100, 4, tier="fast") for _ in range(12)]
    shed = [refusal for refusal in answers if refusal is not None]
    assert answers[:3] == [None] * 3, "0.2 s of prompt each, and a second is promised"
    assert len(shed) >= 5
    assert {refusal.error for refusal in shed} == {"Shed"}
    assert answers[-1] is not None, "once shedding has begun it goes on, as nothing has left the queue"
    for refusal in shed:
        assert "tier fast promises it within 1 s" in refusal.message
        assert refusal.retry_after_s is not None
        assert 1 <= refusal.retry_after_s <= 120
    assert line.scheduler.lifecycle.ledgers[0].refused == {"shed": len(shed)}
    assert len(line.scheduler.waiting) == 12 - len(shed)


def test_what_is_not_shed_keeps_the_promise() -> None:
    line = timed_line(seats=4, ttft_s=2.0)
    requests: list[Request] = []
    shed = 0
    while line.scheduler.has_work or len(requests) < 60:
        for _ in range(2):
            if len(requests) < 60:
                request = line.request(60, 8, tier="fast")
                requests.append(request)
                shed += line.scheduler.offer(request, line.now) is not None
        plan = line.plan()
        line.now += 0.001 + TOKEN_S * plan.num_tokens
        line.settle(plan, elapsed_s=0.001 + TOKEN_S * plan.num_tokens)
    served = [line.timeline(request) for request in requests if request.id in line.finished]
    assert 10 < len(served) < 60
    assert shed == 60 - len(served)
    assert max(timeline.queued_s + timeline.prefill_s for timeline in served) < 2.0 * 1.1


@pytest.mark.parametrize(("setting", "tier"), [({"shed": False}, "fast"), ({}, "slow"), ({"ttft_s": None}, "fast")])
def test_nothing_is_shed_where_it_is_off_or_nothing_is_promised(setting: dict[str, object], tier: str) -> None:
    line = timed_line(seats=2, **setting)
    assert [line.offer(100, 4, tier=tier) for _ in range(30)] == [None] * 30


@pytest.mark.parametrize("busy", [False, True])
def test_a_request_that_nobody_is_ahead_of_is_never_shed_however_long_its_own_prompt_takes(busy: bool) -> None:
    line = timed_line(seats=2)
    if busy:
        line.add(4, 50, tier="fast")
        line.step()
    assert line.offer(3000, 4, tier="fast") is None


def test_a_group_that_nobody_is_ahead_of_is_never_shed_for_its_own_size() -> None:
    line = timed_line(seats=2)
    prompt = list(range(400))  # 0.8 s of a promised second
    leader = line.request(prompt, 50, tier="fast", keys=[root_key()])
    assert line.scheduler.offer(leader, line.now) is None
    for _ in range(5):
        sibling = line.request(prompt, 50, tier="fast", keys=[root_key()], leader=leader)
        assert line.scheduler.offer(sibling, line.now) is None
    assert error(line.offer(400, 50, tier="fast")) == "Shed", "others are"


def test_requests_of_lower_tiers_shed_nobody_above_them() -> None:
    line = timed_line(seats=2)
    for _ in range(40):
        line.add(100, 50, tier="slow")
    line.step()
    assert line.offer(100, 4, tier="fast") is None


def test_what_is_ahead_of_a_request_in_higher_tiers_counts_against_it() -> None:
    tiers = (Tier(name="first", weight=2.0), Tier(name="second", weight=1.0, ttft_s=1.0))
    line = Line(tiers=tiers, seats=2, blocks=4000, budget=100, max_len=4096, cost=StepCost(0.001, TOKEN_S, 0.0))
    assert line.offer(100, tier="second") is None
    for _ in range(20):
        line.add(100, 4, tier="first")
    assert error(line.offer(100, tier="second")) == "Shed"


def test_the_time_since_its_arrival_counts_against_the_target() -> None:
    line = timed_line(seats=2)
    line.now = 10.0
    assert line.offer(50, tier="fast") is None
    assert line.offer(50, tier="fast", arrival_s=9.9) is None
    assert error(line.offer(50, tier="fast", arrival_s=8.0)) == "Shed"


def test_a_light_tenant_is_not_shed_for_another_s_flood() -> None:
    line = timed_line(seats=2)
    for _ in range(40):
        line.add(100, 4, tier="fast", tenant="flood")
    assert error(line.offer(100, 4, tier="fast", tenant="flood")) == "Shed"
    assert line.offer(100, 4, tier="fast", tenant="light") is None
    assert line.offer(100, 4, tier="fast", tenant="another") is None


def test_the_rate_at_which_seats_were_given_tells_how_long_the_queue_takes() -> None:
    tiers = (Tier(name="fast", ttft_s=5.0),)
    line = Line(seats=1, tiers=tiers, step_s=0.1)
    for _ in range(20):
        line.scheduler.lengths.observe("fast", "", 10)
    for _ in range(6):
        line.add(4, 10, tier="fast")  # a second each
    while len(line.scheduler.waiting):
        line.step()
    answers = [line.offer(4, 10, tier="fast") for _ in range(10)]
    accepted = answers.index(next(refusal for refusal in answers if refusal is not None))
    assert 2 <= accepted <= 6
    assert {error(refusal) for refusal in answers[accepted:]} == {"Shed"}


def test_before_anything_is_measured_the_predicted_ends_of_the_seated_tell_how_long_it_takes() -> None:
    line = timed_line(seats=2, cost=StepCost(0.05, TOKEN_S, 0.0))
    for _ in range(200):
        line.scheduler.lengths.observe("fast", "", 400)
    line.add(4, 600, tier="fast"), line.add(4, 600, tier="fast")
    line.step()
    refusal = line.offer(4, 5, tier="fast")  # the first seat is free in about 400 steps of 54 ms
    assert refusal is not None
    assert refusal.error == "Shed"
    assert refusal.retry_after_s is not None
    assert 15 < refusal.retry_after_s < 30


def test_seats_that_were_given_at_one_moment_to_requests_that_came_together_tell_nothing_of_the_rate() -> None:
    def accepted(pairs: int) -> int:
        line = Line(seats=2, tiers=(Tier(name="fast", ttft_s=5.0),), step_s=0.1)
        for _ in range(20):
            line.scheduler.lengths.observe("fast", "", 10)
        for _ in range(pairs):  # nobody waits for anybody
            line.add(4, 10, tier="fast")
            line.add(4, 10, tier="fast")
            line.run()
            line.now += 1.0
        for _ in range(12):
            line.add(4, 10, tier="fast")
        while len(line.scheduler.waiting):
            line.step()
        return sum(line.offer(4, 10, tier="fast") is None for _ in range(40))

    assert accepted(pairs=100) == accepted(pairs=0)


def test_first_tokens_that_come_later_than_predicted_make_the_predictions_more_careful() -> None:
    def accepted(late: float) -> int:
        line = timed_line(seats=2)
        for _ in range(60):
            request = line.request(4, tier="fast")
            request.expected_ttft_s = 0.8
            line.scheduler.intake.first_token(request, request.arrival_s + 0.8 * late)
        return sum(line.offer(100, 4, tier="fast") is None for _ in range(20))

    assert accepted(late=3.0) < accepted(late=0.5)


# ---------------------------------------------------------------------- deadlines


def test_a_deadline_ends_a_request_that_waits() -> None:
    line = Line(seats=1)
    line.add(4, 50)
    line.step()
    waiting = line.add(4, 4, deadline_s=2.5)
    assert line.scheduler.next_change_s() == 2.5
    line.now = 2.4
    assert line.expire() == []
    line.now = 2.5
    (finished,) = line.expire()
    assert (finished.id, finished.reason) == (waiting.id, FinishReason.ERROR)
    assert finished.refusal is not None
    assert finished.refusal.error == "DeadlineExceeded"
    assert "2.5 s after it came" in finished.refusal.message
    assert len(line.scheduler.waiting) == 0
    assert line.scheduler.lifecycle.ledgers[1].refused == {"deadline_exceeded": 1}


def test_a_deadline_ends_a_request_that_runs_and_its_row_in_flight_is_dropped() -> None:
    line = Line()
    request = line.add(4, 50, deadline_s=2.0)
    line.step()
    flying = line.plan()
    line.now = 2.0
    assert [finished.id for finished in line.expire()] == [request.id]
    assert line.pool.live == 0
    assert len(line.settle(flying).ids) == 0
    assert line.outputs == {request.id: [TOKEN]}
    assert line.scheduler.wasted_rows == {"refused": 1}
    assert not line.scheduler.has_work


def test_a_deadline_ends_a_swapped_request_and_its_pins() -> None:
    line = Line(seats=1, host_blocks=8, preemption="swap")
    request = line.add(6, 50, tier="batch", deadline_s=2.0)
    line.step()
    line.add(4, 50, tier="interactive")
    line.step()
    assert request.swapped is not None
    line.now = 2.0
    assert [finished.id for finished in line.expire()] == [request.id]
    assert line.host is not None
    assert line.host.pool.live == 0
    timeline = line.timeline(request)
    assert timeline.swapped_s == 2.0
    assert timeline.preemptions == {"swap": 1}


def test_a_deadline_of_a_request_that_has_ended_is_passed_over() -> None:
    line = Line()
    done, gone = line.add(4, 2, deadline_s=1.0), line.add(4, 50, deadline_s=1.0)
    line.step(), line.step()
    line.scheduler.abort(gone.id, "cancel", line.now)
    assert done.finish is FinishReason.LENGTH
    line.now = 5.0
    assert line.expire() == []
    assert list(line.finished) == [done.id]


def test_far_deadlines_of_requests_that_have_ended_take_no_memory_for_long() -> None:
    line = Line(seats=2)
    kept = line.add(4, 200, deadline_s=50.0)
    for _ in range(400):
        line.add(4, 1, deadline_s=1e9)
        line.step()
    assert len(line.scheduler.intake._expiries) < 100
    line.now = 50.0
    assert [finished.id for finished in line.expire()] == ([kept.id] if kept.finish is None else [])


def test_deadlines_are_kept_in_the_order_of_time_not_of_arrival() -> None:
    line = Line(seats=1)
    ids = [line.add(4, 50, deadline_s=deadline).id for deadline in (3.0, 1.0, 2.0)]
    line.now = 1.5
    assert [finished.id for finished in line.expire()] == [ids[1]]
    line.now = 9.0
    assert [finished.id for finished in line.expire()] == [ids[2], ids[0]]


def test_a_leader_whose_deadline_passes_hands_its_prefill_to_a_sibling() -> None:
    line = Line(budget=4)
    prompt = list(range(100, 110))
    leader = line.add(prompt, keys=[root_key()], deadline_s=1.0)
    siblings = [line.add(prompt, keys=[root_key()], leader=leader) for _ in range(2)]
    line.step()
    line.now = 1.0
    assert [finished.id for finished in line.expire()] == [leader.id]
    line.run()
    assert [len(line.outputs[sibling.id]) for sibling in siblings] == [4, 4]


# ---------------------------------------------------------------------- time limits of queues

LIMITED = (Tier(name="first", weight=1.0), Tier(name="limited", queue_limit_s=3.0))


def test_who_has_waited_for_its_first_seat_as_long_as_its_tier_allows_is_refused() -> None:
    line = Line(seats=1, tiers=LIMITED)
    line.add(4, 50, tier="first")
    line.step()
    line.now = 1.0
    waiting = line.add(4, 4, tier="limited")
    line.now = 3.9
    assert line.expire() == []
    line.now = 4.0
    (finished,) = line.expire()
    assert finished.id == waiting.id
    assert finished.refusal is not None
    assert finished.refusal.error == "QueueTimeout"
    assert "no seat within 3 s, the longest wait of tier limited" in finished.refusal.message
    assert finished.refusal.retry_after_s == 3.0
    assert line.timeline(waiting).queued_s == 3.0
    assert line.scheduler.lifecycle.ledgers[1].refused == {"queue_timeout": 1}


def test_the_limit_counts_from_the_arrival_not_from_when_the_engine_heard_of_it() -> None:
    line = Line(seats=1, tiers=LIMITED)
    line.add(4, 50, tier="first")
    line.step()
    line.now = 2.0
    line.add(4, 4, tier="limited", arrival_s=0.5)
    line.now = 3.5
    assert len(line.expire()) == 1


def test_who_has_had_a_seat_may_wait_for_the_next_one_as_long_as_it_takes() -> None:
    line = Line(seats=1, tiers=LIMITED)
    request = line.add(4, 9, tier="limited")
    line.step()
    line.add(4, 20, tier="first")
    line.step()
    assert request.slot < 0
    line.now = 100.0
    assert line.expire() == []
    line.run()
    assert len(line.outputs[request.id]) == 9


def test_a_request_that_got_its_seat_in_time_is_left_alone() -> None:
    line = Line(tiers=LIMITED)
    request = line.add(4, 9, tier="limited")
    line.step()
    line.now = 50.0
    assert line.expire() == []
    assert request.slot >= 0


# ---------------------------------------------------------------------- steps of beam searches


def test_a_step_of_a_search_under_way_is_neither_refused_nor_given_up_while_it_waits() -> None:
    line = Line(seats=1, tiers=(Tier(name="bounded", max_queue=0, queue_limit_s=3.0),))
    line.add(4, 50, tier="bounded")
    line.step()
    assert error(line.offer(4, 1, tier="bounded", beam_step=0)) == "QueueFull"
    assert line.offer(4, 1, tier="bounded", beam_step=1) is None
    line.now = 100.0
    assert line.expire() == []
    late = line.request(4, 1, tier="bounded", beam_step=2, deadline_s=101.0)
    assert line.scheduler.offer(late, line.now) is None
    line.now = 102.0
    assert [finished.refusal.error for finished in line.expire() if finished.refusal] == ["DeadlineExceeded"]


def test_a_step_of_a_search_has_the_rank_of_its_arrival_and_an_account_of_its_own_time() -> None:
    line = Line(seats=1)
    line.add(4, 2)
    line.step()
    line.now = 10.0
    other, first, step = line.add(4, 1), *(line.add(4, 1, beam_step=n, arrival_s=1.0) for n in (0, 1))
    line.now = 12.0
    line.run()
    assert list(line.finished) == [1, first.id, step.id, other.id]
    assert (line.timeline(first).queued_s, line.timeline(step).queued_s) == (11.0, 2.0)


def test_a_search_s_prompt_is_charged_once_and_its_steps_say_nothing_of_lengths() -> None:
    line = Line()
    lengths, shares = line.scheduler.lengths, line.scheduler.waiting.lines[1].shares
    before = lengths.mean(lengths.handle("standard", "a"))
    for step in range(10):
        line.add(20, 1, tenant="a", beam_step=step)
        line.run()
    assert lengths.mean(lengths.handle("standard", "a")) == before
    assert shares.served("a") == 20 * PROMPT_WEIGHT + 10 * OUTPUT_WEIGHT
