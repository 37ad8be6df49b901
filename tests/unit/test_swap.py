"""Preemption by swap: copies in the plan, pins, and the choice between swapping and recomputing."""

from __future__ import annotations

import numpy as np
import pytest

from ropeway.cache.keys import root_key
from ropeway.plan import Plan, Result
from ropeway.request import FinishReason, Request, SamplingParams
from ropeway.scheduling.cost import StepCost
from tests.support.line import TOKEN, Line
from tests.support.world import Arrival, Setup, World


def swap_line(**settings: object) -> Line:
    return Line(**{"preemption": "swap", "host_blocks": 32, **settings})  # type: ignore[arg-type]


def preempt(line: Line, request: Request) -> Plan:
    """The plan in which the request has given its only seat to a more urgent one."""
    line.add(2, 2, tier="interactive")
    plan = line.plan()
    assert request.slot < 0
    return plan


# ---------------------------------------------------------------------- out and back


def test_a_swapped_request_goes_on_where_it_was_with_the_copies_of_all_its_blocks() -> None:
    line = swap_line(seats=1)
    request = line.add(10, 9, tier="batch")
    line.step(), line.step()
    held = line.scheduler.seats.held(request.slot)
    assert len(held) == 3, "the last one partly filled: positions 8 to 10"
    out = preempt(line, request)
    assert out.to_host[:, 0].tolist() == held
    line.settle(out)
    line.step()
    back = line.plan()
    (seat,) = back.seats
    assert back.to_device.tolist() == [
        [place, block] for place, block in zip(out.to_host[:, 1], seat.blocks, strict=True)
    ]
    assert line.rows(back) == {request.id: (11, 1)}, "nothing is computed again"
    assert seat.token_ids.tolist() == request.tokens.tolist()
    assert seat.prompt_tokens == 10
    line.settle(back)
    line.run()
    assert line.outputs[request.id] == [TOKEN] * 9
    assert line.host is not None
    assert (line.host.swaps_out, line.host.swaps_in) == (3, 3)
    assert line.host.pool.live == 0


def test_its_device_blocks_are_free_for_the_plan_that_swaps_it_out() -> None:
    line = swap_line(blocks=5, seats=2)
    request = line.add(14, 6, tier="batch")
    line.step()
    held = line.scheduler.seats.held(request.slot)
    line.add(14, 4, tier="interactive")
    plan = line.step()
    assert plan.to_host[:, 0].tolist() == held
    assert set(plan.new_blocks.tolist()) & set(held)
    line.run()
    assert len(line.outputs[request.id]) == 6


def test_blocks_that_are_still_cached_on_the_device_are_shared_without_a_copy() -> None:
    line = swap_line(seats=1)
    request = line.add(10, 9, tier="batch", keys=[root_key()])
    line.step(), line.step()
    held = line.scheduler.seats.held(request.slot)
    line.settle(preempt(line, request))
    line.step()
    back = line.plan()
    (seat,) = back.seats
    assert seat.blocks.tolist()[:2] == held[:2]
    assert len(back.to_device) == 1, "the tail alone"
    assert line.rows(back) == {request.id: (11, 1)}
    line.settle(back)
    line.run()
    assert len(line.outputs[request.id]) == 9


def test_a_request_whose_blocks_are_all_cached_on_the_device_needs_no_copy() -> None:
    line = swap_line(seats=1)
    request = line.add(8, 9, tier="batch", keys=[root_key()])
    line.step()
    line.settle(preempt(line, request))
    assert request.swapped is not None
    line.step()
    back = line.plan()
    assert len(back.to_device) == 0
    assert line.rows(back) == {request.id: (8, 1)}
    assert line.host is not None
    assert line.host.pool.live == 0, "its pins have ended all the same"


def test_blocks_that_host_memory_holds_already_are_not_copied_twice() -> None:
    line = swap_line(seats=1)
    request = line.add(10, 20, tier="batch", keys=[root_key()])
    for _ in range(4):
        line.step()  # meanwhile the three full blocks are written through
    assert line.host is not None
    assert line.host.pool.cached == 3
    out = preempt(line, request)
    assert len(out.to_host) == 1, "the tail"
    assert request.swapped is not None
    assert len(request.swapped.host_blocks) == 4
    line.settle(out)
    line.run()
    assert len(line.outputs[request.id]) == 20


