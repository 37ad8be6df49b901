"""How much memory this process may use: the machine's, within the limits of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from ropeway.devices.control_groups import MEMBERSHIP, ROOT, ControlGroup, control_groups


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the device's memory (on a CPU within the control group's limit, if there is one)."""

    total: int
    available: int


def host_memory(membership: Path = MEMBERSHIP, root: Path = ROOT) -> Memory:
    """Bytes of host memory in all and still available, whichever limit is the tightest."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for limit, used in control_group_limits(membership, root):
        total = min(total, limit)
        available = min(available, max(limit - used, 0))
    return Memory(total=total, available=available)


def control_group_limits(membership: Path = MEMBERSHIP, root: Path = ROOT) -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of every memory control group this process is in, ancestors included.

    ``memory.high`` counts like ``memory.max``: beyond it the kernel slows a group down until it gives back as much as
    it takes."""
    for group in control_groups("memory", membership, root):
        names = ("memory.max", "memory.high") if group.version == 2 else ("memory.limit_in_bytes",)
        limits = [limit for name in names if (limit := group.number(name)) is not None]
        used = group.number("memory.current" if group.version == 2 else "memory.usage_in_bytes")
        if limits and used is not None:
            yield min(limits), max(used - _reclaimable(group), 0)


def _reclaimable(group: ControlGroup) -> int:
    """Bytes of page cache that the kernel gives back under pressure: what was read once, and half of what was read
    again and again (a downloaded checkpoint is; but so are libraries in use)."""
    prefix = "" if group.version == 2 else "total_"
    statistics = group.statistics("memory.stat")
    return statistics.get(f"{prefix}inactive_file", 0) + statistics.get(f"{prefix}active_file", 0) // 2
