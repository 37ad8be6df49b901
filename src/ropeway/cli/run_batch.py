"""ropeway run-batch"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ropeway.cli.failures import told_plainly
from ropeway.cli.options import ConfigFile, Model, resolved, with_settings
from ropeway.logs import log_to_stderr


@told_plainly
@with_settings("model", "cache", "scheduler", "engine", "parallel")
def run_batch(
    model: Model = None,
    input_file: Annotated[Path, typer.Option("--input", "-i", metavar="FILE.jsonl", help="Requests.")] = Path("-"),
    output_file: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.jsonl", help="Answers.")] = Path("-"),
    resume: Annotated[bool, typer.Option("--resume", help="Keep the answers that the output has.")] = False,
    config: ConfigFile = None,
    **flags: Any,
) -> None:
    """Answer a file of requests in OpenAI's batch format, all of them in one continuous batch."""
    import asyncio

    from ropeway.server.batch import run_file

    log_to_stderr()
    settings = resolved(model, config, flags).config
    done = asyncio.run(run_file(settings, input_file, output_file, resume=resume))
    typer.echo(f"{done.answered} answered, {done.failed} failed, {done.kept} kept from before", err=True)
    if done.failed:
        raise typer.Exit(1)
