"""Where the time of a decode step goes, kernel by kernel.

python -m benchmarks.profile_step qwen3-0.6b --batch 32 --context 384
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ropeway.bench.profile import StepProfile, profile_step
from ropeway.bench.random_model import random_model
from ropeway.bench.report import readable, reported_to, settings_of
from ropeway.bench.shapes import SHAPES
from ropeway.cli.failures import told_plainly
from ropeway.settings import resolve


def table_of(profile: StepProfile) -> Table:
    table = Table(
        title=f"{profile.batch} requests at {profile.context} tokens: {profile.step_us / 1000:.2f} ms a step, "
        f"idle between steps {profile.idle_us / 1000:.2f} ms, not in kernels {profile.host_share:.1%}",
        title_justify="left",
    )
    for heading in ("part", "calls", "us", "share", "weights read at"):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    for part in profile.parts:
        rate = readable("weight_bytes_per_s", part.weight_bytes_per_s) if part.weight_bytes else ""
        table.add_row(part.kind, str(part.calls), f"{part.us:,.0f}", f"{part.share:.1%}", rate)
    return table


@told_plainly
def _main(
    model: Annotated[str, typer.Argument(help=f"A model, or a random one's shape: {', '.join(SHAPES)}.")],
    batch: Annotated[int, typer.Option(min=1, help="Requests in the step.")] = 32,
    context: Annotated[int, typer.Option(min=1, help="Tokens in the cache per request.")] = 384,
    steps: Annotated[int, typer.Option(min=1, help="Steps to take medians over.")] = 32,
    device: Annotated[str, typer.Option(help="cpu or reference.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Profile decode steps of one batch."""
    folder = str(random_model(model)) if model in SHAPES else model
    fields = {"model": folder, "device": device, "threads": threads, "max_num_seqs": max(batch, 64)}
    config = resolve(fields).config
    with reported_to(json_file) as report:
        profile = profile_step(config, batch=batch, context=context, steps=steps)
        report.update(asdict(profile), settings=settings_of(config) | {"model": model})
    Console().print(table_of(profile))


if __name__ == "__main__":
    typer.run(_main)
