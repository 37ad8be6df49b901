"""ropeway bench perplexity"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ropeway.cli.failures import told_plainly
from ropeway.cli.options import ConfigFile, Model, resolved, with_settings
from ropeway.cli.terminal import JsonFile, print_table, progress_bar
from ropeway.config import Config
from ropeway.errors import ConfigError
from ropeway.logs import log_to_stderr
from ropeway.settings import Origin, convert, settings


@told_plainly
@with_settings(
    "model.dtype",
    "model.weights",
    "cache.block_size",
    "cache.kv_dtype",
    "scheduler.max_batched_tokens",
    "engine.device",
    "engine.threads",
    "engine.activations",
)
def perplexity(
    model: Model = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What to predict, in UTF-8; default: docstrings of Python's standard library.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="The first N tokens of it; default: 8,192 at most.", show_default=False),
    ] = None,
    context: Annotated[
        int, typer.Option(min=2, metavar="N", help="Tokens of a chunk, each predicted from those before it there.")
    ] = 1024,
    baseline_weights: Annotated[
        str, typer.Option(metavar="W", help="--weights of the baseline; auto: as in the file.")
    ] = "auto",
    baseline_kv_dtype: Annotated[str, typer.Option(metavar="K", help="--kv-dtype of the baseline.")] = "fp32",
    baseline_activations: Annotated[str, typer.Option(metavar="A", help="--activations of the baseline.")] = "int16",
    json: JsonFile = None,
    config: ConfigFile = None,
    **flags: Any,
) -> None:
    """What a setting costs in exactness: perplexity of a text, beside a baseline in the same run."""
    log_to_stderr(logging.WARNING)
    chosen = resolved(model, config, flags).config
    baseline = _baseline(chosen, weights=baseline_weights, kv_dtype=baseline_kv_dtype, activations=baseline_activations)
    from ropeway.bench.docstrings import standard_library_docstrings
    from ropeway.bench.perplexity import measure_perplexity, read_text
    from ropeway.bench.report import figures_table, reported_to, settings_of

    written = standard_library_docstrings() if text is None else _read(text)
    with reported_to(json) as report, progress_bar("tokens") as progress:
        cut = read_text(chosen, written, tokens=tokens, context=context)
        cost, chunks = measure_perplexity(chosen, baseline, cut, progress=progress)
        report.update(
            asdict(cost),
            context=context,
            by_chunk=chunks,
            text="docstrings" if text is None else str(text),
            text_sha256=hashlib.sha256(written.encode()).hexdigest(),
            settings=settings_of(chosen),
            baseline_settings=settings_of(baseline),
        )
    print_table(
        figures_table(f"{chosen.model.model}: {_described(chosen)} beside {_described(baseline)}", asdict(cost))
    )


def _baseline(config: Config, **fields: str) -> Config:
    """The configuration with other words for these settings. Raises ``ConfigError`` for a word they don't know."""
    value = {
        name: convert(settings()[name], word, Origin(3, "--baseline-" + name.replace("_", "-")))
        for name, word in fields.items()
    }
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dtype="auto", weights=value["weights"]),
        cache=dataclasses.replace(config.cache, kv_dtype=value["kv_dtype"]),
        engine=dataclasses.replace(config.engine, activations=value["activations"]),
    )


def _described(config: Config) -> str:
    weights = config.model.dtype if config.model.weights == "auto" else config.model.weights
    return f"weights {weights}, KV {config.cache.kv_dtype}, activations {config.engine.activations}"


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", param="text") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 at byte {error.start}; convert it", param="text") from error
