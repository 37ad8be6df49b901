"""Sampling flags of the commands that generate."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ropeway.config import Config
from ropeway.request import SamplingParams

MaxTokens = Annotated[int | None, typer.Option("--max-tokens", metavar="N", help="Most tokens to generate.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", help="0 is greedy; default: what the model recommends, else 0.7.", show_default=False
    ),
]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Same seed, same answer; default: a random one.", show_default=False)
]

TEMPERATURE = 0.7
"""For a person at a terminal, where neither they nor the model say otherwise; the API's default of 1 makes small
models ramble."""


def sampling_params(config: Config, **given: Any) -> SamplingParams:
    """The fields given, over those the model recommends, over the built-in ones; None is not given, but for
    ``max_tokens``, where it is "up to the context". Raises ``InvalidRequest``."""
    from ropeway.loading.sources import resolve
    from ropeway.server.sampling import read_defaults

    defaults = read_defaults(resolve(config.model.model))
    fields = {name: value for name, value in given.items() if value is not None or name == "max_tokens"}
    return SamplingParams(**{"temperature": TEMPERATURE, **defaults, **fields})
