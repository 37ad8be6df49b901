"""The loop of the engine process: messages in, steps, messages out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from ropeway.cache.pool import BlockPool
from ropeway.config import EngineConfig, SchedulerConfig
from ropeway.engine.child import EngineLoop
from ropeway.engine.engine import Engine
from ropeway.engine.messages import (
    Abort,
    Explain,
    Explained,
    FromEngine,
    NewRequest,
    Shutdown,
    Stats,
    Submit,
    ToEngine,
    decode_from_engine,
)
from ropeway.outcome import StepOutput
from ropeway.request import FinishReason, SamplingParams
from ropeway.scheduling.scheduler import Scheduler
from ropeway.wire import encode
from tests.support.fake_device import END, FakeDevice


class CountingEngine(Engine):
    """An engine that knows how often it was asked for a step."""

    calls = 0

    def step(self, ahead: int) -> None:
        self.calls += 1
        super().step(ahead)


class Turning:
    """A loop that turns in a thread, seen from the other end of its socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, seats: int = 4, **config: Any) -> None:
        self.socket = context.socket(zmq.PAIR)
        self.socket.bind(f"inproc://{id(self)}")
        inner = context.socket(zmq.PAIR)
        inner.connect(f"inproc://{id(self)}")
        self.sockets = [self.socket, inner]
        loop = EngineLoop(inner)
        scheduler = Scheduler(SchedulerConfig(max_num_seqs=seats, **config), BlockPool(64, 4), 128)
        self.engine = CountingEngine(scheduler, FakeDevice(64, 4), loop._publish, max_model_len=128, end_ids=(END,))
        self.thread = threading.Thread(target=loop.turn, args=(self.engine, EngineConfig()))
        self.thread.start()

    def send(self, message: ToEngine) -> None:
        self.socket.send(encode(message))

    def submit(self, *ids: int, length: int = 8, max_tokens: int = 4) -> None:
        prompt = np.arange(length, dtype=np.int32) % 60 + 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.send(Submit([NewRequest(id=i, prompt=prompt, params=params, seed=i, tier=1) for i in ids]))

    def messages(self, within_s: float = 5.0) -> Iterator[FromEngine]:
        """What it says, as long as it says something every ``within_s``."""
        while self.socket.poll(int(within_s * 1000)):
            yield decode_from_engine(self.socket.recv())

    def outputs(self, until: int) -> list[StepOutput]:
        """Its outputs up to the end of request ``until``."""
        said = []
        for message in self.messages():
            if isinstance(message, StepOutput):
                said.append(message)
                if any(finished.id == until for finished in message.finished):
                    return said
        raise AssertionError(f"request {until} has not ended")

    def end(self) -> None:
        self.send(Shutdown())
        self.thread.join(5)
        assert not self.thread.is_alive()
        for socket in self.sockets:
            socket.close(linger=0)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.term()


@pytest.fixture
def turning(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Turning]:
    turning = Turning(context)
    yield turning
    turning.end()


def test_a_submission_is_answered_then_run_to_its_end(turning: Turning) -> None:
    turning.submit(1, 2)
    turning.submit(3, length=200)
    said = turning.outputs(until=3)
    assert [i for output in said for i in output.accepted] == [1, 2]
    (refused,) = [f for output in said for f in output.finished if f.id == 3]
    assert refused.reason is FinishReason.ERROR
    assert refused.refusal is not None
    assert refused.refusal.error == "ContextLengthExceeded"
    if 2 not in {f.id for output in said for f in output.finished}:
        said += turning.outputs(until=2)
    ends = {f.id: f for output in said for f in output.finished}
    for request_id in (1, 2):
        timeline = ends[request_id].timeline
        assert timeline is not None
        assert (timeline.phase, timeline.tier, timeline.output_tokens) == ("finished", "standard", 4)
        assert timeline.total_s > 0


def test_questions_are_answered_in_their_order_and_before_an_abort_takes_effect(turning: Turning) -> None:
    turning.submit(1, max_tokens=100)
    turning.send(Explain([1, 7]))
    turning.send(Abort([1], "stop_string"))
    turning.send(Explain([1]))
    told = []
    for message in turning.messages():
        if isinstance(message, Explained):
            told.append(set(message.timelines))
        if len(told) == 2:
            break
    assert told == [{1}, set()]


def test_an_idle_engine_reports_every_second_and_after_its_last_request_at_once(turning: Turning) -> None:
    turning.submit(1)
    turning.outputs(until=1)
    began = time.monotonic()
    reports = []
    for message in turning.messages():
        if isinstance(message, Stats) and not message.running + message.waiting:
            reports.append(time.monotonic() - began)
        if len(reports) == 2:
            break
    assert reports[0] < 0.5
    assert 0.7 < reports[1] - reports[0] < 2.0


def test_a_request_that_comes_to_an_idle_engine_is_not_kept_waiting(turning: Turning) -> None:
    taken = []
    for request_id in range(1, 12):
        began = time.monotonic()
        turning.submit(request_id)
        turning.outputs(until=request_id)
        taken.append(time.monotonic() - began)
    assert sorted(taken)[len(taken) // 2] < 0.03, taken


def test_requests_that_follow_each_other_on_one_seat_are_not_kept_waiting(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    turning = Turning(context, seats=1)
    try:
        began = time.monotonic()
        turning.submit(*range(1, 41))
        turning.outputs(until=40)
        assert time.monotonic() - began < 1.0
    finally:
        turning.end()


def test_a_loop_that_has_work_and_nothing_to_run_does_not_spin(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    turning = Turning(context, batching="dynamic", batch_window_s=0.5)
    try:
        turning.submit(1)
        turning.outputs(until=1)
        assert turning.engine.calls < 40
        turning.engine.calls = 0
        turning.submit(2, 3, 4)
        time.sleep(0.2)
        turning.submit(5)  # the batch is full now
        began = time.monotonic()
        turning.outputs(until=5)
        assert time.monotonic() - began < 0.2
    finally:
        turning.end()
