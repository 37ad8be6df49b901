"""A client's connection, with a clock for when it is the client's turn to send.

uvicorn closes a connection that idles between two requests; a head that never ends, or never begins, it waits for. Once
a head is there, whoever reads the body bounds that (``limits.read_body``).
"""

from __future__ import annotations

import asyncio

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ropeway.errors import RequestTimeout
from ropeway.server.errors import error_body

MOST_WAITING = 512
"""Connections that may owe a head for longer than ``_BRIEF_S``; beyond, the one that has owed it longest is closed."""
_BRIEF_S = 1.0
"""A client that means it sends a head at once; many of these may come together."""

Waiting = dict["Connection", float]
"""Connections whose turn it is, and since when (the loop's time), in that order."""


class Connection(H11Protocol):
    """Closed when what the client is to send has not come in time: a head, which is told (408) if some of it is there,
    or the rest of a body that was answered before its end."""

    def __init__(self, config: uvicorn.Config, server_state: ServerState, arrival_s: float, waiting: Waiting) -> None:
        """``arrival_s``: from the connection's start, or a head's first byte, to the head's end. ``waiting``: shared by
        a listener's connections."""
        super().__init__(config, server_state, {})
        self._arrival_s = arrival_s
        self._waiting = waiting
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """See whose turn it is."""
        if self.conn.their_state is not h11.IDLE and self.conn.our_state is not h11.DONE:
            self._rest()
        elif self._end is None:
            now = self.loop.time()
            self._end = self.loop.call_later(self._arrival_s, self._give_up)
            self._waiting[self] = now
            while len(self._waiting) > MOST_WAITING:
                oldest, since = next(iter(self._waiting.items()))
                if now - since <= _BRIEF_S:
                    break
                oldest._give_up()

    def _rest(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None
            del self._waiting[self]

    def _give_up(self) -> None:
        self._rest()
        if self.transport.is_closing():
            return
        if self.conn.their_state is not h11.IDLE or not self.conn.trailing_data[0]:
            self.timeout_keep_alive_handler()
            return
        error = RequestTimeout(f"the request's head had not arrived after {self._arrival_s:g} s (body_timeout_s)")
        body = error_body(error)
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for part in (
            h11.Response(status_code=error.status, headers=headers, reason="Request Timeout"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(part) or b"")
        self.transport.close()
