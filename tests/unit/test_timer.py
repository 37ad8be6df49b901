"""A device that only takes time: when its work begins and ends, and what it was idle for."""

from __future__ import annotations

import numpy as np
import pytest

from ropeway.devices import timer
from ropeway.devices.timer import TimedStream
from ropeway.execution.timer import TimerExecutor
from tests.support.line import Line


class Clock:
    """Stands in for the ``time`` module."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timer, "time", clock)
    return clock


def test_work_on_an_idle_device_begins_at_once(clock: Clock) -> None:
    assert TimedStream().submit(2.0).end_s == 102.0


def test_work_begins_when_the_work_before_it_ends(clock: Clock) -> None:
    stream = TimedStream()
    stream.submit(2.0)
    clock.now = 101.0
    assert stream.submit(3.0).end_s == 105.0
    assert (stream.busy_s, stream.idle_s, stream.bubble) == (5.0, 0.0, 0.0)


def test_a_late_submission_leaves_a_bubble(clock: Clock) -> None:
    stream = TimedStream()
    stream.submit(2.0)
    clock.now = 106.0
    assert stream.submit(4.0).end_s == 110.0
    assert (stream.busy_s, stream.idle_s) == (6.0, 4.0)
    assert stream.bubble == pytest.approx(0.4)


def test_time_before_the_first_work_is_no_bubble(clock: Clock) -> None:
    stream = TimedStream()
    assert stream.bubble == 0.0
    clock.now = 500.0
    stream.submit(1.0)
    assert stream.idle_s == 0.0


def test_waiting_sleeps_until_the_end_and_no_longer(clock: Clock) -> None:
    event = TimedStream().submit(2.0)
    clock.now = 100.5
    event.wait()
    event.wait()
    assert clock.slept == [1.5]
    assert clock.now == 102.0


def test_steps_take_what_their_plans_say_and_sample_a_token_per_row(clock: Clock) -> None:
    executor = TimerExecutor(lambda plan: plan.num_tokens / 10, vocab_size=4)
    line = Line()
    line.add(6)
    line.add(2)
    work = executor.forward(line.plan())
    work.sample()
    result = work.result()
    assert clock.now == pytest.approx(100.8)
    assert result.token_ids.dtype == np.int32
    assert result.token_ids.tolist() == [6 % 3 + 1, 2 % 3 + 1]
    assert result.elapsed_s == pytest.approx(0.8)
    assert executor.stream.busy_s == pytest.approx(0.8)
    executor.close()
