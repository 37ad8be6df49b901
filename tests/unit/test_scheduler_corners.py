"""Corners of the scheduler where several of its parts meet; each test is of a fault that was here once."""

from __future__ import annotations

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
