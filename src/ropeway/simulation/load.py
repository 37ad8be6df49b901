"""When requests come: by a trace's times, or one after the other from a number of users."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Load(Protocol):
    """Requests are rows of a trace, in [0, n)."""

    @property
    def next_s(self) -> float:
        """When the next one comes, as far as can be told now; infinite: none."""
        ...

    def pop(self) -> int:
        """The row of that one, which is taken off."""
        ...

    def ended(self, now_s: float, wait_s: float) -> None:
        """A request has ended; who sent it may not send another one for ``wait_s``."""
        ...


class OpenLoad:
    """Requests come at their times, whatever the engines do."""

    def __init__(self, arrival_s: NDArray[np.float64]) -> None:
        """float64 [n], never falling."""
        self._arrival_s: Sequence[float] = arrival_s.tolist()
        self._next = 0

    @property
    def next_s(self) -> float:
        return self._arrival_s[self._next] if self._next < len(self._arrival_s) else math.inf

    def pop(self) -> int:
        self._next += 1
        return self._next - 1

    def ended(self, now_s: float, wait_s: float) -> None:
        """Changes nothing."""


class ClosedLoad:
    """Each of ``users`` sends its next request when its last one has ended; rows are taken in their order."""

    def __init__(self, requests: int, users: int) -> None:
        self._left = requests
        self._requests = requests
        self._ready_s = [0.0] * min(users, requests)

    @property
    def next_s(self) -> float:
        return self._ready_s[0] if self._left and self._ready_s else math.inf

    def pop(self) -> int:
        heapq.heappop(self._ready_s)
        self._left -= 1
        return self._requests - self._left - 1

    def ended(self, now_s: float, wait_s: float) -> None:
        heapq.heappush(self._ready_s, now_s + wait_s)
