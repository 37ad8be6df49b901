"""An engine in this process, driven step by step with token ids: the production loop under a stopwatch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ropeway.bench.workload import WorkloadRequest
from ropeway.config import Config
from ropeway.devices.base import Device
from ropeway.engine.assembly import assemble
from ropeway.engine.messages import NewRequest
from ropeway.engine.submission import Submitter
from ropeway.errors import RopewayError
from ropeway.execution.executor import Executor, Work
from ropeway.loading.sources import resolve as resolve_source
from ropeway.outcome import StepOutput
from ropeway.plan import Masks, Plan, Result
from ropeway.request import FinishReason, SamplingParams, Timeline
from ropeway.scheduling.scheduler import Scheduler
from ropeway.tiers import find_tier

Progress = Callable[[int, int], None]
"""Called with (output tokens so far, output tokens in all)."""


@dataclass(slots=True)
class RequestTimes:
    """One request of a run; times are seconds since the run began."""

    arrival_s: float
    first_token_s: float = float("nan")
    finished_s: float = float("nan")
    token_ids: list[int] = field(default_factory=list)
    """The output."""
    timeline: Timeline | None = None
    """Where its time went; once it has finished."""

    @property
    def output_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Steps:
    """The steps of a run as columns, one entry per step; int64 unless it says otherwise."""

    rows: NDArray[np.int64]
    """Padding included."""
    tokens: NDArray[np.int64]
    live_slots: NDArray[np.int64]
    """Slots of the KV cache with keys and values of the seated requests, this step's included."""
    allocated_slots: NDArray[np.int64]
    """Slots of the blocks that the seated requests hold."""
    padding: NDArray[np.int64]
    """Of the rows, those of requests that had finished."""
    waiting: NDArray[np.int64]
    """Requests without a seat when the step had been planned."""
    elapsed_s: NDArray[np.float64]
    """float64: what it took on the device, copies not counted."""
    copy_s: NDArray[np.float64]
    """float64: what its copies between device and host memory took."""

    def slot_use(self, slots: int) -> float:
        """Rows that some request needed, as a share of all slots: over the steps in which requests were waiting, since
        once the queue is empty there is nobody to fill a slot. 1 if nobody ever waited."""
        full = self.waiting > 0
        if not full.any():
            return 1.0
        return float((self.rows - self.padding)[full].sum() / (slots * np.count_nonzero(full)))


@dataclass(frozen=True)
class Run:
    """What happened, and when. ``tokens_at`` counts output tokens as they became known to the host."""

    wall_s: float
    requests: list[RequestTimes]
    """In the order of the workload."""
    steps: Steps
    tokens_at: list[tuple[float, int]]
    """(seconds since the run began, output tokens) of every settled step that gave any."""
    preemptions: int

    def tokens_after(self, seconds: float) -> int:
        """Output tokens that came later than ``seconds`` after the start."""
        return sum(count for moment, count in self.tokens_at if moment > seconds)


