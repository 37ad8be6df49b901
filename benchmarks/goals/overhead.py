"""Goal 11: what a step costs the host, plain and with every feature of the scheduler on; and for how much of the time
the device has nothing to do between steps, on the timer and on the CPU, where the tokens must be those of synchronous
scheduling.

The limits are for steps back to back. With steps of 5 ms, whose host sleeps meanwhile, the figures show the machine
rather than the code (``python -m benchmarks.after_sleep``); they are printed beside the others, and so is what a step
costs when requests contend for blocks and take each other's seats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import product

from benchmarks.goals.models import small_model
from benchmarks.goals.verdict import Check, Outcome, table_of
from ropeway.bench.bubbles import Comparison, measure_bubbles
from ropeway.bench.overhead import Features, OverheadRun, measure_overhead
from ropeway.settings import resolve

SEQUENCES = (64, 256, 1024)
FEATURES: tuple[Features, ...] = ("plain", "all", "contested")
LIMITED = ("plain", "all")
BUBBLE_AT = 256
CPU_SEQUENCES, CPU_STEPS, CPU_TURNS = 8, 30, 5
CPU_BUBBLE = 0.02
"""Twice the timer's: a step of a real model is two pieces of work, forward and sampling, between which the device's
thread is in Python, and the host's works on the cores that compute."""


def limits(running: float) -> tuple[float, float]:
    """Microseconds of a step: median and 99th percentile."""
    return 20 + running, 50 + 2 * running


def measure(
    *,
    sequences: Sequence[int] = SEQUENCES,
    steps: int = 1000,
    steps_ms: Sequence[float] = (5.0, 0.0),
    rounds: int = 3,
    model: str | None = None,
) -> Outcome:
    """Every setting is run once in each of the ``rounds``; the run that is the median one counts. ``model``: what is
    run on the CPU; default: the embedded one."""
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
    source, label = (model, model) if model is not None else small_model()
    on_cpu = cpu_bubbles(source)
    outcome = Outcome(
        checks=[
            *(check for run in runs if not run.step_ms and run.features in LIMITED for check in _checks(run)),
            Check(f"bubble with {watched} sequences, steps of {steps_ms[0]:g} ms", bubble, 0.01, "at most", "%"),
            *_cpu_checks(label, on_cpu),
        ],
        figures={
            "runs": [asdict(run) for run in runs],
            "cpu": {"model": label, "runs": [asdict(run) for run in on_cpu.runs]},
        },
    )
    outcome.tables = [
        table_of(
            "microseconds of CPU time a step, median / 99th percentile",
            ["features", "step", "running", "plan", "settle", "both", "limit", "submit a request", "preemptions"],
            [_row(run) for run in runs],
        )
    ]
    return outcome


def cpu_bubbles(model: str) -> Comparison:
    """Decode steps of a model on the CPU, synchronously and asynchronously."""
    config = resolve({"model": model}, environ={}).config
    return measure_bubbles(config, sequences=CPU_SEQUENCES, steps=CPU_STEPS, turns=CPU_TURNS)


def _cpu_checks(model: str, found: Comparison) -> list[Check]:
    off, on = found.runs
    name = f"{model} on the CPU, {on.sequences} sequences: "
    note = f"{off.bubble:.2%} synchronously; a step takes {on.step_ms:.2f} ms, {off.step_ms:.2f} synchronously"
    return [
        Check(name + "bubble", on.bubble, CPU_BUBBLE, "at most", "%", note),
        Check(name + "answers with the tokens of synchronous scheduling", found.same_tokens, 1.0, unit="%"),
    ]


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
