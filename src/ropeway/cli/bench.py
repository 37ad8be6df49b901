"""ropeway bench latency | throughput | overhead"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ropeway.cli.failures import told_plainly
from ropeway.cli.options import ConfigFile, Model, log_to_stderr, resolved, with_settings

app = typer.Typer(no_args_is_help=True, help="Measure: one batch, a workload, or the host's own cost.")

_SEQUENCES = (64, 256, 1024)

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write every figure here, too.", show_default=False)
]


@app.command()
@told_plainly
@with_settings("model", "cache", "scheduler", "engine")
def latency(
    model: Model = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of each prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens to generate for each.")] = 128,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Requests at once.")] = 1,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Runs; the medians are reported.")] = 3,
    json: JsonFile = None,
    config: ConfigFile = None,
    **flags: Any,
) -> None:
    """Prefill and decode rates of one batch, beside what this machine can do at best."""
    log_to_stderr(logging.WARNING)
    settings = resolved(model, config, flags).config
    from ropeway.bench.latency import measure_latency
    from ropeway.bench.report import figures_table, reported_to, settings_of

    asked = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "batch": batch, "repeat": repeat}
    with reported_to(json) as report, _progress("runs") as progress:
        figures = asdict(measure_latency(settings, **asked, progress=progress))
        report.update(figures, **asked, settings=settings_of(settings))
    _print(figures_table(f"{settings.model.model}: {batch} x ({prompt_tokens} + {output_tokens}) tokens", figures))


@app.command()
@told_plainly
@with_settings("model", "cache", "scheduler", "engine")
def throughput(
    model: Model = None,
    workload: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="A request per line: prompt_tokens or prompt_token_ids, output_tokens, arrival_s; "
            "default: 32 requests of mixed lengths, all at once.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Chooses the ids of prompts given by length.")] = 0,
    json: JsonFile = None,
    config: ConfigFile = None,
    **flags: Any,
) -> None:
    """How fast a workload gets done."""
    log_to_stderr(logging.WARNING)
    settings = resolved(model, config, flags).config
    from ropeway.bench.workload import mixed_workload, read_workload

    requests = mixed_workload() if workload is None else read_workload(workload)
    from ropeway.bench.report import figures_table, reported_to, settings_of
    from ropeway.bench.throughput import measure_throughput

    with reported_to(json) as report, _progress("output tokens") as progress:
        figures = asdict(measure_throughput(settings, requests, seed=seed, progress=progress))
        report.update(figures, workload=None if workload is None else str(workload), settings=settings_of(settings))
    _print(figures_table(f"{settings.model.model}: {workload or 'mixed lengths'}", figures))


@app.command()
@told_plainly
def overhead(
    sequences: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N ...", min=1, help="Requests running at once; default: 64 256 1024.", show_default=False
        ),
    ] = None,
    more: Annotated[list[int] | None, typer.Argument(hidden=True, min=1)] = None,
    step_ms: Annotated[
        float, typer.Option(metavar="X", help="What a step takes on the device; 0: steps run back to back.")
    ] = 5.0,
    json: JsonFile = None,
) -> None:
    """What the host costs per step: the production loop over a device that only takes time."""
    if not step_ms >= 0:
        raise typer.BadParameter("--step-ms must be 0 or more")
    from ropeway.bench.overhead import report as measure_overhead
    from ropeway.bench.report import reported_to

    # "--sequences 64 256": an option takes one value, the rest are left over.
    counts = [*(sequences or []), *(more or [])] or list(_SEQUENCES)
    with reported_to(json) as report:
        report.update(measure_overhead(counts, step_ms))
    _print(_overhead_table(report["runs"]))


def _overhead_table(runs: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title="host cost per step: microseconds of CPU time, p50 / p99", title_justify="left")
    for heading in ("sequences", "async", "bubble", "plan", "settle", "both"):
        table.add_column(heading, justify="right")
    for run in runs:
        costs = [run[name] for name in ("plan_us", "settle_us", "host_us_per_step")]
        table.add_row(
            str(run["sequences"]),
            "on" if run["async_scheduling"] else "off",
            f"{run['bubble']:.2%}",
            *(f"{cost['p50']:.0f} / {cost['p99']:.0f}" for cost in costs),
        )
    return table


def _print(table: Any) -> None:
    from rich.console import Console

    Console().print(table)


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(what))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("loading", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, description="measuring", completed=done, total=total)

        yield show
