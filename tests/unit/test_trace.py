"""Traces: what is noted, how it is written, and that it can be had from a running server."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ropeway import SamplingParams
from ropeway.devices.stream import ThreadStream
from ropeway.parallel.overlap import Overlapping
from ropeway.trace import COMMUNICATION, COMPUTE, HOST, Trace
from tests.support.llms import tiny_llm
from tests.unit.test_overlap import Link, layers


def intervals(trace: bytes) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Complete events by (process, thread)."""
    found = defaultdict(list)
    for event in json.loads(trace)["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def names(trace: bytes) -> dict[tuple[str, int, int], str]:
    events = json.loads(trace)["traceEvents"]
    return {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}


def test_tracks_are_named_and_times_are_microseconds() -> None:
    trace = Trace()
    trace.add(HOST, "plan", 1.0, 1.5, tokens=3)
    trace.add(COMMUNICATION, "collective", 2.0, 2.25)
    ((plan,), (collective,)) = intervals(trace.json()).values()
    assert plan == {
        "ph": "X", "pid": 0, "tid": 0, "name": "plan", "ts": 1e6, "dur": 5e5, "args": {"tokens": 3},
    }  # fmt: skip
    assert names(trace.json())["thread_name", 0, collective["tid"]] == COMMUNICATION


def test_requests_get_lanes_that_are_used_again() -> None:
    trace = Trace()
    trace.add_request("b", 1.0, [("queued", 0.5), ("prefill", 0.0), ("decode", 1.0)])
    trace.add_request("a", 0.0, [("queued", 0.5), ("decode", 1.5)])
    trace.add_request("c", 2.0, [("decode", 1.0)])
    lanes = {lane: [event["name"] for event in events] for lane, events in intervals(trace.json()).items()}
    assert lanes == {(1, 0): ["a", "queued", "decode", "c", "decode"], (1, 1): ["b", "queued", "decode"]}


def test_the_oldest_intervals_are_dropped() -> None:
    trace = Trace(most=2)
    for number in range(5):
        trace.add(HOST, str(number), number, number + 1)
    assert [name for name, *_ in trace.intervals(HOST)] == ["3", "4"]


@pytest.fixture
def overlapping() -> Iterator[Overlapping]:
    made = Overlapping(Link(0.01), ThreadStream("communication"))
    yield made
    made.close()


def test_of_two_micro_batches_no_two_intervals_of_a_kind_overlap(overlapping: Overlapping) -> None:
    trace = overlapping.trace = Trace()
    overlapping.both(lambda: layers(overlapping, 1.0, [], 0.01), lambda: layers(overlapping, 2.0, [], 0.01))
    for track, least in ((COMPUTE, 8), (COMMUNICATION, 8)):
        found = trace.intervals(track)
        assert len(found) >= least
        assert all(before[2] <= after[1] for before, after in itertools.pairwise(found))
    communicating = sum(end - begin for _, begin, end in trace.intervals(COMMUNICATION))
    both = sum(
        max(min(end, other_end) - max(begin, other_begin), 0.0)
        for _, begin, end in trace.intervals(COMMUNICATION)
        for _, other_begin, other_end in trace.intervals(COMPUTE)
    )
    assert both > 0.5 * communicating


def test_an_engine_writes_its_trace_when_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with tiny_llm(trace=str(file)) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        llm.generate([[5, 6, 7], [8, 9], [10] * 100], params, progress=False)
    found = intervals(file.read_bytes())
    host = {event["name"] for event in found[0, 0]}
    device = [event for event in found[0, 1] if event["name"] == "forward"]
    assert host == {"plan", "submit", "settle"}
    assert sum(event["args"]["tokens"] for event in device) >= 105 + 3 * 7
    requests = [event for (process, _), events in found.items() if process == 1 for event in events]
    assert sum(event["name"].startswith("request ") for event in requests) == 3
    assert {"prefill", "decode"} <= {event["name"] for event in requests}


def test_a_file_that_cannot_be_written_costs_the_trace_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tiny_llm(trace=str(tmp_path / "missing" / "trace.json")) as llm:
        llm.generate([5], SamplingParams(max_tokens=2), progress=False)
    assert "the trace cannot be written" in caplog.text
