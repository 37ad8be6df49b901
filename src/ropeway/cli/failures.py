"""How commands fail: one line on stderr and an exit code, never a traceback for what a user can cause."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import typer

from ropeway.errors import RopewayError

Command = TypeVar("Command", bound=Callable[..., None])


def told_plainly(command: Command) -> Command:
    """Turn a ``RopewayError`` into ``error: ...`` and exit code 1; Ctrl-C into exit code 130."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except RopewayError as error:
            typer.echo(f"error: {error.message}", err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(130) from interrupt

    return wrapped  # type: ignore[return-value]
