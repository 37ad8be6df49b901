"""Bad clients and bad luck: hostile requests, an engine that is killed, clients that leave or read nothing, ten times
the load that can be served, a full disk, a clock that jumps. Afterwards nothing is lost, nothing is held, and the
server answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections import Counter
from functools import partial
from typing import Any

import httpx

from benchmarks.goals import clock_jumps, full_disk
from benchmarks.goals.verdict import Check, Outcome, table_of
from benchmarks.hostile import HostileRequest, requests
from benchmarks.server import Server, running

HOSTILE = 10_000
_AT_ONCE = 24
_CHAT = "/v1/chat/completions"
_STORM = 200
_OVERLOAD_S = 20.0
_DOCUMENTED = frozenset({503, 504})
"""5xx that say something: the queue's time limit, the request's own, an engine being started again, draining."""


def measure(model: str = "smollm2-135m", hostile: int = HOSTILE) -> Outcome:
    """Raises ``RuntimeError`` when the server does not start, or ends."""
    flags = ("--max-num-seqs", "16", "--max-queue", "64", "--max-model-len", "1024", "--read-timeout-s", "3")
    with running(model, *flags) as server:
        figures: dict[str, Any] = {}
        for name, part in (
            ("hostile", lambda: _hostile(server, hostile)),
            ("storm", lambda: _storm(server)),
            ("slow_readers", lambda: _slow_readers(server)),
            ("killed", lambda: _killed(server)),
            ("overload", lambda: _overload(server)),
        ):
            began = time.monotonic()
            figures[name] = asyncio.run(part())
            figures[name]["wall_s"] = time.monotonic() - began
            figures[name]["leaked_blocks"] = server.held_blocks()
            figures[name]["serves"] = server.serves()
    more: list[Check] = []
    for name, measured in (("full_disk", full_disk.measure), ("clock_jumps", clock_jumps.measure)):
        began = time.monotonic()
        figures[name], checks = measured(model)
        figures[name]["wall_s"] = time.monotonic() - began
        more += checks
    parts = [part for part in figures.values() if "skipped" not in part]
    leaked = sum(part["leaked_blocks"] for part in parts)
    checks = [
        Check("5xx that nobody documents, over hostile requests", figures["hostile"]["unexplained"], 0, "at most"),
        Check("hostile requests without any answer", figures["hostile"]["unanswered"], 0, "at most"),
        Check("blocks held when all is over", leaked, 0, "at most"),
        Check("parts after which the server answers", sum(part["serves"] for part in parts), len(parts)),
        Check("streams of a killed engine that end without an error", figures["killed"]["silent"], 0, "at most"),
        Check("until it serves again after a kill", figures["killed"]["back_s"], 10.0, "at most", "s"),
        Check("under 10x load: answers other than 200 and 429", figures["overload"]["other"], 0, "at most"),
        Check("under 10x load: longest queue beyond its bound", figures["overload"]["beyond"], 0, "at most"),
        *more,
    ]
    rows = [
        [name, part["wall_s"], part.get("leaked_blocks", "-"), part.get("skipped") or str(part.get("statuses", ""))]
        for name, part in figures.items()
    ]
    return Outcome(checks, figures, [table_of("robustness", ["part", "seconds", "leaked", "answers"], rows)])


def _body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, **fields}


async def _hostile(server: Server, count: int) -> dict[str, Any]:
    statuses: Counter[str] = Counter()
    examples: list[dict[str, Any]] = []

    async with server.client() as client:

        async def send(request: HostileRequest) -> None:
            try:
                answer = await client.request(
                    request.method,
                    request.path,
                    content=request.content,
                    headers=httpx.Headers(request.headers, encoding="latin-1"),
                )
            except httpx.HTTPError as error:
                statuses[type(error).__name__] += 1
                examples.append(
                    {"path": request.path[:100], "problem": repr(error), "content": str(request.content[:300])}
                )
                return
            statuses[str(answer.status_code)] += 1
            if answer.status_code >= 500 and answer.status_code not in _DOCUMENTED:
                examples.append(
                    {"path": request.path[:100], "problem": answer.text, "content": str(request.content[:300])}
                )

        await _bounded((partial(send, request) for request in requests(count)), _AT_ONCE)
    unexplained = sum(
        n for code, n in statuses.items() if code.isdecimal() and int(code) >= 500 and int(code) not in _DOCUMENTED
    )
    unanswered = sum(n for code, n in statuses.items() if not code.isdecimal())
    return {
        "requests": count,
        "statuses": dict(statuses),
        "unexplained": unexplained,
        "unanswered": unanswered,
        "examples": examples[:20],
    }


async def _bounded(works: Any, most: int) -> None:
    """Run all, so many at once."""
    running_now: set[asyncio.Task[None]] = set()
    for work in works:
        running_now.add(asyncio.create_task(work()))
        if len(running_now) >= most:
            done, running_now = await asyncio.wait(running_now, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    if running_now:
        await asyncio.gather(*running_now)


async def _storm(server: Server) -> dict[str, Any]:
    """Clients that leave as soon as they have seen a little."""
    async with server.client() as client:

        async def one(number: int) -> None:
            with contextlib.suppress(httpx.HTTPError, TimeoutError):
                async with asyncio.timeout(0.02 * (number % 20)):
                    async with client.stream("POST", _CHAT, json=_body(max_tokens=900, stream=True)) as response:
                        async for _ in response.aiter_lines():
                            pass

        for _ in range(4):
            await asyncio.gather(*(one(number) for number in range(_STORM // 4)))
    return {"left": _STORM}


async def _slow_readers(server: Server) -> dict[str, Any]:
    """Clients that send a request and read nothing at all."""
    body = json.dumps(_body(max_tokens=900, stream=True, logprobs=True, top_logprobs=20)).encode()
    head = f"POST {_CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    sockets = []
    for _ in range(8):
        each = socket.socket()
        each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        each.connect(("127.0.0.1", server.port))
        each.sendall(head + body)
        sockets.append(each)
    async with server.client() as client:
        began = time.monotonic()
        answer = await client.post(_CHAT, json=_body())
        beside_s = time.monotonic() - began
    await asyncio.to_thread(server.until_idle)
    for each in sockets:
        each.close()
    return {"readers": len(sockets), "a_request_beside_s": beside_s, "status": answer.status_code}


async def _killed(server: Server) -> dict[str, Any]:
    """SIGKILL to the engine with streams under way and requests waiting."""
    silent = 0
    async with server.client() as client:

        async def one() -> None:
            nonlocal silent
            lines: list[str] = []
            try:
                async with client.stream(
                    "POST", _CHAT, json=_body(max_tokens=900, stream=True, ignore_eos=True)
                ) as response:
                    lines = [line async for line in response.aiter_lines() if line]
                told = response.status_code != 200 or '"error"' in lines[-1]
            except httpx.HTTPError:
                told = True
            silent += not told

        streams = [asyncio.create_task(one()) for _ in range(30)]
        await asyncio.sleep(2.0)
        os.kill(server.engine.pid, signal.SIGKILL)
        began = time.monotonic()
        await asyncio.gather(*streams)
        ended_s = time.monotonic() - began
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.post(_CHAT, json=_body())).status_code == 200:
                    break
            await asyncio.sleep(0.05)
        back_s = time.monotonic() - began
    return {"silent": silent, "streams_ended_s": ended_s, "back_s": back_s}


async def _overload(server: Server) -> dict[str, Any]:
    """First what it can take, then ten times as many clients, each of which comes again at once."""
    statuses: Counter[int] = Counter()
    longest = 0.0
    async with server.client() as client:

        async def user(until_s: float) -> None:
            while time.monotonic() < until_s:
                answer = await client.post(_CHAT, json=_body(max_tokens=32, ignore_eos=True))
                statuses[answer.status_code] += 1
                if answer.status_code == 429:
                    assert int(answer.headers["retry-after"]) >= 1
                    await asyncio.sleep(0.1)

        users = [asyncio.create_task(user(time.monotonic() + _OVERLOAD_S)) for _ in range(16 * 10)]
        while not all(each.done() for each in users):
            samples = await asyncio.to_thread(server.samples)
            longest = max(longest, samples["ropeway_num_requests_waiting"])
            await asyncio.sleep(0.2)
        await asyncio.gather(*users)
    other = sum(count for status, count in statuses.items() if status not in (200, 429))
    return {"statuses": dict(statuses), "other": other, "longest_queue": longest, "beyond": max(longest - 64, 0)}
