"""What the host costs per step: the production loop over a device that only takes time.

``features`` says what the scheduler has to do:

    plain       equal requests, room for everybody
    all         everything on: three tiers, eight tenants, deadlines, prefixes that tenants share, admission by profile,
                shedding, steps bounded by TPOT targets, write-through to host memory; room for everybody
    contested   the same with a pool in which admission has to decide, and a quarter more requests than seats, each of
                which is followed by another one after a while: they take each other's seats and are swapped
"""

from __future__ import annotations

import gc
import heapq
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from ropeway.cache.host import HostTier
from ropeway.cache.pool import BlockPool
from ropeway.config import SchedulerConfig
from ropeway.engine.engine import Engine
from ropeway.engine.messages import NewRequest
from ropeway.execution.timer import TimerExecutor
from ropeway.outcome import StepOutput
from ropeway.plan import Plan, Result
from ropeway.request import SamplingParams
from ropeway.scheduling.scheduler import Scheduler
from ropeway.tiers import DEFAULT_TIERS
from ropeway.trace import Trace

Features = Literal["plain", "all", "contested"]
T = TypeVar("T")

_BLOCK_SIZE = 16
_PROMPT = 32
_OUTPUTS: dict[Features, tuple[int, int]] = {"plain": (128, 384), "all": (128, 384), "contested": (16, 496)}
"""Output lengths are drawn between these, so that some request ends in nearly every step. When contested they vary
more, so that those admitted together do not end together."""
_WARM_UP: dict[Features, int] = {"plain": 400, "all": 400, "contested": 1000}
"""Steps before those that are measured, back to back. By then nobody is left of those that began together, whose blocks
would all be full at once; and where lengths are predicted, the predictions have come near the truth."""

_CONTESTED_BLOCKS = 13
"""Per seat: about what a running request holds in the mean, and a third of what the longest end with."""
_PAUSE_STEPS = 8.0
"""When contested: mean time until a request is followed by another one. Meanwhile lower tiers get on."""
_BLOCK_BYTES = 1 << 18
_TENANTS = 8
_TIER_OF = (0, 1, 1, 1, 2)
"""Tiers of the requests, in turn."""
_HOUR_S = 3600.0


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
    features: Features
    prefix_cache: bool
    steps: int
    step_ms: float
    running: float
    """Requests with a seat, in the mean over steps."""
    bubble: float
    """Share of the time in which the device had nothing to do."""
    plan_us: Percentiles
    settle_us: Percentiles
    host_us_per_step: Percentiles
    """plan + settle."""
    submit_us_per_request: Percentiles
    preemptions: int
    swapped_blocks: int
    """Copied to host memory for preempted requests."""
    refused: int


