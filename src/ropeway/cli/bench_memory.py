"""ropeway bench preemption | prefix"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropeway.cli.failures import told_plainly
from ropeway.cli.options import ConfigFile, Model, resolved, with_settings
from ropeway.cli.terminal import JsonFile, print_table, progress_bar
from ropeway.logs import log_to_stderr

if TYPE_CHECKING:
    from ropeway.bench.preemption import ResumeCost

_LENGTHS = (64, 256, 1024)


@told_plainly
@with_settings("model", "cache", "engine")
def preemption(
    model: Model = None,
    lengths: Annotated[
        list[int] | None,
        typer.Option(
            "--length",
            min=1,
            metavar="N",
            help="Prompt tokens; may be repeated; default: 64, 256, 1024.",
            show_default=False,
        ),
    ] = None,
    kept: Annotated[
        bool, typer.Option("--kept/--lost", help="Whether a preempted request's blocks stay in the prefix cache.")
    ] = False,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Requests of each kind and length.")] = 6,
    json: JsonFile = None,
    config: ConfigFile = None,
    **flags: Any,
) -> None:
    """What it costs to take a request's seat away and give it back: by swap, by recomputing, and as chosen by cost."""
    log_to_stderr(logging.ERROR)
    settings = resolved(model, config, flags).config
    from ropeway.bench.preemption import measure_preemption
    from ropeway.bench.preemption import report as summary
    from ropeway.bench.report import reported_to, settings_of

    chosen = lengths or list(_LENGTHS)
    with reported_to(json) as report, progress_bar("runs") as progress:
        costs = measure_preemption(settings, chosen, kept=kept, repeat=repeat, progress=progress)
        report.update(summary(costs), kept=kept, settings=settings_of(settings))
    print_table(_preemption_table(f"{settings.model.model}: what a preemption costs, medians", costs))


@told_plainly
@with_settings("model", "cache", "scheduler", "engine", "parallel")
def prefix(
    model: Model = None,
    prompt_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens of each prompt.")] = 1280,
    shared: Annotated[float, typer.Option(metavar="X", help="Share of them that two prompts have in common.")] = 0.95,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Pairs of prompts; the medians are reported.")] = 5,
    zero_hits: Annotated[
        bool, typer.Option("--zero-hits", help="Measure, too, what the cache costs where nothing is shared.")
    ] = False,
    json: JsonFile = None,
    config: ConfigFile = None,
    **flags: Any,
) -> None:
    """What the prefix cache saves where prompts share a beginning."""
    log_to_stderr(logging.WARNING)
    settings = resolved(model, config, flags).config
    from ropeway.bench.prefix import measure_prefix, measure_zero_hits
    from ropeway.bench.report import figures_table, reported_to, settings_of

    with reported_to(json) as report:
        with progress_bar("pairs") as progress:
            gain = measure_prefix(
                settings, prompt_tokens=prompt_tokens, shared=shared, repeat=repeat, progress=progress
            )
        figures = asdict(gain)
        if zero_hits:
            with progress_bar("pairs") as progress:
                figures["zero_hits"] = asdict(measure_zero_hits(settings, repeat=repeat, progress=progress))
        report.update(figures, settings=settings_of(settings))
    print_table(figures_table(f"{settings.model.model}: a shared beginning", asdict(gain)))
    if zero_hits:
        print_table(figures_table(f"{settings.model.model}: nothing shared", figures["zero_hits"]))


def _preemption_table(title: str, costs: Sequence[ResumeCost]) -> Any:
    from rich.table import Table

    from ropeway.bench.report import readable

    table = Table(title=title, title_justify="left")
    for heading in ("prompt tokens", "kind", "cost", "what was done", "same tokens"):
        table.add_column(heading, justify="right" if heading in ("prompt tokens", "cost") else "left")
    for cost in costs:
        done = ", ".join(f"{word} {count}" for word, count in cost.done.items())
        shown = readable("cost_s", cost.median_s)
        table.add_row(str(cost.context_tokens), cost.kind, shown, done, "yes" if cost.identical else "NO")
    return table
