"""ropeway top"""

from __future__ import annotations

from typing import Annotated

import typer

from ropeway.cli.failures import told_plainly


@told_plainly
def top(
    url: Annotated[str, typer.Argument(help="Where the server listens.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="ROPEWAY_API_KEY", help="A key that may see all requests.", show_default=False)
    ] = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    screenshot: Annotated[
        str | None,
        typer.Option(metavar="FILE.svg", help="Look a few times, save a picture and exit.", show_default=False),
    ] = None,
) -> None:
    """Watch a running server in the terminal: its batch, queues, KV pool and latencies."""
    from ropeway.cli.top_view import TopApp

    TopApp(url.rstrip("/"), api_key, every_s=every, screenshot=screenshot).run(
        headless=screenshot is not None, size=None if screenshot is None else (132, 34)
    )
