"""The three passes, preemption, and what requests wait for, on workloads made by hand."""

from __future__ import annotations

import dataclasses
import random

import pytest

from ropeway.cache.keys import root_key
from ropeway.request import FinishReason
from ropeway.scheduling.scheduler import MAX_PREEMPTIONS
from tests.support.line import TOKEN, Line

PROMPT = list(range(100, 110))
"""Two full blocks of four, and two tokens more."""


# ---------------------------------------------------------------------- budget and passes


@pytest.mark.parametrize("budget", [1, 3, 8, 64])
def test_no_step_computes_more_tokens_than_the_budget(budget: int) -> None:
    line = Line(budget=budget, seats=min(budget, 8))
    rng = random.Random(budget)
    for _ in range(12):
        line.add(rng.randint(1, 40), rng.randint(1, 9))
    plans = line.run()
    assert max(plan.num_tokens for plan in plans) == budget
    assert sorted(line.outputs) == list(range(1, 13))


def test_a_prompt_is_cut_to_the_budget_and_samples_at_its_end_only() -> None:
    line = Line(budget=16)
    request = line.add(40, 2)
    plans = [line.step() for _ in range(3)]
    assert [line.rows(plan)[request.id] for plan in plans] == [(0, 16), (16, 16), (32, 8)]
    assert [plan.samples.tolist() for plan in plans] == [[False], [False], [True]]
    assert line.outputs == {request.id: [TOKEN]}


def test_decodes_go_before_prompts_and_prompts_share_the_rest_in_order() -> None:
    line = Line(budget=10)
    running = line.add(3, 20)
    line.step()
    first, second = line.add(5), line.add(30)
    plan = line.step()
    assert line.order(plan) == [running.id, first.id, second.id]
    assert line.rows(plan) == {running.id: (3, 1), first.id: (0, 5), second.id: (0, 4)}


@pytest.mark.report("vllm-project/vllm#1026")
def test_a_long_prompt_never_holds_up_a_running_request() -> None:
    line = Line(budget=8)
    running = line.add(2, 30)
    line.step()
    long = line.add(60, 1)
    rows = [line.rows(line.step()) for _ in range(9)]
    assert all(row[running.id][1] == 1 for row in rows)
    assert sum(row[long.id][1] for row in rows) == 60


def test_the_longest_unserved_come_first_when_the_budget_is_below_their_number() -> None:
    line = Line(budget=16)
    for _ in range(5):
        line.add(2, 40)
    line.step()
    line.scheduler.config = dataclasses.replace(line.scheduler.config, max_batched_tokens=2)
    served = [line.order(line.step()) for _ in range(5)]
    assert served == [[1, 2], [3, 4], [1, 5], [2, 3], [1, 4]]


def test_without_chunked_prefill_a_prompt_is_one_row_before_the_decodes() -> None:
    line = Line(budget=8, chunked=False)
    running = line.add(3, 20)
    line.step()
    long, short = line.add(30), line.add(4)
    plan = line.step()
    assert line.rows(plan) == {long.id: (0, 30)}  # beyond the budget, since it cannot be cut
    plan = line.step()
    assert set(line.order(plan)) == {short.id, running.id, long.id}
    assert line.rows(plan)[short.id] == (0, 4)


def test_never_more_seats_than_there_are_and_one_that_ends_gives_its_to_the_next() -> None:
    line = Line(seats=2)
    first, second, third = line.add(3, 2), line.add(3, 9), line.add(3, 9)
    line.step()
    assert line.scheduler.seats.taken == 2
    assert third.slot < 0
    line.step()
    assert first.finish is FinishReason.LENGTH
    line.step()
    assert second.slot >= 0
    assert third.slot >= 0


def test_a_certain_length_limit_costs_no_row_too_many() -> None:
    line = Line()
    line.add(5, 3)
    first = line.plan()
    second = line.plan()  # two steps ahead of what is known
    third = line.plan()
    assert line.scheduler.plan(line.now) is None
    for plan in (first, second, third):
        line.settle(plan)
    assert line.outputs == {1: [TOKEN] * 3}
    assert not line.scheduler.wasted_rows


def test_an_end_token_seen_late_costs_one_row_that_is_dropped_and_counted() -> None:
    line = Line()
    request = line.add(5, 9, end_ids=(3,))
    first, second = line.plan(), line.plan()
    output = line.settle(first, {request.id: 3})
    assert [(f.id, f.reason, f.end_token) for f in output.finished] == [(request.id, FinishReason.STOP, 3)]
    assert line.pool.live == 0
    assert len(line.settle(second).ids) == 0
    assert line.scheduler.wasted_rows == {"eos": 1}


