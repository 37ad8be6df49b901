"""An engine that is started again when it dies: what was under way ends with an error, what comes later is served."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from ropeway.engine.client import AsyncEngine, Generation, RequestOptions
from ropeway.engine.messages import EngineInfo, Inspected, Stats
from ropeway.errors import EngineDead
from ropeway.request import SamplingParams
from ropeway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_LOOK_S = 1.0
_HUNG_S = 10.0
"""How long an idle engine may be silent, after its client has called it that, before it is ended."""
_BUSY_HUNG_S = 240.0
"""The same of a busy one: a long prompt in one step takes its time."""
_FORGIVEN_S = 600.0
"""An engine that has lived so long begins anew with its deaths."""


class SupervisedEngine:
    """Implements ``AsyncEngine``. Belongs to the loop it is made on."""

    def __init__(self, engine: AsyncEngine, start: Callable[[], Awaitable[AsyncEngine]], most_restarts: int) -> None:
        """``start`` makes another one like ``engine``. After ``most_restarts`` deaths, each before it had lived for ten
        minutes, the next one is final."""
        self.restarts = 0
        self.since_s = time.time()
        """When it last came to life, or died, by the wall's clock."""
        self._born_s = time.monotonic()
        self._engine = engine
        self._start = start
        self._most = most_restarts
        self._why: str | None = None
        """Why there is no engine now."""
        self._given_up = asyncio.Event()
        self._task = asyncio.create_task(self._supervise())

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._engine.tokenizer

    @property
    def stats(self) -> Stats:
        return self._engine.stats

    @property
    def failure(self) -> str | None:
        return self._why or self._engine.failure

    async def died(self) -> str:
        """See ``AsyncEngine.died``: when it is not started again."""
        await self._given_up.wait()
        assert self._why is not None
        return self._why

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, options: RequestOptions = RequestOptions()
    ) -> Generation:
        """See ``AsyncEngine.submit``."""
        if self._why is not None:
            raise EngineDead(self._why)
        return self._engine.submit(prompt, params, options)

    async def record(self, on: bool) -> bytes:
        """See ``AsyncEngine.record``."""
        return await self._engine.record(on)

    async def inspect(self) -> Inspected:
        """See ``AsyncEngine.inspect``."""
        return await self._engine.inspect()

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._engine.close()

    async def _supervise(self) -> None:
        deaths = 0
        while True:
            why = await self._end_of(self._engine)
            lived_s = time.monotonic() - self._born_s
            deaths = 1 if lived_s > _FORGIVEN_S else deaths + 1
            while deaths <= self._most:
                pause_s = min(_FIRST_PAUSE_S * 2 ** (deaths - 1), _LONGEST_PAUSE_S)
                self._dead(f"{why}; it is being started again")
                log.error("the engine is dead: %s; it is started again in %.1f s", why, pause_s)
                try:
                    await self._engine.close()
                    await asyncio.sleep(pause_s)
                    self._engine = await self._start()
                except Exception as error:  # whatever it is, it must not leave a server that waits for ever
                    why = f"the engine could not be started again: {error}"
                    deaths += 1
                    continue
                self.restarts += 1
                self._why, self.since_s, self._born_s = None, time.time(), time.monotonic()
                log.warning("the engine lives again, after %d restarts in all", self.restarts)
                break
            else:
                self._dead(why)
                self._given_up.set()
                return

    @staticmethod
    async def _end_of(engine: AsyncEngine) -> str:
        """Why the engine has ended, or has to: one that answers nobody for long is as good as dead."""
        died = asyncio.ensure_future(engine.died())
        silent = 0
        try:
            while not (await asyncio.wait({died}, timeout=_LOOK_S))[0]:
                failure = engine.failure
                silent = 0 if failure is None else silent + 1
                busy = engine.stats.running + engine.stats.waiting > 0
                if failure is not None and silent * _LOOK_S > (_BUSY_HUNG_S if busy else _HUNG_S):
                    return failure
            return died.result()
        finally:
            died.cancel()

    def _dead(self, why: str) -> None:
        if self._why is None:
            self.since_s = time.time()
        self._why = why


def since_of(engine: AsyncEngine, otherwise_s: float) -> float:
    """When an engine came to life, by the wall's clock, if anybody keeps that."""
    return engine.since_s if isinstance(engine, SupervisedEngine) else otherwise_s


def restarts_of(engine: AsyncEngine) -> int:
    """How often it was started again, if anybody does that."""
    return engine.restarts if isinstance(engine, SupervisedEngine) else 0
