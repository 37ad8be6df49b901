"""Late planning: how long the next plan can wait for arrivals."""

from __future__ import annotations

import numpy as np
import pytest

from ropeway.cache.host import HostTier
from ropeway.cache.keys import chain, root_key
from ropeway.cache.pool import BlockPool
from ropeway.config import SchedulerConfig
from ropeway.engine.engine import Engine
from ropeway.engine.messages import NewRequest
from ropeway.engine.pace import Pace
from ropeway.plan import Masks, Plan, Result
from ropeway.request import SamplingParams
from ropeway.scheduling.cost import StepCost
from ropeway.scheduling.scheduler import Scheduler
from tests.support.fake_device import FakeDevice
from tests.support.fake_store import FakeStore
from tests.support.line import TOKEN, Line

STEP_S = 0.1
"""What a step of any size takes here."""
MARGIN_S = 0.01
"""A tenth of it: so much before its end the next one is planned."""


def a_plan() -> Plan:
    line = Line()
    line.add(8, 4)
    return line.plan()


def test_the_next_plan_waits_until_just_before_the_running_step_ends() -> None:
    pace = Pace(StepCost(STEP_S, 0.0, 0.0))
    pace.planned(a_plan(), 1.0, 1.0)
    assert pace.patience_s(1.0) == pytest.approx(STEP_S - MARGIN_S)
    assert pace.patience_s(1.05) == pytest.approx(0.05 - MARGIN_S)
    assert pace.patience_s(1.095) == 0.0
    assert pace.patience_s(2.0) == 0.0


def test_it_is_planned_earlier_by_twice_the_longest_time_that_planning_took_lately() -> None:
    pace = Pace(StepCost(STEP_S, 0.0, 0.0))
    pace.planned(a_plan(), 0.98, 1.0)
    assert pace.patience_s(1.0) == pytest.approx(STEP_S - MARGIN_S - 0.04)
    for _ in range(300):
        pace.planned(a_plan(), 2.0, 2.0)
        pace.settled(2.0)
    assert pace.patience_s(2.0) == pytest.approx(STEP_S - MARGIN_S, abs=1e-3), "and a stall is forgotten"


def test_with_a_step_behind_the_running_one_the_end_of_both_is_waited_for() -> None:
    pace = Pace(StepCost(STEP_S, 0.0, 0.0))
    pace.planned(a_plan(), 1.0, 1.0)
    pace.planned(a_plan(), 1.0, 1.0)
    assert pace.patience_s(1.0) == pytest.approx(2 * STEP_S - MARGIN_S)


@pytest.mark.parametrize("late_s", [-0.03, 0.0, 0.05])
def test_a_step_that_ended_otherwise_than_predicted_moves_the_end_of_the_one_after_it(late_s: float) -> None:
    pace = Pace(StepCost(STEP_S, 0.0, 0.0))
    pace.planned(a_plan(), 1.0, 1.0)
    pace.planned(a_plan(), 1.0, 1.0)
    now = 1.0 + STEP_S + late_s
    pace.settled(now)
    assert 0 <= pace.patience_s(now) <= STEP_S - MARGIN_S + 1e-9
    if late_s < 0:
        assert pace.patience_s(now) == pytest.approx(STEP_S - MARGIN_S)


def test_the_end_goes_by_the_size_of_the_step() -> None:
    plan = a_plan()
    pace = Pace(StepCost(0.0, 0.01, 0.001))
    pace.planned(plan, 0.0, 0.0)
    assert pace.patience_s(0.0) == pytest.approx(0.9 * (8 * 0.01 + 8 * 0.001))


def test_nothing_is_waited_for_before_step_times_are_known() -> None:
    pace = Pace(StepCost())
    pace.planned(a_plan(), 1.0, 1.0)
    assert pace.patience_s(1.0) == 0.0


# ---------------------------------------------------------------------- in the engine


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SteadyWork:
    def __init__(self, plan: Plan, clock: Clock, ends_s: float) -> None:
        self.plan, self._clock, self._ends_s = plan, clock, ends_s

    def sample(self, masks: Masks | None = None) -> None: ...

    def result(self) -> Result:
        self._clock.now = max(self._clock.now, self._ends_s)
        return Result(np.full(int(self.plan.samples.sum()), TOKEN, dtype=np.int32), elapsed_s=STEP_S)


