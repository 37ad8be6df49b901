"""Time that passes only when it is told to."""

from __future__ import annotations


class VirtualClock:
    """Call it for the time in seconds; it never goes back."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance_to(self, moment_s: float) -> None:
        """A moment that is past changes nothing."""
        if moment_s > self.now_s:
            self.now_s = moment_s
