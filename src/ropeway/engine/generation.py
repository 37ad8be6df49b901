"""A request under way in an engine process: the engine's answer, a mailbox of news, and where its time goes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from ropeway.engine.client import Delta, Usage, error_of
from ropeway.outcome import Refusal
from ropeway.request import Timeline

_PHASES = ("decode", "swapped", "preempted", "prefill", "queued")


class EngineSide(Protocol):
    """What a request needs of the engine's process."""

    def abort(self, ids: Sequence[int]) -> None: ...
    async def explain(self, ids: Sequence[int]) -> Mapping[int, Timeline]: ...


class ProcessTimelines:
    """Implements ``Timelines``. Holds nothing of the request but its ids."""

    def __init__(self, engine: EngineSide, ids: Sequence[int]) -> None:
        self.ended: dict[int, Timeline] = {}
        self._engine = engine
        self._ids = ids

    async def ask(self) -> Mapping[int, Timeline]:
        """Of all completions, by index; those under way are asked after."""
        open_ids = {request_id: index for index, request_id in enumerate(self._ids) if index not in self.ended}
        if not open_ids:
            return self.ended
        # The engine answers in order: what it has been asked for before, when it let a completion go, has come by then.
        told = await self._engine.explain(list(open_ids))
        return {open_ids[request_id]: timeline for request_id, timeline in told.items()} | self.ended


class ProcessGeneration:
    """Implements ``Generation``; an ``EngineProcess`` fills it."""

    def __init__(self, engine: EngineSide, ids: Sequence[int], usage: Usage, arrival_s: float) -> None:
        self.usage = usage
        self.ids = ids
        self.arrival_s = arrival_s
        self.timelines = ProcessTimelines(engine, ids)
        self._engine = engine
        self._open = len(ids)
        self._mail: deque[Delta] = deque()
        self._news = asyncio.Event()
        self._unanswered = set(ids)
        self._answered = asyncio.Event()
        self._refusal: Refusal | None = None

    async def accepted(self) -> None:
        """Return when the engine has taken every completion; see ``Generation.accepted``."""
        await self._answered.wait()
        if self._refusal is not None:
            raise error_of(self._refusal)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            while self._mail:
                delta = self._mail.popleft()
                self._open -= delta.finish_reason is not None
                yield delta
            if not self._open:
                return
            self._news.clear()
            await self._news.wait()

    def cancel(self) -> None:
        """Abort what is unfinished. Idempotent."""
        self._engine.abort(self.ids)

    def answer(self, request_id: int) -> None:
        """The engine has taken this completion, or it is over."""
        self._unanswered.discard(request_id)
        if not self._unanswered:
            self._answered.set()

    def put(self, delta: Delta) -> None:
        if delta.timeline is not None:
            self.timelines.ended[delta.index] = delta.timeline
        if delta.finish_reason is not None:
            self.answer(self.ids[delta.index])
        if delta.refusal is not None:
            self._refusal = self._refusal or delta.refusal
            self._answered.set()
        self._mail.append(delta)
        self._news.set()

    def ended_here(self, index: int, timeline: Timeline, now: float) -> None:
        """A completion was ended on this side at ``now``; the engine heard of it a little later, and that is when its
        ``timeline`` stops."""
        self.timelines.ended[index] = cut(timeline, now - self.arrival_s)


def cut(timeline: Timeline, total_s: float) -> Timeline:
    """The timeline of a request that ended ``total_s`` after its arrival: what is beyond comes off its last phase. In
    place."""
    excess = timeline.total_s - total_s
    for phase in (timeline.phase, *_PHASES):
        part = f"{phase}_s"
        if excess > 0 and phase in _PHASES:
            taken = min(excess, getattr(timeline, part))
            setattr(timeline, part, getattr(timeline, part) - taken)
            excess -= taken
    timeline.phase = "finished"
    return timeline
