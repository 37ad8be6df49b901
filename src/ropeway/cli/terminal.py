"""What measuring commands share: where figures go, tables, and a bar of progress."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write every figure here, too.", show_default=False)
]


def print_table(table: Any) -> None:
    from rich.console import Console

    Console().print(table)


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr if that is a terminal; called with (done, total)."""
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
