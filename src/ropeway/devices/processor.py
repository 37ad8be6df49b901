"""How many cores this process may compute on."""

from __future__ import annotations

import math
import os
from pathlib import Path

from ropeway.devices.control_groups import MEMBERSHIP, control_groups


def available_cores(root: Path = Path("/sys"), membership: Path = MEMBERSHIP) -> int:
    """Physical cores among the processors this process may run on, within its control groups' quota.

    Hardware threads of one core share its arithmetic units, so they count once."""
    cores = {core_of(processor, root) for processor in available_processors()}
    granted = granted_processors(root, membership)
    return max(1, len(cores) if granted is None else min(len(cores), math.ceil(granted)))


def available_processors() -> frozenset[int]:
    """Numbers of the processors (hardware threads) this process may run on."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return frozenset(range(os.cpu_count() or 1))


def core_of(processor: int, root: Path = Path("/sys")) -> str:
    """A name of the core that a processor belongs to."""
    try:
        return (root / f"devices/system/cpu/cpu{processor}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(processor)


def granted_processors(root: Path = Path("/sys"), membership: Path = MEMBERSHIP) -> float | None:
    """Processors' worth of time that the tightest quota among this process's control groups grants; None: no quota.

    ``cpu.max`` (version 2) is "quota period" in microseconds, or "max period"; version 1 has a file for each, and -1
    for no quota."""
    granted = []
    for group in control_groups("cpu", membership, root / "fs/cgroup"):
        if group.version == 2:
            quota, _, period = group.text("cpu.max").partition(" ")
        else:
            quota, period = group.text("cpu.cfs_quota_us"), group.text("cpu.cfs_period_us")
        if quota.strip().isdecimal() and period.strip().isdecimal() and int(period) > 0:
            granted.append(int(quota) / int(period))
    return min(granted, default=None)
