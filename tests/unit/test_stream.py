"""Streams: order, completion, errors and the end."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest

from ropeway.devices.stream import InlineStream, ThreadStream


@pytest.fixture(params=[InlineStream, ThreadStream])
def stream(request: pytest.FixtureRequest) -> Iterator[InlineStream | ThreadStream]:
    stream = request.param()
    yield stream
    stream.close()


def test_work_runs_in_the_order_of_submission(stream: InlineStream | ThreadStream) -> None:
    done: list[int] = []
    events = [stream.submit(lambda i=i: done.append(i)) for i in range(100)]  # type: ignore[misc]
    events[-1].wait()
    assert done == list(range(100))


def test_wait_raises_what_the_work_raised_and_later_work_still_runs(stream: InlineStream | ThreadStream) -> None:
    def fail() -> None:
        raise ValueError("no")

    failed, fine = stream.submit(fail), stream.submit(lambda: None)
    fine.wait()
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            failed.wait()


def test_a_thread_stream_returns_before_the_work_is_done() -> None:
    stream, gate, seen = ThreadStream(), threading.Event(), []
    event = stream.submit(lambda: seen.append(gate.wait(10)))
    assert seen == []
    gate.set()
    event.wait()
    assert seen == [True]
    stream.close()


def test_close_finishes_what_is_queued_and_may_be_called_twice() -> None:
    stream, done = ThreadStream(), []
    for i in range(50):
        stream.submit(lambda i=i: done.append(i))  # type: ignore[misc]
    stream.close()
    stream.close()
    assert len(done) == 50
    with pytest.raises(RuntimeError, match="closed stream"):
        stream.submit(lambda: None)


def test_an_idle_thread_keeps_nothing_of_its_last_work_alive() -> None:
    class Tensors:
        pass

    stream, tensors = ThreadStream(), Tensors()
    gone = weakref.ref(tensors)
    stream.submit(lambda kept=tensors: None).wait()  # type: ignore[misc]
    stream.submit(lambda: None).wait()
    del tensors
    assert gone() is None
    stream.close()