def test_a_request_swapped_twice_copies_only_what_is_new() -> None:
    line = swap_line(seats=1, blocks=8)
    request = line.add(10, 20, tier="batch", keys=[root_key()])
    line.step()
    line.settle(preempt(line, request))
    while request.slot < 0:
        line.step()
    assert line.host is not None
    first = line.host.swaps_out
    for _ in range(5):
        line.step()
    held = line.scheduler.seats.held(request.slot)
    line.settle(preempt(line, request))
    assert line.host.swaps_out - first <= len(held) - 2, "the two blocks of its prompt are there"
    line.run()
    assert len(line.outputs[request.id]) == 20


def test_a_copy_is_written_before_the_same_plan_reads_its_block_for_another() -> None:
    line = swap_line(blocks=4, seats=2, aging_s=1.0)
    first = line.add(12, 4, tier="batch")
    line.step()
    urgent = line.add(10, 4, tier="standard")
    line.step()
    assert first.swapped is not None
    while urgent.slot >= 0:
        line.step()
    line.step()
    assert first.slot >= 0
    line.run()
    assert [len(line.outputs[request.id]) for request in (first, urgent)] == [4, 4]


def test_one_that_gives_way_in_the_plan_that_brings_it_back_keeps_the_copies_it_came_from() -> None:
    line = swap_line(blocks=10, seats=3)
    request = line.add(20, 10, tier="standard")
    line.step()
    protected = [line.add(4, 9, tier="batch", preemptions=3) for _ in range(2)]
    line.step()
    urgent = line.add(4, 4, tier="interactive")
    while urgent.finish is None:
        line.step()
    assert request.swapped is not None
    assert line.pool.available == 6
    places, computed = request.swapped.host_blocks, request.swapped.computed
    plan = line.plan()  # it takes the last six blocks, and then both others need one
    assert all(other.id in line.order(plan) for other in protected)
    assert request.slot < 0
    assert request.preemptions == 2
    assert (request.swapped.host_blocks, request.swapped.computed) == (places, computed)
    assert len(plan.to_host) == 0, "what is not back on the device yet cannot be copied from there"
    line.settle(plan)
    line.run()
    assert [len(line.outputs[each.id]) for each in (request, *protected)] == [10, 9, 9]


def test_a_request_preempted_with_a_step_in_flight_keeps_its_token_and_its_copies_hold_it() -> None:
    line = swap_line(seats=1)
    request = line.add(10, 9, tier="batch")
    line.step()
    flying = line.plan()
    assert line.rows(flying) == {request.id: (10, 1)}
    out = preempt(line, request)
    assert request.swapped is not None
    assert request.swapped.computed == 11, "the copy comes after the step in flight"
    line.settle(flying, {request.id: 99})
    assert line.outputs[request.id] == [TOKEN, 99]
    line.settle(out)
    line.step()
    back = line.plan()
    assert line.rows(back) == {request.id: (11, 1)}
    assert back.seats[0].token_ids.tolist()[10:] == [TOKEN, 99]
    line.settle(back)
    line.run()
    assert line.outputs[request.id] == [TOKEN, 99, *[TOKEN] * 7]


def test_a_request_swapped_inside_its_prompt_goes_on_inside_it() -> None:
    line = swap_line(seats=1, budget=16)
    request = line.add(40, 3, tier="batch")
    line.step()
    line.settle(preempt(line, request))
    line.step()
    back = line.plan()
    assert line.rows(back) == {request.id: (16, 16)}
    line.settle(back)
    line.run()
    assert len(line.outputs[request.id]) == 3


@pytest.mark.parametrize("end", ["abort", "deadline", "end token"])
def test_whatever_ends_a_swapped_request_its_pins_end_with_it(end: str) -> None:
    line = swap_line(seats=1)
    request = line.add(10, 9, tier="batch", end_ids=(3,), deadline_s=5.0)
    line.step()
    flying = line.plan()
    out = preempt(line, request)
    assert line.host is not None
    assert line.host.pool.live == 3
    if end == "abort":
        line.scheduler.abort(request.id, "cancel", line.now)
    elif end == "deadline":
        line.now = 5.0
        assert [f.refusal.error for f in line.expire() if f.refusal is not None] == ["DeadlineExceeded"]
    line.settle(flying, {request.id: 3} if end == "end token" else None)
    assert request.finish is {"abort": FinishReason.ABORT, "deadline": FinishReason.ERROR}.get(end, FinishReason.STOP)
    assert line.host.pool.live == 0
    assert line.scheduler.lifecycle.ledgers[2].swapped == 0
    line.settle(out)
    line.run()
    assert line.pool.live == 0


