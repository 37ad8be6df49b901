"""Where requests' time went: for ``GET /v1/requests/{id}`` and the header ``Server-Timing``.

A request's end-to-end time is cut into the engine's phases, which follow each other without gaps, and ``delivery``:
what it took from the engine's word to the last byte handed over. Of several choices, the request's own parts are those
of the one that ended last.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import islice

from ropeway.engine.client import Delta, Generation, Timelines, Usage
from ropeway.request import FinishReason, Timeline
from ropeway.server.protocol import ChoiceTiming, RequestTiming, TimeParts

MOST_ENDED = 1000
"""Requests that are remembered after their end."""


class _Choice:
    __slots__ = ("ended_s", "reason", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.ended_s: float | None = None
        self.reason: FinishReason | None = None


class Record:
    """One HTTP request, while it is under way and after."""

    def __init__(self, completion_id: str, request_id: str, tier: str, arrival_s: float, owner: str = "") -> None:
        """``arrival_s`` on the clock of ``time.monotonic``; the ids are what ``owner`` (the name of a key) may ask
        by."""
        self.id = completion_id
        self.request_id = request_id
        self.owner = owner
        self.tier = tier
        self.arrival_s = arrival_s
        self.ended_s: float | None = None
        self.error: str | None = None
        self._created = int(time.time())
        self._timelines: Sequence[Timelines] = ()
        self._usages: Sequence[Usage] = ()
        self._choices: list[_Choice] = []

    def begin(self, generations: Sequence[Generation], n: int) -> None:
        """What the engine makes of it: one generation per prompt, ``n`` choices each."""
        self._timelines = [generation.timelines for generation in generations]
        self._usages = [generation.usage for generation in generations]
        self._choices = [_Choice() for _ in range(len(generations) * n)]

    def saw(self, index: int, delta: Delta) -> None:
        """News of a choice has reached the server; ``index`` over all prompts."""
        choice = self._choices[index]
        choice.tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            choice.reason, choice.ended_s = delta.finish_reason, time.monotonic()

    def end(self) -> None:
        """Its answer is complete, or nobody wants more of it. The first time counts."""
        if self.ended_s is None:
            self.ended_s = time.monotonic()

    async def explain(self, limit_s: float | None = None) -> RequestTiming:
        """Where its time went so far. Asks the engine for what is not known, for ``limit_s`` at most (by default: as
        long as the engine's client does)."""
        n = len(self._choices) // len(self._timelines)
        told: Sequence[Mapping[int, Timeline]] = [each.ended for each in self._timelines]
        if any(len(each) < n for each in told):
            told = await self._ask(limit_s)
        now = time.monotonic()
        choices = [
            self._choice(index, choice, told[index // n].get(index % n), now)
            for index, choice in enumerate(self._choices)
        ]
        last = max(choices, key=lambda choice: (choice.finish_reason is None, choice.e2e_s))
        e2e_s = (now if self.ended_s is None else self.ended_s) - self.arrival_s
        preemptions: Counter[str] = Counter()
        for choice in choices:
            preemptions.update(choice.preemptions)
        return RequestTiming(
            id=self.id,
            request_id=self.request_id,
            created=self._created,
            tier=self.tier,
            phase=last.phase,
            error=self.error,
            e2e_s=e2e_s,
            parts=_delivered(last.parts, e2e_s),
            waits_s=last.waits_s,
            preemptions=dict(preemptions),
            prompt_tokens=sum(usage.prompt_tokens for usage in self._usages),
            output_tokens=sum(choice.output_tokens for choice in choices),
            cached_tokens=sum(usage.cached_tokens for usage in self._usages),
            choices=choices,
        )

    async def _ask(self, limit_s: float | None) -> list[Mapping[int, Timeline]]:
        asking = asyncio.gather(*(each.ask() for each in self._timelines))
        try:
            return await asyncio.wait_for(asking, limit_s)
        except TimeoutError:
            return [each.ended for each in self._timelines]

    def _choice(self, index: int, choice: _Choice, told: Timeline | None, now: float) -> ChoiceTiming:
        """``told`` is None when the engine has not answered in time, or is dead."""
        timeline = Timeline() if told is None else told
        ended_s = self.ended_s if choice.ended_s is None else choice.ended_s
        e2e_s = (now if ended_s is None else ended_s) - self.arrival_s
        parts = TimeParts(
            queued_s=timeline.queued_s,
            prefill_s=timeline.prefill_s,
            decode_s=timeline.decode_s,
            preempted_s=timeline.preempted_s,
            swapped_s=timeline.swapped_s,
        )
        return ChoiceTiming(
            index=index,
            phase="unknown" if told is None else told.phase,
            finish_reason=choice.reason,
            e2e_s=e2e_s,
            parts=_delivered(parts, e2e_s),
            waits_s=timeline.waits,
            preemptions=timeline.preemptions,
            output_tokens=choice.tokens,
            cached_tokens=timeline.cached_tokens,
        )


def _delivered(parts: TimeParts, e2e_s: float) -> TimeParts:
    """The engine's parts, and the rest of ``e2e_s``."""
    engine_s = parts.queued_s + parts.prefill_s + parts.decode_s + parts.preempted_s + parts.swapped_s
    return TimeParts(
        queued_s=parts.queued_s,
        prefill_s=parts.prefill_s,
        decode_s=parts.decode_s,
        preempted_s=parts.preempted_s,
        swapped_s=parts.swapped_s,
        delivery_s=max(e2e_s - engine_s, 0.0),
    )


def server_timing(parts: TimeParts) -> str:
    """The parts as the value of a ``Server-Timing`` header, in milliseconds."""
    named = {name.removesuffix("_s"): getattr(parts, name) for name in parts.__struct_fields__}
    return ", ".join(f"{name};dur={seconds * 1000:.3f}" for name, seconds in named.items())


class Records:
    """All requests under way, and the last ``most_ended`` that have ended."""

    def __init__(self, most_ended: int = MOST_ENDED) -> None:
        self._most_ended = most_ended
        self._by_id: dict[str, Record] = {}
        self._by_request_id: dict[tuple[str, str], Record] = {}
        """By owner and id: clients choose these themselves."""
        self._ended: deque[Record] = deque()

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, record: Record) -> None:
        self._by_id[record.id] = self._by_request_id[record.owner, record.request_id] = record

    def end(self, record: Record) -> None:
        """Its answer is complete; it is forgotten after ``most_ended`` others."""
        if record.ended_s is not None:
            return
        record.end()
        self._ended.append(record)
        while len(self._ended) > self._most_ended:
            oldest = self._ended.popleft()
            del self._by_id[oldest.id]
            if self._by_request_id.get((oldest.owner, oldest.request_id)) is oldest:
                del self._by_request_id[oldest.owner, oldest.request_id]

    def latest(self, most: int) -> list[Record]:
        """The newest ones, of all owners."""
        return list(islice(reversed(self._by_id.values()), most))

    def find_any(self, completion_id: str) -> Record | None:
        """Anybody's."""
        return self._by_id.get(completion_id)

    def find(self, name: str, owner: str = "") -> Record | None:
        """The owner's, by the id of the completion, or by the ``X-Request-Id`` of its answer. Of several requests with
        the same one, the latest."""
        record = self._by_id.get(name) or self._by_request_id.get((owner, name))
        return record if record is not None and record.owner == owner else None
