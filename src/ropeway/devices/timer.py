"""A device that only takes time. It has no thread: when work ends is computed when it is submitted.

    submitted      v1      v2
    device      ...|--d1--|--d2--|        end = max(end of the work before, submission) + duration

So bubbles and overlaps of a loop can be measured without an accelerator, from computed times.
"""

from __future__ import annotations

import time


class TimedEvent:
    """Completion of timed work."""

    __slots__ = ("end_s",)

    def __init__(self, end_s: float) -> None:
        self.end_s = end_s

    def wait(self) -> None:
        """Sleep until the work's end; returns at once if that has passed."""
        left = self.end_s - time.monotonic()
        if left > 0:
            time.sleep(left)


class TimedStream:
    """Work in order, one piece at a time."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        """Time under work since the start."""
        self.idle_s = 0.0
        """Time between two pieces of work: bubbles."""
        self._end_s: float | None = None

    def submit(self, duration_s: float) -> TimedEvent:
        """Queue work that takes ``duration_s``."""
        now = time.monotonic()
        if self._end_s is None:
            self._end_s = now
        begin = max(self._end_s, now)
        self.idle_s += begin - self._end_s
        self.busy_s += duration_s
        self._end_s = begin + duration_s
        return TimedEvent(self._end_s)

    @property
    def bubble(self) -> float:
        """Share of the time since the first work in which the device had nothing to do."""
        total = self.busy_s + self.idle_s
        return self.idle_s / total if total else 0.0
