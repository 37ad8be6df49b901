"""The executor for one device in this process."""

from __future__ import annotations

from collections.abc import Callable

from ropeway.devices.base import Event
from ropeway.execution.worker import Worker
from ropeway.plan import Masks, Plan, Result

_CHECK_S = 0.1


class LocalWork:
    """A step queued on the device's stream."""

    def __init__(self, worker: Worker, plan: Plan) -> None:
        self.plan = plan
        self._step = worker.begin(plan)
        self._stream = worker.device.stream
        self._forward = self._stream.submit(self._step.forward)
        self._sample: Event | None = None

    def sample(self, masks: Masks | None = None) -> None:
        self._step.prepare_sampling(masks)
        self._sample = self._stream.submit(self._step.sample)

    def result(self, check: Callable[[], None] | None = None) -> Result:
        """``check`` is called now and then while this waits, and may raise to end that."""
        if self._sample is None:
            raise RuntimeError("the step has not been sampled")
        for event in (self._forward, self._sample):
            while not event.wait(None if check is None else _CHECK_S):
                assert check is not None
                check()
        return self._step.result()


class LocalExecutor:
    """Implements ``Executor`` over one worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def forward(self, plan: Plan) -> LocalWork:
        return LocalWork(self.worker, plan)

    def close(self) -> None:
        self.worker.close()
