"""API keys: with one set, every route but ``/health`` wants ``Authorization: Bearer KEY``.

The check is made on the way in, before any route is chosen, so no spelling of a path passes by it and a client
without a key can't tell which routes exist. ``/health`` stays open for probes; it says nothing but yes or no to
those without a key. The management listener, which only this machine can reach, asks for none.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ropeway.errors import Unauthorized
from ropeway.server.errors import error_response

OPEN_PATHS = frozenset({"/health"})
_STATE = "has_key"


class RequireKey:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.strip().encode()  # a mounted secret ends in a newline, a header never does

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # Starlette decodes headers as Latin-1; so does this, and any bytes of a key compare.
        right = scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._key)
        if right or scope["path"] in OPEN_PATHS:
            scope.setdefault("state", {})[_STATE] = right
            await self._app(scope, receive, send)
            return
        problem = "is wrong" if given else "is missing"
        error = Unauthorized(f"the API key {problem}; send it as 'Authorization: Bearer KEY'")
        await error_response(error)(scope, receive, send)


def has_key(request: Request) -> bool:
    """Whether a request that was let in brought the key."""
    return bool(request.scope.get("state", {}).get(_STATE))
