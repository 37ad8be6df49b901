"""The executor for one device in this process."""

from __future__ import annotations

from ropeway.devices.base import Event
from ropeway.execution.worker import Worker
from ropeway.plan import Plan, Result


class LocalWork:
    """A step queued on the device's stream."""

    def __init__(self, worker: Worker, plan: Plan) -> None:
        self.plan = plan
        self._worker = worker
        self._result: Result | None = None
        self._forward = worker.device.stream.submit(lambda: worker.forward(plan))
        self._sample: Event | None = None

    def sample(self) -> None:
        self._sample = self._worker.device.stream.submit(self._run_sample)

    def result(self) -> Result:
        if self._sample is None:
            raise RuntimeError("the step has not been sampled")
        self._forward.wait()
        self._sample.wait()
        assert self._result is not None
        return self._result

    def _run_sample(self) -> None:
        self._result = self._worker.sample()


class LocalExecutor:
    """Implements ``Executor`` over one worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def forward(self, plan: Plan) -> LocalWork:
        return LocalWork(self.worker, plan)

    def close(self) -> None:
        self.worker.device.close()
