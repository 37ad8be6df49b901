"""One production engine on a virtual clock: the loop of ``engine/child.py``, with moments in place of waits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ropeway.cache.host import HostTier
from ropeway.cache.pool import BlockPool
from ropeway.config import SchedulerConfig
from ropeway.engine.engine import Engine
from ropeway.engine.messages import NewRequest
from ropeway.execution.executor import Executor, Work
from ropeway.outcome import StepOutput
from ropeway.plan import Plan
from ropeway.scheduling.scheduler import Scheduler
from ropeway.simulation.clock import VirtualClock
from ropeway.simulation.cost_model import CostModel
from ropeway.simulation.executor import END_TOKEN, SimulatedExecutor
from ropeway.tiers import DEFAULT_TIERS, Tier

_TICK_S = 0.001
"""Time between two looks of an engine that has work, nothing running and no moment to wait for."""

Outbox = Callable[[StepOutput, float], None]
"""Called with what an engine says, and when."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What every engine of a fleet is made of."""

    cost: CostModel
    scheduler: SchedulerConfig
    block_size: int
    num_blocks: int
    max_model_len: int
    prefix_cache: bool = True
    host_blocks: int = 0
    """Blocks of host memory for swapped requests and cached prefixes."""
    tiers: tuple[Tier, ...] = DEFAULT_TIERS
    ahead: int = 0
    """Steps planned before the running one has ended."""


@dataclass(slots=True)
class Usage:
    """What an engine's steps used; sums over steps, those of time weighted with the steps' seconds."""

    steps: int = 0
    step_s: float = 0.0
    rows: int = 0
    """Of requests that have not ended."""
    queued_steps: int = 0
    """Steps that left somebody waiting."""
    queued_rows: int = 0
    """``rows`` of these."""
    live_token_s: float = 0.0
    """Positions of the seated requests that are computed, the step's included."""
    allocated_token_s: float = 0.0
    """Room in the blocks that they hold."""
    scheduler_us: list[float] = field(default_factory=list)
    """CPU time of each call of ``Engine.step``, what the simulator does in it not counted."""


class SimulatedEngine:
    """Made of the parts that serve real requests. ``wakes_s`` is the moment at which ``advance`` is to be called."""

    def __init__(self, settings: EngineSettings, last_position: NDArray[np.int64], outbox: Outbox) -> None:
        """``last_position``: int64 [requests], where each request's last token stands, by internal id."""
        self.clock = VirtualClock()
        self.usage = Usage()
        self.wakes_s = math.inf
        self._settings = settings
        self._outbox = outbox
        self._outside_ns = 0
        self.device = SimulatedExecutor(settings.cost, self.clock, last_position, settings.block_size, self._observe)
        host = HostTier(BlockPool(settings.host_blocks, settings.block_size)) if settings.host_blocks else None
        self.scheduler = Scheduler(
            settings.scheduler,
            BlockPool(settings.num_blocks, settings.block_size),
            settings.max_model_len,
            tiers=settings.tiers,
            host=host,
            block_bytes=settings.block_size * settings.cost.kv_bytes_per_token,
        )
        self.engine = Engine(
            self.scheduler,
            _Stopwatch(self.device, self),
            self._receive,
            max_model_len=settings.max_model_len,
            end_ids=(END_TOKEN,),
            prefix_cache=settings.prefix_cache,
            clock=self.clock,
        )

    def submit(self, request: NewRequest, now_s: float) -> None:
        """A request arrives. An engine that was busy waiting for a step's end takes it in after that."""
        self.clock.advance_to(now_s)
        self.engine.submit([request])
        if not self.device.pending and self.engine.has_work:
            self.wakes_s = self.clock.now_s  # what has come may let something go on

    def advance(self, now_s: float) -> None:
        """One turn of the loop."""
        self.clock.advance_to(now_s)
        self._outside_ns = 0
        began = time.thread_time_ns()
        self.engine.step(self._settings.ahead)
        self.usage.scheduler_us.append((time.thread_time_ns() - began - self._outside_ns) / 1000)
        if self.device.pending:
            self.wakes_s = self.clock.now_s if self._settings.ahead else self.device.ends_s
        elif self.engine.has_work:
            self.wakes_s = self.clock.now_s + max(self.engine.patience_s(), _TICK_S)
        else:
            self.wakes_s = math.inf

    def put_off(self, ends_s: float) -> None:
        """The step that was begun last does not end before this moment."""
        self.device.put_off(ends_s)
        if self.device.pending and not self._settings.ahead:
            self.wakes_s = self.device.ends_s

    def outside(self, since_ns: int) -> None:
        """CPU time from ``since_ns`` on was not the engine's."""
        self._outside_ns += time.thread_time_ns() - since_ns

    def _receive(self, output: StepOutput) -> None:
        began = time.thread_time_ns()
        self._outbox(output, self.clock.now_s)
        self.outside(began)

    def _observe(self, plan: Plan, step_s: float) -> None:
        usage, seats = self.usage, self.scheduler.seats
        ranked = seats.ranked
        rows = len(plan.slot)
        if self.scheduler.lifecycle.padding:
            rows -= int(np.count_nonzero(seats.padding[plan.slot]))
        usage.steps += 1
        usage.step_s += step_s
        usage.rows += rows
        if len(self.scheduler.waiting):
            usage.queued_steps += 1
            usage.queued_rows += rows
        usage.live_token_s += int(seats.computed[ranked].sum()) * step_s
        usage.allocated_token_s += int(seats.blocks_held[ranked].sum()) * self._settings.block_size * step_s


class _Stopwatch:
    """Implements ``Executor`` over another one whose CPU time is not the engine's."""

    def __init__(self, executor: Executor, owner: SimulatedEngine) -> None:
        self._executor = executor
        self._owner = owner

    def forward(self, plan: Plan) -> Work:
        began = time.thread_time_ns()
        work = self._executor.forward(plan)
        self._owner.outside(began)
        return work

    def close(self) -> None:
        self._executor.close()
