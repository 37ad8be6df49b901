"""Why requests wait: one account per line and reason, so that a request's own waits are two readings apart."""

from __future__ import annotations

from typing import Literal

from ropeway.request import Request

Reason = Literal["step", "slots", "blocks", "budget", "tier", "gate"]
REASONS: tuple[Reason, ...] = ("step", "slots", "blocks", "budget", "tier", "gate")


class WaitAccounts:
    """Seconds that pass are put to the reason that a line was last found to wait for."""

    def __init__(self, lines: int) -> None:
        self._seconds = [[0.0] * len(REASONS) for _ in range(lines)]
        self._now_for = [REASONS.index("step")] * lines
        self._until_s: float | None = None

    def advance(self, now: float) -> None:
        """Put the time since the last call to each line's reason."""
        passed = 0.0 if self._until_s is None else now - self._until_s
        if passed < 0.0:
            return  # what has been counted once is not counted again
        for account, reason in zip(self._seconds, self._now_for, strict=True):
            account[reason] += passed
        self._until_s = now

    def waits_for(self, line: int, reason: Reason) -> None:
        """What the line waits for from now on."""
        self._now_for[line] = REASONS.index(reason)

    def read(self, line: int) -> tuple[float, ...]:
        """The accounts of a line, to be compared with a later reading."""
        return tuple(self._seconds[line])

    def begin(self, request: Request, line: int) -> None:
        """The request begins to wait; ``advance`` has been called for this moment."""
        request.waits_from = self.read(line)

    def since(self, request: Request, line: int) -> dict[str, float]:
        """What it has waited for in all, given that it has been waiting since ``begin``."""
        waits = dict(request.timeline.waits)
        for reason, after, before in zip(REASONS, self._seconds[line], request.waits_from, strict=True):
            if after > before:
                name = "gate" if request.gated else reason
                waits[name] = waits.get(name, 0.0) + after - before
        return waits

    def end(self, request: Request, line: int) -> None:
        """It waits no more, or for something else: note what it waited for since ``begin``."""
        request.timeline.waits = self.since(request, line)
        request.waits_from = self.read(line)
