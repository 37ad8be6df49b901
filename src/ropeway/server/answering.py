"""What the generating routes have in common: from a body that has been read to a response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from ropeway.engine.client import RequestOptions
from ropeway.errors import RopewayError
from ropeway.request import BeamSearchParams, Completion, SamplingParams
from ropeway.server.auth import caller_of
from ropeway.server.explaining import server_timing
from ropeway.server.generating import Generating
from ropeway.server.spans import span_of
from ropeway.server.state import state_of
from ropeway.server.streaming import EventStream, cancelling_on_disconnect, json_response
from ropeway.server.tracing import request_id_of

_TIMING_S = 0.05
"""How long a whole answer that a stop string ended waits for the engine's account of it: the engine gives it between
two steps, when it hears of that end."""


class Answer(Protocol):
    """Writes the answer to one request, whole or in chunks."""

    @property
    def id(self) -> str:
        """The completion's."""
        ...

    @property
    def model(self) -> str:
        """The name that the request means."""
        ...

    def whole(self, generating: Generating, completions: Sequence[Completion], prompts: Sequence[list[int]]) -> Any: ...
    def chunks(self, generating: Generating, prompts: Sequence[list[int]]) -> AsyncGenerator[bytes, None]: ...
    def broken(self, error: RopewayError) -> bytes:
        """The event that ends a stream on the way."""
        ...


async def respond(
    request: Request,
    answer: Answer,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    options: RequestOptions,
    *,
    stream: bool,
    beams: BeamSearchParams | None = None,
) -> Response:
    """Generate from ``prompts``, token ids each; with ``beams`` by a search, whose answers ``params`` describe. A
    response begins when the engine has taken all of it: what it refuses is an answer with a status of its own, streamed
    or not.

    ``Server-Timing`` says where the time went; of a stream, how long it took until then."""
    state = state_of(request)
    span = span_of(request)
    if span is not None:
        span.asks(answer.model, params, stream=stream)
    generating = state.generate(
        prompts,
        params,
        options,
        completion_id=answer.id,
        request_id=request_id_of(request),
        caller=caller_of(request),
        beams=beams,
    )
    if span is not None:
        span.generating = generating
    with cancelling_on_disconnect(request.receive, generating.cancel):
        await generating.accepted()
        if not stream:
            completions = await generating.collect()
            timing = await generating.record.explain(_TIMING_S)
            # Without the engine's account there is nothing to tell.
            known = timing.phase == "finished"
            headers = {"server-timing": server_timing(timing.parts)} if known else None
            if params.prompt_logprobs is None:
                return json_response(answer.whole(generating, completions, prompts), headers)
            # A long prompt's are many; the event loop goes on meanwhile.
            return await asyncio.to_thread(
                lambda: json_response(answer.whole(generating, completions, prompts), headers)
            )
    queued_s = time.monotonic() - generating.record.arrival_s
    so_far = {"server-timing": f"queued;dur={queued_s * 1000:.3f}"}
    events = answer.chunks(generating, prompts)
    return EventStream(
        events, generating.cancel, so_far, broken=answer.broken, read_timeout_s=state.config.server.read_timeout_s
    )
