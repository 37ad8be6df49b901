"""The executor for one device in this process."""

from __future__ import annotations

from ropeway.devices.base import Event
from ropeway.execution.worker import Worker
from ropeway.plan import Plan, Result


class LocalWork:
    """A step queued on the device's stream."""

    def __init__(self, worker: Worker, plan: Plan) -> None:
        self.plan = plan
        self._step = worker.begin(plan)
        self._stream = worker.device.stream
        self._forward = self._stream.submit(self._step.forward)
        self._sample: Event | None = None

    def sample(self) -> None:
        self._step.prepare_sampling()
        self._sample = self._stream.submit(self._step.sample)

    def result(self) -> Result:
        if self._sample is None:
            raise RuntimeError("the step has not been sampled")
        self._forward.wait()
        self._sample.wait()
        return self._step.result()


class LocalExecutor:
    """Implements ``Executor`` over one worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def forward(self, plan: Plan) -> LocalWork:
        return LocalWork(self.worker, plan)

    def close(self) -> None:
        self.worker.device.close()
