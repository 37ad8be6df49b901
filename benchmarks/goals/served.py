"""The tiers on a real server: interactive requests once a second over a batch load that never lets a seat go empty.

A server process with SmolLM2 and steps bounded to 50 ms answers over HTTP. Interactive requests come alone first, then
over the batch load; before both, every batch request is answered alone, so that lost or wrong tokens show.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from benchmarks.goals.verdict import Check, Outcome, table_of
from benchmarks.server import Server, running

_STEP_S = 0.05
_TIERS = f"""
[[tier]]
name = "interactive"
weight = 6
tpot_s = {_STEP_S}

[[tier]]
name = "batch"
weight = 0
"""
_SEATS = 4
"""Every other seat's token takes some 2 ms of a step's 50, and so delays a prompt that fills eight or nine steps: with
eight seats by two steps more."""
_BATCH_USERS = 16
_BATCH = (128, 160)
"""Prompt and output tokens."""
_BATCH_PROMPTS = 24
_INTERACTIVE = (512, 24)
_ALONE = 30
_OVER = 60


def measure(model: str = "smollm2-135m") -> Outcome:
    """Raises ``RuntimeError`` when the server does not start or a request fails."""
    with _server(model) as server:
        return asyncio.run(_measure(server))


async def _measure(server: Server) -> Outcome:
    async with _client(server) as client:
        rng = np.random.default_rng(0)
        batch = [rng.integers(1, 1000, _BATCH[0]).tolist() for _ in range(_BATCH_PROMPTS)]
        alone = [(await _ask(client, prompt, _BATCH[1], "batch")).tokens for prompt in batch]
        idle = await _once_a_second(client, rng, _ALONE)
        before = await asyncio.to_thread(server.samples)
        load = _BatchLoad(client, batch)
        async with load.running():
            await asyncio.sleep(5.0)
            over = await _once_a_second(client, rng, _OVER)
        after = await asyncio.to_thread(server.samples)
    wrong = sum(answer.tokens != alone[index] for index, answer in load.answers)
    steps = after["ropeway_engine_steps_total"] - before["ropeway_engine_steps_total"]
    step_s = load.wall_s / steps
    ttft = {name: np.array([answer.ttft_s for answer in answers]) for name, answers in (("idle", idle), ("over", over))}
    figures = {name: {f"p{q}": float(np.percentile(times, q)) for q in (50, 90, 99)} for name, times in ttft.items()}
    extra = figures["over"]["p99"] - figures["idle"]["p99"]
    rate = sum(len(answer.tokens) for _, answer in load.answers) / load.wall_s
    outcome = Outcome(
        checks=[
            Check(
                "interactive P99 TTFT over a batch load, beyond idle, in steps of 50 ms",
                extra / _STEP_S,
                2.2,
                "at most",
            ),
            Check("batch answers that differ from the same request alone", float(wrong), 0.0, "at most"),
        ],
        figures={
            "ttft_s": figures,
            "step_bound_s": _STEP_S,
            "mean_step_s": step_s,
            "batch_answers": len(load.answers),
            "batch_tokens_per_s": rate,
            "preemptions": _differences(before, after, "ropeway_preemptions_total"),
        },
    )
    rows = [[name, *(1000 * figures[name][f"p{q}"] for q in (50, 90, 99))] for name in ("idle", "over")]
    outcome.tables.append(table_of("interactive TTFT, ms", ["", "p50", "p90", "p99"], rows))
    return outcome


# --------------------------------------------------------------------------- the loads


@dataclass(frozen=True)
class _Answer:
    tokens: list[int]
    ttft_s: float


async def _once_a_second(client: httpx.AsyncClient, rng: np.random.Generator, count: int) -> list[_Answer]:
    """``count`` interactive requests, a new prompt each, sent a second apart whatever becomes of them."""
    prompts = [rng.integers(1, 1000, _INTERACTIVE[0]).tolist() for _ in range(count)]

    async def send(index: int) -> _Answer:
        await asyncio.sleep(float(index))
        return await _ask(client, prompts[index], _INTERACTIVE[1], "interactive")

    return await asyncio.gather(*map(send, range(count)))


@dataclass
class _BatchLoad:
    """Users that each send their next batch request when their last one is answered."""

    client: httpx.AsyncClient
    prompts: Sequence[list[int]]
    answers: list[tuple[int, _Answer]] = field(default_factory=list)
    """(prompt, its answer) in the order of their ends."""
    wall_s: float = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """From entering on; on leaving, requests under way are answered and no new ones sent."""
        self._stop = False
        began = time.monotonic()
        users = [asyncio.create_task(self._user(user)) for user in range(_BATCH_USERS)]
        yield
        self._stop = True
        await asyncio.gather(*users)
        self.wall_s = time.monotonic() - began

    async def _user(self, user: int) -> None:
        index = user
        while not self._stop:
            prompt = index % len(self.prompts)
            self.answers.append((prompt, await _ask(self.client, self.prompts[prompt], _BATCH[1], "batch")))
            index += _BATCH_USERS


async def _ask(client: httpx.AsyncClient, prompt: list[int], output_tokens: int, tier: str) -> _Answer:
    body = {
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "priority": tier,
    }
    began, first, tokens = time.monotonic(), None, []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"the server answered {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.monotonic()
            for choice in json.loads(line[6:])["choices"]:
                tokens += choice.get("token_ids") or []
    if first is None or len(tokens) != output_tokens:
        raise RuntimeError(f"{output_tokens} tokens were asked and {len(tokens)} came")
    return _Answer(tokens, first - began)


# --------------------------------------------------------------------------- the server


@asynccontextmanager
async def _client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=200, max_keepalive_connections=200)
    async with httpx.AsyncClient(base_url=server.url, timeout=600.0, limits=limits, trust_env=False) as client:
        yield client


@contextmanager
def _server(model: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        tiers = Path(folder) / "tiers.toml"
        tiers.write_text(_TIERS, encoding="utf-8")
        flags = ("--tiers", str(tiers), "--step-budget", "tpot", "--max-num-seqs", str(_SEATS), "--swap-space", "0.5")
        with running(model, *flags) as server:
            yield server


def _differences(before: dict[str, float], after: dict[str, float], name: str) -> dict[str, float]:
    return {key: value - before.get(key, 0.0) for key, value in after.items() if key.startswith(name)}
