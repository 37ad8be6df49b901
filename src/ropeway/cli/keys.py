"""ropeway keys"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ropeway.cli.failures import told_plainly

app = typer.Typer(
    name="keys",
    help="API keys of a server (serve --api-keys FILE).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def keys() -> None:
    """API keys of a server (serve --api-keys FILE)."""


@app.command()
@told_plainly
def new(
    name: Annotated[str, typer.Argument(help="What logs are to call it.")],
    tenant: Annotated[str | None, typer.Option(help="Whose it is; default: the name.")] = None,
    tier: Annotated[str | None, typer.Option(help="The highest tier it may ask for.")] = None,
    requests_per_minute: Annotated[float | None, typer.Option(min=0.001)] = None,
    tokens_per_minute: Annotated[float | None, typer.Option(min=0.001)] = None,
    max_concurrent: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Make a key: it is shown once, on stderr; the entry for the file goes to stdout (>> keys.toml)."""
    from ropeway.server.keys import digest_of, new_key

    key = new_key()
    typer.echo(f"key of {name}, shown this once: {key}", err=True)
    fields = {
        "name": name,
        "sha256": digest_of(key.encode()),
        "tenant": tenant,
        "tier": tier,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
    }
    typer.echo("[[key]]")
    for field, value in fields.items():
        if value is not None:
            typer.echo(f"{field} = {json.dumps(value, ensure_ascii=False)}")
    typer.echo()
