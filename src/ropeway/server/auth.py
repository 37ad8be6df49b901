"""API keys at the door: with any set, every route but ``/health`` wants ``Authorization: Bearer KEY``, or
``X-API-Key: KEY``.

The check is made on the way in, before any route is chosen, so no spelling of a path passes by it and a client
without a key can't tell which routes exist. ``/health`` stays open for probes; it says nothing but yes or no to
those without a key. So does the dashboard's page, which knows nothing by itself. The management listener, which only
this machine can reach, asks for none.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ropeway.errors import Unauthorized
from ropeway.server.errors import StrangeOrigin, error_response
from ropeway.server.keys import Caller, KeyRing

OPEN_PATHS = frozenset({"/health", "/dashboard", "/dashboard/app.js", "/dashboard/style.css", "/dashboard/plotly.js"})
_STATE = "caller"
_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})


class RequireKey:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")
        # Starlette decodes headers as Latin-1; so does this, and any bytes of a key compare.
        caller = self._keys.find(given.strip().encode("latin-1"))
        if caller is not None or scope["path"] in OPEN_PATHS:
            scope.setdefault("state", {})[_STATE] = caller
            await self._app(scope, receive, send)
            return
        problem = "is wrong" if given else "is missing"
        error = Unauthorized(f"the API key {problem}; send it as 'Authorization: Bearer KEY'")
        await error_response(error, scope["path"])(scope, receive, send)


class RefuseStrangers:
    """ASGI middleware for listeners that want no key: a browser sends requests for any page that it shows, and lets
    that page read the answer only if it may; so what would do something is refused when it comes for another origin."""

    def __init__(self, app: ASGIApp, origins: Collection[str] = ()) -> None:
        """``origins``: those that may; ``*`` for all."""
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _HARMLESS and "*" not in self._origins:
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and origin not in self._origins and urlsplit(origin).netloc != headers.get("host"):
                error = StrangeOrigin(
                    f"pages of {origin:.100} may not use this server; --cors-origins names those that may"
                )
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller | None:
    """Whoever made a request that was let in; None: nobody needs a key, or this route needs none."""
    caller = request.scope.get("state", {}).get(_STATE)
    return caller if isinstance(caller, Caller) else None
