"""A device that only takes time. It has no thread: when work ends is computed when it is submitted.

    submitted      v1      v2
    compute     ...|--d1--|--d2--|        end = max(end of the work before, submission, events waited for) + duration
    communicate           |---c1---|

So bubbles and overlaps can be measured without an accelerator, from computed times, and are the same every time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


class TimedEvent:
    """Completion of timed work."""

    __slots__ = ("end_s",)

    def __init__(self, end_s: float) -> None:
        self.end_s = end_s

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until the work's end, or for ``timeout_s``; returns at once if that has passed. False: not yet."""
        left = self.end_s - time.monotonic()
        if left > 0:
            time.sleep(left if timeout_s is None else min(left, timeout_s))
        return timeout_s is None or left <= timeout_s


@dataclass(frozen=True)
class Interval:
    """Work on a stream."""

    name: str
    begin_s: float
    end_s: float


class TimedStream:
    """Work in order, one piece at a time."""

    def __init__(self, *, keep: bool = False, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        """``keep``: note every piece of work in ``intervals``. ``clock``: the host's, in seconds; one that stands still
        is a host that takes no time."""
        self.busy_s = 0.0
        """Time under work since the start."""
        self.idle_s = 0.0
        """Time between two pieces of work: bubbles."""
        self.intervals: list[Interval] = []
        self._keep = keep
        self._clock = clock
        self._end_s: float | None = None
        self._not_before_s = 0.0

    def submit(self, duration_s: float, name: str = "") -> TimedEvent:
        """Queue work that takes ``duration_s``."""
        now = self._clock()
        if self._end_s is None:
            self._end_s = max(now, self._not_before_s)
        begin = max(self._end_s, now, self._not_before_s)
        self.idle_s += begin - self._end_s
        self.busy_s += duration_s
        self._end_s = begin + duration_s
        if self._keep:
            self.intervals.append(Interval(name, begin, self._end_s))
        return TimedEvent(self._end_s)

    def wait_for(self, event: TimedEvent) -> None:
        """What is submitted from here on begins after ``event``."""
        self._not_before_s = max(self._not_before_s, event.end_s)

    def record(self) -> TimedEvent:
        """Completion of all that was submitted so far."""
        return TimedEvent(max(self._end_s or 0.0, self._not_before_s))

    @property
    def bubble(self) -> float:
        """Share of the time since the first work in which the device had nothing to do."""
        total = self.busy_s + self.idle_s
        return self.idle_s / total if total else 0.0
