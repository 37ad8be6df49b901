"""GET /dashboard and what its page asks for. Nothing is loaded from elsewhere, so it works without a network.

The page itself is open; what it shows is told to whoever may see everybody's requests: to anyone where no keys are
needed, else to keys with ``admin``. It never shows text."""

from __future__ import annotations

import asyncio
import time
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from ropeway.engine.supervision import restarts_of
from ropeway.errors import Forbidden, InvalidRequest
from ropeway.server.auth import caller_of
from ropeway.server.errors import RequestNotFound
from ropeway.server.state import State, state_of
from ropeway.server.streaming import json_response
from ropeway.version import __version__

_FOLDER = Path(__file__).parent
_FILES = {"app.js": "text/javascript", "style.css": "text/css"}
_MOST_BLOCKS = 4096
"""Cells of the block map; beyond that several blocks share one, which shows the busiest."""
_MOST_RECORDS = 60
_LONGEST_S = 10.0
_HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


async def page(request: Request) -> Response:
    return FileResponse(_FOLDER / "index.html", media_type="text/html", headers=_HEADERS)


async def part(request: Request) -> Response:
    """The page's script or style, or the library that draws its charts."""
    name = request.path_params["name"]
    if name == "plotly.js":
        return FileResponse(_plotly(), media_type="text/javascript", headers={"cache-control": "max-age=86400"})
    if name not in _FILES:
        raise RequestNotFound(f"there is no /dashboard/{name[:80]} here", code="not_found")
    return FileResponse(_FOLDER / name, media_type=_FILES[name], headers=_HEADERS)


async def now(request: Request) -> Response:
    """Everything the page shows, at this moment."""
    state = state_of(request)
    check_sees_all(request, state)
    return json_response(await snapshot(state))


async def story(request: Request) -> Response:
    """Where a request's time went, whoever's it is."""
    state = state_of(request)
    check_sees_all(request, state)
    name = request.path_params["request_id"]
    record = state.records.find_any(name)
    if record is None:
        raise RequestNotFound(f"there is no request {name!r:.200} here any more", param="request_id")
    return json_response(await record.explain())


async def timeline(request: Request) -> Response:
    """What the host and the device do in the next ``seconds`` (at most 10), as Chrome's trace events."""
    state = state_of(request)
    check_sees_all(request, state)
    try:
        wanted_s = float(request.query_params.get("seconds", "2"))
    except ValueError:
        wanted_s = 0.0
    if not 0 < wanted_s <= _LONGEST_S:
        raise InvalidRequest(f"seconds must be a number above 0, at most {_LONGEST_S:g}", param="seconds")
    async with state.tracing():
        await state.engine.record(True)
        await asyncio.sleep(wanted_s)
        trace = await state.engine.record(False)
    return Response(trace, media_type="application/json")


def check_sees_all(request: Request, state: State) -> None:
    """Raises ``Forbidden`` for a key that may see its own requests only."""
    caller = caller_of(request)
    if state.keys.needed and (caller is None or not caller.key.admin):
        raise Forbidden("this key sees its own requests only; give its entry admin = true")


async def snapshot(state: State) -> dict[str, Any]:
    """Also what ``ropeway top`` shows."""
    engine = state.engine
    stats, info = engine.stats, engine.info
    body: dict[str, Any] = {
        "version": __version__,
        "model": state.model_names[0],
        "now_s": time.time(),
        "up_s": time.monotonic() - state.began_s,
        "failure": engine.failure,
        "restarts": restarts_of(engine),
        "draining": state.door.closed,
        "warnings": info.warnings,
        "limits": {
            "max_num_seqs": info.max_num_seqs,
            "max_model_len": info.max_model_len,
            "num_blocks": info.num_blocks,
            "block_size": info.block_size,
            "kv_pool_bytes": info.kv_pool_bytes,
        },
        "tiers": [tier.name for tier in info.tiers],
        "stats": msgspec.to_builtins(stats),
        "latencies": _latencies(state),
        "tokens": state.metrics.totals(),
        "requests": [
            {
                "id": record.id,
                "request_id": record.request_id,
                "tier": record.tier,
                "age_s": time.monotonic() - record.arrival_s,
                "ended": record.ended_s is not None,
                "error": record.error,
            }
            for record in state.records.latest(_MOST_RECORDS)
        ],
        "seats": [],
        "queue": [],
        "blocks": "",
    }
    if engine.failure is None:
        inspected = await engine.inspect()
        body["seats"] = msgspec.to_builtins(inspected.seats)
        body["queue"] = msgspec.to_builtins(inspected.queue)
        body["blocks"] = _block_map(inspected.blocks)
    return body


def _block_map(states: bytes) -> str:
    """A digit per cell."""
    each = -(-len(states) // _MOST_BLOCKS) or 1
    return "".join(str(max(states[first : first + each])) for first in range(0, len(states), each))


def _latencies(state: State) -> dict[str, list[tuple[float | None, float]]]:
    """(upper bound, how many up to it) of the histograms, over all tiers; the page tells what came between two
    looks."""
    metrics = state.metrics
    return {
        "ttft": metrics.buckets(metrics.time_to_first_token),
        "itl": metrics.buckets(metrics.inter_token_latency),
        "e2e": metrics.buckets(metrics.e2e_request_latency),
    }


@cache
def _plotly() -> Path:
    import plotly

    return Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
