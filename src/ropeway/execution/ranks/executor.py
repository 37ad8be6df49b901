"""The executor for a model spread over ranks: rank 0 in this process, the others in processes of their own."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from ropeway.execution.local import LocalWork
from ropeway.execution.ranks.cutting import Cutter
from ropeway.execution.worker import Worker
from ropeway.plan import Masks, Plan, Result


class Others(Protocol):
    """The other ranks."""

    @property
    def failure(self) -> Exception | None: ...
    def rehearse(self, plan: Plan, fused: bool) -> None: ...
    def run(self, plan: Plan) -> None: ...
    def check(self) -> None: ...
    def explain(self, error: Exception) -> Exception: ...
    def close(self) -> None: ...


class RankedWork:
    """Rank 0's part of a step; its tokens are those of all ranks."""

    def __init__(self, plan: Plan, others: Others, work: LocalWork) -> None:
        """``plan``: as it came, uncut."""
        self.plan = plan
        self._others = others
        self._work = work

    def sample(self, masks: Masks | None = None) -> None:
        self._work.sample(masks)

    def result(self) -> Result:
        """Raises why a rank cannot go on, where one cannot."""
        try:
            return self._work.result(self._others.check)
        except RuntimeError as error:  # a collective that found nobody
            raise self._others.explain(error) from error


class RanksExecutor:
    """Implements ``Executor``."""

    def __init__(self, others: Others, worker: Worker) -> None:
        self.cutter: Cutter | None = None
        """Cuts steps into two micro-batches; None: nobody does."""
        self._others = others
        self._worker = worker

    def rehearse(self, plan: Plan, *, fused: bool = False) -> float:
        """Run a plan as it is, before any that counts -> seconds on the device. ``fused``: with fused collectives,
        where they are configured."""
        self._others.rehearse(plan, fused)
        self._worker.device.stream.submit(partial(self._worker.fuse, fused))
        work = RankedWork(plan, self._others, LocalWork(self._worker, plan))
        work.sample()
        return work.result().elapsed_s

    def forward(self, plan: Plan) -> RankedWork:
        self._others.check()
        cut = plan if self.cutter is None else self.cutter.cut(plan)
        self._others.run(cut)
        return RankedWork(plan, self._others, LocalWork(self._worker, cut))

    def close(self) -> None:
        """Where a rank has failed, the device may wait for it in vain, and is left alone: its thread ends with the
        process."""
        self._others.close()
        if self._others.failure is None:
            self._worker.close()