# ---------------------------------------------------------------------- admission


def test_nobody_passes_a_head_that_does_not_fit() -> None:
    line = Line(blocks=6)
    running = line.add(11, 4)
    line.step()
    head, small = line.add(15), line.add(2)
    while running.finish is None:
        line.step()
        assert head.slot < 0
        assert small.slot < 0
    line.step()
    assert head.slot >= 0


@pytest.mark.parametrize(("blocks", "size", "longest"), [(4, 4, 17), (1, 16, 17), (2, 1, 3)])
def test_fits_counts_the_keys_and_values_a_whole_life_needs(blocks: int, size: int, longest: int) -> None:
    scheduler = Line(blocks=blocks, block_size=size).scheduler
    assert scheduler.fits(longest)  # those of the last token are never needed
    assert not scheduler.fits(longest + 1)
    assert not Line(blocks=blocks, block_size=size, max_len=longest - 1).scheduler.fits(longest)


@pytest.mark.parametrize(("size", "blocks"), [(1, 30), (4, 8), (16, 2)])
@pytest.mark.parametrize("budget", [1, 5, 64])
def test_a_lone_request_that_fills_the_pool_is_never_preempted(size: int, blocks: int, budget: int) -> None:
    line = Line(blocks=blocks, block_size=size, seats=1, budget=budget)
    request = line.add(10, blocks * size + 1 - 10)
    line.run()
    assert len(line.outputs[request.id]) == blocks * size - 9
    assert line.scheduler.preemptions == 0


# ---------------------------------------------------------------------- preemption


def test_the_youngest_gives_way_and_comes_back_to_its_place() -> None:
    line = Line(blocks=6)
    requests = [line.add(7, 5) for _ in range(3)]
    late = line.add(3)
    line.step()
    assert [request.slot >= 0 for request in (*requests, late)] == [True, True, True, False]
    line.step()
    plan = line.step()  # the eighth token of each is full: a block each is needed, and none is left
    assert line.order(plan) == [1, 2]
    assert [request.preemptions for request in (*requests, late)] == [0, 0, 1, 0]
    assert [request.id for request in line.scheduler.waiting] == [3, late.id]
    line.run()
    assert {i: len(output) for i, output in line.outputs.items()} == {1: 5, 2: 5, 3: 5, late.id: 4}


def test_one_with_a_row_in_the_plan_is_no_victim_of_that_plan() -> None:
    line = Line(blocks=5, budget=16)
    older, younger = line.add(8, 4), line.add(3, 12)
    line.step()
    line.scheduler.preemption.preempt(older.slot, line.now)
    line.scheduler.config = dataclasses.replace(line.scheduler.config, max_batched_tokens=2)
    for _ in range(8):  # a decode of the younger one and a token of the older one's prompt
        assert line.order(line.step()) == [younger.id, older.id]
    assert line.pool.available == 0
    assert line.order(line.step()) == [younger.id]  # the older one needs a block and waits
    assert younger.preemptions == 0
    assert line.order(line.step()) == [older.id]  # now the younger one would need one, too
    assert younger.preemptions == 1


def test_a_preempted_request_keeps_its_tokens_and_the_border_of_its_prompt() -> None:
    line = Line(blocks=6)
    requests = [line.add(7, 5) for _ in range(3)]
    while not requests[2].preemptions:
        line.step()
    victim = requests[2]
    known = victim.tokens.tolist()
    assert known[7:] == line.outputs[3]
    assert victim.prompt_tokens == 7
    while victim.slot < 0:
        plan = line.step()
    (seat,) = plan.seats
    assert seat.token_ids.tolist() == known
    assert seat.prompt_tokens == 7
    line.run()
    assert line.outputs[3] == [TOKEN] * 5


def test_a_token_of_a_preempted_request_that_arrives_late_is_kept() -> None:
    line = Line(blocks=6)
    requests = [line.add(7, 5) for _ in range(3)]
    line.step()
    flying = line.plan()
    assert requests[2].id in line.order(flying)
    ahead = line.plan()
    assert requests[2].preemptions == 1
    assert requests[2].unsettled == 1
    assert len(requests[2].tokens) == 8  # the one in flight is not known yet
    output = line.settle(flying, {3: 99})
    assert dict(zip(output.ids.tolist(), output.tokens.tolist(), strict=True))[3] == 99
    assert requests[2].tokens.tolist()[7:] == [TOKEN, 99]
    assert requests[2].unsettled == 0
    line.settle(ahead)
    line.run()
    assert line.outputs[3] == [TOKEN, 99, TOKEN, TOKEN, TOKEN]


