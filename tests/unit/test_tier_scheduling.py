"""Tiers: who takes whose seat and blocks, who ages, who gets the budget, and what targets do to a step."""

from __future__ import annotations

import pytest

from ropeway.cache.keys import root_key
from ropeway.plan import Plan
from ropeway.request import Request
from ropeway.scheduling.cost import StepCost
from ropeway.scheduling.scheduler import MAX_PREEMPTIONS
from ropeway.tiers import Tier
from tests.support.line import TOKEN, Line

AGING_S = 10.0
"""The default: with the default tiers, interactive and batch are 60 s apart, standard and batch 30 s."""


def victims(line: Line, requests: list[Request]) -> list[int]:
    return [request.id for request in requests if request.preemptions]


def step_keeping_rows(line: Line) -> Plan:
    """A step; whoever has a row in it still has his seat and his blocks."""
    plan = line.plan()
    seats = line.scheduler.seats
    assert seats.request_id[plan.slot].tolist() == plan.request.tolist()
    for slot, start, count in zip(plan.slot.tolist(), plan.start.tolist(), plan.count.tolist(), strict=True):
        assert len(seats.held(slot)) * line.pool.block_size >= start + count
    line.settle(plan)
    return plan


# ---------------------------------------------------------------------- preemption at admission


@pytest.mark.report("vllm-project/vllm PR#45561")
@pytest.mark.report("vllm-project/vllm#40004")
def test_an_interactive_request_takes_the_seat_of_a_batch_request_when_all_are_taken() -> None:
    line = Line(seats=2)
    background = [line.add(4, 100, tier="batch") for _ in range(2)]
    for _ in range(5):
        line.step()
    urgent = line.add(6, 5, tier="interactive")
    plan = line.step()
    assert line.rows(plan)[urgent.id] == (0, 6)
    assert line.outputs[urgent.id] == [TOKEN]
    assert sum(request.preemptions for request in background) == 1
    line.run()
    assert [len(line.outputs[request.id]) for request in (*background, urgent)] == [100, 100, 5]


def test_an_interactive_request_takes_the_blocks_of_batch_requests_when_they_are_short() -> None:
    line = Line(blocks=10)
    background = [line.add(14, 20, tier="batch") for _ in range(2)]  # four blocks each, with the next token
    line.step()
    urgent = line.add(15, 4, tier="interactive")
    plan = line.step()
    assert line.rows(plan)[urgent.id] == (0, 15)
    assert victims(line, background) == [2]
    line.run()
    assert [len(line.outputs[request.id]) for request in (*background, urgent)] == [20, 20, 4]


def test_as_many_give_way_as_it_takes_and_not_one_more() -> None:
    line = Line(blocks=12)
    background = [line.add(6, 20, tier="batch") for _ in range(6)]  # two blocks each
    line.step()
    line.add(18, 4, tier="interactive")  # five blocks, with the next token
    line.step()
    assert victims(line, background) == [4, 5, 6]


def test_nobody_gives_way_where_a_seat_and_blocks_are_free() -> None:
    line = Line(seats=3)
    background = [line.add(4, 20, tier="batch") for _ in range(2)]
    line.step()
    urgent = line.add(4, 4, tier="interactive")
    assert set(line.order(line.step())) == {1, 2, urgent.id}
    assert victims(line, background) == []


def test_nobody_gives_way_in_vain() -> None:
    line = Line(blocks=12)
    firm = line.add(30, 8, tier="standard")  # eight blocks
    background = line.add(6, 20, tier="batch")  # and two
    line.step()
    larger = line.add(22, 4, tier="standard")  # six, of which the lower tier and the free ones make four
    while firm.finish is None:
        assert larger.slot < 0
        assert background.preemptions == 0
        line.step()
    line.step()
    assert larger.slot >= 0


@pytest.mark.parametrize("tier", ["interactive", "standard"])
def test_nobody_takes_the_seat_of_an_equal_or_a_higher_tier(tier: str) -> None:
    line = Line(seats=2)
    seated = [line.add(4, 20, tier="interactive"), line.add(4, 20, tier=tier)]
    line.step()
    late = line.add(4, 4, tier=tier)
    for _ in range(5):
        line.step()
        assert late.slot < 0
    assert victims(line, seated) == []


