"""Command-line flags made from the settings, so that every command has the same ones, described the same way."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from ropeway.settings import Resolved, Setting, resolve, settings

Command = TypeVar("Command", bound=Callable[..., None])

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A hub id, a folder, a .gguf file or a built-in name; default: the embedded model.",
        show_default=False,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings as TOML, YAML or JSON.", show_default=False),
]


def with_settings(*places: str) -> Callable[[Command], Command]:
    """Give a command the flags of these sections of the settings, or of single fields (``cache.kv_dtype``). It declares
    ``**flags`` and receives all of them there, by field name, None where not given. The field ``model`` is left out: it
    is an argument."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        chosen = [s for s in settings().values() if s.section in places or s.path in places]
        made = [_parameter(s) for s in chosen if s.name != "model"]
        command.__signature__ = signature.replace(parameters=[*own, *made])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in [*own, *made]}
        return command

    return decorate


def resolved(model: str | None, file: Path | None, flags: dict[str, Any]) -> Resolved:
    """The settings of a command; notes about them go to the log. Raises ``ConfigError``."""
    result = resolve({"model": model, **flags}, file=file)
    for note in result.notes:
        logging.getLogger("ropeway").warning("%s", note)
    return result


def _parameter(setting: Setting) -> inspect.Parameter:
    flag = setting.flag
    if setting.kind is bool:
        flag += f"/--no-{flag.removeprefix('--')}"
    kind: Any = Literal[setting.choices] if setting.choices else setting.kind
    option = typer.Option(
        flag,
        help=_help(setting),
        show_default=False,
        rich_help_panel=f"Settings: {setting.section}",
    )
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _help(setting: Setting) -> str:
    # A bracket begins markup for rich.
    text = setting.doc.replace("[", r"\[")
    if setting.default is None or "default" in setting.doc:
        return text
    default = setting.default
    shown = {True: "yes", False: "no"}[default] if isinstance(default, bool) else default
    return rf"{text} \[default: {shown}]"
