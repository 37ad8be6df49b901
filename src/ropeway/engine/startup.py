"""How long the parts of a process's start take."""

from __future__ import annotations

import os
import time
from pathlib import Path


class StartUp:
    """Parts that follow one another, in seconds. The clock is ``time.monotonic``."""

    def __init__(self, began_s: float | None = None) -> None:
        """``began_s``: when the first part began; default: now."""
        self.parts: dict[str, float] = {}
        self._last_s = time.monotonic() if began_s is None else began_s

    def ended(self, part: str) -> None:
        """``part`` ends now, and the next one begins."""
        now = time.monotonic()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last_s
        self._last_s = now


def process_began_s(stat: Path = Path("/proc/self/stat")) -> float:
    """When this process began, on the clock of ``time.monotonic``, to ten milliseconds; now, where the system doesn't
    tell (proc_pid_stat(5): field 22 is the start in clock ticks since boot)."""
    now = time.monotonic()
    try:
        # The second field is the program's name in parentheses, and may hold any character.
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])
        since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - max(since_boot_s - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
