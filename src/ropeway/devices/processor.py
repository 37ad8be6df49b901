"""How many cores this process may compute on."""

from __future__ import annotations

import math
import os
from pathlib import Path


def available_cores(root: Path = Path("/sys")) -> int:
    """Physical cores among the processors this process may run on, within its control group's quota.

    Hardware threads of one core share its arithmetic units, so they count once."""
    try:
        processors = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
    cores = {_siblings(root, processor) for processor in processors}
    return max(1, min(len(cores), _quota(root)))


def _siblings(root: Path, processor: int) -> str:
    """A name of the core that a processor belongs to."""
    try:
        return (root / f"devices/system/cpu/cpu{processor}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(processor)


def _quota(root: Path) -> int:
    """Whole processors granted by cgroup v2's ``cpu.max`` ("quota period", in microseconds), rounded up."""
    try:
        quota, period = (root / "fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # none, or "max"
        return os.cpu_count() or 1
