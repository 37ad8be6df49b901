"""What to change on a machine for more speed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ropeway.bench.surroundings import Surroundings

_OTHERS = 0.15
"""Processors' worth of other processes' time that is worth a word."""
_STOLEN = 0.02
_LITTLE_MEMORY = 2 << 30
_FLAGS = {
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"),
    "avx2": ("avx2", "fma", "f16c"),
}
"""What the kernels of an instruction set need, as /proc/cpuinfo spells it; best first."""


@dataclass(frozen=True)
class Advice:
    topic: str
    """A word or two, always the same for the same rule."""
    found: str
    change: str


def advise(around: Surroundings, *, threads: int, isa: str | None, built: tuple[str, ...] = ()) -> list[Advice]:
    """Advice for an engine of ``threads`` threads whose kernels use the instruction set ``isa`` (None: no native
    kernels), chosen from those in ``built`` that run here. Nothing to change: an empty list."""
    rules = (_threads(around, threads), _large_pages(around), _load(around), _memory(around), _governor(around))
    found = [advice for rule in rules for advice in rule]
    return found if isa is None else [*found, *_instructions(around.cpu_flags, isa, built)]


def usable_threads(around: Surroundings) -> int:
    """One per core, within what control groups grant."""
    granted = math.inf if around.granted is None else math.ceil(around.granted)
    return max(1, int(min(around.cores, granted)))


def _threads(around: Surroundings, threads: int) -> Iterator[Advice]:
    usable = usable_threads(around)
    granted = around.granted
    if granted is not None and threads > math.ceil(granted):
        yield Advice(
            "threads",
            f"{threads} threads share a quota of {granted:g} processors, and all stand still when it is used up",
            f"--threads {usable}, or a higher quota (cpu.max of the control group, --cpus of a container)",
        )
    elif threads > around.processors:
        yield Advice(
            "threads",
            f"{threads} threads take turns on {around.processors} processors that this process may run on",
            f"--threads {usable}, or more processors (taskset, --cpuset-cpus of a container)",
        )
    elif threads > around.cores:
        yield Advice(
            "threads",
            f"{threads} threads on {around.cores} cores: the {around.processors} processors are hardware threads "
            "that share a core's arithmetic units",
            f"--threads {usable}",
        )
    elif threads < usable:
        yield Advice(
            "threads", f"{threads} threads leave {usable - threads} of {usable} cores idle", f"--threads {usable}"
        )
    if granted is not None and granted < around.cores:
        yield Advice(
            "quota",
            f"control groups grant {granted:g} of {around.cores} cores",
            "a higher quota (cpu.max of the control group, --cpus of a container)"
            + ("" if granted == int(granted) else f", a whole number: the last of {usable} threads often waits"),
        )
    if around.nodes > 1:
        yield Advice(
            "memory nodes",
            f"the processors belong to {around.nodes} nodes, and read each other's memory slowly",
            "one engine on each: numactl --cpunodebind=0 --membind=0 ropeway serve ...",
        )


def _large_pages(around: Surroundings) -> Iterator[Advice]:
    if around.large_pages == "never":
        yield Advice(
            "large pages",
            "the system gives none: weights and the KV pool lie in pages of 4 KiB",
            "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _load(around: Surroundings) -> Iterator[Advice]:
    load = around.load
    if load.others > _OTHERS:
        who = "" if load.busiest is None else f", most of all {load.busiest}"
        yield Advice(
            "other processes",
            f"they take {load.others:.1f} of {around.processors} processors{who}",
            "stop them, or keep them on other processors (taskset)",
        )
    if load.stolen_fraction > _STOLEN:
        yield Advice(
            "stolen time",
            f"the host of this virtual machine keeps {load.stolen_fraction:.0%} of its time to itself",
            "a machine with processors of its own",
        )


def _memory(around: Surroundings) -> Iterator[Advice]:
    memory, whole = around.memory, around.machine_memory
    if memory.available >= _LITTLE_MEMORY:
        return
    limited = whole is not None and memory.total < 0.95 * whole
    yield Advice(
        "memory",
        f"{memory.available / 2**30:.1f} GiB are available, and by default the KV pool takes at most half of what the "
        "weights leave",
        "a higher limit (memory.max of the control group, --memory of a container)"
        if limited
        else "end what else holds memory, or take a smaller model",
    )


def _governor(around: Surroundings) -> Iterator[Advice]:
    slow = [governor for governor in around.governors if governor != "performance"]
    if slow:
        yield Advice(
            "clock rate",
            f"it follows the governor {', '.join(slow)}, which lowers it between steps",
            "as root: cpupower frequency-set -g performance",
        )


def _instructions(flags: frozenset[str], isa: str, built: tuple[str, ...]) -> Iterator[Advice]:
    if not flags.intersection(("avx", "avx2", "sse2")):
        return  # another architecture, or a system that doesn't tell
    for name, needed in _FLAGS.items():
        if name == isa:
            return
        missing = [flag for flag in needed if flag not in flags]
        if not missing and name not in built:
            yield Advice(
                "instruction sets",
                f"this processor has {name}, but the kernels were compiled without it",
                "install Ropeway again with a newer compiler (GCC 12, Clang 16)",
            )
            return
        if not missing:
            yield Advice("instruction sets", f"kernels use {isa}, not {name}", "leave the choice to Ropeway")
            return
        if name == "avx2":
            yield Advice(
                "instruction sets",
                f"this processor offers no {', '.join(missing)}: products run in portable code, many times slower",
                "another machine; in a virtual one, let it see its host's processor",
            )
        elif "avx512f" in flags:
            yield Advice(
                "instruction sets",
                f"this processor has AVX-512 without {', '.join(missing)}, so kernels use {isa}",
                "a newer processor multiplies bfloat16 and 8-bit integers in hardware",
            )
