"""Streams of a device whose kernels run on host threads: work in order, its completion as an event."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class HostEvent:
    """Completion of one piece of work."""

    __slots__ = ("_done", "_error")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True when the work is done, False when it is not by then; raise what it raised."""
        if not self._done.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def run(self, work: Callable[[], Any]) -> None:
        """Do the work and keep what it raises for ``wait``."""
        try:
            work()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()


class InlineStream:
    """Runs work where it is submitted, before ``submit`` returns."""

    def submit(self, work: Callable[[], Any]) -> HostEvent:
        event = HostEvent()
        event.run(work)
        return event

    def close(self) -> None:
        """Nothing to give back."""


class ThreadStream:
    """One thread takes work from a queue, first in, first out."""

    def __init__(self, name: str = "device-stream") -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], HostEvent] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._closed = False
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> HostEvent:
        """Queue the work; raises ``RuntimeError`` after ``close``."""
        if self._closed:
            raise RuntimeError("work was submitted to a closed stream")
        event = HostEvent()
        self._queue.put((work, event))
        return event

    def close(self) -> None:
        """Finish what is queued and end the thread. May be called twice."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            work, event = item
            event.run(work)
            del item, work, event  # an idle thread must not keep the last step's tensors alive