def test_the_victim_is_of_the_lowest_tier() -> None:
    line = Line(seats=3)
    cheap = line.add(4, 20, tier="standard")
    batch = line.add(30, 20, tier="batch")
    high = line.add(4, 20, tier="interactive")
    line.step()
    urgent = line.add(4, 2, tier="interactive")
    line.step()
    assert urgent.slot >= 0
    assert victims(line, [cheap, batch, high]) == [batch.id]


def test_of_the_lowest_tier_the_one_whose_resume_is_cheapest_gives_way() -> None:
    line = Line(seats=3)
    requests = [line.add(prompt, 20, tier="batch") for prompt in (20, 5, 12)]
    line.step()
    line.add(4, 2, tier="interactive")
    line.step()
    assert victims(line, requests) == [2]


def test_of_those_that_resume_alike_the_youngest_gives_way() -> None:
    line = Line(seats=3)
    requests = [line.add(8, 20, tier="batch") for _ in range(3)]
    line.step()
    line.add(4, 2, tier="interactive")
    line.step()
    assert victims(line, requests) == [3]


def test_a_tier_that_is_not_preemptible_keeps_its_seat() -> None:
    tiers = (Tier(name="first", weight=2.0), Tier(name="firm", weight=1.0, preemptible=False), Tier(name="last"))
    line = Line(seats=2, tiers=tiers)
    firm, last = line.add(4, 20, tier="firm"), line.add(4, 20, tier="last")
    line.step()
    first, second = line.add(4, 4, tier="first"), line.add(4, 4, tier="first")
    line.step()
    assert first.slot >= 0, "in the seat of the last"
    assert second.slot < 0
    assert (firm.preemptions, last.preemptions) == (0, 1)
    while firm.finish is None:
        line.step()
    assert firm.preemptions == 0


def test_a_request_preempted_three_times_keeps_its_seat() -> None:
    line = Line(seats=1)
    batch = line.add(4, 30, tier="batch")
    for times in range(1, MAX_PREEMPTIONS + 1):
        line.step()
        urgent = line.add(4, 2, tier="interactive")
        while urgent.finish is None:
            line.step()
        assert batch.preemptions == times
    line.step()
    urgent = line.add(4, 2, tier="interactive")
    while batch.finish is None:
        assert urgent.slot < 0
        line.step()
    assert batch.preemptions == MAX_PREEMPTIONS
    line.run()
    assert len(line.outputs[batch.id]) == 30


def test_preemptions_for_a_higher_tier_are_counted_as_such() -> None:
    line = Line(seats=1)
    line.add(4, 20, tier="batch")
    line.step()
    line.add(4, 2, tier="interactive")
    line.run()
    ledgers = line.scheduler.lifecycle.ledgers
    assert [dict(ledger.preemptions) for ledger in ledgers] == [{}, {}, {"recompute": 1, "admission": 1}]
    assert line.scheduler.preemptions == 1


@pytest.mark.report("vllm-project/vllm#23347")
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("blocks", [24, 200])
def test_a_victim_never_has_a_row_in_the_plan_that_takes_its_seat_or_blocks(blocks: int, ahead: int) -> None:
    line = Line(seats=6, blocks=blocks, budget=32)
    requests = [line.add(12, 40, tier="batch") for _ in range(9)]
    seats, flying = line.scheduler.seats, []
    for number in range(400):
        if number in (5, 6, 7):
            requests.append(line.add(20, 12, tier="interactive"))
        plan = line.scheduler.plan(line.now)
        if plan is not None:
            assert seats.request_id[plan.slot].tolist() == plan.request.tolist()
            assert (seats.blocks_held[plan.slot] * 4 >= plan.start + plan.count).all()
            flying.append(plan)
        while len(flying) > (ahead if plan is not None else 0):
            line.settle(flying.pop(0))
        if not line.scheduler.has_work:
            break
    assert line.scheduler.preemptions > 0
    assert [len(line.outputs[request.id]) for request in requests] == [40] * 9 + [12] * 3


def test_when_blocks_run_out_the_lowest_tier_gives_way_though_it_came_first() -> None:
    line = Line(blocks=6)
    batch = line.add(7, 12, tier="batch")
    others = [line.add(7, 12, tier="standard"), line.add(7, 12, tier="interactive")]
    while not line.scheduler.preemptions:
        step_keeping_rows(line)
    assert victims(line, [batch, *others]) == [batch.id]
    ledgers = line.scheduler.lifecycle.ledgers
    assert ledgers[2].preemptions["admission"] == 0
    line.run()
    assert [len(line.outputs[request.id]) for request in (batch, *others)] == [12] * 3


