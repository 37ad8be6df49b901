"""ropeway serve"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ropeway.cli.failures import told_plainly
from ropeway.cli.options import ConfigFile, Model, resolved, with_settings
from ropeway.logs import log_to_stderr
from ropeway.settings import render


@told_plainly
@with_settings("model", "cache", "scheduler", "engine", "parallel", "server")
def serve(
    model: Model = None,
    config: ConfigFile = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the settings and where each came from, then exit.")
    ] = False,
    **flags: Any,
) -> None:
    """Serve a model over HTTP, as the OpenAI API does; with --node-rank, hold ranks for the host that serves."""
    log_to_stderr()
    result = resolved(model, config, flags)
    if result.config.server.log_format == "json":
        log_to_stderr(form="json", again=True)
    if show_config:
        typer.echo(render(result))
        return
    if result.config.parallel.node_rank:
        from ropeway.execution.ranks.node import run_node

        raise typer.Exit(run_node(result.config.parallel))
    from ropeway.engine.spawn import SpawnedEngine

    with SpawnedEngine() as spawned:  # before the imports of the server, which take a while
        from ropeway.server.run import run

        raise typer.Exit(run(result.config, spawned))