def test_a_preempted_request_is_not_seated_while_a_step_of_it_is_in_flight() -> None:
    line = Line()
    requests = [line.add(7, 2), line.add(7, 2), line.add(7, 5)]
    line.step()
    flying = line.plan()
    line.scheduler.preemption.preempt(requests[2].slot, line.now)
    assert line.scheduler.plan(line.now) is None  # there is room, but its token is under way
    line.settle(flying, {3: 99})
    (seat,) = line.plan().seats
    assert seat.token_ids.tolist()[7:] == [TOKEN, 99]


def test_an_end_token_that_arrives_late_ends_a_preempted_request() -> None:
    line = Line(blocks=6)
    requests = [line.add(7, 5, end_ids=(3,)) for _ in range(3)]
    line.step()
    flying, ahead = line.plan(), line.plan()
    assert requests[2].slot < 0
    assert [f.id for f in line.settle(flying, {3: 3}).finished] == [3]
    line.settle(ahead)
    assert requests[2].finish is FinishReason.STOP
    assert len(line.scheduler.waiting) == 0


def test_after_three_preemptions_a_request_is_seated_with_its_whole_life_and_is_no_victim() -> None:
    line = Line(blocks=6)
    older = line.add(4, 13)
    line.step()
    protected = line.add(4, 13, preemptions=MAX_PREEMPTIONS)
    line.step()
    assert protected.slot >= 0  # four blocks of a life, beside the two that the older one needs next
    while protected.finish is None:
        line.step()
    assert protected.preemptions == MAX_PREEMPTIONS
    assert older.preemptions == 1  # though it came first
    line.run()
    assert len(line.outputs[older.id]) == 13


def test_protected_requests_sit_together_only_as_far_as_their_lives_fit_and_let_others_pass() -> None:
    line = Line(blocks=8)
    first = line.add(4, 17, preemptions=MAX_PREEMPTIONS)  # a life of five blocks
    second = line.add(4, 13, preemptions=MAX_PREEMPTIONS)  # and one of four
    other = line.add(4, 4)
    line.step()
    assert first.slot >= 0
    assert other.slot >= 0, "an ordinary request passes a protected one that waits for another's life to end"
    while first.finish is None:
        assert second.slot < 0
        line.step()
    line.step()
    assert second.slot >= 0
    line.run()
    assert first.preemptions == second.preemptions == MAX_PREEMPTIONS


def test_a_protected_request_with_an_open_end_does_not_empty_the_line() -> None:
    line = Line(blocks=16, seats=8, max_len=64)
    protected = line.add(4, 59, preemptions=MAX_PREEMPTIONS)  # its life is the whole pool
    others = [line.add(4, 8) for _ in range(4)]
    line.step()
    assert protected.slot >= 0
    assert all(other.slot >= 0 for other in others)
    line.run()
    assert len(line.outputs[protected.id]) == 59


def test_a_leader_that_is_aborted_hands_its_prefill_to_one_sibling() -> None:
    line = Line(budget=4)
    leader, heir, *others = line.add_group(PROMPT, 4, prefix_cache=True)
    line.step()
    line.scheduler.abort(leader.id, "cancel", line.now)
    line.step()
    assert heir.slot >= 0
    assert all(other.slot < 0 for other in others)
    line.run()
    assert all(len(line.outputs[request.id]) == 4 for request in (heir, *others))


def test_preemptions_of_a_request_are_bounded_and_everybody_ends() -> None:
    line = Line(blocks=10, seats=6, budget=16)
    requests = [line.add(6, 33) for _ in range(12)]
    line.run()
    assert line.scheduler.preemptions > 0
    assert max(request.preemptions for request in requests) <= MAX_PREEMPTIONS
    assert all(len(line.outputs[request.id]) == 33 for request in requests)


# ---------------------------------------------------------------------- prefixes and groups


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.report("vllm-project/vllm#16863")
def test_siblings_wait_for_the_leaders_prompt_and_share_its_full_blocks(prefix_cache: bool) -> None:
    line = Line()
    leader, *siblings = line.add_group(PROMPT, 3, prefix_cache=prefix_cache)
    first = line.plan()
    assert line.rows(first) == {leader.id: (0, 10)}
    assert all(request.gate is not None and not request.gate.open for request in siblings)
    line.settle(first)
    second = line.plan()
    assert line.rows(second) == {leader.id: (10, 1), siblings[0].id: (8, 2), siblings[1].id: (8, 2)}
    assert [seat.blocks.tolist() for seat in second.seats] == [line.scheduler.seats.held(leader.slot)[:2]] * 2
    line.settle(second)
    line.run()
    assert line.cached == {leader.id: 0, siblings[0].id: 0, siblings[1].id: 0}


