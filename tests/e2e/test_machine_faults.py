"""A disk that fills up and a clock that jumps, under a real server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.faults import FakeClock, SmallDisk, Unavailable, small_disk
from tests.e2e.test_lifecycle import stream
from tests.e2e.test_serving import complete, ids, token_ids
from tests.support.chat_model import tiny_chat_model
from tests.support.server_process import ServerProcess


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    try:
        with small_disk(1 << 20) as disk:
            yield disk
    except Unavailable as unavailable:
        pytest.skip(str(unavailable))


@pytest.fixture
def clock(tmp_path: Path) -> FakeClock:
    try:
        return FakeClock(tmp_path)
    except Unavailable as unavailable:
        pytest.skip(str(unavailable))


def test_a_disk_cache_that_fills_up_costs_no_answer(disk: SmallDisk) -> None:
    flags = ("--disk-cache", str(disk.folder / "kv"), "--swap-space", "0.05", "--kv-blocks", "128")
    with ServerProcess(tiny_chat_model(), *flags) as server, server.client() as client:

        def answers() -> list[list[int]]:
            return [token_ids(complete(client, ids(seed, 400), max_tokens=8, temperature=0)) for seed in range(12)]

        first = answers()
        disk.fill()
        for seed in range(100, 112):
            complete(client, ids(seed, 400), max_tokens=2)
        assert answers() == first
        server.until("ropeway_disk_failed", 1)
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 200
        assert "is full; free some of it" in health.json()["disk_failure"]
        assert server.log().count("the disk cache saves nothing") == 1
        server.until('ropeway_kv_blocks{state="live"}', 0)


def test_no_room_for_log_trace_and_lengths_breaks_nothing(disk: SmallDisk) -> None:
    trace, lengths, log = disk.folder / "trace.json", disk.folder / "lengths.json", disk.folder / "log"
    flags = ("--trace", str(trace), "--length-profile", str(lengths), "--access-log", "--log-format", "json")
    with ServerProcess(tiny_chat_model(), *flags, log=log) as server, server.client() as client:

        def lines() -> int:
            return log.read_bytes().count(b"\n")

        def ask(requests: int) -> None:
            for seed in range(requests):
                assert complete(client, ids(seed, 20), max_tokens=4).choices[0].finish_reason == "length"

        def until_lines(count: int) -> None:
            """A request's line comes into the log after its answer."""
            deadline = time.monotonic() + 5
            while lines() < count:
                assert time.monotonic() < deadline, f"{lines()} lines in the log, not {count}"
                time.sleep(0.02)

        before = lines()
        ask(5)
        until_lines(before + 5)
        disk.fill()
        before = lines()
        ask(60)
        assert lines() - before < 30  # those that still fit into the file's last page
        disk.free()
        before = lines()
        ask(5)
        until_lines(before + 4)  # one may end the last line, which was cut off
        disk.fill()
        server.terminate()
        assert server.process.wait(20) == 0
    assert not lengths.exists()


def test_a_clock_that_jumps_moves_no_deadline_and_no_duration(clock: FakeClock) -> None:
    with ServerProcess(tiny_chat_model(), environment=clock.environment) as server, server.client() as client:
        url = f"{server.url}/v1/completions"
        assert all(clock.reaches(pid) for pid in (server.process.pid, *(child.pid for child in server.children())))
        since = httpx.get(f"{server.url}/health").json()["since"]
        for jump_s in (-3600, 86400, 0):
            # Of two under way, one has a minute and one too little.
            events: list[str] = []
            patient = threading.Thread(target=stream, args=(server, 1900, events))
            patient.start()
            server.until("ropeway_num_requests_running", 1)
            body = {"prompt": ids(2, 10), "max_tokens": 1900, "n": 16, "ignore_eos": True, "timeout": 0.3}
            late: list[httpx.Response] = []
            hasty = threading.Thread(target=lambda b=body, a=late: a.append(httpx.post(url, json=b, timeout=30)))
            began = time.monotonic()
            hasty.start()
            clock.jump(jump_s)
            hasty.join()
            assert late[0].status_code == 504
            assert 0.3 <= time.monotonic() - began < 5
            patient.join()
            assert events[-1] == "data: [DONE]"
            assert '"finish_reason":"length"' in events[-2]
            answer = complete(client, ids(3, 10), max_tokens=1)
            assert abs(answer.created - time.time() - jump_s) < 10
            now = httpx.get(f"{server.url}/dashboard/now").json()
            assert 0 < now["up_s"] < 300
            assert httpx.get(f"{server.url}/health").json()["since"] == since
        assert server.metric("ropeway_engine_restarts_total") == 0
        text = httpx.get(f"{server.url}/metrics").text
    sums = {name: float(value) for name, value in (line.split(" ") for line in text.splitlines() if "_sum{" in line)}
    assert sums
    assert all(0 <= value < 300 for value in sums.values()), json.dumps(sums)
