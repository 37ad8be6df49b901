"""What this process runs among: processors it may use, other processes on them, pages, clocks, memory. Read from files
as Linux has them; elsewhere what is not told is unknown."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ropeway.devices.memory import Memory, host_memory
from ropeway.devices.processor import available_processors, core_of, granted_processors

_PROC = Path("/proc")
_SYS = Path("/sys")
_BUSY = ("user", "nice", "system", "irq", "softirq")
_COLUMNS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
"""Of a processor's line in /proc/stat (proc_stat(5)), in clock ticks."""


@dataclass(frozen=True)
class Load:
    """What was computed on this process's processors while somebody looked."""

    others: float
    """By other processes, in processors' worth of time."""
    busiest: str | None
    """The one that computed most, with its process id; None if none is visible."""
    stolen_fraction: float
    """Of the time, by the machine's host."""


@dataclass(frozen=True)
class Surroundings:
    processors: int
    """Hardware threads this process may run on."""
    cores: int
    """Physical ones among them."""
    granted: float | None
    """Processors' worth of time that control groups grant; None: no limit."""
    nodes: int
    """Of memory that these processors are spread over."""
    large_pages: str | None
    """``always``, ``madvise`` or ``never``; None: the system has none."""
    governors: tuple[str, ...]
    """That choose the clock rates of these processors; none where they are not visible, as in most virtual machines."""
    cpu_flags: frozenset[str]
    memory: Memory
    machine_memory: int | None
    """Bytes of the whole machine, whatever this process may use of them."""
    load: Load


def look_around(proc: Path = _PROC, sys: Path = _SYS, *, watch_s: float = 0.5) -> Surroundings:
    """Look for ``watch_s`` seconds, in which this process should do nothing."""
    processors = available_processors()
    before = _Ticks(proc, processors)
    time.sleep(watch_s)
    membership = proc / "self/cgroup"
    return Surroundings(
        processors=len(processors),
        cores=len({core_of(processor, sys) for processor in processors}),
        granted=granted_processors(sys, membership),
        nodes=_nodes(sys, processors),
        large_pages=chosen_word(_text(sys / "kernel/mm/transparent_hugepage/enabled")),
        governors=_governors(sys, processors),
        cpu_flags=frozenset(_entry(proc / "cpuinfo", ("flags", "Features")).split()),
        memory=host_memory(membership, sys / "fs/cgroup"),
        machine_memory=_kib(_entry(proc / "meminfo", ("MemTotal",))),
        load=before.until(_Ticks(proc, processors)),
    )


def chosen_word(text: str) -> str | None:
    """The word in brackets: "always [madvise] never" has ``madvise`` chosen."""
    _, bracket, rest = text.partition("[")
    return rest.partition("]")[0] if bracket else None


class _Ticks:
    """Clock ticks spent up to now: by these processors, by this process, by every visible one."""

    def __init__(self, proc: Path, processors: Iterable[int]) -> None:
        names = {f"cpu{processor}" for processor in processors}
        rows = [line.split() for line in _text(proc / "stat").splitlines()]
        mine = [[int(word) for word in row[1 : 1 + len(_COLUMNS)]] for row in rows if row and row[0] in names]
        self.spent = dict(zip(_COLUMNS, map(sum, zip(*mine, strict=True)), strict=False)) if mine else {}
        self.processors = len(mine)
        own = (proc / "self").resolve().name
        self.own = _process_ticks(proc / "self")[1]
        folders = [folder for folder in proc.glob("[0-9]*") if folder.name not in (own, str(os.getpid()))]
        self.processes = {folder.name: _process_ticks(folder) for folder in folders}

    def until(self, later: _Ticks) -> Load:
        gone = {name: later.spent.get(name, 0) - ticks for name, ticks in self.spent.items()}
        total = sum(gone.values())
        if total <= 0:
            return Load(others=0.0, busiest=None, stolen_fraction=0.0)
        busy = sum(gone.get(name, 0) for name in _BUSY) - (later.own - self.own)
        took = {
            pid: ticks - self.processes[pid][1] for pid, (_, ticks) in later.processes.items() if pid in self.processes
        }
        most = max(took, key=lambda pid: took[pid], default=None)
        return Load(
            others=max(busy, 0) / total * self.processors,
            busiest=None if most is None or took[most] <= 0 else f"{later.processes[most][0]} (process {most})",
            stolen_fraction=gone.get("steal", 0) / total,
        )


def _process_ticks(folder: Path) -> tuple[str, int]:
    """A process's name and its clock ticks so far (proc_pid_stat(5): fields 14 and 15)."""
    head, _, rest = _text(folder / "stat").rpartition(")")
    fields = rest.split()
    if len(fields) < 13:
        return "", 0  # it has ended
    return head.partition("(")[2], int(fields[11]) + int(fields[12])


def _nodes(sys: Path, processors: Iterable[int]) -> int:
    folders = {
        node.name
        for processor in processors
        for node in (sys / f"devices/system/cpu/cpu{processor}").glob("node[0-9]*")
    }
    return max(len(folders), 1)


def _governors(sys: Path, processors: Iterable[int]) -> tuple[str, ...]:
    files = (sys / f"devices/system/cpu/cpu{processor}/cpufreq/scaling_governor" for processor in processors)
    return tuple(sorted({text for file in files if (text := _text(file).strip())}))


def _entry(file: Path, keys: tuple[str, ...]) -> str:
    """The first "key : value" of a file whose key is one of these; empty if there is none."""
    for line in _text(file).splitlines():
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""


def _kib(text: str) -> int | None:
    number = text.partition(" ")[0]
    return int(number) * 1024 if number.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
