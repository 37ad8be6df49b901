"""What the core of a rank does during a step that runs whole, in two micro-batches, and as two steps of half the
tokens; perf(1) looks a thousand times a second. Needs root, and Debian's iproute2 and linux-perf.

python -m benchmarks.overlap_profile qwen3-0.6b --link-rate 2gbit
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.goals.overlap import two_ranks
from benchmarks.goals.verdict import table_of
from ropeway.bench.overlap import OverlapBench, Sample, between_hosts
from ropeway.bench.report import reported_to, settings_of
from ropeway.bench.shapes import SHAPES
from ropeway.cli.failures import told_plainly
from ropeway.config import Config
from ropeway.errors import RopewayError

WHOLE, CUT, HALVES = "whole", "micro-batches", "two halves"
KIND = "many prompts"
"""Two halves of these attend to as much as the whole."""
LOOKS_PER_S = 997
"""A prime: nothing else has this period."""
_HEAD = re.compile(r"(?P<command>.+?)\s+\d+\s+(?P<time>\d+\.\d+):$")
_FRAME = re.compile(r"\s*[0-9a-f]+ (?P<symbol>.*) \((?P<file>.*)\)$")
_IN_LINUX = {
    "copying": r"_copy_(to|from)_iter",
    "limiting the rate": r"\b(tbf_|qdisc_watchdog)",
    "network": r"\b(__)?(tcp|ip|sock|skb|net|dev|qdisc|tbf|veth|sys_send|sys_recv|tasklet)",
    "waking and waiting": r"futex|poll|schedule|wake",
    "interrupts": r"irq",
}
"""The first pattern found in the chain of calls says what it is for."""


@dataclass(frozen=True)
class Look:
    time_s: float
    """CLOCK_MONOTONIC."""
    part: str
    """What the core was doing."""


@dataclass
class Runs:
    """Steps in each way, in turns."""

    samples: dict[str, list[Sample]] = field(default_factory=lambda: {WHOLE: [], CUT: [], HALVES: []})
    intervals: list[tuple[float, float, str]] = field(default_factory=list)
    """From when to when, CLOCK_MONOTONIC, and which way."""

    def medians(self) -> dict[str, dict[str, float]]:
        return {
            way: {
                name: statistics.median(getattr(sample, name) for sample in samples)
                for name in ("wall_s", "comm_s", "exposed_s")
            }
            for way, samples in self.samples.items()
        }


def run(bench: OverlapBench, tokens: int, turns: int) -> Runs:
    runs = Runs()
    step, half = bench.plan(KIND, tokens), bench.plan(KIND, tokens // 2)
    for turn in range(turns):
        for way in list(runs.samples)[:: -1 if turn % 2 else 1]:
            began = time.monotonic()
            plans = [half, half] if way == HALVES else [step]
            made = [bench.run(plan, overlapped=way == CUT) for plan in plans]
            runs.intervals.append((began, time.monotonic(), way))
            columns = zip(*((each.wall_s, each.comm_s, each.exposed_s) for each in made), strict=True)
            runs.samples[way].append(Sample(*map(sum, columns)))
    return runs


@contextmanager
def watched(core: int, file: Path) -> Iterator[None]:
    """Raises ``RopewayError`` where perf records nothing."""
    if shutil.which("perf") is None:
        raise RopewayError("the command perf is missing (Debian: linux-perf)")
    options = ["--quiet", "-C", str(core), "-k", "CLOCK_MONOTONIC", "-e", "cpu-clock", "-F", str(LOOKS_PER_S), "-g"]
    perf = subprocess.Popen(["perf", "record", *options, "-o", str(file)], stderr=subprocess.PIPE, text=True)
    try:
        time.sleep(1.0)  # until it looks
        yield
    finally:
        perf.send_signal(signal.SIGINT)
        _, error = perf.communicate(timeout=60)
    if not file.exists():
        raise RopewayError(f"perf has recorded nothing: {error.strip()}")


def looks(text: str) -> Iterator[Look]:
    """From what ``perf script -F comm,tid,time,ip,sym,dso`` prints."""
    for block in text.split("\n\n"):
        first, *rest = block.strip("\n").split("\n")
        head = _HEAD.match(first.strip())
        frames = [(frame["symbol"], frame["file"]) for frame in map(_FRAME.match, rest) if frame is not None]
        if head is not None and frames:
            yield Look(float(head["time"]), part_of(head["command"], frames))


def part_of(command: str, frames: Sequence[tuple[str, str]]) -> str:
    """What is done, by the chain of calls, innermost first: (symbol, file)."""
    symbol, file = frames[0]
    if file.startswith("["):
        if command == "swapper" and "halt" in symbol:
            return "idle"
        chain = " ".join(name for name, where in frames if where == file)
        return "Linux: " + next((part for part, pattern in _IN_LINUX.items() if re.search(pattern, chain)), "else")
    name = Path(file).name
    if name.startswith("_native"):
        return "Ropeway's kernels"
    if name.startswith(("libtorch", "libc10")):
        return "sums" if "add_kernel" in symbol else "else of torch"
    return "Python and the rest"


def milliseconds(seen: Iterable[Look], runs: Runs) -> dict[str, dict[str, float]]:
    """What a step took of the core, part by part, for each way."""
    counts: dict[str, Counter[str]] = {way: Counter() for way in runs.samples}
    for look in seen:
        place = bisect(runs.intervals, look.time_s, key=lambda interval: interval[0]) - 1
        if place >= 0 and look.time_s <= runs.intervals[place][1]:
            counts[runs.intervals[place][2]][look.part] += 1
    return {
        way: {part: 1e3 * count / LOOKS_PER_S / len(runs.samples[way]) for part, count in parts.most_common()}
        for way, parts in counts.items()
    }


def profile(config: Config, *, link_rate: str, tokens: int, turns: int) -> dict[str, Any]:
    """Raises ``NoNetwork``, ``ConfigError``, ``RopewayError`` and what loading raises."""
    with tempfile.TemporaryDirectory() as folder, between_hosts(config, link_rate) as bench:
        file = Path(folder) / "perf.data"
        (core,) = os.sched_getaffinity(0)
        run(bench, tokens, 1)  # touches memory
        with watched(core, file):
            runs = run(bench, tokens, turns)
        command = ["perf", "script", "-i", str(file), "-F", "comm,tid,time,ip,sym,dso"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {"steps": runs.medians(), "milliseconds": milliseconds(looks(text), runs)}


def _table(title: str, figures: dict[str, Any]) -> Table:
    ways = list(figures["steps"])
    steps, parts = figures["steps"], figures["milliseconds"]
    rows = [[name, *(1e3 * steps[way][name] for way in ways)] for name in steps[WHOLE]]
    every = sorted({part for way in ways for part in parts[way]}, key=lambda part: -parts[CUT].get(part, 0.0))
    rows += [[part, *(parts[way].get(part, 0.0) for way in ways)] for part in every]
    return table_of(title, ["ms a step", *ways], rows)


@told_plainly
def _main(
    shape: Annotated[str, typer.Argument(help=f"Of random weights: {', '.join(SHAPES)}.")],
    link_rate: Annotated[str, typer.Option(help="As tc(8) writes it.")],
    tokens: Annotated[int, typer.Option(min=64, help="Of a step.")] = 512,
    turns: Annotated[int, typer.Option(min=1, help="Steps in each way.")] = 10,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Profile a step of two ranks between two network namespaces."""
    config = two_ranks(shape, tokens)
    with reported_to(json_file) as report:
        figures = profile(config, link_rate=link_rate, tokens=tokens, turns=turns)
        settings = settings_of(config) | {"model": shape, "link_rate": link_rate, "tokens": tokens, "turns": turns}
        report.update(figures, settings=settings)
    Console().print(_table(f"{shape}, {KIND}, {tokens} tokens, link {link_rate}", figures))


if __name__ == "__main__":
    typer.run(_main)
