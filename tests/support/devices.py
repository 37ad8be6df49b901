"""Devices for tests that run on each of them; one that this checkout cannot offer is a skip with its reason."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from ropeway.devices.base import Device, Stream
from ropeway.devices.stream import HostEvent, InlineStream
from ropeway.errors import Unsupported

DEVICES = ("reference", "cpu")


class LazyStream:
    """Does nothing before somebody waits for it: the worst case of a device that runs behind the host."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Callable[[], Any], _LazyEvent]] = deque()

    def submit(self, work: Callable[[], Any]) -> _LazyEvent:
        event = _LazyEvent(self)
        self._queue.append((work, event))
        return event

    def run_until(self, event: _LazyEvent) -> None:
        while not event.done and self._queue:
            work, first = self._queue.popleft()
            first.run(work)
            first.done = True

    def close(self) -> None:
        while self._queue:
            self.run_until(self._queue[-1][1])


class _LazyEvent(HostEvent):
    __slots__ = ("done", "stream")

    def __init__(self, stream: LazyStream) -> None:
        super().__init__()
        self.stream = stream
        self.done = False

    def wait(self, timeout_s: float | None = None) -> bool:
        self.stream.run_until(self)
        return super().wait(timeout_s)


def new_device(name: str, stream: Stream) -> Device:
    if name == "reference":
        from ropeway.devices.reference import ReferenceDevice

        return ReferenceDevice(stream=stream)
    try:
        from ropeway.devices.cpu.device import CpuDevice

        return CpuDevice(stream=stream)
    except Unsupported as error:
        pytest.skip(error.message)


@functools.cache
def device(name: str) -> Device:
    """The device, shared by all tests of the process; it does its work at once."""
    return new_device(name, InlineStream())


@functools.cache
def lazy_device(name: str) -> Device:
    """The same for one that does it as late as possible."""
    return new_device(name, LazyStream())
