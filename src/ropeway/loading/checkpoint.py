"""What every checkpoint format looks like from above: one dictionary in the words of Hugging Face's
``config.json``, and named tensors in the names of Hugging Face's models, whatever the file calls them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from ropeway.devices.base import HostTensor


class Checkpoint(Protocol):
    path: Path
    config: dict[str, Any]
    """As ``config.json``: ``architectures``, ``hidden_size``, ``rope_scaling``, ..."""
    generation_config: dict[str, Any]
    """As ``generation_config.json``; {} when there is none."""

    def names(self) -> Iterable[str]:
        """All tensor names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def get(self, name: str, rows: slice | None = None) -> HostTensor:
        """The tensor, or rows [start, stop) of a matrix, mapped or decoded on the spot; nothing is kept. The pages of
        what was read are given back to the system, those of a mapped tensor at the next ``get``: they come back from
        the file when touched, but a process that packs slice by slice doesn't grow by the file. Raises ``LoadError``.
        """
        ...

    def close(self) -> None: ...
