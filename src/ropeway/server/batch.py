"""Files of requests in OpenAI's batch format: a JSON object per line with ``custom_id``, ``method``, ``url`` and
``body``; answers come in the order in which they are ready. Requests go through the same routes as a client's."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import msgspec

from ropeway.config import Config
from ropeway.errors import ConfigError
from ropeway.server.app import create_app
from ropeway.server.sampling import read_defaults

_URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_AHEAD = 64
"""Requests that wait beside those in the batch, so that no seat is empty."""
_DAYS_S = 7 * 24 * 3600.0


class BatchLine(msgspec.Struct, kw_only=True):
    custom_id: str
    method: str = "POST"
    url: str
    body: dict[str, Any]


@dataclass
class BatchCounts:
    answered: int = 0
    failed: int = 0
    kept: int = 0


async def run_file(config: Config, source: Path, target: Path, *, resume: bool = False) -> BatchCounts:
    """Answer every line of ``source`` in ``target``. With ``resume``, lines whose answer is in the target already are
    left out; those that failed are tried again. A line that is no request, or that is refused, is an answer with an
    error.

    Raises ``ConfigError`` for files that cannot be read or written, and for a target that is there already; what
    loading the model raises."""
    from ropeway.engine.process import start_engine
    from ropeway.loading.sources import resolve

    if not source.is_file():
        raise ConfigError(f"{source} is no file; give the requests with --input")
    if target.exists() and not resume:
        raise ConfigError(f"{target} exists; give another one, or --resume to go on with it")
    known = _keep_answered(target) if resume and target.exists() else set()
    seats = config.scheduler.max_num_seqs
    scheduler = dataclasses.replace(config.scheduler, shed=False)  # nobody waits for any one of them
    # Nobody but this comes in, and it has no key; nobody watches.
    server = dataclasses.replace(
        config.server, max_queue=seats + _AHEAD, api_key=None, api_keys=None, otlp_endpoint=None
    )
    config = dataclasses.replace(config, scheduler=scheduler, server=server)
    engine = await start_engine(config)
    try:
        defaults = read_defaults(await asyncio.to_thread(resolve, config.model.model))
        transport = httpx.ASGITransport(create_app(engine, config, sampling_defaults=defaults))
        with source.open("rb") as lines, target.open("ab") as answers:
            async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=_DAYS_S) as client:
                return await _run(client, _lines(lines), answers, known, seats + _AHEAD // 2)
    finally:
        await engine.close()


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    return (line for line in file if line.strip())


def _keep_answered(target: Path) -> set[str]:
    """Take out of a file what failed, and what was cut off by whatever ended the run before. Returns whose answers are
    left."""
    known = set()
    kept = target.with_name(f"{target.name}.part")
    with target.open("rb") as lines, kept.open("wb") as out:
        for line in lines:
            try:
                answer = msgspec.json.decode(line)
                name, failed = str(answer["custom_id"]), answer["error"] is not None
            except (msgspec.DecodeError, KeyError, TypeError):
                continue
            if not failed:
                known.add(name)
                out.write(line.rstrip(b"\n") + b"\n")
    kept.replace(target)
    return known


async def _run(
    client: httpx.AsyncClient, lines: Iterator[bytes], answers: IO[bytes], known: set[str], most: int
) -> BatchCounts:
    counts = BatchCounts()
    running: set[asyncio.Task[dict[str, Any]]] = set()

    def settle(done: set[asyncio.Task[dict[str, Any]]]) -> None:
        for task in done:
            answer = task.result()
            counts.answered += answer["error"] is None
            counts.failed += answer["error"] is not None
            answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()

    seen = set(known)
    for number, line in enumerate(lines, 1):
        request, problem = _read(line, seen)
        if request is not None and request.custom_id in known:
            counts.kept += 1
            continue
        if request is not None and problem is None:
            seen.add(request.custom_id)
        name = f"line {number}" if request is None else request.custom_id
        running.add(asyncio.create_task(_answer(client, name, request, problem)))
        if len(running) >= most:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            settle(done)
    while running:
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        settle(done)
    return counts


def _read(line: bytes, seen: set[str]) -> tuple[BatchLine | None, str | None]:
    """(the request, what is wrong with it)"""
    try:
        request = msgspec.json.decode(line, type=BatchLine)
    except msgspec.DecodeError as error:
        return None, f"the line is no request: {str(error).replace('`', '')}"
    if request.url not in _URLS:
        return request, f"url is {request.url!r:.80}; it must be one of {', '.join(_URLS)}"
    if request.method != "POST":
        return request, f"method is {request.method!r:.20}; it must be POST"
    if request.body.get("stream"):
        return request, "stream makes no sense in a file; leave it out"
    if request.custom_id in seen:
        return request, f"custom_id {request.custom_id!r:.80} stands in several lines"
    return request, None


async def _answer(
    client: httpx.AsyncClient, name: str, request: BatchLine | None, problem: str | None
) -> dict[str, Any]:
    answer: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": name, "response": None, "error": None}
    if request is None or problem is not None:
        answer["error"] = {"code": "invalid_request", "message": problem}
        return answer
    while (response := await client.post(request.url, json=request.body)).status_code == 429:
        await asyncio.sleep(float(response.headers.get("retry-after", "1")))  # several choices fill the queue sooner
    body = response.json()
    request_id = response.headers.get("x-request-id")
    answer["response"] = {"status_code": response.status_code, "request_id": request_id, "body": body}
    if response.status_code != 200:
        error = body.get("error", {})
        answer["error"] = {"code": error.get("code") or error.get("type"), "message": error.get("message")}
    return answer
