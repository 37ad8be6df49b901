"""ropeway config"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ropeway.cli.failures import told_plainly

if TYPE_CHECKING:
    from ropeway.migration.translation import Translation

app = typer.Typer(
    name="config",
    help="Settings from other engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
imports = typer.Typer(
    help="Translate another engine's configuration into a file for --config. What cannot be translated is listed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(imports, name="import")

Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write the settings there, not to stdout.", show_default=False),
]


@imports.command()
@told_plainly
def mindie(
    file: Annotated[Path, typer.Argument(metavar="CONFIG.json", help="MindIE's configuration.")],
    output: Output = None,
) -> None:
    """From MindIE's config.json (and what MindIE reads from the environment)."""
    from ropeway.migration.mindie import environment, from_mindie

    translation = from_mindie(file)
    environment(os.environ, translation)
    _tell(translation, f"MindIE's {file.name}", output)


@imports.command()
@told_plainly
def vllm(
    arguments: Annotated[str, typer.Argument(metavar="ARGS", help='"MODEL --flag value ...", in one pair of quotes.')],
    output: Output = None,
) -> None:
    """From the arguments of vllm serve."""
    from ropeway.migration.vllm import from_vllm

    _tell(from_vllm(arguments), "the arguments of vllm serve", output)


def _tell(translation: Translation, source: str, output: Path | None) -> None:
    notes = translation.check()
    text = translation.toml(source)
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
        typer.echo(f"{len(translation.values)} settings written to {output}", err=True)
    for title, lines in (
        ("Not translated:", translation.lost),
        ("Needed no translation:", translation.kept),
        ("Notes:", notes),
    ):
        if lines:
            typer.echo(f"\n{title}", err=True)
            for line in lines:
                typer.echo(f"  {line}", err=True)
