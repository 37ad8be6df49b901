"""What is noted of a simulated run: each request's times, and how full the fleet was over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from ropeway.bench.latencies import Recorder, Status
from ropeway.outcome import Finished, StepOutput
from ropeway.request import FinishReason, Timeline
from ropeway.simulation.engine import SimulatedEngine

Progress = Callable[[int, int], None]
"""Called with (requests ended, requests in all)."""

_PHASES = ("queued", "prefill", "decode", "preempted", "swapped")
_SHED = frozenset({"Shed", "QueueFull"})
"""Errors that a client meets as 429."""
_MOST_SAMPLES = 2000
_FIRST_DISTANCE_S = 0.05


class Recording:
    """Implements ``Listener``; rows are those of the trace."""

    def __init__(self, tiers: Sequence[str], progress: Progress | None = None) -> None:
        """``tiers``: each request's, by name."""
        self.recorder = Recorder(len(tiers), tiers)
        self.accepted = np.zeros(len(tiers), dtype=np.bool_)
        """Which were taken into a queue."""
        self.ended = 0
        self.refused: Counter[str] = Counter()
        """Requests not served to their end, by the name of the error."""
        self.phases_s: Counter[str] = Counter()
        """What the served ones spent in each phase of their timelines, together."""
        self.waits_s: Counter[str] = Counter()
        """What they waited for without a seat."""
        self._progress = progress

    def arrived(self, row: int, now_s: float) -> None:
        self.recorder.arrived(row, now_s)

    def output(self, output: StepOutput, now_s: float) -> None:
        if len(output.ids):
            self.recorder.step(output.ids, now_s)
        if output.accepted:
            self.accepted[output.accepted] = True
        for finished in output.finished:
            self.recorder.ended(finished.id, self._status(finished), now_s)
        if output.finished and self._progress is not None:
            self._progress(self.ended, len(self.recorder))

    def _status(self, finished: Finished) -> Status:
        self.ended += 1
        if finished.reason is not FinishReason.ERROR:
            self._sum_up(finished.timeline)
            return Status.OK
        error = "RopewayError" if finished.refusal is None else finished.refusal.error
        self.refused[error] += 1
        return Status.SHED if error in _SHED else Status.FAILED

    def _sum_up(self, timeline: Timeline | None) -> None:
        if timeline is not None:
            for phase in _PHASES:
                self.phases_s[phase] += getattr(timeline, f"{phase}_s")
            self.waits_s.update(timeline.waits)


class Series:
    """A ``Watch``: samples at even distances in virtual time. When there are too many, every other one goes and the
    distance doubles."""

    def __init__(self) -> None:
        self.t_s: list[float] = []
        self.requests_waiting: list[int] = []
        """Requests without a seat, over all engines; ``requests_running``: those with one."""
        self.requests_running: list[int] = []
        self.kv_used: list[float] = []
        """Share of the blocks that somebody references."""
        self._distance_s = _FIRST_DISTANCE_S
        self._next_s = 0.0

    def __call__(self, now_s: float, engines: Sequence[SimulatedEngine]) -> None:
        if now_s < self._next_s:
            return
        schedulers = [engine.scheduler for engine in engines]
        self.t_s.append(now_s)
        self.requests_waiting.append(sum(len(scheduler.waiting) for scheduler in schedulers))
        self.requests_running.append(sum(scheduler.seats.taken for scheduler in schedulers))
        blocks = sum(scheduler.pool.num_blocks for scheduler in schedulers)
        self.kv_used.append(sum(scheduler.pool.live for scheduler in schedulers) / blocks)
        if len(self.t_s) >= _MOST_SAMPLES:
            for column in self.columns().values():
                del column[1::2]
            self._distance_s *= 2
        self._next_s = self.t_s[-1] + self._distance_s

    def columns(self) -> dict[str, list[float] | list[int]]:
        """The samples by name, as JSON has them."""
        return {
            "t_s": self.t_s,
            "waiting": self.requests_waiting,
            "running": self.requests_running,
            "kv_used": self.kv_used,
        }