def test_one_that_got_its_seat_in_this_pass_gives_way_to_a_higher_tier_in_the_next() -> None:
    line = Line(blocks=6, seats=2, host_blocks=8, preemption="swap", aging_s=1.0)
    aged = line.add(14, 10, tier="batch")
    line.step()
    blocker = line.add(14, 3, tier="interactive")
    line.step()
    assert aged.swapped is not None
    line.now = 60.0
    urgent = line.add(14, 4, tier="interactive")
    while blocker.finish is None:
        line.step()
    line.step()
    assert aged.slot >= 0, "its age gets it the seat, and its blocks come back at once"
    assert urgent.slot < 0
    line.step()
    assert urgent.slot >= 0
    line.run()
    assert [len(line.outputs[request.id]) for request in (aged, blocker, urgent)] == [10, 3, 4]


# ---------------------------------------------------------------------- ageing


@pytest.mark.parametrize(("early_s", "first"), [(59.9, "interactive"), (60.1, "batch")])
def test_the_next_free_seat_goes_to_who_has_waited_for_the_difference_of_the_weights(
    early_s: float, first: str
) -> None:
    tiers = (
        Tier(name="interactive", weight=6.0),
        Tier(name="firm", weight=3.0, preemptible=False),
        Tier(name="batch", weight=0.0),
    )
    line = Line(seats=1, tiers=tiers)
    running = line.add(4, 3, tier="firm")
    line.step()
    waiting = {"batch": line.add(4, 2, tier="batch")}
    line.now = early_s
    waiting["interactive"] = line.add(4, 2, tier="interactive")
    while running.finish is None:
        line.step()
    line.step()
    assert {name: request.slot >= 0 for name, request in waiting.items()} == {
        name: name == first for name in ("batch", "interactive")
    }


def test_ageing_never_preempts() -> None:
    line = Line(seats=1)
    running = line.add(4, 20, tier="standard")
    line.step()
    aged = line.add(4, 2, tier="batch")
    line.now = 1000.0
    while running.finish is None:
        assert aged.slot < 0
        line.step()
    assert running.preemptions == 0
    line.step()
    assert aged.slot >= 0


def test_a_batch_request_is_served_in_bounded_time_however_many_interactive_ones_come() -> None:
    line = Line(seats=1, step_s=0.1)
    for _ in range(4):
        line.add(4, 5, tier="interactive")
    line.step()
    batch = line.add(4, 5, tier="batch")
    began = line.now
    while batch.finish is None:
        while len(line.scheduler.waiting) < 4:  # more than one seat can ever serve
            line.add(4, 5, tier="interactive")
        line.step()
    service_s = 5 * line.step_s
    # Its age, then a service of another before each of its seats, of which a higher tier may take three.
    assert line.now - began <= 6 * AGING_S + 2 * (MAX_PREEMPTIONS + 1) * service_s + 1.0
    assert line.now - began >= 6 * AGING_S - service_s, "it was not served before its time"


def test_a_preempted_request_ages_from_its_arrival() -> None:
    line = Line(seats=1)
    batch = line.add(4, 9, tier="batch")
    line.step()
    first = line.add(4, 3, tier="interactive")
    line.step()
    assert batch.slot < 0
    line.now = 61.0
    second = line.add(4, 3, tier="interactive")
    while first.finish is None:
        line.step()
    plan = line.plan()
    assert line.order(plan) == [batch.id]
    assert second.slot < 0


def test_a_seated_batch_prompt_gets_the_budget_in_bounded_time_however_much_of_it_others_could_use() -> None:
    line = Line(seats=4, budget=64, blocks=400, step_s=0.5)
    line.add(200, 4, tier="interactive")
    line.step()
    batch = line.add(100, 2, tier="batch")
    seated_s: float | None = None
    while batch.finish is None:
        while len(line.scheduler.waiting) < 3:
            line.add(200, 4, tier="interactive")  # three steps of prompt each, so there is always some left
        line.step()
        if batch.slot >= 0 and seated_s is None:
            seated_s = line.now
    assert seated_s is not None
    assert seated_s <= 6 * AGING_S + 10 * line.step_s
    assert 6 * AGING_S < line.now - seated_s <= 6 * AGING_S + 5 * line.step_s


