"""The model that measurements on the CPU use."""

from __future__ import annotations

from ropeway.bench.random_model import random_model
from ropeway.errors import LoadError, ModelNotFound
from ropeway.loading.sources import resolve

SMALL = "smollm2-135m"
REAL = (SMALL, "qwen2.5-coder-0.5b")
"""The models whose perplexity means something."""


def small_model() -> tuple[str, str]:
    """(what to load, what to call it): SmolLM2-135M, or where it can't be fetched, its shape with random weights."""
    try:
        resolve(SMALL)
    except (LoadError, ModelNotFound):
        return str(random_model(SMALL)), f"{SMALL} (random weights)"
    return SMALL, SMALL
