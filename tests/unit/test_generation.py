"""A request under way in an engine process: when it counts as taken, and where its time goes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from ropeway.engine.client import Delta, Usage, error_of
from ropeway.engine.generation import ProcessGeneration, cut
from ropeway.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineDead,
    QueueFull,
    QueueTimeout,
    RopewayError,
    Shed,
)
from ropeway.outcome import Refusal
from ropeway.request import FinishReason, Timeline


class Asked:
    """Implements ``EngineSide``: writes down what it is asked, and knows the timelines it was given."""

    def __init__(self) -> None:
        self.aborted: list[Sequence[int]] = []
        self.questions: list[Sequence[int]] = []
        self.known: dict[int, Timeline] = {}

    def abort(self, ids: Sequence[int]) -> None:
        self.aborted.append(ids)

    async def explain(self, ids: Sequence[int]) -> Mapping[int, Timeline]:
        self.questions.append(ids)
        await asyncio.sleep(0)
        return {request_id: self.known[request_id] for request_id in ids if request_id in self.known}


def generation(engine: Asked, n: int) -> ProcessGeneration:
    return ProcessGeneration(engine, list(range(10, 10 + n)), Usage(prompt_tokens=2), arrival_s=100.0)


def last(index: int, *, refusal: Refusal | None = None, timeline: Timeline | None = None) -> Delta:
    reason = FinishReason.LENGTH if refusal is None else FinishReason.ERROR
    return Delta(index, "", [], finish_reason=reason, refusal=refusal, timeline=timeline)


async def test_a_request_is_taken_when_every_completion_is() -> None:
    each = generation(Asked(), 3)
    waiting = asyncio.create_task(each.accepted())
    for request_id in (12, 10):
        each.answer(request_id)
        await asyncio.sleep(0)
        assert not waiting.done()
    each.answer(11)
    await asyncio.wait_for(waiting, 1)


async def test_a_completion_that_ended_before_the_answer_is_not_waited_for() -> None:
    each = generation(Asked(), 2)
    each.answer(10)
    each.put(Delta(1, "", [], finish_reason=FinishReason.ABORT))
    await asyncio.wait_for(each.accepted(), 1)


async def test_one_refused_completion_is_enough_and_the_others_are_not_waited_for() -> None:
    each = generation(Asked(), 3)
    each.put(last(1, refusal=Refusal("Shed", "too late", retry_after_s=4.5)))
    with pytest.raises(Shed, match="too late") as refused:
        await asyncio.wait_for(each.accepted(), 1)
    assert refused.value.retry_after_s == 4.5


async def test_the_deltas_come_in_order_until_every_completion_has_ended() -> None:
    each = generation(Asked(), 2)
    for delta in (last(1), Delta(0, "a", [5]), last(0), Delta(0, "late", [6])):
        each.put(delta)
    assert [delta.index async for delta in each][:3] == [1, 0, 0]


async def test_timelines_of_the_ended_are_known_and_only_the_others_asked_after() -> None:
    engine = Asked()
    engine.known[12] = Timeline(phase="decode")
    each = generation(engine, 3)
    first = Timeline(phase="finished", decode_s=1.0)
    each.put(last(0, timeline=first))
    assert dict(await each.timelines.ask()) == {0: first, 2: engine.known[12]}
    assert engine.questions == [[11, 12]]
    for index in (1, 2):
        each.put(last(index, timeline=first))
    assert dict(await each.timelines.ask()) == {0: first, 1: first, 2: first}
    assert len(engine.questions) == 1


async def test_what_ends_while_the_engine_is_asked_is_told_as_ended() -> None:
    engine = Asked()
    engine.known[10] = Timeline(phase="decode")
    each = generation(engine, 1)
    asking = asyncio.create_task(each.timelines.ask())
    await asyncio.sleep(0)
    each.put(last(0, timeline=Timeline(phase="finished")))
    assert (await asking)[0].phase == "finished"


async def test_a_completion_ended_here_has_no_time_after_its_end() -> None:
    each = generation(Asked(), 1)
    each.ended_here(0, Timeline(phase="decode", queued_s=1.0, prefill_s=0.5, decode_s=4.0), 103.0)
    timeline = each.timelines.ended[0]
    assert (timeline.phase, timeline.queued_s, timeline.prefill_s, timeline.decode_s) == ("finished", 1.0, 0.5, 1.5)


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode", "preempted", "swapped"])
@pytest.mark.parametrize("total_s", [0.0, 0.5, 1.75, 5.0, 9.0])
def test_a_cut_timeline_is_no_longer_than_asked_and_has_no_negative_part(phase: str, total_s: float) -> None:
    timeline = Timeline(
        phase=phase,  # type: ignore[arg-type]
        queued_s=1.0,
        prefill_s=1.0,
        decode_s=1.0,
        preempted_s=1.0,
        swapped_s=1.0,
    )
    assert cut(timeline, total_s) is timeline
    assert timeline.total_s == pytest.approx(min(total_s, 5.0))
    assert timeline.phase == "finished"
    parts = [getattr(timeline, f"{name}_s") for name in ("queued", "prefill", "decode", "preempted", "swapped")]
    assert min(parts) >= 0
    if total_s == 9.0:
        assert set(parts) == {1.0}


@pytest.mark.parametrize(
    ("name", "kind", "retry_after_s"),
    [
        ("Shed", Shed, 3.0),
        ("QueueFull", QueueFull, None),
        ("QueueTimeout", QueueTimeout, 2.0),
        ("DeadlineExceeded", DeadlineExceeded, None),
        ("ContextLengthExceeded", ContextLengthExceeded, None),
        ("EngineDead", EngineDead, None),
    ],
)
def test_a_refusal_stands_for_its_error(name: str, kind: type[RopewayError], retry_after_s: float | None) -> None:
    error = error_of(Refusal(name, "why", retry_after_s))
    assert type(error) is kind
    assert error.message == "why"
    if retry_after_s is not None:
        assert isinstance(error, QueueFull)
        assert error.retry_after_s == retry_after_s


@pytest.mark.parametrize("refusal", [None, Refusal("NoSuchError", "why"), Refusal("annotations", "why")])
def test_a_refusal_of_no_known_kind_is_a_fault_of_ours(refusal: Refusal | None) -> None:
    error = error_of(refusal)
    assert (error.status, error.code) == (500, "request_failed")
    assert refusal is None or "why" in error.message