class SteadyDevice:
    """Implements ``Executor``: every step takes ``STEP_S`` on the clock, one after the other."""

    def __init__(self, clock: Clock) -> None:
        self.begun: list[float] = []
        """When each step was handed over."""
        self._clock = clock
        self._free_s = 0.0

    def forward(self, plan: Plan) -> SteadyWork:
        self.begun.append(self._clock.now)
        self._free_s = max(self._free_s, self._clock.now) + STEP_S
        return SteadyWork(plan, self._clock, self._free_s)

    def close(self) -> None: ...


def steady_engine(**settings: object) -> tuple[Engine, Clock, SteadyDevice]:
    clock = Clock()
    device = SteadyDevice(clock)
    config = SchedulerConfig(max_num_seqs=4, max_batched_tokens=64, **settings)  # type: ignore[arg-type]
    scheduler = Scheduler(config, BlockPool(64, 4), 128, cost=StepCost(STEP_S, 0.0, 0.0))
    return Engine(scheduler, device, lambda output: None, max_model_len=128, clock=clock), clock, device


def request(number: int, output: int = 8, **fields: object) -> NewRequest:
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    return NewRequest(id=number, prompt=np.arange(1, 9, dtype=np.int32), params=params, seed=0, **fields)  # type: ignore[arg-type]


def test_an_arrival_just_before_the_running_step_ends_is_in_the_next_one() -> None:
    engine, clock, device = steady_engine()
    engine.submit([request(1)])
    engine.step(1)
    for _ in range(3):
        clock.now += engine.patience_s()
        engine.step(1)
    patience_s = engine.patience_s()
    assert patience_s == pytest.approx(STEP_S - MARGIN_S)
    clock.now += patience_s - 0.001
    engine.submit([request(2, output=1)])
    clock.now += engine.patience_s()
    planned_s = clock.now
    engine.step(1)
    assert engine.scheduler.seats.taken == 2
    assert device.begun[-1] == planned_s
    assert len(np.diff(device.begun[1:])) == 3
    assert np.allclose(np.diff(device.begun[1:]), STEP_S), "no step begins late for it"


def test_an_idle_engine_need_not_wait() -> None:
    engine, _, _ = steady_engine()
    assert engine.patience_s() == 0.0
    engine.submit([request(1)])
    assert engine.patience_s() == 0.0, "there is something to plan"


def test_with_nothing_to_plan_the_engine_waits_until_something_can_change_by_itself() -> None:
    engine, clock, _ = steady_engine(batching="dynamic", batch_window_s=0.03)
    engine.submit([request(1)])
    engine.step(0)
    assert engine.steps == 0
    assert engine.patience_s() == pytest.approx(0.03)
    clock.now += 0.02
    assert engine.patience_s() == pytest.approx(0.01)
    clock.now += 0.02
    engine.step(0)
    assert engine.steps == 1


def test_with_nothing_to_plan_the_engine_looks_again_now_and_then_whatever_may_come() -> None:
    engine, clock, _ = steady_engine(batching="dynamic", batch_window_s=100.0)
    engine.submit([request(1)])
    engine.step(0)
    assert 0.0 < engine.patience_s() <= 0.05
    engine.submit([request(2, deadline_s=0.02)])
    assert engine.patience_s() == 0.0, "the newcomer may be what was missing"
    engine.step(0)
    assert engine.patience_s() == pytest.approx(0.02), "a deadline comes first"
    clock.now = 0.02
    engine.step(0)
    assert len(engine.scheduler.waiting) == 1


def test_while_blocks_come_from_disk_the_engine_looks_often_but_does_not_spin() -> None:
    device = FakeDevice(16, 4, 16)
    prompt = np.arange(1, 9, dtype=np.int32)
    held = {key: [[1, 2, 3, 4], [5, 6, 7, 8]] for key in chain(root_key(), prompt, 4)}
    host = HostTier(BlockPool(16, 4), FakeStore(device.host, held=dict(held)))  # type: ignore[arg-type]
    scheduler = Scheduler(SchedulerConfig(), BlockPool(16, 4), 64, host=host)
    clock = Clock()
    engine = Engine(scheduler, device, lambda output: None, max_model_len=64, clock=clock)
    engine.submit([request(1)])
    engine.step(1)
    assert engine.steps == 0
    assert 0.0 < engine.patience_s() <= 0.002
