"""Errors as clients see them, whatever went wrong: OpenAI's ``{"error": {"message", "type", "param", "code"}}``; for
``/v1/messages`` Anthropic's ``{"type": "error", "error": {"type", "message"}}``."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ropeway.errors import Draining, EngineDead, QueueFull, RopewayError
from ropeway.server.protocol import ErrorBody, ErrorDetail

logger = logging.getLogger(__name__)


class ClientGone(RopewayError):
    """The client closed its connection. Nobody reads this answer; the status (nginx's) is for the log."""

    status = 499
    kind = "client_closed_request"


class Cancelled(RopewayError):
    """Somebody who may has ended the request."""

    status = 499
    kind = "request_cancelled"
    default_code = "cancelled"


class Conflict(RopewayError):
    """Something that is under way stands in the way."""

    status = 409
    kind = "invalid_request_error"
    default_code = "conflict"


class StrangeOrigin(RopewayError):
    """A browser asks for a page of another origin."""

    status = 403
    kind = "permission_error"
    default_code = "origin_not_allowed"


class RequestNotFound(RopewayError):
    """An id that no request remembered here has."""

    status = 404
    kind = "invalid_request_error"
    default_code = "request_not_found"


def error_body(error: RopewayError) -> bytes:
    detail = ErrorDetail(message=error.message, type=error.kind, param=error.param, code=error.code)
    return msgspec.json.encode(ErrorBody(error=detail))


_MESSAGES = "/v1/messages"
_STATE = "error"
_MESSAGE_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def message_error_body(error: RopewayError) -> bytes:
    """The same in Anthropic's shape."""
    kind = _MESSAGE_KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})


class _ErrorResponse(Response):
    """Leaves its error in the scope, where middleware finds it."""

    def __init__(self, error: RopewayError, body: bytes, headers: Mapping[str, str]) -> None:
        super().__init__(body, error.status, headers, "application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})[_STATE] = self._error
        await super().__call__(scope, receive, send)


def told_error(scope: Scope) -> RopewayError | None:
    """What a request was answered with, if that was an error."""
    error = scope.get("state", {}).get(_STATE)
    return error if isinstance(error, RopewayError) else None


def error_response(error: RopewayError, path: str = "") -> Response:
    """``path``: what was asked for; it tells the shape."""
    headers: dict[str, str] = {}
    if isinstance(error, QueueFull):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, Draining | EngineDead):
        headers["retry-after"] = "1"
    elif error.status == 401:
        headers["www-authenticate"] = "Bearer"
    body = message_error_body(error) if path.startswith(_MESSAGES) else error_body(error)
    return _ErrorResponse(error, body, headers)


def unexpected(error: Exception) -> RopewayError:
    """What a client is told of a fault of ours: that it is one. The log has the rest."""
    logger.error("unexpected %s in a request", type(error).__name__, exc_info=error)
    return RopewayError("internal error; the server's log says more", code="internal_error")


class FaultBarrier:
    """ASGI middleware: a fault of ours is an answer like any other, so the connection stays usable. Starlette's own
    handler for exceptions raises them again, upon which the server drops the connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            await error_response(unexpected(error), scope["path"])(scope, receive, send)


def install(app: FastAPI) -> None:
    """Give every error of ``app`` the one shape."""

    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, RopewayError)
        return error_response(error, request.url.path)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told = RopewayError(_in_words(request, error))
        told.status, told.kind = error.status_code, "invalid_request_error"
        told.code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        response = error_response(told, request.url.path)
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(RopewayError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_middleware(FaultBarrier)


def _in_words(request: Request, error: HTTPException) -> str:
    path = request.url.path[:200]
    if error.status_code == 404:
        return f"there is no {path} here"
    if error.status_code == 405:
        return f"{path} does not take {request.method}"
    return str(error.detail)
