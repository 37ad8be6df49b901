"""Sockets bound early, and uvicorn on them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from ropeway.errors import ConfigError
from ropeway.server.connections import Connection, Waiting

logger = logging.getLogger(__name__)

_LOOK_S = 2.0
"""Between two looks at whether a certificate has changed."""


def bind(host: str, port: int, field: str) -> socket.socket:
    """A socket bound to an address, not listening yet. ``field``: the setting that chose the port.

    Raises ``ConfigError`` naming the port when that can't be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"host {host!r} is no address of this machine: {error.strerror}", param="host") from error
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit this; without it a header and its body, two writes, are 40 ms apart.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _in_use(host, port, field, error) from error
    bound.set_inheritable(False)
    return bound


def _in_use(host: str, port: int, field: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {host} port {port} ({field}): {error.strerror}; choose another one with "
        f"--{field.replace('_', '-')}",
        param=field,
    )


class Certificate:
    """A certificate and its key, in files that may change while they are in use."""

    def __init__(self, chain: Path, key: Path | None) -> None:
        """Raises ``ConfigError`` for files that cannot be read, or do not belong together."""
        self._files = (chain, key)
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._load()
        self._seen = self._times()

    async def keep_fresh(self) -> None:
        """Read the files again whenever they have changed; connections from then on get the new ones."""
        while True:
            await asyncio.sleep(_LOOK_S)
            times = self._times()
            if times == self._seen:
                continue
            try:
                self._load()
            except ConfigError as error:  # perhaps one of the two has not come yet
                logger.warning("%s; the old one stays in use", error.message)
            else:
                logger.info("the TLS certificate was read again")
            self._seen = times

    def _load(self) -> None:
        chain, key = self._files
        try:
            # A pair that does not fit would leave a context with half of it: try it on another one.
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(chain, key)
            self.context.load_cert_chain(chain, key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"the TLS certificate {chain} cannot be used: {error}", param="tls_cert") from error

    def _times(self) -> list[int]:
        times = []
        for file in self._files:
            with contextlib.suppress(OSError):
                times.append(0 if file is None else file.stat().st_mtime_ns)
        return times


class Listener:
    """uvicorn on a bound socket, without its signal handling."""

    def __init__(
        self, app: FastAPI, bound: socket.socket, field: str, arrival_s: float, certificate: Certificate | None = None
    ) -> None:
        """``field``: the setting that chose the port, for an error to name. ``arrival_s``: how long a client has for a
        TLS handshake, and then for a request's head. ``certificate``: for HTTPS."""
        self._bound = bound
        self._field = field
        self._certificate = certificate
        self._fresh: asyncio.Task[None] | None = None
        self._server = _Server(
            uvicorn.Config(
                app,
                # httptools drops the body of a request that offers another protocol (``Upgrade: h2c``, as Java's client
                # does), and bounds neither headers nor the URL.
                http="h11",
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                proxy_headers=False,
                backlog=2048,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=1,
            ),
            arrival_s,
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accept connections. Raises ``ConfigError`` when another process has come to listen on the port."""
        host, port = self._bound.getsockname()[:2]
        if self._certificate is not None:
            self._server.config.load()
            self._server.config.ssl = self._certificate.context
            self._fresh = asyncio.create_task(self._certificate.keep_fresh())
        task = asyncio.create_task(self._server.serve(sockets=[self._bound]))
        while not self._server.started:
            await asyncio.wait({task}, timeout=0.005)
            if task.done():
                try:
                    task.result()
                except OSError as error:
                    raise _in_use(host, port, self._field, error) from error
        self._task = task

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._fresh is not None:
            self._fresh.cancel()
        if self._task is not None:
            await self._task


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, arrival_s: float) -> None:
        super().__init__(config)
        self._arrival_s = arrival_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's own on bound sockets, with connections of ours; it hands on no limit for TLS handshakes."""
        context, waiting = self.config.ssl, Waiting()

        def connection() -> Connection:
            return Connection(self.config, self.server_state, self._arrival_s, waiting)

        self.servers = [
            await asyncio.get_running_loop().create_server(
                connection,
                sock=each,
                backlog=self.config.backlog,
                ssl=context,
                ssl_handshake_timeout=None if context is None else self._arrival_s,
            )
            for each in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
