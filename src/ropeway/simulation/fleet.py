"""Engines behind a router, a load on them, and one order of events over all."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ropeway.engine.messages import NewRequest
from ropeway.outcome import Finished, StepOutput
from ropeway.simulation.engine import EngineSettings, SimulatedEngine
from ropeway.simulation.load import Load
from ropeway.simulation.router import Router

MakeRequest = Callable[[int, float], NewRequest]
"""(row, moment of arrival) -> the request, with the row as its internal id."""


class Listener(Protocol):
    """What becomes of the requests, told per engine in the order of time."""

    def arrived(self, row: int, now_s: float) -> None: ...
    def output(self, output: StepOutput, now_s: float) -> None:
        """Tokens and ends of some step; ids are rows."""
        ...


Watch = Callable[[float, Sequence[SimulatedEngine]], None]
"""Called with the time and the engines before each event."""


class Group:
    """Engines whose steps begin together and last as long as the longest of them. An engine of its own is a group of
    one."""

    def __init__(self, engines: Sequence[SimulatedEngine]) -> None:
        self.engines = engines
        self.wakes_s = math.inf
        """When some of them are to be advanced."""

    def submit(self, member: int, request: NewRequest, now_s: float) -> None:
        self.engines[member].submit(request, now_s)
        self._set_wake()

    def advance(self, now_s: float) -> None:
        awake = [engine for engine in self.engines if not math.isinf(engine.wakes_s)]
        for engine in awake:
            engine.advance(now_s)
        if len(awake) > 1:
            ends_s = max(engine.device.ends_s for engine in awake)
            for engine in awake:
                engine.put_off(ends_s)
        self._set_wake()

    def _set_wake(self) -> None:
        running = [engine.wakes_s for engine in self.engines if engine.device.pending]
        self.wakes_s = max(running) if running else min(engine.wakes_s for engine in self.engines)


class Fleet:
    """Runs a load to its end."""

    def __init__(
        self,
        settings: EngineSettings,
        engines: int,
        router: Router,
        load: Load,
        make_request: MakeRequest,
        last_position: NDArray[np.int64],
        listener: Listener,
        *,
        group_size: int = 1,
        watch: Watch | None = None,
    ) -> None:
        """``last_position``: int64 [rows], where the last token of each request stands. ``group_size``: so many engines
        step together; raises ``ValueError`` if they can't be grouped so."""
        if group_size < 1 or engines % group_size:
            raise ValueError(f"{engines} engines in groups of {group_size}")
        self.engines = [SimulatedEngine(settings, last_position, self._receive) for _ in range(engines)]
        self.now_s = 0.0
        self._group_size = group_size
        self._groups = [Group(self.engines[at : at + group_size]) for at in range(0, engines, group_size)]
        self._router = router
        self._load = load
        self._make_request = make_request
        self._listener = listener
        self._watch = watch
        self._wakes: list[tuple[float, int]] = []
        """Heap of (moment, group); one whose moment is not its group's any more is void."""
        self._told: list[tuple[float, int, int]] = []
        """Heap of (moment, row, output tokens): ends that the router has not heard of."""

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until every request has ended, or ``until`` says so after an event."""
        while not until():
            wake_s = self._next_wake_s()
            arrival_s = self._load.next_s
            self.now_s = min(wake_s, arrival_s)
            if math.isinf(self.now_s):
                return
            if self._watch is not None:
                self._watch(self.now_s, self.engines)
            if arrival_s <= wake_s:
                self._arrive()
            else:
                _, number = heapq.heappop(self._wakes)
                group = self._groups[number]
                group.advance(wake_s)
                if not math.isinf(group.wakes_s):
                    heapq.heappush(self._wakes, (group.wakes_s, number))

    def _next_wake_s(self) -> float:
        while self._wakes:
            moment, number = self._wakes[0]
            if self._groups[number].wakes_s == moment:
                return moment
            heapq.heappop(self._wakes)
        return math.inf

    def _arrive(self) -> None:
        while self._told and self._told[0][0] <= self.now_s:
            _, row, tokens = heapq.heappop(self._told)
            self._router.ended(row, tokens)
        row = self._load.pop()
        self._listener.arrived(row, self.now_s)
        request = self._make_request(row, self.now_s)
        number, member = divmod(self._router.route(request), self._group_size)
        group = self._groups[number]
        before = group.wakes_s
        group.submit(member, request, self.now_s)
        if group.wakes_s != before:
            heapq.heappush(self._wakes, (group.wakes_s, number))

    def _receive(self, output: StepOutput, now_s: float) -> None:
        self._listener.output(output, now_s)
        for finished in output.finished:
            tokens = 0 if finished.timeline is None else finished.timeline.output_tokens
            heapq.heappush(self._told, (now_s, finished.id, tokens))
            self._load.ended(now_s, _wait_s(finished))


def _wait_s(finished: Finished) -> float:
    refusal = finished.refusal
    return 0.0 if refusal is None or refusal.retry_after_s is None else refusal.retry_after_s
