"""ropeway bench fit"""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ropeway.cli.failures import told_plainly
from ropeway.cli.options import ConfigFile, Model, resolved, with_settings
from ropeway.cli.terminal import print_table, progress_bar
from ropeway.logs import log_to_stderr


@told_plainly
@with_settings("model", "cache", "scheduler", "engine", "parallel")
def fit(
    model: Model = None,
    requests: Annotated[int, typer.Option(min=1, metavar="N", help="Requests to run.")] = 64,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Chooses their lengths and ids.")] = 0,
    json: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write the cost model here, for ropeway simulate --cost-model FILE.",
            show_default=False,
        ),
    ] = None,
    config: ConfigFile = None,
    **flags: Any,
) -> None:
    """What a step takes on this machine: a cost model for the simulator, fitted to the steps of real requests."""
    log_to_stderr(logging.WARNING)
    settings = resolved(model, config, flags).config
    from ropeway.bench.fit import measure_fit
    from ropeway.bench.report import figures_table
    from ropeway.errors import ConfigError

    if json is not None:
        try:
            json.open("a").close()
        except OSError as error:
            raise ConfigError(f"cannot write to {json}: {error.strerror}", param="json") from error
    with progress_bar("output tokens") as progress:
        cost, how_well = measure_fit(settings, requests=requests, seed=seed, progress=progress)
    if json is not None:
        json.write_bytes(cost.to_json())
    shown = {"kv_tokens": cost.kv_tokens, "copy_bytes_per_s": cost.copy_bytes_per_s, **asdict(how_well)}
    coefficients = {name: f"{shown.pop(name):.3g} s" for name in ("a_s", "b_s_per_token", "c_s_per_kv_token")}
    print_table(figures_table(cost.name, coefficients | shown))
