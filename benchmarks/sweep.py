"""Static, dynamic and continuous batching from a quarter of capacity to three times of it, in the simulator:

    python -m benchmarks.sweep                        # benchmarks/results/sweep.json and docs/images/sweep_*.svg

The Azure conversation trace on the default cost model; arrivals at random. Continuous batching runs with the defaults,
and with greedy admission and without shedding, which is what an engine without admission control does. The baselines
shed nothing either: their batches take longer than the TTFT target, so they would refuse nearly all.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropeway.bench.report import reported_to
from ropeway.bench.traces import Trace, read_trace
from ropeway.config import SchedulerConfig
from ropeway.simulation.cost_model import DEFAULT_COST_MODEL, read_cost_model
from ropeway.simulation.replay import replay
from ropeway.simulation.setup import replay_settings

ROOT = Path(__file__).parents[1]
TRACES = [ROOT / "benchmarks" / "traces" / f"azure2023_conv_part{part}.csv" for part in (1, 2)]
CAPACITY = 3.0
"""Requests per second: about the highest rate at which an engine of the default cost model meets nearly all targets."""
LOADS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
SLO_TTFT_S, SLO_ITL_S = 2.0, 0.1
SECONDS = 400.0
"""Length of every run, in its own time."""


@dataclass(frozen=True)
class Mode:
    name: str
    config: dict[str, Any]
    colour: str


MODES = (
    Mode("continuous", {}, "#1b6ca8"),
    Mode("continuous, greedy, not shedding", {"admission": "greedy", "shed": False}, "#7fb2d6"),
    Mode("dynamic", {"batching": "dynamic", "shed": False}, "#d98c2b"),
    Mode("static", {"batching": "static", "shed": False}, "#4f8a4c"),
    Mode("static, padded rows", {"batching": "static", "padded_rows": True, "shed": False}, "#a33b3b"),
)


def run(trace: Trace, mode: Mode, load: float) -> dict[str, Any]:
    """Figures of one mode at ``load`` times capacity."""
    rate = load * CAPACITY
    cost = read_cost_model(DEFAULT_COST_MODEL)
    config = SchedulerConfig(
        **{"max_num_seqs": cost.max_num_seqs, "max_batched_tokens": cost.max_batched_tokens, **mode.config}
    )
    requests = trace.take(round(rate * SECONDS)).at_rate(rate, seed=1)
    settings = replay_settings(requests, cost, config, slo_ttft=SLO_TTFT_S, slo_itl=SLO_ITL_S, prefix_cache=False)
    figures = replay(requests, settings).figures()
    kept = ("goodput_per_s", "attainment", "shed", "evictions_per_request", "ttft_s", "itl_s", "tpot_s", "slot_use")
    return {"mode": mode.name, "load": load, "rate": rate} | {name: figures[name] for name in kept}


def draw(runs: list[dict[str, Any]], folder: Path) -> None:
    """One plot per figure, over the load."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "ropeway"  # the same picture for the same figures
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    plots = {
        "goodput": ("requests per second that met both targets", lambda r: r["goodput_per_s"], "linear"),
        "ttft": ("P99 time to first token of those served, s", lambda r: r["ttft_s"]["p99"], "log"),
        "itl": ("P99 time between tokens, s", lambda r: r["itl_s"]["p99"], "linear"),
    }
    for name, (title, figure, scale) in plots.items():
        plot, axes = pyplot.subplots(figsize=(7, 4))
        for mode in MODES:
            points = [(r["load"], figure(r)) for r in runs if r["mode"] == mode.name]
            axes.plot(*zip(*points, strict=True), label=mode.name, color=mode.colour, marker="o", markersize=3)
        if name == "goodput":
            offered = [(load, load * CAPACITY) for load in LOADS if load <= 1.5]
            axes.plot(*zip(*offered, strict=True), label="offered", color="#999999", linestyle=":")
        axes.set(title=title, xlabel="load, in capacities", yscale=scale)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        plot.tight_layout()
        plot.savefig(folder / f"sweep_{name}.svg", metadata={"Date": None})
        pyplot.close(plot)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "sweep.json")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--redraw", action="store_true", help="draw what the JSON file has, run nothing")
    arguments = parser.parse_args()
    if arguments.redraw:
        runs = json.loads(arguments.json.read_text(encoding="utf-8"))["runs"]
    else:
        trace = read_trace(TRACES)
        with reported_to(arguments.json) as report:
            report["capacity_per_s"], report["slo_ttft_s"], report["slo_itl_s"] = CAPACITY, SLO_TTFT_S, SLO_ITL_S
            runs = report["runs"] = []
            for mode in MODES:
                for load in LOADS:
                    runs.append(run(trace, mode, load))
                    last = runs[-1]
                    print(f"{mode.name:34} {load:5.2f}  good/s {last['goodput_per_s']:6.3f}  shed {last['shed']}")
    draw(runs, arguments.images)


if __name__ == "__main__":
    main()