def test_pinned_copies_are_never_displaced() -> None:
    line = swap_line(seats=1, host_blocks=4)
    request = line.add(10, 9, tier="batch")
    line.step()
    line.settle(preempt(line, request))
    for number in range(6):  # their published blocks would like to be copied, too
        line.add(9, 4, tier="interactive", keys=[root_key(salt=bytes([number]))])
        line.step(), line.step()
    assert request.swapped is not None
    line.run()
    assert len(line.outputs[request.id]) == 9
    assert request.timeline.preemptions == {"swap": 1}


# ---------------------------------------------------------------------- the choice


@pytest.mark.report("vllm-project/vllm#787")
@pytest.mark.parametrize("host_blocks", [0, 2])
def test_when_host_memory_is_full_the_request_is_recomputed_and_nothing_is_held(host_blocks: int) -> None:
    line = swap_line(seats=1, host_blocks=host_blocks)
    request = line.add(10, 9, tier="batch")
    line.step()
    plan = preempt(line, request)
    assert request.swapped is None
    assert len(plan.to_host) == 0
    line.settle(plan)
    line.step()
    assert line.rows(line.step())[request.id] == (0, 11)
    line.run()
    assert line.outputs[request.id] == [TOKEN] * 9
    assert request.timeline.preemptions == {"recompute": 1}
    if line.host is not None:
        assert (line.host.pool.live, line.host.swaps_out) == (0, 0)


def test_recompute_never_copies_a_victim() -> None:
    line = swap_line(seats=1, preemption="recompute")
    request = line.add(10, 9, tier="batch")
    line.step()
    plan = preempt(line, request)
    assert len(plan.to_host) == 0
    line.settle(plan)
    line.run()
    assert request.timeline.preemptions == {"recompute": 1}


@pytest.mark.parametrize(("token_s", "kind"), [(6e-5, "swap"), (4e-5, "recompute")])
def test_auto_takes_what_costs_less_copies_both_ways_or_the_prompt_again(token_s: float, kind: str) -> None:
    block_s = 1e-4
    line = swap_line(
        seats=1, preemption="auto", cost=StepCost(0.01, token_s, 0.0), block_bytes=int(block_s * 4e9), shed=False
    )
    request = line.add(40, 9, tier="batch")
    line.step()
    assert (2 * 10 * block_s < 40 * token_s) == (kind == "swap")
    line.settle(preempt(line, request))
    line.run()
    assert request.timeline.preemptions == {kind: 1}


@pytest.mark.parametrize(("copy_s", "kind"), [(1e-6, "swap"), (0.1, "recompute")])
def test_auto_goes_by_what_copies_have_taken_so_far(copy_s: float, kind: str) -> None:
    line = swap_line(seats=1, preemption="auto", cost=StepCost(0.01, 5e-4, 0.0), block_bytes=int(1e-3 * 4e9))
    for _ in range(600):
        line.scheduler.copy_cost.observe(8, 8 * copy_s)
    request = line.add(40, 9, tier="batch")
    line.step()
    line.settle(preempt(line, request))
    line.run()
    assert request.timeline.preemptions == {kind: 1}


def test_copies_in_settled_plans_are_what_is_learnt_from() -> None:
    line = swap_line(seats=1)
    request = line.add(10, 9, tier="batch")
    line.step()
    before = line.scheduler.copy_cost.seconds(1)
    plan = preempt(line, request)
    sampled = np.full(int(plan.samples.sum()), TOKEN, dtype=np.int32)
    line.scheduler.settle(plan, Result(sampled, elapsed_s=0.02, copy_s=3 * before * 4), line.now)
    assert before < line.scheduler.copy_cost.seconds(1) < 4 * before
    line.run()


def test_the_gauges_tell_swapped_requests_and_copied_blocks() -> None:
    line = swap_line(seats=1)
    request = line.add(10, 9, tier="batch")
    line.step()
    line.settle(preempt(line, request))
    ledger = line.scheduler.lifecycle.ledgers[2]
    assert (ledger.swapped, ledger.waiting, ledger.preemptions["swap"]) == (1, 1, 1)
    assert line.host is not None
    assert (line.host.swaps_out, line.host.swaps_in, line.host.pool.live) == (3, 0, 3)
    while request.slot < 0:
        line.step()
    assert (ledger.swapped, ledger.waiting) == (0, 0)
    assert (line.host.swaps_out, line.host.swaps_in, line.host.pool.live) == (3, 3, 0)


