"""An executor whose steps take time and compute nothing: it shows what the host costs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ropeway.devices.timer import TimedEvent, TimedStream
from ropeway.plan import Masks, Plan, Result
from ropeway.trace import COMPUTE, Trace


class TimerWork:
    """A step on the timed stream."""

    def __init__(self, plan: Plan, event: TimedEvent, duration_s: float, vocab_size: int) -> None:
        self.plan = plan
        self._event = event
        self._duration_s = duration_s
        self._vocab_size = vocab_size
        self._masks: Masks | None = None

    def sample(self, masks: Masks | None = None) -> None:
        """Its time is in the step's."""
        self._masks = masks

    def result(self) -> Result:
        """Wait for the step's end. Tokens depend on their position only and avoid id 0, but for masked rows, which get
        the lowest id that is allowed."""
        self._event.wait()
        position = (self.plan.start + self.plan.count)[self.plan.samples]
        token_ids = (position % (self._vocab_size - 1) + 1).astype(np.int32)
        if self._masks is not None:
            bits = np.unpackbits(self._masks.bits.view(np.uint8), axis=1, bitorder="little")
            token_ids[self._masks.row] = bits.argmax(axis=1)
        return Result(token_ids, elapsed_s=self._duration_s)


class TimerExecutor:
    """Implements ``Executor``. ``step_s`` gives a plan's duration in seconds."""

    def __init__(self, step_s: Callable[[Plan], float], vocab_size: int = 32_000) -> None:
        self.stream = TimedStream()
        self.trace: Trace | None = None
        """Takes what the stream does when."""
        self._step_s = step_s
        self._vocab_size = vocab_size

    def forward(self, plan: Plan) -> TimerWork:
        duration_s = self._step_s(plan)
        event = self.stream.submit(duration_s)
        if self.trace is not None:
            began_s = event.end_s - duration_s
            self.trace.add(COMPUTE, "forward", began_s, event.end_s, step=plan.seq, tokens=plan.num_tokens)
        return TimerWork(plan, event, duration_s, self._vocab_size)

    def close(self) -> None:
        """Nothing to give back."""
