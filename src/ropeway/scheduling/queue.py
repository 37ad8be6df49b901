"""The waiting line."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from ropeway.request import Request


def _order(request: Request) -> int:
    return request.order


class WaitingQueue:
    """Waiting requests in policy order. A preempted request returns to its old place."""

    def __init__(self) -> None:
        self._line: list[Request] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._line)

    def add(self, request: Request) -> None:
        insort(self._line, request, key=_order)

    def remove(self, request: Request) -> None:
        place = bisect_left(self._line, request.order, key=_order)
        assert self._line[place] is request
        del self._line[place]
