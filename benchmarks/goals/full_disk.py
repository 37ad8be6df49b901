"""A full disk, first below the disk cache, then below everything else that a server writes: its log, a trace, what it
has learnt of lengths. Nothing of that is needed for an answer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.faults import SmallDisk, Unavailable, small_disk
from benchmarks.goals.verdict import Check
from benchmarks.server import Server, running
from ropeway.execution.disk import RETRY_S

_DISK_BYTES = 4 << 20
"""Some eleven blocks of the embedded model."""
_PROMPTS, _PROMPT, _OUTPUT = 24, 256, 16
_FLAGS = ("--max-num-seqs", "8", "--max-model-len", "512", "--kv-blocks", "160", "--no-shed")
"""Device and host hold fewer blocks than the prompts have, so every round of them is computed and kept anew."""
_CACHE = ("--swap-space", "0.05", "--disk-cache")
_FULL_S = RETRY_S + 5
"""So long that the store tries again."""
_SAVES_NOTHING = "the disk cache saves nothing"


def measure(model: str) -> tuple[dict[str, Any], list[Check]]:
    """Figures and checks; skipped where no file system can be mounted. Raises ``RuntimeError`` when a server does not
    start."""
    try:
        with small_disk(_DISK_BYTES) as below_cache, small_disk(_DISK_BYTES) as below_files:
            figures = _measure(model, below_cache, below_files)
    except Unavailable as unavailable:
        return {"skipped": str(unavailable)}, _checks({}, str(unavailable))
    return figures, _checks(figures)


def _checks(figures: dict[str, Any], note: str = "") -> list[Check]:
    get = figures.get
    return [
        Check("full disk: answers other than 200, health's included", get("other"), 0, "at most", note=note),
        Check("full disk: answers that differ from those without a disk", get("wrong"), 0, "at most", note=note),
        Check("full disk: told by health and metrics", get("told"), 1, note=note),
        Check("full disk: lines in the log about it, until there is room", get("lines"), 1, "at most", note=note),
        Check("full disk: until blocks are written again", get("again_s"), RETRY_S + 15, "at most", "s", note),
        Check("full disk: log lines that were lost", get("lost_lines"), _PROMPTS, note=note),
        Check("full disk: log lines when there is room again", get("new_lines"), 1, note=note),
        Check("full disk: exit code with no room for log, trace, lengths", get("exit_code"), 0, "at most", note=note),
    ]


class _Rounds:
    """Asks for the same answers again and again, and compares them with the first ones."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.prompts = [rng.integers(1, 1000, _PROMPT).tolist() for _ in range(_PROMPTS)]
        self.first: list[list[int]] = []
        self.statuses: Counter[str] = Counter()
        self.wrong = 0

    def ask(self, server: Server) -> None:
        """One round, and how the server is."""
        answers = asyncio.run(self._ask(server))
        self.first = self.first or answers
        self.wrong += sum(one != other for one, other in zip(answers, self.first, strict=True))

    @property
    def other(self) -> int:
        """Answers other than 200."""
        return self.statuses.total() - self.statuses["200"]

    async def _ask(self, server: Server) -> list[list[int]]:
        async with server.client() as client:

            async def one(prompt: list[int]) -> list[int]:
                body = {"prompt": prompt, "max_tokens": _OUTPUT, "temperature": 0, "ignore_eos": True}
                answer = await client.post("/v1/completions", json={**body, "return_token_ids": True})
                self._count(answer)
                return answer.json()["choices"][0]["token_ids"] if answer.is_success else []

            answers = await asyncio.gather(*map(one, self.prompts))
            self._count(await client.get("/health"))
        return answers

    def _count(self, answer: httpx.Response) -> None:
        self.statuses[str(answer.status_code)] += 1


def _measure(model: str, below_cache: SmallDisk, below_files: SmallDisk) -> dict[str, Any]:
    rounds = _Rounds()
    with running(model, *_FLAGS) as server:
        rounds.ask(server)
    with running(model, *_FLAGS, *_CACHE, str(below_cache.folder / "kv")) as server:
        figures = _below_cache(server, below_cache, rounds)
        figures |= {"leaked_blocks": server.held_blocks(), "serves": server.serves()}
    figures |= _below_files(model, below_files, rounds)
    return figures | {"statuses": dict(rounds.statuses), "other": rounds.other, "wrong": rounds.wrong}


def _below_cache(server: Server, disk: SmallDisk, rounds: _Rounds) -> dict[str, Any]:
    """It fills by itself, then somebody takes what is left, and then gives back more than a block's room."""
    disk.fill(_DISK_BYTES // 2)
    began = time.monotonic()
    while time.monotonic() - began < _FULL_S:
        rounds.ask(server)
    kept = server.samples()["ropeway_disk_blocks"]
    disk.fill()
    rounds.ask(server)
    told = server.samples()["ropeway_disk_failed"] == 1 and _health(server)["disk_failure"] is not None
    lines = server.log.read_text().count(_SAVES_NOTHING)
    disk.free()
    began = time.monotonic()
    while (again_s := time.monotonic() - began) < 2 * _FULL_S and server.samples()["ropeway_disk_blocks"] <= kept:
        rounds.ask(server)
    return {"kept_blocks": kept, "told": int(told), "lines": lines, "again_s": again_s}


def _below_files(model: str, disk: SmallDisk, rounds: _Rounds) -> dict[str, Any]:
    """It is filled once the server is there, has room for a while, and is full when the server ends."""
    log = disk.folder / "log"
    trace, lengths = disk.folder / "trace.json", disk.folder / "lengths.json"
    files = ("--trace", str(trace), "--length-profile", str(lengths))
    with running(model, *_FLAGS, *files, "--access-log", "--log-format", "json", log=log) as server:
        before = _lines(log)
        disk.fill()
        rounds.ask(server)
        rounds.ask(server)
        full = _lines(log)
        disk.free()
        rounds.ask(server)
        after = _lines(log)
        disk.fill()
    # A round is a line for every prompt, and one for the question after its health. Some fit into the file's last page.
    lost = 2 * (_PROMPTS + 1) - (full - before)
    return {"lost_lines": lost, "new_lines": after - full, "exit_code": abs(server.process.returncode)}


def _lines(log: Path) -> int:
    return log.read_bytes().count(b"\n")


def _health(server: Server) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{server.url}/health", timeout=30, trust_env=False).json()
    return answer
