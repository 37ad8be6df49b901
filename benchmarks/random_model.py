"""Write a checkpoint with the shape of a known model and random weights, for benchmarks of any engine.

python -m benchmarks.random_model qwen3-0.6b            # prints the folder
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropeway.bench.random_model import random_model
from ropeway.bench.shapes import SHAPES
from ropeway.cli.failures import told_plainly


@told_plainly
def _main(
    shape: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}.")],
    root: Annotated[Path | None, typer.Option(help="Where to write it; default: Ropeway's cache.")] = None,
) -> None:
    """Write a checkpoint with random weights and print its folder."""
    typer.echo(random_model(shape, root))


if __name__ == "__main__":
    typer.run(_main)
