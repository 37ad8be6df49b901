"""What the server costs in throughput: the same requests through the Python API and through HTTP, 64 at a time.

python -m benchmarks.through_http        # JSON with --json FILE
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from benchmarks.server import Server, running
from ropeway import LLM, SamplingParams
from ropeway.bench.report import reported_to
from ropeway.cli.failures import told_plainly

_AT_ONCE = 64
_TOKENS = 32


@told_plainly
def _main(
    model: Annotated[str, typer.Argument()] = "smollm2-135m",
    requests: Annotated[int, typer.Option(min=1)] = 300,
    turns: Annotated[int, typer.Option(min=1)] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Run both in turns; the medians count."""
    with reported_to(json_file) as report:
        figures = measure(model, requests, turns)
        report.update(figures)
    for name in ("whole", "streamed"):
        typer.echo(f"{name} answers over HTTP: {figures[name]:.2f} of the Python API's throughput")


def measure(model: str, requests: int, turns: int) -> dict[str, Any]:
    """``whole`` and ``streamed``: throughput over HTTP, relative to the Python API's."""
    prompts = [f"Story {number}: once upon a time" for number in range(requests)]
    params = SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True)
    seconds: dict[str, list[float]] = {"python": [], "whole": [], "streamed": []}
    flags = (
        "--max-num-seqs",
        str(_AT_ONCE),
        "--max-model-len",
        "256",
        "--kv-memory",
        "0.5",
        "--no-prefix-cache",
        "--no-shed",
    )
    fields = {"max_num_seqs": _AT_ONCE, "max_model_len": 256, "kv_memory": 0.5, "prefix_cache": False, "shed": False}
    with running(model, *flags) as server, LLM(model, **fields) as llm:
        for turn in range(turns + 1):
            began = time.perf_counter()
            llm.generate(prompts, params, progress=False)
            took = {"python": time.perf_counter() - began}
            for name in ("whole", "streamed"):
                took[name] = asyncio.run(_through(server, prompts, stream=name == "streamed"))
            if turn:  # after one that warms everything up
                for name, each in took.items():
                    seconds[name].append(each)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    ratios = {name: medians["python"] / medians[name] for name in ("whole", "streamed")}
    return {"model": model, "requests": requests, "at_once": _AT_ONCE, "tokens": _TOKENS, "seconds": seconds, **ratios}


async def _through(server: Server, prompts: list[str], *, stream: bool) -> float:
    """Seconds for all of them."""
    waiting = iter(prompts)
    limits = httpx.Limits(max_connections=_AT_ONCE)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits, trust_env=False) as client:

        async def user() -> None:
            for prompt in waiting:
                body = {"prompt": prompt, "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
                (await client.post("/v1/completions", json=body)).raise_for_status()

        began = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(_AT_ONCE)))
        return time.perf_counter() - began


if __name__ == "__main__":
    typer.run(_main)