# ---------------------------------------------------------------------- places in the queue


def test_nothing_of_its_tier_or_below_passes_a_head_that_does_not_fit_but_a_higher_tier_does() -> None:
    line = Line(blocks=8)
    running = line.add(19, 12, tier="standard")  # five blocks, and it grows
    line.step()
    head = line.add(18, 4, tier="standard")
    small, batch = line.add(2, 2, tier="standard"), line.add(2, 2, tier="batch")
    line.step()
    urgent = line.add(2, 2, tier="interactive")
    while running.finish is None:
        line.step()
        assert head.slot < 0
        assert small.slot < 0
        assert batch.slot < 0
    assert urgent.finish is not None
    line.step()
    assert head.slot >= 0
    line.run()
    assert [len(line.outputs[request.id]) for request in (head, small, batch)] == [4, 2, 2]


def test_free_seats_go_to_the_tiers_in_their_order() -> None:
    line = Line(seats=1)
    running = line.add(4, 2, tier="interactive")
    line.step()
    waiting = [line.add(4, 1, tier=tier) for tier in ("batch", "standard", "interactive", "standard")]
    served: list[int] = []
    while line.scheduler.has_work:
        served += [seat for seat in line.order(line.step()) if seat != running.id]
    assert served == [waiting[2].id, waiting[1].id, waiting[3].id, waiting[0].id]


def test_a_higher_tier_is_admitted_against_the_present_only_as_lower_ones_can_give_way_later() -> None:
    line = Line(blocks=20, admission="watermark", watermark=0.5)
    for _ in range(3):
        line.add(11, 20, tier="batch")
    line.step()
    assert line.scheduler.seats.taken == 3, "the first always, then as long as half of the pool stays free"
    late = line.add(11, 4, tier="batch")
    line.step()
    assert late.slot < 0
    urgent = line.add(11, 4, tier="interactive")
    line.step()
    assert urgent.slot >= 0
    assert line.scheduler.preemptions == 0


def test_the_reservation_widens_with_preemptions_and_narrows_without() -> None:
    line = Line(blocks=10, seats=6, budget=16)
    reservation = line.scheduler.admission.reservation
    least = reservation.share
    requests = [line.add(6, 33) for _ in range(4)]
    while not line.scheduler.preemptions:
        line.step()
    line.run()
    widest = reservation.share
    assert widest > least
    assert all(request.finish is not None for request in requests)
    line.add(4, 200 - 163)
    line.run()
    assert least <= reservation.share < widest


# ---------------------------------------------------------------------- the budget


def test_prompts_of_higher_tiers_get_the_budget_first() -> None:
    line = Line(budget=10)
    batch = line.add(30, 4, tier="batch")
    line.step()
    standard, urgent = line.add(12, 4, tier="standard"), line.add(7, 4, tier="interactive")
    plan = line.step()
    assert line.rows(plan) == {urgent.id: (0, 7), standard.id: (0, 3)}
    plan = line.step()
    assert line.rows(plan) == {urgent.id: (7, 1), standard.id: (3, 9)}
    plan = line.step()
    assert line.rows(plan) == {urgent.id: (8, 1), standard.id: (12, 1), batch.id: (10, 8)}


def test_decodes_never_wait_for_a_prompt_of_any_tier() -> None:
    line = Line(budget=8, seats=6)
    running = [line.add(2, 30, tier=tier) for tier in ("batch", "standard")]
    line.step()
    line.add(50, 1, tier="interactive")
    line.add(50, 1, tier="interactive")
    for _ in range(12):
        rows = line.rows(line.step())
        assert all(rows[request.id][1] == 1 for request in running)


def test_a_seat_is_given_only_while_the_budget_reaches_so_that_arrivals_can_still_pass() -> None:
    line = Line(budget=10, seats=8)
    first, second = line.add(30, 1, tier="standard"), line.add(30, 1, tier="standard")
    line.step()
    assert first.slot >= 0
    assert second.slot < 0, "the first one's prompt fills the step"
    urgent = line.add(6, 2, tier="interactive")
    assert line.rows(line.step()) == {urgent.id: (0, 6), first.id: (10, 4)}


# ---------------------------------------------------------------------- a step's length by the tightest TPOT target

STEP_A, STEP_B = 0.01, 0.001
"""Seconds of a step, and per token in it."""


