"""Responses that notice when their client goes away, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ropeway.errors import RopewayError
from ropeway.server.errors import error_body, unexpected
from ropeway.server.tracing import direct_send

logger = logging.getLogger(__name__)

_LOOKS = 4
"""At whether a client reads, within the time that it has."""

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


class _Patience:
    """Ends the block it guards, and nothing more, when a call in it takes too long. A look now and then costs less than
    a timer for every call."""

    def __init__(self, limit_s: float | None) -> None:
        self.lost = False
        self._limit_s = limit_s
        self._since_s: float | None = None
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._next: asyncio.TimerHandle | None = None

    def begins(self) -> None:
        self._since_s = self._loop.time()

    def ends(self) -> None:
        self._since_s = None

    def _look(self) -> None:
        assert self._limit_s is not None
        if self._since_s is not None and self._loop.time() - self._since_s > self._limit_s:
            self.lost = True
            assert self._task is not None
            self._task.cancel()
        else:
            self._next = self._loop.call_later(self._limit_s / _LOOKS, self._look)

    def __enter__(self) -> None:
        if self._limit_s is not None:
            self._next = self._loop.call_later(self._limit_s / _LOOKS, self._look)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._next is not None:
            self._next.cancel()
        if not self.lost or kind is not asyncio.CancelledError:
            return False
        assert self._task is not None
        self._task.uncancel()
        return True


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
        patience = _Patience(self._read_timeout_s)
        try:
            with cancelling_on_disconnect(receive, self._cancel), patience:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                # What middleware has to say is said with the headers; every token goes the short way.
                send = direct_send(scope) or send
                async with contextlib.aclosing(self._told()) as told:
                    async for data in told:
                        patience.begins()
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                        patience.ends()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._cancel()
        if patience.lost:
            # The server closes a connection whose answer is not complete.
            logger.warning("a stream is given up: its client had read nothing for %g s", self._read_timeout_s)

    async def _told(self) -> AsyncGenerator[bytes, None]:
        try:
            async with contextlib.aclosing(self._events) as events:
                async for data in events:
                    yield data
        except RopewayError as error:
            yield self._broken(error)
        except Exception as error:
            yield self._broken(unexpected(error))
