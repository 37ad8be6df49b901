"""How the ranks of one model talk: the collectives that models call in their straight-line code.

A collective is also the only place where two micro-batches of a step change over, so models need to know
neither of ranks that wait nor of micro-batches.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Communicator(Protocol):
    """Every rank calls the same collectives in the same order, with tensors of the same shape."""

    @property
    def rank(self) -> int:
        """0 <= rank < size."""
        ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, added in rank order; ``x`` may be overwritten."""
        ...

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The ranks' tensors concatenated along ``dim`` in rank order."""
        ...


class SingleProcess:
    """One rank: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x