def tpot_line(**fields: object) -> Line:
    tiers = (Tier(name="tight", weight=2.0, tpot_s=0.05), Tier(name="loose", weight=1.0, tpot_s=0.1), Tier(name="none"))
    return Line(
        blocks=200,
        budget=200,
        max_len=600,
        step_budget="tpot",
        tiers=tiers,
        cost=StepCost(STEP_A, STEP_B, 0.0),
        **fields,  # type: ignore[arg-type]
    )


def test_a_step_is_cut_to_what_the_tightest_running_tier_allows_and_goes_back_when_that_leaves() -> None:
    line = tpot_line()
    tight = line.add(4, 4, tier="tight")
    line.step()
    line.add(600 - 20, 4, tier="none")
    sizes = []
    while tight.finish is None:
        sizes.append(line.step().num_tokens)
    assert len(sizes) == 3
    for size in sizes:
        assert STEP_A + STEP_B * size <= 0.05
        assert STEP_A + STEP_B * (size + 4) > 0.05 * 0.95, "and no shorter than it must be"
    loose = line.add(4, 2, tier="loose")
    size = line.step().num_tokens
    assert loose.slot >= 0
    assert 0.1 * 0.9 < STEP_A + STEP_B * size <= 0.1
    while loose.finish is None:
        line.step()
    assert line.step().num_tokens == 200, "nobody with a target is left"


def test_every_running_request_gets_its_token_and_some_prompt_goes_on_whatever_the_target() -> None:
    line = tpot_line(seats=60)
    running = [line.add(1, 9, tier="tight") for _ in range(50)]
    line.step()
    long = line.add(300, 2, tier="none")
    rows = line.rows(line.step())  # 50 tokens alone take longer than the target
    assert all(rows[request.id][1] == 1 for request in running)
    assert rows[long.id][1] >= line.pool.block_size


def test_a_constant_budget_knows_no_targets() -> None:
    line = Line(budget=200, blocks=200, max_len=600, cost=StepCost(STEP_A, STEP_B, 0.0))
    line.add(4, 9, tier="interactive")
    line.step()
    line.add(500, 2, tier="batch")
    assert line.step().num_tokens == 200


def test_without_measured_steps_the_budget_is_the_constant_one_and_then_follows_what_is_measured() -> None:
    tiers = (Tier(name="tight", weight=1.0, tpot_s=0.05), Tier(name="none"))
    line = Line(blocks=1000, budget=200, max_len=3000, step_budget="tpot", tiers=tiers)
    line.add(4, 40, tier="tight")
    line.settle(line.plan(), elapsed_s=STEP_A + STEP_B * 4)
    line.add(2900, 2, tier="none")
    sizes = []
    for _ in range(30):
        plan = line.plan()
        sizes.append(plan.num_tokens)
        line.settle(plan, elapsed_s=STEP_A + STEP_B * plan.num_tokens)
    assert sizes[0] == 200
    assert all(STEP_A + STEP_B * size <= 0.052 for size in sizes[12:])
    assert sizes[-1] > 30


def test_blocks_that_victims_share_are_freed_with_the_last_of_them() -> None:
    line, prompt = Line(blocks=16), list(range(12))
    background = []
    for _ in range(3):
        background.append(line.add(prompt, 30, tier="batch", keys=[root_key()]))
        line.step()
    own = [len(line.scheduler.seats.held(request.slot)) - 2 for request in background]
    assert line.pool.live == 2 + sum(own)  # two blocks are everybody's
    blocks = line.pool.available + own[1] + own[2] + 1  # one more than two of them can give
    urgent = line.add(4 * blocks - 1, 2, tier="interactive")
    plan = line.step()
    assert urgent.id in line.rows(plan)
    assert victims(line, background) == [1, 2, 3]
    line.run()


def test_while_nothing_is_given_back_a_head_that_does_not_fit_is_not_tried_again() -> None:
    line = Line(blocks=8)
    line.add(12, 12)
    line.step()
    waiting = line.add(20, 2)
    tried: list[int] = []
    find = line.scheduler.prefixes.find
    line.scheduler.prefixes.find = lambda request: tried.append(request.id) or find(request)  # type: ignore[method-assign,func-returns-value]
    for _ in range(5):
        line.step()
    assert tried == [waiting.id]
    line.run()
    assert len(line.outputs[waiting.id]) == 2
