"""Goal 11: what a step costs the host, plain and with every feature of the scheduler on.

The limits are for steps back to back. With steps of 5 ms, whose host sleeps meanwhile, the figures show the machine
rather than the code (``python -m benchmarks.after_sleep``); they are printed beside the others, and so is what a step
costs when requests contend for blocks and take each other's seats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import product

from benchmarks.goals.verdict import Check, Outcome, table_of
from ropeway.bench.overhead import Features, OverheadRun, measure_overhead

SEQUENCES = (64, 256, 1024)
FEATURES: tuple[Features, ...] = ("plain", "all", "contested")
LIMITED = ("plain", "all")
BUBBLE_AT = 256


def limits(running: float) -> tuple[float, float]:
    """Microseconds of a step: median and 99th percentile."""
    return 20 + running, 50 + 2 * running


def measure(
    *, sequences: Sequence[int] = SEQUENCES, steps: int = 1000, steps_ms: Sequence[float] = (5.0, 0.0), rounds: int = 3
) -> Outcome:
    """Every setting is run once in each of the ``rounds``; the run that is the median one counts."""
    settings = list(product(steps_ms, FEATURES, sequences))
    repeated = [
        [
            measure_overhead(count, async_scheduling=True, step_ms=step_ms, steps=steps, features=features)
            for step_ms, features, count in settings
        ]
        for _ in range(rounds)
    ]
    runs = [_median(same) for same in zip(*repeated, strict=True)]
    watched = BUBBLE_AT if BUBBLE_AT in sequences else sequences[-1]
    bubble = max(run.bubble for run in runs if run.step_ms == steps_ms[0] and run.sequences == watched)
    outcome = Outcome(
        checks=[
            *(check for run in runs if not run.step_ms and run.features in LIMITED for check in _checks(run)),
            Check(f"bubble with {watched} sequences, steps of {steps_ms[0]:g} ms", bubble, 0.01, "at most", "%"),
        ],
        figures={"runs": [asdict(run) for run in runs]},
    )
    outcome.tables = [
        table_of(
            "microseconds of CPU time a step, median / 99th percentile",
            ["features", "step", "running", "plan", "settle", "both", "limit", "submit a request", "preemptions"],
            [_row(run) for run in runs],
        )
    ]
    return outcome


def _median(runs: Sequence[OverheadRun]) -> OverheadRun:
    return sorted(runs, key=lambda run: run.host_us_per_step.p50)[len(runs) // 2]


def _pace(run: OverheadRun) -> str:
    return f"{run.step_ms:g} ms" if run.step_ms else "back to back"


def _checks(run: OverheadRun) -> list[Check]:
    name = f"{run.sequences} sequences, features: {run.features}: "
    p50, p99 = limits(run.running)
    return [
        Check(name + "P50", run.host_us_per_step.p50, p50, "at most", "us"),
        Check(name + "P99", run.host_us_per_step.p99, p99, "at most", "us"),
    ]


def _row(run: OverheadRun) -> list[object]:
    costs = (run.plan_us, run.settle_us, run.host_us_per_step)
    p50, p99 = limits(run.running)
    submit = run.submit_us_per_request
    return [
        run.features,
        _pace(run),
        f"{run.running:.0f}",
        *(f"{cost.p50:.0f} / {cost.p99:.0f}" for cost in costs),
        f"{p50:.0f} / {p99:.0f}",
        f"{submit.p50:.0f} / {submit.p99:.0f}",
        run.preemptions,
    ]
