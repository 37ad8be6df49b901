"""Measure the project's goals, by their numbers.

python -m benchmarks.goals 1 2b 10              # figures, targets and verdicts; JSON under benchmarks/results
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console

from benchmarks.goals.verdict import Outcome
from ropeway.bench.report import reported_to
from ropeway.cli.failures import told_plainly

RESULTS = Path(__file__).parents[1] / "results"


class Goal(NamedTuple):
    area: str
    module: str
    """Its function ``measure`` needs no argument and returns an ``Outcome``."""


GOALS: dict[int | str, Goal] = {
    1: Goal("continuous batching", "benchmarks.goals.batching"),
    2: Goal("throughput", "benchmarks.goals.throughput"),
    "2b": Goal("throughput, fastest settings", "benchmarks.goals.throughput_fastest"),
    3: Goal("decode", "benchmarks.goals.decode"),
    4: Goal("prefill", "benchmarks.goals.prefill"),
    5: Goal("KV memory", "benchmarks.goals.kv_memory"),
    6: Goal("chunked prefill", "benchmarks.goals.chunked"),
    7: Goal("preemption", "benchmarks.goals.preemption"),
    8: Goal("admission", "benchmarks.goals.admission"),
    9: Goal("tiers", "benchmarks.goals.tiers"),
    10: Goal("prefix cache", "benchmarks.goals.prefix"),
    11: Goal("host cost of a step", "benchmarks.goals.overhead"),
    12: Goal("micro-batches", "benchmarks.goals.overlap"),
    13: Goal("KV types", "benchmarks.goals.kv_types"),
    14: Goal("determinism", "benchmarks.goals.determinism"),
    15: Goal("simulator", "benchmarks.goals.simulator"),
    16: Goal("robustness", "benchmarks.goals.robustness"),
    18: Goal("start and footprint", "benchmarks.goals.startup"),
}


@told_plainly
def _main(
    names: Annotated[list[str], typer.Argument(metavar="N [N ...]", help="Which goals.", show_default=False)],
    json_dir: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where goal_N.json goes.", show_default=False)
    ] = RESULTS,
) -> None:
    """Measure goals; the exit code is 1 if one of them is missed."""
    numbers = [int(name) if name.isdecimal() else name for name in names]
    strangers = [number for number in numbers if number not in GOALS]
    if strangers:
        raise typer.BadParameter(f"goal {strangers[0]} is none of {', '.join(map(str, GOALS))}")
    logging.basicConfig(level=logging.WARNING)
    verdicts = {number: measure(number, json_dir).verdict for number in numbers}
    if len(verdicts) > 1:
        typer.echo(", ".join(f"goal {number} {verdict}" for number, verdict in verdicts.items()))
    if "missed" in verdicts.values():
        raise typer.Exit(1)


def measure(number: int | str, folder: Path) -> Outcome:
    """Run a goal's measurement, print what it shows and write it down."""
    goal = GOALS[number]
    console = Console()
    module = importlib.import_module(goal.module)
    folder.mkdir(parents=True, exist_ok=True)
    with reported_to(folder / f"goal_{number}.json") as report:
        outcome: Outcome = module.measure()
        report.update({"goal": number, "area": goal.area, "command": f"python -m benchmarks.goals {number}"})
        report.update(outcome.report())
    for table in outcome.tables:
        console.print(table)
    console.print(outcome.table(f"goal {number}, {goal.area}: {outcome.verdict}"))
    console.print(f"{report['machine']['stolen_time_fraction']:.1%} of the CPU time was stolen by the host")
    return outcome


if __name__ == "__main__":
    typer.run(_main)
