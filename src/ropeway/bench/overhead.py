"""What the host costs per step: the production loop over a device that only takes time."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from ropeway.cache.pool import BlockPool
from ropeway.config import SchedulerConfig
from ropeway.engine.engine import Engine
from ropeway.engine.messages import NewRequest
from ropeway.execution.timer import TimerExecutor
from ropeway.outcome import StepOutput
from ropeway.plan import Plan, Result
from ropeway.request import SamplingParams
from ropeway.scheduling.scheduler import Scheduler

_BLOCK_SIZE = 16
_PROMPT = 32
_OUTPUTS = (128, 384)
"""Output lengths are drawn between these, so that some request ends in nearly every step."""
_WARM_UP = 20

T = TypeVar("T")


@dataclass(frozen=True)
class Percentiles:
    p50: float
    p99: float

    @classmethod
    def of(cls, values: list[float]) -> Percentiles:
        p50, p99 = np.percentile(values, [50, 99])
        return cls(float(p50), float(p99))


@dataclass(frozen=True)
class OverheadRun:
    """Costs are microseconds of thread CPU time, the garbage collector frozen."""

    sequences: int
    async_scheduling: bool
    steps: int
    step_ms: float
    bubble: float
    """Share of the time in which the device had nothing to do."""
    plan_us: Percentiles
    settle_us: Percentiles
    host_us_per_step: Percentiles
    """plan + settle."""


class _MeasuredScheduler(Scheduler):
    """The scheduler, its two calls timed."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, max_model_len: int) -> None:
        super().__init__(config, pool, max_model_len)
        self.plan_us: list[float] = []
        self.settle_us: list[float] = []

    def plan(self) -> Plan | None:
        return _timed(super().plan, self.plan_us)

    def settle(self, plan: Plan, result: Result) -> StepOutput:
        return _timed(lambda: Scheduler.settle(self, plan, result), self.settle_us)


def _timed(call: Callable[[], T], into: list[float]) -> T:
    began = time.thread_time_ns()
    value = call()
    into.append((time.thread_time_ns() - began) / 1000)
    return value


def measure_overhead(sequences: int, *, async_scheduling: bool, step_ms: float = 5.0, steps: int = 400) -> OverheadRun:
    """Run ``steps`` steps with ``sequences`` requests running: a closed loop in which every request that ends is
    followed by a new one with a prompt of 32 tokens."""
    longest = _PROMPT + _OUTPUTS[1]
    blocks = sequences * -(-longest // _BLOCK_SIZE) + sequences
    config = SchedulerConfig(max_num_seqs=sequences, max_batched_tokens=sequences + 512)
    scheduler = _MeasuredScheduler(config, BlockPool(blocks, _BLOCK_SIZE), longest)
    executor = TimerExecutor(lambda plan: step_ms / 1000)
    arrivals = _arrivals(random.Random(0))
    ended = [sequences]

    def count(output: StepOutput) -> None:
        ended[0] += len(output.finished)

    engine = Engine(scheduler, executor, count, max_model_len=longest)
    gc.collect()
    gc.freeze()
    try:
        for step in range(steps + _WARM_UP):
            if step == _WARM_UP:
                executor.stream.busy_s = executor.stream.idle_s = 0.0
                scheduler.plan_us.clear()
                scheduler.settle_us.clear()
            engine.submit([next(arrivals) for _ in range(ended[0])])
            ended[0] = 0
            engine.step(int(async_scheduling))
    finally:
        gc.unfreeze()
    pairs = zip(scheduler.plan_us, scheduler.settle_us, strict=False)
    return OverheadRun(
        sequences=sequences,
        async_scheduling=async_scheduling,
        steps=steps,
        step_ms=step_ms,
        bubble=executor.stream.bubble,
        plan_us=Percentiles.of(scheduler.plan_us),
        settle_us=Percentiles.of(scheduler.settle_us),
        host_us_per_step=Percentiles.of([plan + settle for plan, settle in pairs]),
    )


def report(sequences: list[int], step_ms: float) -> dict[str, Any]:
    """Every number of sequences, asynchronous scheduling off and on."""
    runs = [
        measure_overhead(count, async_scheduling=mode, step_ms=step_ms) for count in sequences for mode in (False, True)
    ]
    return {"runs": [asdict(run) for run in runs]}


def _arrivals(rng: random.Random) -> Iterator[NewRequest]:
    request_id = 0
    while True:
        request_id += 1
        prompt = np.array([rng.randrange(1, 32_000) for _ in range(_PROMPT)], dtype=np.int32)
        params = SamplingParams(max_tokens=rng.randint(*_OUTPUTS), ignore_eos=True)
        yield NewRequest(id=request_id, prompt=prompt, params=params, seed=request_id)
