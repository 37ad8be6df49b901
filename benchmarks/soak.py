"""A long row of short requests: does the memory of server and engine grow?

python -m benchmarks.soak --requests 100000        # JSON with --json FILE
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated

import httpx
import typer

from benchmarks.server import Server, running
from ropeway.bench.report import reported_to
from ropeway.cli.failures import told_plainly

_AT_ONCE = 32
_LOOKS = 20


@told_plainly
def _main(
    model: Annotated[str, typer.Argument()] = "smollm2-135m",
    requests: Annotated[int, typer.Option(min=1000)] = 100_000,
    warm_up: Annotated[
        float, typer.Option(min=0.01, max=0.9, help="Share of the requests before memory counts.")
    ] = 0.1,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Send them, and look at resident memory on the way."""
    flags = ("--max-num-seqs", "32", "--max-queue", "64", "--max-model-len", "256", "--kv-memory", "0.1", "--no-shed")
    with reported_to(json_file) as report, running(model, *flags) as server:
        began = time.monotonic()
        looks = asyncio.run(_send(server, requests))
        after = [bytes_ for done, bytes_ in looks if done >= warm_up * requests]
        # A trend, not two looks: least squares over what came after the warm-up.
        growth = _growth(after)
        samples = server.samples()
        figures = {
            "model": model,
            "requests": requests,
            "wall_s": time.monotonic() - began,
            "resident_bytes": looks,
            "growth": growth,
            "live_blocks": samples['ropeway_kv_blocks{state="live"}'],
        }
        report.update(figures)
    typer.echo(f"{requests} requests in {figures['wall_s']:.0f} s; resident memory grew by {growth:+.2%} after warm-up")


def _growth(values: list[int]) -> float:
    """Of the line through the values, from the first to the last, relative."""
    count = len(values)
    mean_x, mean_y = (count - 1) / 2, sum(values) / count
    above = sum((x - mean_x) * (y - mean_y) for x, y in enumerate(values))
    slope = above / sum((x - mean_x) ** 2 for x in range(count))
    return slope * (count - 1) / (mean_y - slope * mean_x)


async def _send(server: Server, requests: int) -> list[tuple[int, int]]:
    """(requests done, resident bytes) now and then."""
    looks: list[tuple[int, int]] = []
    done = 0
    numbers = iter(range(requests))
    every = requests // _LOOKS
    async with httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False) as client:

        async def user() -> None:
            nonlocal done
            for number in numbers:
                body = {"prompt": f"{number}", "max_tokens": 1 + number % 3, "user": f"user-{number % 50}"}
                stream = number % 4 == 0
                answer = await client.post("/v1/completions", json={**body, "stream": stream})
                if answer.status_code != 200:
                    raise RuntimeError(f"request {number} was answered {answer.status_code}: {answer.text}")
                done += 1
                if done % every == 0:
                    looks.append((done, await asyncio.to_thread(server.resident_bytes)))

        await asyncio.gather(*(user() for _ in range(_AT_ONCE)))
    return looks


if __name__ == "__main__":
    typer.run(_main)
