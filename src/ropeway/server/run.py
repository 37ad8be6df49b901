"""The life of a server process: bind, load, serve, drain.

Ports are bound before the model is loaded, so that one in use is told at once. The management listener answers from
then on (healthy, not ready), the API once the engine is there. The first SIGTERM or SIGINT closes the door: readiness
and new requests get 503, running ones have ``drain_timeout_s`` to finish. A second one ends everything at once.
When the engine dies, requests end with an error and it is started again; when that is no use, the server ends soon
after with exit code 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from ropeway.config import Config, ServerConfig
from ropeway.engine.client import AsyncEngine
from ropeway.engine.spawn import SpawnedEngine
from ropeway.engine.supervision import SupervisedEngine
from ropeway.errors import ConfigError, Draining
from ropeway.server.app import create_app, create_management_app
from ropeway.server.listening import Certificate, Listener, bind
from ropeway.server.sampling import given_defaults, read_defaults
from ropeway.server.spans import check_packages
from ropeway.server.state import State

logger = logging.getLogger(__name__)

StartEngine = Callable[[Config], Awaitable[AsyncEngine]]

_LOOPBACK = "127.0.0.1"
_LAST_WORDS_S = 2.0
"""Time for cancelled requests to tell their clients."""


def run(config: Config, spawned: SpawnedEngine) -> int:
    """Serve until a signal ends it, with the engine process ``spawned``; the exit code. Raises ``ConfigError`` for a
    port in use, or what loading raises."""
    import uvloop

    from ropeway.engine.process import start_engine

    restart = start_engine if config.server.engine_restarts and config.parallel.nnodes == 1 else None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(config, functools.partial(start_engine, spawned=spawned), restart))


async def serve(config: Config, start_engine: StartEngine, restart: StartEngine | None = None) -> int:
    """As ``run``, on a loop that is running already, in the main thread. ``restart``: makes another engine when one has
    died; None: the server ends with it."""
    signals = _Signals()
    certificate = _certificate(config.server)
    given_defaults(config.server.sampling_defaults)  # what is wrong with them is told before anything is loaded
    if config.server.otlp_endpoint is not None:
        check_packages()
    with contextlib.ExitStack() as stack:
        api_socket, management_socket = _bind_both(config.server, stack)
        stack.enter_context(signals.caught())
        management_app = create_management_app()
        management = Listener(management_app, management_socket, "management_port", config.server.body_timeout_s)
        await management.start()
        engine: AsyncEngine | None = None
        try:
            engine = await _unless(signals.first, start_engine(config))
            if engine is None:
                return 0
            if restart is not None:
                again = functools.partial(restart, config)
                engine = SupervisedEngine(engine, again, config.server.engine_restarts)
            return await _serve_api(config, engine, api_socket, management_app, signals, certificate)
        finally:
            await management.stop()
            if engine is not None:
                await engine.close()


def _certificate(config: ServerConfig) -> Certificate | None:
    if config.tls_cert is None:
        if config.tls_key is not None:
            raise ConfigError("tls_key needs tls_cert, the certificate it belongs to", param="tls_key")
        return None
    return Certificate(Path(config.tls_cert), None if config.tls_key is None else Path(config.tls_key))


async def _serve_api(
    config: Config,
    engine: AsyncEngine,
    api_socket: socket.socket,
    management_app: FastAPI,
    signals: _Signals,
    certificate: Certificate | None,
) -> int:
    defaults = await asyncio.to_thread(_sampling_defaults, config)
    app = create_app(engine, config, sampling_defaults=defaults)
    state: State = app.state.ropeway
    api = Listener(app, api_socket, "port", config.server.body_timeout_s, certificate)
    await api.start()
    management_app.state.ropeway = state
    signals.on_hangup = functools.partial(_reload_keys, state)
    # What start-up made lives as long as the process; the collector need not look at it again.
    gc.collect()
    gc.freeze()
    _announce(state, api_socket)
    failure = await _unless(signals.first, engine.died())
    if failure is None:
        code = await _drain(state, config.server.drain_timeout_s, signals)
    else:
        code = await _give_up(state, failure)
    await api.stop()
    await state.close()
    return code


def _reload_keys(state: State) -> None:
    try:
        logger.info("%d API keys were read", state.keys.reload())
    except ConfigError as error:
        logger.error("the API keys stay as they are: %s", error.message)


async def _drain(state: State, timeout_s: float, signals: _Signals) -> int:
    """Let running requests finish; the exit code."""
    state.door.closed = True
    logger.info("shutting down: %d requests have %.0f s to finish", state.door.inside, timeout_s)
    finished = asyncio.create_task(state.door.empty())
    impatient = asyncio.create_task(signals.second.wait())
    await asyncio.wait({finished, impatient}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    impatient.cancel()
    if not finished.done():
        logger.warning("%d requests are cut off", state.door.inside)
        state.cancel_all(Draining("the server shut down before the request was finished"))
        await asyncio.wait({finished}, timeout=_LAST_WORDS_S)
        finished.cancel()
    return 128 + signal.SIGTERM if signals.second.is_set() else 0


async def _give_up(state: State, failure: str) -> int:
    """The engine is gone: whoever asks hears of it for a while, and whoever started the server may start it again; the
    exit code."""
    logger.error("the engine is dead, and the server ends: %s", failure)
    await asyncio.sleep(_LAST_WORDS_S)
    return 1


class _Signals:
    """SIGTERM and SIGINT, counted; and SIGHUP."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.on_hangup: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, self._heard)
        loop.add_signal_handler(signal.SIGHUP, lambda: self.on_hangup())
        try:
            yield
        finally:
            for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(each)

    def _heard(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _unless(event: asyncio.Event, work: Awaitable[Any]) -> Any:
    """The result of ``work``, or None if ``event`` comes first and ``work`` is cancelled."""
    task = asyncio.ensure_future(work)
    waiter = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return None
    finally:
        waiter.cancel()


def _bind_both(server: ServerConfig, stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    api = stack.enter_context(contextlib.closing(bind(server.host, server.port, "port")))
    port = server.management_port
    if port is None:
        port = server.port + 1 if server.port else 0
    return api, stack.enter_context(contextlib.closing(bind(_LOOPBACK, port, "management_port")))


def _sampling_defaults(config: Config) -> dict[str, float]:
    from ropeway.loading.sources import resolve

    defaults = read_defaults(resolve(config.model.model))
    if defaults:
        listed = ", ".join(f"{name}={value}" for name, value in defaults.items())
        logger.info("where a request does not say otherwise, the model's generation_config.json does: %s", listed)
    return defaults | given_defaults(config.server.sampling_defaults)


def _announce(state: State, api_socket: socket.socket) -> None:
    info = state.engine.info
    host, port = api_socket.getsockname()[:2]
    logger.info(
        "serving %s on http://%s:%d (context %d tokens, %d blocks of %d, %d sequences at once)",
        ", ".join(state.model_names),
        f"[{host}]" if ":" in host else host,
        port,
        info.max_model_len,
        info.num_blocks,
        info.block_size,
        info.max_num_seqs,
    )
