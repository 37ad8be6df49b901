"""Two micro-batches of one step that take turns: while one computes, the other communicates.

    compute         | A1 |   B1   |   A2   |   B2   | ...
    communication        |  A1  |   |  B1  |   |  A2  | ...

They change over inside the collectives, and nowhere else: a collective is queued on the communication stream, the other
micro-batch goes on, and when this one's turn comes again it waits for its own result. So models know nothing of
micro-batches. Both are greenlets of the thread that computes: there is nothing to lock, and what PyTorch keeps per
thread (inference mode, say) holds for both; neither enters such a mode across a collective.

The alternative, for one micro-batch: a product whose parts are added up is computed some rows at a time, and these are
added up while the next ones are computed.

A is always ahead. So every rank communicates in the same order A, B, A, B, and part B may read what part A has written
in the same layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Generic, TypeVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

from ropeway.devices.base import Event, Stream
from ropeway.parallel.communicator import Communicator, Product
from ropeway.trace import COMMUNICATION, COMPUTE, Trace

FUSED_ROWS = 32
"""Least rows of a block: fewer would waste what a product gains from many."""

A = TypeVar("A")
B = TypeVar("B")


@dataclass
class Communication:
    """Seconds since the last ``Overlapping.take``."""

    busy_s: float = 0.0
    """Under collectives."""
    exposed_s: float = 0.0
    """The same, in which nothing was computed."""


class Overlapping:
    """Implements ``Communicator`` over another one: which is called on a stream of its own while two micro-batches run,
    or a product is added up block by block, and directly where nothing could be done meanwhile."""

    def __init__(self, communicator: Communicator, stream: Stream) -> None:
        """``stream`` is closed with this."""
        self.fused_blocks = 0
        """Most blocks of rows that ``reduce_product`` is cut into; below 2: it is not."""
        self.rank = communicator.rank
        self.size = communicator.size
        self._communicator = communicator
        self._stream = stream
        self.trace: Trace | None = None
        """Takes what was computed and communicated when."""
        self._other: dict[greenlet, greenlet] = {}
        """While two run: who goes on when one waits."""
        self._computing_s = 0.0
        """While two run: since when one of them has computed."""
        self._spent = Communication()

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._run(lambda: self._communicator.all_reduce(x))

    def reduce_product(self, product: Product, x: Tensor, features: int) -> Tensor:
        """Block after block of rows is computed while the one before is added up over the ranks."""
        rows = len(x)
        blocks = min(self.fused_blocks, rows // FUSED_ROWS)
        if blocks < 2:
            return self.all_reduce(product(x))
        out = x.new_empty(rows, features)
        queued = []
        for begin, end in pairwise(rows * block // blocks for block in range(blocks + 1)):
            queued.append(_Queued(partial(self._sum_into, out[begin:end], product(x[begin:end])), self._stream))
        for each in queued:
            self._await(each)
        return out

    def _sum_into(self, out: Tensor, part: Tensor) -> None:
        out.copy_(self._communicator.all_reduce(part))

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return self._run(lambda: self._communicator.all_gather(x, dim))

    def broadcast(self, x: Tensor) -> None:
        self._run(lambda: self._communicator.broadcast(x))

    def fail(self) -> None:
        self._communicator.fail()

    def both(self, first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
        """The results of two micro-batches, with the same collectives in the same order; ``first`` is ahead. What one
        of them raises ends both, and is raised."""
        results: list[A | B] = []
        a = greenlet(lambda: results.append(first()))
        b = greenlet(lambda: results.append(second()))
        self._other = {a: b, b: a}
        self._computing_s = time.perf_counter()
        try:
            a.switch()
            while not b.dead:
                b.switch()
            self._computed()
        finally:
            self._other = {}
            for part in (a, b):
                if not part.dead:
                    part.throw(GreenletExit)
        got_a, got_b = results
        return got_a, got_b  # type: ignore[return-value]

    def take(self) -> Communication:
        """What was spent since this was last called; between steps."""
        spent, self._spent = self._spent, Communication()
        return spent

    def close(self) -> None:
        self._stream.close()

    def _run(self, collective: Callable[[], A]) -> A:
        other = self._other.get(getcurrent())
        if other is None:
            began = time.perf_counter()
            result = collective()
            took = time.perf_counter() - began
            self._spent.busy_s += took
            self._spent.exposed_s += took
            if self.trace is not None:
                self.trace.add(COMMUNICATION, "collective", began, began + took)
            return result
        queued = _Queued(collective, self._stream)
        self._computed()
        if not other.dead:
            other.switch()
        self._await(queued)
        self._computing_s = time.perf_counter()
        return queued.result

    def _await(self, queued: _Queued[A]) -> None:
        began = time.perf_counter()
        queued.event.wait()
        self._spent.exposed_s += time.perf_counter() - began
        self._spent.busy_s += queued.took_s
        if self.trace is not None:
            self.trace.add(COMMUNICATION, "collective", queued.began_s, queued.began_s + queued.took_s)

    def _computed(self) -> None:
        """One micro-batch has computed until now."""
        now = time.perf_counter()
        if self.trace is not None:
            self.trace.add(COMPUTE, "micro-batch", self._computing_s, now)
        self._computing_s = now


class _Queued(Generic[A]):
    """A collective on the communication stream."""

    def __init__(self, collective: Callable[[], A], stream: Stream) -> None:
        self.began_s = self.took_s = 0.0
        self._collective = collective
        self.event: Event = stream.submit(self._run)

    @torch.inference_mode()  # as on the thread that computes
    def _run(self) -> None:
        self.began_s = time.perf_counter()
        self.result = self._collective()
        self.took_s = time.perf_counter() - self.began_s
