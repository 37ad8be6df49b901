"""Draw what host and device do in some steps of the engine, with and without asynchronous scheduling, as its own trace
has noted it: on the timer device, and of the embedded model on the CPU.

python -m benchmarks.async_figure         # docs/images/async.svg, and its figures in benchmarks/results/async.json
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.goals.models import small_model
from benchmarks.goals.overhead import cpu_bubbles
from ropeway.bench.bubbles import Decoding, decoding_of, step_begins
from ropeway.bench.overhead import measure_overhead
from ropeway.bench.report import reported_to
from ropeway.trace import COMPUTE, HOST, Trace

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "async"
from matplotlib import pyplot as plt  # noqa: E402

ROOT = Path(__file__).parents[1]
FIGURE = ROOT / "docs" / "images" / "async.svg"
RESULTS = ROOT / "benchmarks" / "results" / "async.json"
TIMER_SEQUENCES, TIMER_STEPS, TIMER_STEP_MS = 256, 300, 5.0
SHOWN = 4
"""Steps."""
MARGIN = 0.2
"""Of a step, shown before the first and after the last."""
_COLOURS = {"plan": "#e08a3c", "submit": "#d4b13a", "settle": "#8a5fb0", "forward": "#3b6fb6", "sample": "#6fb1d6"}
_BUBBLE = "#f4c7c3"


@dataclass(frozen=True)
class Panel:
    """A run that is drawn."""

    where: str
    run: Decoding
    trace: Trace

    @property
    def title(self) -> str:
        how = "asynchronous" if self.run.async_scheduling else "synchronous"
        return f"{self.where}, {how}: the device has nothing to do for {100 * self.run.bubble:.1f} % of the time"


def on_timer() -> list[Panel]:
    panels = []
    for mode in (False, True):
        trace = Trace()
        measure_overhead(TIMER_SEQUENCES, async_scheduling=mode, step_ms=TIMER_STEP_MS, steps=TIMER_STEPS, trace=trace)
        where = f"timer device, steps of {TIMER_STEP_MS:g} ms, {TIMER_SEQUENCES} requests"
        panels.append(Panel(where, decoding_of(trace, TIMER_SEQUENCES, mode), trace))
    return panels


def typical_steps(trace: Trace, count: int) -> tuple[float, float]:
    """(begin, end) of so many consecutive steps that take as long as the median of all such."""
    begins = step_begins(trace)
    spans = sorted((after - begin, begin, after) for begin, after in zip(begins, begins[count:], strict=False))
    _, begin, end = spans[len(spans) // 2]
    return begin, end


def draw(panels: list[Panel]) -> Any:
    """Two tracks a panel; those of one place share their scale."""
    windows = [typical_steps(panel.trace, SHOWN) for panel in panels]
    widest = {panel.where: 0.0 for panel in panels}
    for panel, (begin, end) in zip(panels, windows, strict=True):
        widest[panel.where] = max(widest[panel.where], end - begin)
    figure, axes = plt.subplots(len(panels), 1, squeeze=False, figsize=(10, 1.55 * len(panels)))
    for panel, (begin, _), axis in zip(panels, windows, axes[:, 0], strict=True):
        margin = MARGIN * widest[panel.where] / SHOWN
        first, last = begin - margin, begin + widest[panel.where] + margin
        for (_, _, end_s), (_, begin_s, _) in pairwise(panel.trace.intervals(COMPUTE)):
            if begin_s > first and end_s < last:
                axis.axvspan(1e3 * (end_s - begin), 1e3 * (begin_s - begin), color=_BUBBLE, linewidth=0)
        for row, track in enumerate((COMPUTE, HOST)):
            for name, begin_s, end_s in panel.trace.intervals(track):
                if end_s > first and begin_s < last:
                    width, left = 1e3 * (end_s - begin_s), 1e3 * (begin_s - begin)
                    axis.barh(row, width, left=left, height=0.7, color=_COLOURS[name], edgecolor="white", linewidth=0.3)
        axis.set_xlim(1e3 * (first - begin), 1e3 * (last - begin))
        axis.set_yticks([0, 1], ["device", "host"])
        axis.set_title(panel.title, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel(f"ms; {SHOWN} steps that take as long as the median of so many", loc="left")
    patches = [mpl.patches.Patch(color=colour, label=name) for name, colour in {**_COLOURS, "bubble": _BUBBLE}.items()]
    figure.legend(handles=patches, ncol=len(patches), loc="lower right", fontsize=8, frameon=False)
    figure.tight_layout()
    return figure


def main() -> None:
    source, label = small_model()
    with reported_to(RESULTS) as report:
        timer, cpu = on_timer(), cpu_bubbles(source)
        where = f"{label} on the CPU, {cpu.runs[0].sequences} requests"
        panels = [*timer, *(Panel(where, run, trace) for run, trace in zip(cpu.runs, cpu.traces, strict=True))]
        report["command"] = "python -m benchmarks.async_figure"
        report["timer"] = {"step_ms": TIMER_STEP_MS, "runs": [asdict(panel.run) for panel in timer]}
        report["cpu"] = {"model": label, "runs": [asdict(run) for run in cpu.runs], "same_tokens": cpu.same_tokens}
    draw(panels).savefig(FIGURE, metadata={"Date": None})
    for panel in panels:
        print(panel.title)
    print(FIGURE)


if __name__ == "__main__":
    main()
