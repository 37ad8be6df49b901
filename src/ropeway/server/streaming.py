"""Responses that notice when their client goes away, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ropeway.errors import RopewayError
from ropeway.server.errors import error_body, unexpected

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(body: Any) -> bytes:
    """A server-sent event. JSON as msgspec writes it holds no line break."""
    return b"data: " + _encode(body) + b"\n\n"


def named_event(name: str, body: Any) -> bytes:
    """One that says what it is, as some APIs want it."""
    return b"event: " + name.encode() + b"\n" + event(body)


def error_event(error: RopewayError) -> bytes:
    """A failure, in the shape of an error's body."""
    return b"data: " + error_body(error) + b"\n\n"


def json_response(body: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encode(body), headers=headers, media_type="application/json")


@contextlib.contextmanager
def cancelling_on_disconnect(receive: Receive, cancel: Callable[[], None]) -> Iterator[None]:
    """Within this block ``cancel`` is called once the client has closed the connection. The request's body must
    have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


class EventStream(Response):
    """Sends ``events``; a failure on the way is told in an event of its own, in the shape of an error's body, and
    ends the stream without ``[DONE]``, so that no client takes a broken answer for a whole one."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        cancel: Callable[[], None],
        headers: Mapping[str, str],
        *,
        broken: Callable[[RopewayError], bytes] = error_event,
        read_timeout_s: float | None = None,
    ) -> None:
        """``cancel`` aborts what ``events`` waits for; called however the stream ends. ``broken``: the event that tells
        a failure. ``read_timeout_s``: how long a client may leave unread what was sent, before the stream is given
        up."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._cancel = cancel
        self._broken = broken
        self._read_timeout_s = read_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with cancelling_on_disconnect(receive, self._cancel):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async with contextlib.aclosing(self._told()) as told:
                    async for data in told:
                        async with asyncio.timeout(self._read_timeout_s):
                            await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            # The server closes a connection whose answer is not complete.
            logger.warning("a stream is given up: its client had read nothing for %g s", self._read_timeout_s)
        finally:
            self._cancel()

    async def _told(self) -> AsyncGenerator[bytes, None]:
        try:
            async with contextlib.aclosing(self._events) as events:
                async for data in events:
                    yield data
        except RopewayError as error:
            yield self._broken(error)
        except Exception as error:
            yield self._broken(unexpected(error))
