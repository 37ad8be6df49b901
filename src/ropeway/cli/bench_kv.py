"""ropeway bench kv"""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropeway.cli.failures import told_plainly
from ropeway.cli.options import ConfigFile, Model, resolved, with_settings
from ropeway.cli.terminal import JsonFile, print_table, progress_bar
from ropeway.logs import log_to_stderr

if TYPE_CHECKING:
    from ropeway.bench.kv import KVFigures


@told_plainly
@with_settings("model", "cache", "engine.device", "engine.threads", "engine.activations")
def kv(
    model: Model = None,
    context: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens before the first that is decoded.")] = 4096,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences at once.")] = 4,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens to decode in a round.")] = 8,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Rounds; the medians are reported.")] = 5,
    traces: Annotated[
        list[Path] | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Recorded requests, for the share of slots held and not used; may be repeated.",
            show_default=False,
        ),
    ] = None,
    json: JsonFile = None,
    config: ConfigFile = None,
    **flags: Any,
) -> None:
    """Room and speed of every type of keys and values, and what it costs to keep them in blocks."""
    log_to_stderr(logging.ERROR)
    settings = resolved(model, config, flags).config
    from ropeway.bench.kv import measure_kv, measure_waste
    from ropeway.bench.report import reported_to, settings_of
    from ropeway.bench.traces import read_trace
    from ropeway.simulation.cost_model import DEFAULT_COST_MODEL, read_cost_model

    trace = read_trace(traces) if traces else None
    with reported_to(json) as report:
        with progress_bar("rounds") as progress:
            figures = measure_kv(settings, context=context, batch=batch, steps=steps, repeat=repeat, progress=progress)
        report.update(asdict(figures), steps=steps, repeat=repeat, settings=settings_of(settings))
        if trace is not None:
            cost = read_cost_model(DEFAULT_COST_MODEL)
            report["kv_waste"] = measure_waste(trace, cost, settings.cache.block_size)
    print_table(_types_table(f"{settings.model.model}: {batch} sequences of {context} tokens", figures))
    for name, ratio in figures.paged_over_contiguous.items():
        typer.echo(f"attention over blocks / over one piece of memory, {name}: {ratio:.3f}")
    if trace is not None:
        typer.echo(f"slots held and not used, blocks of {settings.cache.block_size}: {report['kv_waste']:.2%}")


def _types_table(title: str, figures: KVFigures) -> Any:
    from rich.table import Table

    from ropeway.bench.report import readable

    table = Table(title=title, title_justify="left")
    for heading in ("", "bytes a token", "room / bf16", "decode, tokens/s", "decode / bf16"):
        table.add_column(heading, justify="right" if heading else "left")
    for each in figures.types:
        if each.decode_tokens_per_s is None:
            table.add_row(each.dtype, "-", "-", each.note, "-")
            continue
        rate = readable("decode_per_s", each.decode_tokens_per_s)
        size, room, relative = each.bytes_per_token, each.capacity, each.decode_over_base
        table.add_row(each.dtype, f"{size:,.0f}", f"{room:.2f}", rate, f"{relative:.2f}")
    return table
