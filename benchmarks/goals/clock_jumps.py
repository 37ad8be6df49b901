"""The wall's clock jumps while requests with deadlines, streams and a queue with a limit are under way: an hour back, a
day on, and right again. What is measured by a clock that only goes on does not notice."""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.faults import FakeClock, Unavailable
from benchmarks.goals.verdict import Check
from benchmarks.server import Server, running

_JUMPS_S = (-3600, 86400, 0)
_BETWEEN_S = 5.0
_SEATS = 4
_USERS = 8
"""Of each kind, of those that want whole answers and of those that stream."""
_TIERS = """
[[tier]]
name = "standard"
queue_limit_s = 30
"""
_DEADLINE_S = 60.0
"""Of requests that are to be answered."""
_SHORT_S = 1.5
"""Of those that are to be given up."""
_SLACK_S = 3.0
_TIMING = re.compile(r"dur=(-?[0-9.]+)")


def measure(model: str) -> tuple[dict[str, Any], list[Check]]:
    """Figures and checks; skipped without a C compiler. Raises ``RuntimeError`` when the server does not start."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            clock = FakeClock(Path(folder))
        except Unavailable as unavailable:
            return {"skipped": str(unavailable)}, _checks({}, str(unavailable))
        tiers = Path(folder) / "tiers.toml"
        tiers.write_text(_TIERS, encoding="utf-8")
        flags = ("--max-num-seqs", str(_SEATS), "--max-model-len", "1024", "--tiers", str(tiers))
        with running(model, *flags, environment=clock.environment) as server:
            figures = asyncio.run(_Jumps(server, clock).measure())
            figures |= {"leaked_blocks": server.held_blocks(), "serves": server.serves()}
    return figures, _checks(figures)


def _checks(figures: dict[str, Any], note: str = "") -> list[Check]:
    get = figures.get
    return [
        Check("clock jumps: processes that see them", get("reached"), 2, note=note),
        Check("clock jumps: those that answers show", get("seen"), len(_JUMPS_S), note=note),
        Check("clock jumps: requests that end otherwise than they should", get("wrong"), 0, "at most", note=note),
        Check("clock jumps: requests given up in time", get("given_up"), 1, note=note),
        Check("clock jumps: durations below 0, or longer than it took", get("bad_durations"), 0, "at most", note=note),
        Check("clock jumps: other starts that health tells", get("other_starts"), 0, "at most", note=note),
    ]


class _Jumps:
    def __init__(self, server: Server, clock: FakeClock) -> None:
        self._server = server
        self._clock = clock
        self._began_s = time.monotonic()
        self._over = False
        self._endings: Counter[str] = Counter()
        self._problems: list[str] = []
        """Of requests that ended otherwise than they should."""
        self._durations: list[str] = []
        """That cannot be."""

    async def measure(self) -> dict[str, Any]:
        pids = (self._server.process.pid, self._server.engine.pid)
        async with self._server.client() as client:
            starts = {await self._start(client)}
            users = [
                asyncio.create_task(self._again_and_again(kind, client))
                for kind, count in ((self._whole, _USERS), (self._streamed, _USERS), (self._late, 1))
                for _ in range(count)
            ]
            seen = 0
            await asyncio.sleep(_BETWEEN_S)
            for offset_s in _JUMPS_S:
                self._clock.jump(offset_s)
                await asyncio.sleep(_BETWEEN_S)
                seen += await self._sees(client, offset_s)
                starts.add(await self._start(client))
            self._over = True
            await asyncio.gather(*users)
        self._look_at_metrics()
        return {
            "reached": sum(map(FakeClock.reaches, pids)),
            "seen": seen,
            "statuses": dict(self._endings),
            "given_up": self._endings["504"],
            "wrong": len(self._problems),
            "problems": self._problems[:20],
            "bad_durations": len(self._durations),
            "durations": self._durations[:20],
            "other_starts": len(starts) - 1,
        }

    async def _again_and_again(
        self, kind: Callable[[httpx.AsyncClient], Awaitable[None]], client: httpx.AsyncClient
    ) -> None:
        while not self._over:
            await kind(client)

    async def _whole(self, client: httpx.AsyncClient) -> None:
        began = time.monotonic()
        answer = await client.post("/v1/completions", json=_body(24, timeout=_DEADLINE_S))
        took_ms = 1000 * (time.monotonic() - began)
        self._ended(answer, 200, answer.text)
        parts = _TIMING.findall(answer.headers.get("server-timing", ""))
        self._bounded("Server-Timing", [float(part) for part in parts], took_ms)

    async def _streamed(self, client: httpx.AsyncClient) -> None:
        body = _body(24, timeout=_DEADLINE_S, stream=True)
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        self._ended(answer, 200, str(lines))
        if answer.is_success and (lines[-1] != "data: [DONE]" or '"finish_reason":"length"' not in lines[-2]):
            self._problems.append(f"a stream ends with {lines[-2:]}")

    async def _late(self, client: httpx.AsyncClient) -> None:
        """One that cannot be done by its deadline."""
        began = time.monotonic()
        answer = await client.post("/v1/completions", json=_body(900, timeout=_SHORT_S))
        took_s = time.monotonic() - began
        self._ended(answer, 504, answer.text)
        if not _SHORT_S <= took_s <= _SHORT_S + _SLACK_S:
            self._problems.append(f"a deadline of {_SHORT_S} s passed after {took_s:.2f} s")

    def _ended(self, answer: httpx.Response, status: int, text: str) -> None:
        self._endings[str(answer.status_code)] += 1
        if answer.status_code != status:
            self._problems.append(f"{answer.status_code} in place of {status}: {text:.300}")

    def _bounded(self, name: str, values: list[float], most: float) -> None:
        self._durations += [f"{name}: {value}" for value in values if not 0 <= value <= most]

    async def _sees(self, client: httpx.AsyncClient, offset_s: int) -> bool:
        """Whether what the server shows of the wall's clock has jumped, and what it shows of durations has not."""
        began_s = time.time()
        created = (await client.post("/v1/completions", json=_body(1))).json()["created"] - offset_s
        shown = began_s - 1 <= created <= time.time() + 1
        now = (await client.get("/dashboard/now")).json()
        up_s = time.monotonic() - self._began_s + _SLACK_S
        self._bounded("up_s", [now["up_s"]], up_s)
        self._bounded("age_s", [request["age_s"] for request in now["requests"]], up_s)
        self._bounded("waits_s", [request["waits_s"] for request in now["queue"]], up_s)
        return bool(shown)

    async def _start(self, client: httpx.AsyncClient) -> int:
        """Since when it lives, as it says."""
        return int((await client.get("/health")).json()["since"])

    def _look_at_metrics(self) -> None:
        """No request took longer than all of this."""
        samples = self._server.samples()
        elapsed_s = time.monotonic() - self._began_s + _SLACK_S
        for name, value in samples.items():
            stem, is_sum, labels = name.partition("_seconds_sum")
            if is_sum:
                self._bounded(name, [value], elapsed_s * samples[f"{stem}_seconds_count{labels}"])
            elif value < 0:
                self._durations.append(f"{name}: {value}")


def _body(tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": "The line keeps moving", "max_tokens": tokens, "ignore_eos": True, **fields}