# ---------------------------------------------------------------------- on a device


def params(output: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=output, n=n, ignore_eos=True)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_swapped_requests_get_the_tokens_they_get_alone(prefix_cache: bool, ahead: int) -> None:
    world = World(
        Setup(
            blocks=16, max_num_seqs=4, preemption="swap", host_blocks=40, prefix_cache=prefix_cache, admission="greedy"
        )
    )
    for number in range(8):
        world.submit(Arrival((*range(1, 14), number + 1), params(20), tier=2))
    for number in range(30):
        if number % 5 == 2:
            world.submit(Arrival((number + 1, 5, 6, 7, 8, 9), params(4), tier=0))
        world.step(ahead, 0.01)
    world.finish((ahead,))
    world.check_end()
    assert world.seen["swap preemptions"] > 3
    assert world.seen["swapped in"] > 8


@pytest.mark.report("vllm-project/vllm#787")
@pytest.mark.parametrize("host_blocks", [1, 60])
def test_groups_that_cannot_be_swapped_together_stop_nobody(host_blocks: int) -> None:
    world = World(Setup(blocks=20, max_num_seqs=6, preemption="swap", host_blocks=host_blocks, prefix_cache=False))
    for number in range(6):
        world.submit(Arrival((number + 1, *range(1, 10)), params(18, n=8), tier=1))
    (single,) = world.submit(Arrival((9, 8, 7), params(10), tier=1))
    for _ in range(12):
        world.step(1, 0.01)
    for _ in range(2):  # a higher tier is what makes siblings give way for sure
        world.submit(Arrival((50, *range(1, 20)), params(12), tier=0))
        world.step(1, 0.01)
    world.finish((1,))
    world.check_end()
    assert len(world.records[single].tokens) == 10
    assert world.seen["swap preemptions"] + world.seen["recompute preemptions"] > 0
    assert (world.seen["swap preemptions"] > 0) == (host_blocks > 1)


@pytest.mark.report("vllm-project/vllm#15996")
@pytest.mark.parametrize("host_blocks", [0, 10, 100])
def test_a_pool_more_than_nine_tenths_full_always_moves_on_with_priorities_and_swap(host_blocks: int) -> None:
    line = Line(blocks=40, block_size=16, seats=12, budget=512, preemption="swap", host_blocks=host_blocks, step_s=0.05)
    requests = []
    fullest = 0.0
    flying: list[Plan] = []
    for number in range(1200):
        if number < 12:  # a request with every step
            requests.append(line.add(60, 120, tier=number % 4, keys=[root_key()]))
        plan = line.scheduler.plan(line.now)
        assert plan is not None or flying or not line.scheduler.has_work, "an empty step with nothing in flight"
        fullest = max(fullest, line.pool.live / 40)
        if plan is not None:
            flying.append(plan)
        line.now += line.step_s
        while len(flying) > (plan is not None):
            line.settle(flying.pop(0))
        if not line.scheduler.has_work:
            break
    assert fullest > 0.9
    assert line.scheduler.preemptions > 0
    assert [len(line.outputs[request.id]) for request in requests] == [120] * 12
    assert all(request.finish is FinishReason.LENGTH for request in requests)
    if host_blocks == 100:
        assert line.host is not None
        assert line.host.swaps_in > 0


def test_whose_seat_alone_is_wanted_is_not_swapped_while_its_blocks_can_be_found_again() -> None:
    """Copies take less than computing all of it again, but more than the part of a block that is not cached."""
    cost = StepCost(0.001, 0.001, 0.0)

    def kind(urgent_tokens: int) -> dict[str, int]:
        line = Line(seats=1, blocks=14, host_blocks=64, cost=cost, preemption="auto", block_bytes=1 << 22)
        long = line.add(33, 20, tier="batch", keys=[root_key()])
        line.step()
        line.step()
        line.add(urgent_tokens, 2, tier="interactive")
        line.run()
        assert len(line.outputs[long.id]) == 20
        return long.timeline.preemptions

    assert kind(urgent_tokens=8) == {"recompute": 1}
    assert kind(urgent_tokens=40) == {"swap": 1}
