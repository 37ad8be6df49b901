"""The command line: ``ropeway COMMAND``. A command is imported and its flags are made when it is asked for, and its
module imports nothing heavy before it runs."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
import typer.core

from ropeway.version import __version__

COMMANDS = ("serve", "chat", "generate", "pull", "doctor", "simulate", "bench", "run-batch", "top", "keys", "config")
"""Modules of ``ropeway.cli``, each with a function, or an ``app`` of further commands, of its name."""


class _OnDemand(typer.core.TyperGroup):
    """Commands whose modules are imported at first use: the flags of all take longer to make than most commands need
    to start."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            for name in COMMANDS:  # so that a similar one can be suggested
                self.get_command(ctx, name)
            return None
        if cmd_name not in self.commands:
            self.commands[cmd_name] = _made(cmd_name)
        return self.commands[cmd_name]


def _made(name: str) -> Any:
    place = name.replace("-", "_")
    module = importlib.import_module(f"ropeway.cli.{place}")
    app: typer.Typer | None = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
        app.command(name)(getattr(module, place))
    command = typer.main.get_command(app)
    command.name = name
    return command


app = typer.Typer(
    name="ropeway",
    cls=_OnDemand,
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
