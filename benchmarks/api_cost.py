"""What a streamed token costs the server's own process, apart from the engine's: processor time over many streams.

python -m benchmarks.api_cost --streams 100        # JSON with --json FILE
"""

from __future__ import annotations

import asyncio
import json
import statistics
from pathlib import Path
from typing import Annotated

import psutil
import typer

from benchmarks.server import Server, running
from ropeway.bench.report import reported_to
from ropeway.cli.failures import told_plainly


@told_plainly
def _main(
    model: Annotated[str, typer.Argument()] = "smollm2-135m",
    streams: Annotated[int, typer.Option(min=1)] = 100,
    tokens: Annotated[int, typer.Option(min=2)] = 100,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Stream many answers at once, and divide the server process's time by their tokens."""
    flags = ("--max-num-seqs", str(streams), "--max-queue", str(streams), "--max-model-len", "1024", "--no-shed")
    with reported_to(json_file) as report, running(model, *flags) as server:
        asyncio.run(_stream_all(server, streams, 4))
        costs = []
        for _ in range(repeats):
            before = _processor_s(server)
            chunks = asyncio.run(_stream_all(server, streams, tokens))
            costs.append((_processor_s(server) - before) / chunks * 1e6)
        figures = {
            "model": model,
            "streams": streams,
            "tokens_per_stream": tokens,
            "server_us_per_token": statistics.median(costs),
            "repeats": costs,
        }
        report.update(figures)
    typer.echo(f"{figures['server_us_per_token']:.1f} us of the server's processor time per streamed token ({costs})")


def _processor_s(server: Server) -> float:
    times = psutil.Process(server.process.pid).cpu_times()
    return float(times.user + times.system)


async def _stream_all(server: Server, streams: int, tokens: int) -> int:
    """Chunks with a token that came."""
    return sum(await asyncio.gather(*(_stream(server, number, tokens) for number in range(streams))))


async def _stream(server: Server, number: int, tokens: int) -> int:
    """As cheap a client as can be: it shares the processor."""
    body = {
        "messages": [{"role": "user", "content": f"Tell me of number {number}."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    received = await reader.read(-1)
    writer.close()
    if b"[DONE]" not in received:
        raise RuntimeError(f"a stream ended early: {received[-500:]!r}")
    return received.count(b'"delta":{"content"')


if __name__ == "__main__":
    typer.run(_main)
