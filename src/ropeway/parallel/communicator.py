"""How the ranks of one model talk: the collectives that models call in their straight-line code.

A collective is also the only place where two micro-batches of a step change over, so models need to know
neither of ranks that wait nor of micro-batches.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ropeway.devices.recording import Handle


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


class Recordable:
    """A communicator whose collectives are recorded where they are called on a handle: each ends a segment of the
    program, which is replayed up to it, and calls the real one then."""

    def __init__(self, communicator: Communicator) -> None:
        self._real = communicator
        self.rank = communicator.rank
        self.size = communicator.size

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        if isinstance(x, Handle):
            return x.reduced(self._real.all_reduce)
        return self._real.all_reduce(x)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        if self.size == 1:
            return x
        if isinstance(x, Handle):
            if dim != 1:
                raise ValueError(f"a recorded all_gather joins features, dimension 1, not {dim}")
            return x.reduced(lambda tensor: self._real.all_gather(tensor, dim), self.size)
        return self._real.all_gather(x, dim)
