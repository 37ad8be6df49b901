"""What happened when: intervals on tracks, as Chrome's trace events, which https://ui.perfetto.dev and chrome://tracing
show. Times are seconds of ``time.monotonic``.

One track per stream of the device, one for the host's phases, and lanes for requests, each of which shows where a
request's time went."""

from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Iterator
from typing import Any

MOST = 1_000_000
"""Intervals that are kept; the oldest are dropped."""
HOST, COMPUTE, COMMUNICATION = "host", "compute", "communication"
_TRACKS = (HOST, COMPUTE, COMMUNICATION)
_LANE = "requests"


class Trace:
    """Takes intervals from any thread."""

    def __init__(self, most: int = MOST) -> None:
        self._intervals: deque[tuple[str, str, float, float, dict[str, Any]]] = deque(maxlen=most)
        self._requests: deque[tuple[float, str, list[tuple[str, float]], dict[str, Any]]] = deque(maxlen=most)

    def add(self, track: str, name: str, begin_s: float, end_s: float, **details: Any) -> None:
        """Something that was done on a track."""
        self._intervals.append((track, name, begin_s, end_s, details))

    def add_request(self, name: str, begin_s: float, phases: list[tuple[str, float]], **details: Any) -> None:
        """A request that came at ``begin_s``, and how many seconds it spent on what, one after the other."""
        self._requests.append((begin_s, name, phases, details))

    def intervals(self, track: str) -> list[tuple[str, float, float]]:
        """(name, begin, end) of a track, in the order of their begin."""
        found = [(name, begin, end) for where, name, begin, end, _ in self._intervals if where == track]
        return sorted(found, key=lambda each: each[1])

    def json(self) -> bytes:
        """All of it, as a file that the viewers open."""
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": list(self._events())}).encode()

    def _events(self) -> Iterator[dict[str, Any]]:
        """Chrome's: "X" is a complete interval, "M" names a track; times are microseconds."""
        for number, track in enumerate(_TRACKS):
            yield _named("thread", 0, number, track)
        yield _named("process", 0, 0, "engine")
        yield _named("process", 1, 0, _LANE)
        for track, name, begin_s, end_s, details in list(self._intervals):
            yield _complete(0, _TRACKS.index(track), name, begin_s, end_s, details)
        ends: list[tuple[float, int]] = []
        """Of lanes: (when it is free again, its number)."""
        for begin_s, name, phases, details in sorted(self._requests, key=lambda request: request[0]):
            end_s = begin_s + sum(seconds for _, seconds in phases)
            lane = heapq.heappop(ends)[1] if ends and ends[0][0] <= begin_s else len(ends)
            heapq.heappush(ends, (end_s, lane))
            yield _complete(1, lane, name, begin_s, end_s, details)
            at_s = begin_s
            for phase, seconds in phases:
                if seconds > 0:
                    yield _complete(1, lane, phase, at_s, at_s + seconds, {})
                at_s += seconds


def _complete(
    process: int, thread: int, name: str, begin_s: float, end_s: float, details: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": 1e6 * begin_s, "dur": 1e6 * (end_s - begin_s)}
    return {"ph": "X", "pid": process, "tid": thread, "name": name, **times, "args": details}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": f"{kind}_name", "args": {"name": name}}
