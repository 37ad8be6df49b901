"""A link between ranks that only takes time; see ``devices.timer``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ropeway.devices.timer import TimedEvent, TimedStream
from ropeway.parallel.communicator import Product


class TimedLink:
    """Implements ``Communicator`` of two ranks that are alike, and the ``Stream`` that ``parallel.overlap`` queues
    collectives on: each takes time on a stream beside the one that computes, after what that has been given so far. The
    numbers stay as they are."""

    rank = 0
    size = 2

    def __init__(self, compute: TimedStream, communicate: TimedStream, seconds: Callable[[int], float]) -> None:
        """``seconds``: of a collective of so many bytes."""
        self._compute = compute
        self._communicate = communicate
        self._seconds = seconds
        self._queued: TimedEvent | None = None
        self._queueing = False

    def all_reduce(self, x: Tensor) -> Tensor:
        self._take(x.nbytes)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        self._take(x.nbytes)
        return x

    def reduce_product(self, product: Product, x: Tensor, features: int) -> Tensor:
        return self.all_reduce(product(x))

    def broadcast(self, x: Tensor) -> None:
        self._take(x.nbytes)

    def fail(self) -> None:
        """Nobody waits for long."""

    def submit(self, work: Callable[[], Any]) -> TimedWait:
        """The collective in ``work`` is queued; the stream that computes waits for it when the event is waited for."""
        self._queueing = True
        try:
            work()
        finally:
            self._queueing = False
        assert self._queued is not None
        return TimedWait(self._compute, self._queued)

    def close(self) -> None:
        """Nothing to give back."""

    def _take(self, nbytes: int) -> None:
        self._communicate.wait_for(self._compute.record())
        self._queued = self._communicate.submit(self._seconds(nbytes), "all_reduce")
        if not self._queueing:
            self._compute.wait_for(self._queued)


class TimedWait:
    """An event of one stream that another one waits for, and not the host."""

    def __init__(self, stream: TimedStream, event: TimedEvent) -> None:
        self._stream = stream
        self._event = event

    def wait(self, timeout_s: float | None = None) -> bool:
        self._stream.wait_for(self._event)
        return True
