"""The command line: ``ropeway COMMAND``. Modules of commands import nothing heavy before they run."""

from __future__ import annotations

from typing import Annotated

import typer

from ropeway.cli import bench
from ropeway.cli.chat import chat
from ropeway.cli.doctor import doctor
from ropeway.cli.generate import generate
from ropeway.cli.pull import pull
from ropeway.cli.serve import serve
from ropeway.cli.simulate import simulate
from ropeway.version import __version__

app = typer.Typer(
    name="ropeway",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ropeway {__version__}")
        raise typer.Exit()


@app.callback()
def ropeway(
    show: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """An LLM serving engine whose batch never stops."""


for command in (serve, chat, generate, pull, doctor, simulate):
    app.command()(command)
app.add_typer(bench.app, name="bench")
