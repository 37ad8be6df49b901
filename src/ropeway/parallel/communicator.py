"""How the ranks of one model talk: the collectives that models call in their straight-line code.

A collective is also the only place where two micro-batches of a step change over, so models need to know
neither of ranks that wait nor of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from ropeway.devices.recording import Handle

Product = Callable[[Tensor], Tensor]


class Collectives(Protocol):
    """What a model calls. Every rank calls the same collectives in the same order, with tensors of the same shape."""

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

    def reduce_product(self, product: Product, x: Tensor, features: int) -> Tensor:
        """``all_reduce(product(x))`` of x [rows, k], where ``product`` gives [rows, features], each row from that row
        of x alone: so it may be computed and added up some rows at a time."""
        ...


class Communicator(Collectives, Protocol):
    """What a rank's process has."""

    def broadcast(self, x: Tensor) -> None:
        """``x`` becomes what it is on rank 0."""
        ...

    def fail(self) -> None:
        """Make this rank's collectives raise ``RuntimeError``, those that wait too where that can be done; from any
        thread."""
        ...


class SingleProcess:
    """One rank: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x

    def reduce_product(self, product: Product, x: Tensor, features: int) -> Tensor:
        return product(x)

    def broadcast(self, x: Tensor) -> None:
        """Nobody else is there."""

    def fail(self) -> None:
        """Nothing waits."""


class Recordable:
    """The collectives of a model, recorded where they are called on a handle: each ends a segment of the program, which
    is replayed up to it, and calls the real one then."""

    def __init__(self, communicator: Collectives, *, fused: bool = False) -> None:
        """``fused``: a product and the sum over its parts are one collective."""
        self._fused = fused
        self._real = communicator
        self.rank = communicator.rank
        self.size = communicator.size

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        if isinstance(x, Handle):
            return x.collective(self._real.all_reduce, x.sizes[0])
        return self._real.all_reduce(x)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        if self.size == 1:
            return x
        if isinstance(x, Handle):
            if dim != 1:
                raise ValueError(f"a recorded all_gather joins features, dimension 1, not {dim}")
            return x.collective(lambda tensor: self._real.all_gather(tensor, dim), self.size * x.sizes[0])
        return self._real.all_gather(x, dim)

    def reduce_product(self, product: Product, x: Tensor, features: int) -> Tensor:
        if self.size == 1:
            return product(x)
        if not self._fused:
            return self.all_reduce(product(x))
        if isinstance(x, Handle):
            return x.collective(lambda tensor: self._real.reduce_product(product, tensor, features), features)
        return self._real.reduce_product(product, x, features)
