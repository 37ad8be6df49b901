"""The version of the installed package."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """As ``pyproject.toml`` says it; ``0+source`` when the package runs from a source tree without being installed."""
    try:
        return importlib.metadata.version("ropeway")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"