@pytest.mark.parametrize(("prefix_cache", "cached"), [(True, 8), (False, 0)])
def test_cached_tokens_of_a_group_are_those_that_were_there_before_it(prefix_cache: bool, cached: int) -> None:
    line = Line()
    line.add_group(PROMPT, 2, prefix_cache=prefix_cache)
    line.run()
    group = line.add_group(PROMPT, 3, prefix_cache=prefix_cache)
    line.run()
    assert [line.cached[request.id] for request in group] == [cached] * 3


def test_a_group_under_a_private_root_shares_with_nobody_else() -> None:
    line = Line()
    line.add_group(PROMPT, 2, prefix_cache=False)
    line.run()
    stranger = line.add(PROMPT, keys=[root_key()])
    line.run()
    assert line.cached[stranger.id] == 0


def test_siblings_do_not_hold_up_those_behind_them() -> None:
    line = Line(budget=16)
    leader, sibling = line.add_group(PROMPT, 2, prefix_cache=True)
    other = line.add(3)
    assert line.order(line.step()) == [leader.id, other.id]
    assert sibling.slot < 0


@pytest.mark.parametrize("seated", [True, False])
def test_siblings_go_on_when_the_leader_is_aborted(seated: bool) -> None:
    line = Line()
    leader, *siblings = line.add_group(PROMPT, 3, prefix_cache=True)
    plan = line.plan() if seated else None
    assert line.scheduler.abort(leader.id, "cancel", line.now)
    if plan is not None:
        assert len(line.settle(plan).ids) == 0
    line.run()
    assert {i: len(output) for i, output in line.outputs.items()} == {s.id: 4 for s in siblings}
    assert all(line.cached[sibling.id] == 0 for sibling in siblings)


@pytest.mark.report("vllm-project/vllm#17305")
@pytest.mark.parametrize(("blocker", "cached"), [(31, 0), (5, 8)])
def test_a_prefix_is_looked_up_when_its_request_is_seated_not_when_it_came(blocker: int, cached: int) -> None:
    line = Line(blocks=8, seats=1)
    line.add(PROMPT, keys=[root_key()])
    line.run()
    long = line.add(blocker, 1)
    again = line.add(PROMPT, keys=[root_key()])
    line.step()
    assert long.finish is not None
    (seat,) = line.step().seats
    assert len(seat.blocks) * 4 == cached
    line.run()
    assert line.cached[again.id] == cached


@pytest.mark.report("vllm-project/vllm#3239")
@pytest.mark.parametrize("length", [7, 8, 9])
def test_of_a_cached_prompt_at_least_one_token_is_computed(length: int) -> None:
    line = Line()
    for cached in (0, (length - 1) // 4 * 4):
        request = line.add(PROMPT[:length], keys=[root_key()])
        plan = line.step()
        assert line.rows(plan)[request.id] == (cached, length - cached)
        line.run()
        assert line.cached[request.id] == cached


def test_output_is_found_again_like_a_prompt() -> None:
    line = Line()
    line.add(PROMPT, 7, keys=[root_key()])
    line.run()
    again = line.add([*PROMPT, *[TOKEN] * 7], keys=[root_key()])
    line.run()
    assert line.cached[again.id] == 16  # the last token's keys and values were never computed


# ---------------------------------------------------------------------- aborts


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_frees_everything_at_once_whatever_the_request_is_doing(steps: int) -> None:
    line = Line(budget=8)
    request = line.add(20, 9)
    for _ in range(steps):
        line.step()
    plan = line.scheduler.plan(line.now)
    assert line.scheduler.abort(request.id, "disconnect", line.now)
    assert not line.scheduler.abort(request.id, "disconnect", line.now)
    assert line.pool.live == 0
    assert plan is not None
    output = line.settle(plan)
    assert not len(output.ids)
    assert not output.started
    assert not output.finished
    assert line.scheduler.wasted_rows == {"disconnect": 1}
    assert line.scheduler.find(request.id) is None


def test_one_that_waits_can_be_aborted() -> None:
    line = Line(seats=1)
    line.add(4), line.add(4)
    line.step()
    assert line.scheduler.abort(2, "cancel", line.now)
    line.run()
    assert list(line.outputs) == [1]
    assert not line.scheduler.abort(99, "cancel", line.now)
