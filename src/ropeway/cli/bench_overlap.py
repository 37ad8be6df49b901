"""ropeway bench overlap"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropeway.bench.shapes import SHAPES
from ropeway.cli.failures import told_plainly
from ropeway.cli.options import ConfigFile, Model, resolved, with_settings
from ropeway.cli.terminal import JsonFile, print_table, progress_bar
from ropeway.errors import ConfigError
from ropeway.logs import log_to_stderr

if TYPE_CHECKING:
    from ropeway.bench.overlap import OverlapRun

_TOKENS = (512,)
_FRACTIONS = (0.2, 0.35, 0.5)


@told_plainly
@with_settings("model", "cache", "scheduler", "engine", "parallel.tensor_parallel_size", "parallel.collectives")
def overlap(
    model: Model = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Instead of MODEL: random weights of a known shape, which are kept; {', '.join(SHAPES)}.",
            show_default=False,
        ),
    ] = None,
    netns: Annotated[
        bool,
        typer.Option(
            "--netns",
            help="Two ranks in two network namespaces, a core each, joined by a cable of limited rate. Needs root.",
        ),
    ] = False,
    link_rates: Annotated[
        list[str] | None,
        typer.Option(
            "--link-rate", metavar="RATE", help="Of the cable, as 1gbit; may be repeated.", show_default=False
        ),
    ] = None,
    fractions: Annotated[
        list[float] | None,
        typer.Option(
            "--comm-fraction",
            min=0.01,
            max=0.99,
            metavar="X",
            help="Instead of a rate: the share of a serial step that communication is to take; may be repeated. "
            "Default with --netns: 0.2, 0.35, 0.5.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            "--prompt-tokens", min=2, metavar="N", help="Of a step; may be repeated; default: 512.", show_default=False
        ),
    ] = None,
    fused: Annotated[bool, typer.Option("--fused/--no-fused", help="Measure fused collectives, too.")] = True,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Turns of every mode; medians are reported.")] = 20,
    json: JsonFile = None,
    config: ConfigFile = None,
    **flags: Any,
) -> None:
    """How much communication between ranks is hidden: steps run whole, in two micro-batches and with fused collectives,
    in turns."""
    log_to_stderr(logging.ERROR)
    if model is not None and shape is not None:
        raise ConfigError(f"MODEL {model} and --shape {shape} exclude each other; give one", param="shape")
    chosen = tokens or list(_TOKENS)
    netns = netns or bool(link_rates or fractions)
    flags["prefix_cache"] = False
    flags["max_batched_tokens"] = max(*chosen, flags.get("max_batched_tokens") or 0)
    flags["tensor_parallel_size"] = 2 if netns else flags.get("tensor_parallel_size") or 2
    if shape is not None:
        from ropeway.bench.random_model import random_model

        model = str(random_model(shape))
    settings = resolved(model, config, flags).config
    name = settings.model.model if shape is None else f"{shape} (random weights)"
    from ropeway.bench.overlap import crossover, measure_overlap
    from ropeway.bench.report import reported_to, settings_of

    with reported_to(json) as report:
        with progress_bar("turns") as progress:
            runs = measure_overlap(
                settings,
                tokens=chosen,
                rates=link_rates or (),
                fractions=(fractions or (() if link_rates else _FRACTIONS)) if netns else (),
                fused=fused,
                repeat=repeat,
                progress=progress,
            )
        best = crossover(runs)
        report.update(
            runs=[dataclasses.asdict(run) for run in runs],
            crossover=best,
            repeat=repeat,
            settings=settings_of(settings) | {"model": name},
        )
    print_table(_runs_table(f"{name}: communication hidden, medians of {repeat} turns", runs))
    for case in best:
        link = "" if case["link_rate"] is None else f" over {case['link_rate']}"
        typer.echo(f"{case['tokens']:,} tokens, {case['what']}{link}: {case['best']} is best ({case['speedup']:.2f}x)")


def _runs_table(title: str, runs: list[OverlapRun]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    headings = ("tokens", "of", "link", "mode", "ms", "comm.", "exposed", "kernel overlap", "effective", "speed-up")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in headings[1:4] else "right")
    for run in runs:
        table.add_row(
            f"{run.tokens:,}",
            run.what,
            run.link_rate or "-",
            run.mode,
            f"{1e3 * run.wall_s:,.1f}",
            f"{run.comm_s / run.wall_s:.0%}",
            f"{1e3 * run.exposed_comm_s:,.1f}",
            f"{run.kernel_overlap:.1%}" if run.mode != "serial" else "",
            f"{run.effective_overlap:.1%}" if run.mode != "serial" else "",
            f"{run.speedup:.2f}x" if run.mode != "serial" else "",
        )
    return table
