"""Does a very long prompt keep the server from answering others? Probes of ``/health`` and a stream of tokens, with and
without prompts of 200,000 characters that are being tokenized meanwhile.

python -m benchmarks.event_loop                    # JSON with --json FILE
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated

import httpx
import numpy as np
import typer

from benchmarks.server import Server, running
from ropeway.bench.report import reported_to
from ropeway.cli.failures import told_plainly

_CHARACTERS = 200_000
_PROBE_S = 0.005
_SENTENCE = "The line keeps moving while cabins get on and off; naïve café, 42 of 100. "


@told_plainly
def _main(
    model: Annotated[str, typer.Argument()] = "smollm2-135m",
    prompts: Annotated[int, typer.Option(min=1, help="Long prompts, one after the other on two connections.")] = 20,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Compare latencies of probes, and gaps of a stream, in both cases."""
    with reported_to(json_file) as report, running(model, "--max-num-seqs", "8", "--max-model-len", "8192") as server:
        figures = asyncio.run(_measure(server, prompts))
        report.update({"model": model, "characters": _CHARACTERS, "prompts": prompts, **figures})
    for name, each in figures.items():
        typer.echo(f"{name}: {json.dumps(each)}")


async def _measure(server: Server, prompts: int) -> dict[str, dict[str, float]]:
    async with httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False) as client:
        figures = {}
        for name, load in (("idle", False), ("tokenizing", True)):
            async with _long_prompts(client, prompts) if load else contextlib.nullcontext(asyncio.Event()) as over:
                probes = await _probe(client, over, 3.0)
            figures[f"{name}_probe_s"] = _summary(probes)
            async with _long_prompts(client, prompts) if load else contextlib.nullcontext(asyncio.Event()) as over:
                gaps = await _stream(client)
            figures[f"{name}_gap_s"] = _summary(gaps)
    return figures


@contextlib.asynccontextmanager
async def _long_prompts(client: httpx.AsyncClient, count: int) -> AsyncIterator[asyncio.Event]:
    """While this is entered, long prompts come; the event is set when all have been answered."""
    text = (_SENTENCE * (_CHARACTERS // len(_SENTENCE) + 1))[:_CHARACTERS]
    over = asyncio.Event()

    async def send(number: int) -> None:
        for turn in range(count // 2):
            body = {"messages": [{"role": "user", "content": f"{number} {turn} {text}"}], "max_tokens": 1}
            answer = await client.post("/v1/chat/completions", json=body)
            if answer.status_code != 400:
                raise RuntimeError(f"a prompt too long was answered {answer.status_code}")

    async def both() -> None:
        await asyncio.gather(send(0), send(1))
        over.set()

    sending = asyncio.create_task(both())
    try:
        yield over
    finally:
        await sending


async def _probe(client: httpx.AsyncClient, over: asyncio.Event, least_s: float) -> list[float]:
    """Latencies of ``/health`` until the event, or for a while."""
    latencies = []
    until_s = time.monotonic() + least_s
    while time.monotonic() < until_s and not over.is_set():
        began = time.perf_counter()
        await client.get("/health")
        latencies.append(time.perf_counter() - began)
        await asyncio.sleep(_PROBE_S)
    return latencies


async def _stream(client: httpx.AsyncClient) -> list[float]:
    """Gaps between the tokens of a stream."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        arrivals = [time.perf_counter() async for line in response.aiter_lines() if line.startswith("data: {")]
    return [float(gap) for gap in np.diff(arrivals)]


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {f"p{share}": float(np.percentile(values, share)) for share in (50, 99, 100)}


if __name__ == "__main__":
    typer.run(_main)
