"""What a benchmark ran on, and what of it others took meanwhile."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from ropeway.devices.memory import host_memory
from ropeway.version import __version__

_CPU_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512vnni",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "sve",
)
"""Instruction sets that kernels choose by, as /proc/cpuinfo spells them."""


def machine_facts() -> dict[str, Any]:
    """Processor, cores this process may use, memory in bytes, and versions."""
    return {
        "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cpu_flags": [flag for flag in _CPU_FLAGS if flag in _cpuinfo("flags").split()],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": host_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "ropeway": __version__,
    }


class StolenTime:
    """The share of this machine's CPU time that its host gave to others, from construction on."""

    def __init__(self) -> None:
        self._began = psutil.cpu_times()

    @property
    def fraction(self) -> float:
        """In [0, 1]; 0 where the system doesn't tell."""
        now = psutil.cpu_times()
        # "guest" times are in "user" and "nice" already (proc_stat(5)).
        spent = {
            name: getattr(now, name) - getattr(self._began, name)
            for name in now._fields
            if name not in ("guest", "guest_nice")
        }
        total = sum(spent.values())
        return float(spent.get("steal", 0.0) / total) if total > 0 else 0.0


class PeakMemory:
    """The highest resident memory of this process, without what measurements take for themselves."""

    def __init__(self) -> None:
        self._before = 0

    @property
    def bytes(self) -> int:
        """Highest resident set so far."""
        return max(self._before, _high_water_mark())

    @contextmanager
    def not_counting(self) -> Iterator[None]:
        """What is allocated and freed in this block leaves no trace in the peak. Only Linux can forget a peak;
        elsewhere the peak includes it."""
        self._before = self.bytes
        yield
        # 5: set the high-water mark to the current size (proc_pid_clear_refs(5)).
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def _high_water_mark() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def _cpuinfo(key: str) -> str:
    """The first processor's entry; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), "")
