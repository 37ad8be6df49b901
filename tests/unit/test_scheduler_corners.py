"""Corners of the scheduler where several of its parts meet; each test is of a fault that was here once."""

from __future__ import annotations

import pytest

from ropeway.cache.keys import root_key
from tests.support.line import Line

PROMPT = list(range(100, 110))
"""Two full blocks of four, and two tokens more."""


def test_one_that_gives_way_in_the_plan_that_brings_it_back_keeps_its_host_copies() -> None:
    line = Line(blocks=8, block_size=4, host_blocks=32, preemption="swap")
    line.add(PROMPT, 2, keys=[root_key()])
    line.run()
    line.add(29, 2)  # takes the device's blocks, so that the prefix is in host memory only
    line.run()
    protected = [line.add(tokens, 4, tier="batch", preemptions=3) for tokens in (12, 8)]
    line.step()
    fresh = line.add(PROMPT, 2, tier="interactive", keys=[root_key()])
    plan = line.plan()  # it is seated with the last three blocks in mind, of which the protected ones take two
    assert fresh.swapped is not None
    assert list(line.rows(plan)) == [request.id for request in protected]
    arriving = set(plan.to_device[:, 1].tolist())
    assert arriving.isdisjoint(plan.to_host[:, 0].tolist()), "a block is copied to the host before it has come"
    line.settle(plan)
    line.run()
    assert len(line.outputs[fresh.id]) == 2


@pytest.mark.parametrize(("prompt", "suffices"), [(18, True), (22, False)])
def test_nobody_gives_way_for_blocks_that_stay_with_those_who_share_them(prompt: int, suffices: bool) -> None:
    line = Line(blocks=12, block_size=4, seats=4)
    prefix = list(range(100, 124))
    line.add([*prefix, 1], 3, tier="interactive", keys=[root_key()])  # seven blocks
    line.step()
    sharing = line.add([*prefix, 2], 3, tier="batch", keys=[root_key()])  # six of those, and one of its own
    line.step()
    late = line.add(prompt, 2, tier="interactive")  # five blocks or six; four are free
    line.step()
    assert (late.slot >= 0) == suffices
    assert sharing.preemptions == suffices


def test_blocks_that_a_victim_shares_with_who_takes_its_place_are_not_counted_as_gained() -> None:
    line = Line(blocks=12, block_size=4, seats=4)
    line.add(12, 8, tier="interactive")  # three blocks, and soon four
    prefix = list(range(100, 124))
    sharing = line.add(prefix, 3, tier="batch", keys=[root_key()])  # six
    line.step()
    line.step()
    late = line.add([*prefix, *range(16)], 3, tier="interactive", keys=[root_key()])  # eleven, of which it finds six
    line.step()
    assert late.slot < 0
    assert sharing.preemptions == 0


def test_who_takes_the_place_of_a_lower_tier_is_not_held_up_by_what_the_future_may_bring() -> None:
    line = Line(blocks=16, block_size=4, seats=2, admission="profile")
    below = line.add(4, 40, tier="batch")
    line.step()
    line.add(20, 30, tier="interactive")
    line.step()
    late = line.add(16, 30, tier="interactive")
    line.step()
    assert below.preemptions == 1
    assert late.slot >= 0


def test_a_head_that_did_not_fit_is_tried_again_when_its_prefix_is_published() -> None:
    line = Line(blocks=11, budget=20)
    prompt = list(range(1, 25))
    first = line.add(prompt, 8, keys=[root_key()])
    second = line.add(prompt, 8, keys=[root_key()])
    flying, ahead = line.plan(), line.plan()
    assert (first.slot >= 0, second.slot >= 0) == (True, False)
    line.settle(flying)
    line.settle(ahead)
    line.step()
    assert first.finish is None, "nobody has given a block back"
    assert second.slot >= 0
    line.run()
    assert [len(line.outputs[request.id]) for request in (first, second)] == [8, 8]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("gone", [1, 2])
def test_what_a_sibling_left_that_was_given_up_is_no_prefix_hit(gone: int, prefix_cache: bool) -> None:
    line = Line(budget=9)
    group = line.add_group(PROMPT, 4, prefix_cache=prefix_cache)
    line.step()  # two blocks of the leader's prompt
    for request in group[:gone]:
        line.scheduler.abort(request.id, "disconnect", line.now)
    line.run()
    assert line.scheduler.prefixes.hits == 0
    assert line.cached == {request.id: 0 for request in group[gone:]}


def test_what_comes_free_is_kept_for_an_aged_head_that_needs_more_and_not_given_to_younger_ones_of_higher_tiers() -> (
    None
):
    line = Line(blocks=10, aging_s=1.0, step_s=0.0)
    first = line.add(16, 9, tier="interactive")
    line.step()
    large = line.add(30, 2, tier="batch")
    line.now += 100.0
    small = line.add(3, 2, tier="interactive")
    line.step()
    assert (large.slot, small.slot) == (-1, -1), "though there is room for the small one"
    while first.finish is None:
        line.step()
    line.step()
    assert large.slot >= 0
    line.run()
    assert [len(line.outputs[request.id]) for request in (first, large, small)] == [9, 2, 2]
