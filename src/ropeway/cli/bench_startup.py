"""ropeway bench startup"""

from __future__ import annotations

import logging
from typing import Annotated, Any

import typer

from ropeway.cli.failures import told_plainly
from ropeway.cli.options import ConfigFile, Model, resolved, with_settings
from ropeway.cli.terminal import JsonFile, print_table, progress_bar
from ropeway.logs import log_to_stderr


@told_plainly
@with_settings("model", "cache", "scheduler", "engine", "parallel")
def startup(
    model: Model = None,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Starts of each kind; medians are reported.")] = 3,
    evict: Annotated[
        bool, typer.Option("--evict", help="Drop the model's files from the page cache before each start.")
    ] = False,
    json: JsonFile = None,
    config: ConfigFile = None,
    **flags: Any,
) -> None:
    """Cold start to first token of generate and serve, part by part, and what memory all processes hold then."""
    log_to_stderr(logging.WARNING)
    settings = resolved(model, config, flags).config
    from ropeway.bench.report import figures_table, reported_to, settings_of
    from ropeway.bench.startup import files_of, measure_startup
    from ropeway.bench.startup import report as summary
    from ropeway.loading.sources import resolve

    files = files_of(resolve(settings.model.model))  # fetched now, if need be: that is no part of a start
    arguments = [settings.model.model, *([] if config is None else ["--config", str(config)]), *_given(flags)]
    with reported_to(json) as report, progress_bar("runs") as progress:
        figures = summary(measure_startup(arguments, repeat=repeat, files=files if evict else (), progress=progress))
        report.update(figures, evicted=evict, settings=settings_of(settings))
    plain = {name: value for name, value in figures.items() if not isinstance(value, dict | list)}
    print_table(figures_table(f"{settings.model.model}: from the command to the first token", plain))
    for kind in ("generate", "serve"):
        print_table(figures_table(f"ropeway {kind}", {f"{k}_s": v for k, v in figures[f"{kind}_parts_s"].items()}))


def _given(flags: dict[str, Any]) -> list[str]:
    """The flags as they were given."""
    words: list[str] = []
    for name, value in flags.items():
        word = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{word}" if value else f"--no-{word}")
        elif value is not None:
            words += [f"--{word}", str(value)]
    return words
