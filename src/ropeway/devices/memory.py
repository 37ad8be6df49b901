"""How much memory this process may use: the machine's, within the limits of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the device's memory (on a CPU within the control group's limit, if there is one)."""

    total: int
    available: int


def host_memory() -> Memory:
    """Bytes of host memory in all and still available, whichever limit is the tightest."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for limit, used in control_group_limits():
        total = min(total, limit)
        available = min(available, max(limit - used, 0))
    return Memory(total=total, available=available)


def control_group_limits(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of every memory control group this process is in, ancestors included.

    ``membership`` holds a line "number:controllers:path" per hierarchy; version 2 is the one numbered 0
    (cgroups(7)). Page cache that the kernel gives back under pressure does not count as used. Inside a
    container the path often lies outside what is mounted; the walk up then ends at the mounted root, whose
    limit is the container's.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        relative = Path(path.lstrip("/"))
        for group in (relative, *relative.parents):
            limit = _number(top / group / names[0])
            used = _number(top / group / names[1])
            if limit is not None and used is not None:
                reclaimable = _statistic(top / group / "memory.stat", names[2])
                yield limit, max(used - reclaimable, 0)


def _number(file: Path) -> int | None:
    """The number in a file; None for a missing file or the word "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _statistic(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for key, value in map(str.split, lines) if key == name), 0)