class Driver:
    """Loads a model and runs workloads on it, greedily and regardless of end tokens. A context manager."""

    def __init__(self, config: Config, *, device: Device | None = None) -> None:
        """``device`` replaces the configured one. Raises what loading raises."""
        path = resolve_source(config.model.model)
        began = time.perf_counter()
        assembly = assemble(config, path, self._receive, device=device)
        self.load_s = time.perf_counter() - began
        """Seconds from a path to an engine that takes requests, imports of the device included."""
        self.config = config
        self._assembly = assembly
        self.engine = assembly.engine
        self.worker = assembly.worker
        self.info = assembly.info
        self._observer = StepObserver(self.engine.executor, self.engine.scheduler)
        self.engine.executor = self._observer
        self._submitter = Submitter(self.info)
        self._ahead = int(config.engine.async_scheduling)
        self._late_planning = config.engine.async_scheduling and config.engine.late_planning
        self._began = 0.0
        self._open: dict[int, RequestTimes] = {}
        self._tokens_at: list[tuple[float, int]] = []
        self._output_tokens = 0

    def run(self, workload: Sequence[WorkloadRequest], *, seed: int = 0, progress: Progress | None = None) -> Run:
        """Run a workload to its end. A request is handed in at the first step after its arrival; with late planning,
        that step is planned as late as in a server. One without a tier belongs to the lowest, which promises nothing
        and so refuses nothing.

        ``seed`` chooses the prompts that are given by length only; two runs with the same one on one driver meet
        each other's prefix cache. Raises ``InvalidRequest`` or ``ContextLengthExceeded``, naming the request,
        before anything runs."""
        prepared = [self._prepare(request, index, seed) for index, request in enumerate(workload)]
        times = [RequestTimes(request.arrival_s) for request in workload]
        self._open = {new.id: record for new, record in zip(prepared, times, strict=True)}
        self._tokens_at = []
        self._output_tokens = 0
        self._observer.clear()
        preemptions = self.engine.scheduler.preemptions
        total = sum(request.output_tokens for request in workload)
        queue = sorted(zip(times, prepared, strict=True), key=lambda pair: pair[0].arrival_s, reverse=True)
        self._began = time.perf_counter()
        while queue or self.engine.has_work:
            self._submit_due(queue)
            if self.engine.has_work:
                self._await_arrivals(queue)
                self.engine.step(self._ahead)
            else:
                time.sleep(max(queue[-1][0].arrival_s - self._now(), 0.0))
            if progress is not None:
                progress(self._output_tokens, total)
        return Run(
            wall_s=self._now(),
            requests=times,
            steps=self._observer.steps(),
            tokens_at=self._tokens_at,
            preemptions=self.engine.scheduler.preemptions - preemptions,
        )

    def close(self) -> None:
        self._assembly.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit_due(self, queue: list[tuple[RequestTimes, NewRequest]]) -> bool:
        """Hand in what has arrived; ``queue`` is in the order of arrival, the next one last. False: nothing has."""
        now, due = self._now(), []
        while queue and queue[-1][0].arrival_s <= now:
            due.append(queue.pop()[1])
        self.engine.submit(due)
        return bool(due)

    def _await_arrivals(self, queue: list[tuple[RequestTimes, NewRequest]]) -> None:
        """Take in what arrives as long as the next plan can wait for it. When nothing can run, wait, too."""
        stuck = self.engine.scheduler.stuck
        if not stuck and not (queue and self._late_planning):
            return
        until = self._now() + self.engine.patience_s()
        while (now := self._now()) < until:
            time.sleep(max(min(until, queue[-1][0].arrival_s if queue else until) - now, 0.0))
            if self._submit_due(queue) and stuck:
                return  # what has come may let something go on

    def _prepare(self, request: WorkloadRequest, index: int, seed: int) -> NewRequest:
        prompt = request.prompt(index, self.info.vocab_size, seed)
        params = SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True, seed=0)
        try:
            tier = len(self.info.tiers) - 1 if request.tier is None else find_tier(self.info.tiers, request.tier)
            (new,) = self._submitter.prepare(prompt.tolist(), params, tier=tier, tenant=request.tenant or "")
        except RopewayError as error:
            raise type(error)(f"request {index + 1} of the workload: {error.message}", param=error.param) from error
        return new

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _receive(self, output: StepOutput) -> None:
        now = self._now()
        if len(output.ids):
            self._tokens_at.append((now, len(output.ids)))
            self._output_tokens += len(output.ids)
        for request_id, token in zip(output.ids.tolist(), output.tokens.tolist(), strict=True):
            self._open[request_id].token_ids.append(token)
        for started in output.started:
            self._open[started.id].first_token_s = now
        for finished in output.finished:
            if finished.reason is FinishReason.ERROR:
                raise RopewayError(f"the engine refused a request: {finished.refusal and finished.refusal.message}")
            self._open[finished.id].finished_s = now
            self._open[finished.id].timeline = finished.timeline


class StepObserver:
    """Implements ``Executor`` over another one: notes what every plan holds, the seats at that moment, and what the
    step took."""

    def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._noted: list[tuple[int, ...]] = []
        self._took: list[tuple[float, float]] = []

    def forward(self, plan: Plan) -> Work:
        seats = self._scheduler.seats
        self._noted.append(
            (
                len(plan.slot),
                plan.num_tokens,
                int(seats.computed[seats.ranked].sum()),
                int(seats.blocks_held[seats.ranked].sum()) * self._scheduler.pool.block_size,
                int(seats.padding[plan.slot].sum()),
                len(self._scheduler.waiting),
            )
        )
        return _ObservedWork(self._executor.forward(plan), self._took)

    def close(self) -> None:
        self._executor.close()

    def clear(self) -> None:
        self._noted.clear()
        self._took.clear()

    def steps(self) -> Steps:
        """All since the last ``clear``, settled by now."""
        noted = np.array(self._noted, dtype=np.int64).reshape(-1, 6)
        took = np.array(self._took, dtype=np.float64).reshape(-1, 2)
        return Steps(*noted.T, *took.T)


class _ObservedWork:
    """Implements ``Work``: one that notes what it took when its result is there."""

    def __init__(self, work: Work, took: list[tuple[float, float]]) -> None:
        self.plan = work.plan
        self._work = work
        self._took = took

    def sample(self, masks: Masks | None = None) -> None:
        self._work.sample(masks)

    def result(self) -> Result:
        result = self._work.result()
        self._took.append((result.elapsed_s, result.copy_s))
        return result
