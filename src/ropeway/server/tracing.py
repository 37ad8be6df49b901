"""Request ids, the access log, and the count of requests under way."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ropeway.errors import Draining
from ropeway.server.errors import error_response

logger = logging.getLogger("ropeway.access")

_ACCEPTABLE = re.compile(r"[\x21-\x7e]{1,128}")
_STATE = "request_id"
_SEND = "send"
_OPEN_WHILE_DRAINING = frozenset({"/health", "/metrics", "/version"})


class RequestId:
    """ASGI middleware: answers carry the client's ``X-Request-Id``, or one of ours.

    The id is a label, for logs and for asking where the time went, so two requests may well have the same. With
    ``access_log`` there is a line per request; without, only for those that failed through no fault of the client.
    """

    def __init__(self, app: ASGIApp, access_log: bool) -> None:
        self._app = app
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _ACCEPTABLE.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {}).update({_STATE: request_id, _SEND: send})
        begin = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._access_log or status >= 500:
                logger.log(
                    logging.INFO if status < 500 else logging.WARNING,
                    "%s %.200r %d %.3f s id=%s",
                    scope["method"],
                    scope["path"],
                    status,
                    time.perf_counter() - begin,
                    request_id,
                    extra={"request_id": request_id, "status": status, "method": scope["method"]},
                )


def direct_send(scope: Scope) -> Send | None:
    """Sends what follows an answer's headers, past all middleware."""
    send: Send | None = scope.get("state", {}).get(_SEND)
    return send


def request_id_of(request: Request) -> str:
    """What the answer to a request carries as ``X-Request-Id``."""
    return str(request.scope["state"][_STATE])


class Door:
    """Whether new requests are let in, and how many are inside."""

    def __init__(self) -> None:
        self.closed = False
        self.inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def enter(self) -> None:
        self.inside += 1
        self._empty.clear()

    def leave(self) -> None:
        self.inside -= 1
        if not self.inside:
            self._empty.set()

    async def empty(self) -> None:
        """Wait until nobody is inside."""
        await self._empty.wait()


class Doorkeeper:
    """ASGI middleware: counts requests until their last byte is sent, and refuses new ones once the door is closed."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_WHILE_DRAINING:
            await self._app(scope, receive, send)
            return
        if self._door.closed:
            error = Draining("the server is shutting down and takes no new requests; try another one")
            await error_response(error, scope["path"])(scope, receive, send)
            return
        self._door.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._door.leave()