class _MeasuredScheduler(Scheduler):
    """The scheduler, its two calls timed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plan_us: list[float] = []
        self.settle_us: list[float] = []
        self.running: list[int] = []

    def plan(self, now: float) -> Plan | None:
        plan = _timed(lambda: Scheduler.plan(self, now), self.plan_us)
        self.running.append(self.seats.taken)
        return plan

    def settle(self, plan: Plan, result: Result, now: float) -> StepOutput:
        return _timed(lambda: Scheduler.settle(self, plan, result, now), self.settle_us)


def _timed(call: Callable[[], T], into: list[float]) -> T:
    began = time.thread_time_ns()
    value = call()
    into.append((time.thread_time_ns() - began) / 1000)
    return value


def measure_overhead(
    sequences: int,
    *,
    async_scheduling: bool,
    step_ms: float = 5.0,
    steps: int = 400,
    features: Features = "plain",
    prefix_cache: bool = True,
    trace: Trace | None = None,
) -> OverheadRun:
    """Run ``steps`` steps with ``sequences`` requests running: a closed loop in which every request that ends is
    followed by a new one with a prompt of 32 tokens. ``trace``: takes what happens in these steps."""
    scheduler = _scheduler(sequences, features)
    step_s = 0.0
    executor = TimerExecutor(lambda plan: step_s)
    rng = random.Random(0)
    arrivals = _arrivals(rng, features)
    due_at = [0.0] * sequences
    """Steps at which requests come, a heap."""
    if features == "contested":  # spread over a lifetime, as if they had been following each other for long
        lifetime = sum(_OUTPUTS[features]) / 2
        due_at = sorted(rng.uniform(0.0, lifetime) for _ in range(sequences + sequences // 4))
    now, refused = 0, 0

    def count(output: StepOutput) -> None:
        nonlocal refused
        for finished in output.finished:
            heapq.heappush(due_at, now + (rng.expovariate(1 / _PAUSE_STEPS) if features == "contested" else 0.0))
            refused += finished.refusal is not None

    engine = Engine(scheduler, executor, count, max_model_len=_longest(features), prefix_cache=prefix_cache)
    submit_us: list[float] = []

    def turn() -> None:
        nonlocal now
        now += 1
        while due_at and due_at[0] <= now:
            heapq.heappop(due_at)
            new = [next(arrivals)]
            _timed(lambda: engine.submit(new), submit_us)  # noqa: B023
        engine.step(int(async_scheduling))

    gc.collect()
    gc.freeze()
    try:
        for _ in range(_WARM_UP[features]):
            turn()
        engine.drain()
        engine.trace = executor.trace = trace
        step_s = step_ms / 1000
        executor.stream.busy_s = executor.stream.idle_s = 0.0
        for noted in (scheduler.plan_us, scheduler.settle_us, scheduler.running, submit_us):
            noted.clear()
        refused = 0
        preemptions, swapped = scheduler.preemptions, _swapped(scheduler)
        for _ in range(steps):
            turn()
    finally:
        gc.unfreeze()
    pairs = zip(scheduler.plan_us, scheduler.settle_us, strict=False)
    return OverheadRun(
        sequences=sequences,
        async_scheduling=async_scheduling,
        features=features,
        prefix_cache=prefix_cache,
        steps=steps,
        step_ms=step_ms,
        running=float(np.mean(scheduler.running)),
        bubble=executor.stream.bubble,
        plan_us=Percentiles.of(scheduler.plan_us),
        settle_us=Percentiles.of(scheduler.settle_us),
        host_us_per_step=Percentiles.of([plan + settle for plan, settle in pairs]),
        submit_us_per_request=Percentiles.of(submit_us or [0.0]),
        preemptions=scheduler.preemptions - preemptions,
        swapped_blocks=_swapped(scheduler) - swapped,
        refused=refused,
    )


def report(
    sequences: list[int], step_ms: float, features: Features = "plain", trace: Trace | None = None
) -> dict[str, Any]:
    """Every number of sequences, asynchronous scheduling off and on; one run after the other in the ``trace``."""
    runs = [
        measure_overhead(count, async_scheduling=mode, step_ms=step_ms, features=features, trace=trace)
        for count in sequences
        for mode in (False, True)
    ]
    return {"runs": [asdict(run) for run in runs]}


def _scheduler(sequences: int, features: Features) -> _MeasuredScheduler:
    longest = _longest(features)
    roomy = sequences * -(-longest // _BLOCK_SIZE) + sequences
    pool = BlockPool(sequences * _CONTESTED_BLOCKS if features == "contested" else roomy, _BLOCK_SIZE)
    if features == "plain":
        config = SchedulerConfig(max_num_seqs=sequences, max_batched_tokens=sequences + 512)
        return _MeasuredScheduler(config, pool, longest)
    config = SchedulerConfig(
        max_num_seqs=sequences,
        max_batched_tokens=sequences + 512,
        step_budget="tpot",
        policy="priority",
        admission="profile",
        preemption="swap",  # the timer's steps cost the same whatever they compute, so auto would never
        shed=True,
    )
    host = HostTier(BlockPool(pool.num_blocks, _BLOCK_SIZE))
    return _MeasuredScheduler(config, pool, longest, tiers=DEFAULT_TIERS, host=host, block_bytes=_BLOCK_BYTES)


def _longest(features: Features) -> int:
    return _PROMPT + _OUTPUTS[features][1]


def _swapped(scheduler: Scheduler) -> int:
    return 0 if scheduler.host is None else scheduler.host.swaps_out


def _arrivals(rng: random.Random, features: Features) -> Iterator[NewRequest]:
    heads = [[rng.randrange(1, 32_000) for _ in range(_BLOCK_SIZE)] for _ in range(_TENANTS)]
    request_id = 0
    while True:
        request_id += 1
        prompt = [rng.randrange(1, 32_000) for _ in range(_PROMPT)]
        params = SamplingParams(max_tokens=rng.randint(*_OUTPUTS[features]), ignore_eos=True)
        if features == "plain":
            array = np.array(prompt, dtype=np.int32)
            yield NewRequest(id=request_id, prompt=array, params=params, seed=request_id, tier=len(DEFAULT_TIERS) - 1)
            continue
        tenant = rng.randrange(_TENANTS)
        prompt[:_BLOCK_SIZE] = heads[tenant]
        yield NewRequest(
            id=request_id,
            prompt=np.array(prompt, dtype=np.int32),
            params=params,
            seed=request_id,
            tier=_TIER_OF[request_id % len(_TIER_OF)],
            tenant=f"tenant {tenant}",
            deadline_s=time.monotonic() + _HOUR_S,
        )
