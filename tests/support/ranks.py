"""Several ranks of one model in one process: a thread each, and collectives between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from ropeway.parallel.communicator import Collectives, Product

T = TypeVar("T")


class ThreadGroup:
    """Where the ranks' tensors meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=60)
        self.collectives = 0
        """How many have run."""

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.parts[rank] = x.clone()
        self.barrier.wait()
        parts = list(self.parts)
        if self.barrier.wait() == 0:
            self.collectives += 1
        return parts


class ThreadCommunicator:
    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.size = group.size

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.group.exchange(self.rank, x)).sum(0)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self.group.exchange(self.rank, x), dim)

    def reduce_product(self, product: Product, x: Tensor, features: int) -> Tensor:
        return self.all_reduce(product(x))


def run_ranks(size: int, work: Callable[[Collectives], T]) -> tuple[list[T], int]:
    """The results of ``work`` on each rank, and the number of collectives. Raises what a rank raises."""
    group = ThreadGroup(size)

    def rank(index: int) -> T:
        try:
            return work(ThreadCommunicator(group, index))
        except BaseException:
            group.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank, index) for index in range(size)]
        errors = [e for f in futures if (e := f.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures], group.collectives
