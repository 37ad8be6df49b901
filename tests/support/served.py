"""A server in a thread of its own, for black-box tests over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI

from ropeway.server.app import create_app
from ropeway.server.listening import Certificate, Listener, bind
from ropeway.settings import resolve
from tests.support.scripted_engine import ScriptedEngine


@dataclass
class Served:
    url: str
    engine: ScriptedEngine
    app: FastAPI
    loop: asyncio.AbstractEventLoop

    def on_loop(self, call: Callable[[], Any]) -> Any:
        """The result of ``call()`` on the server's loop."""
        result: Future[Any] = Future()
        self.loop.call_soon_threadsafe(lambda: result.set_result(call()))
        return result.result(5)

    def idle(self, within_s: float = 3.0) -> bool:
        """Whether the engine has nothing under way, at the latest after ``within_s``."""
        deadline = time.monotonic() + within_s
        while self.engine.live and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self.engine.live


@contextlib.contextmanager
def serving(
    engine: ScriptedEngine,
    sampling_defaults: dict[str, float] | None = None,
    certificate: Certificate | None = None,
    **fields: Any,
) -> Iterator[Served]:
    """Serve ``engine`` on a free port, with settings as ``LLM`` takes them."""
    config = resolve({"model": "scripted", **fields}, environ={}, given_as="argument").config
    bound = bind("127.0.0.1", 0, "port")
    url = f"http{'' if certificate is None else 's'}://127.0.0.1:{bound.getsockname()[1]}"
    ready: Future[tuple[FastAPI, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def main() -> None:
        app, over = create_app(engine, config, sampling_defaults=sampling_defaults), asyncio.Event()
        listener = Listener(app, bound, "port", config.server.body_timeout_s, certificate)
        await listener.start()
        ready.set_result((app, asyncio.get_running_loop(), over))
        await over.wait()
        await listener.stop()
        await app.state.ropeway.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    app, loop, over = ready.result(10)
    try:
        yield Served(url, engine, app, loop)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)


def events(response: httpx.Response) -> Iterator[str]:
    """The data of every server-sent event, ``[DONE]`` included."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
        else:
            assert not line, f"{line!r} is no event"
