"""The engine in a process of its own, seen from the process that serves it.

    server process                                    engine process (engine/child.py)
    EngineProcess --- Start, Submit, Abort, ... --->  Engine.step, Engine.step, ...
                  <-- EngineInfo | Failed -----------
                  <-- StepOutput, Stats, Explained --

over one private ipc socket (a pair, in a folder only this user can enter), msgspec on the wire.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from ropeway import errors
from ropeway.config import Config
from ropeway.engine.client import RequestOptions, Usage
from ropeway.engine.completions import CompletionText, Router
from ropeway.engine.generation import ProcessGeneration
from ropeway.engine.messages import (
    Abort,
    EngineInfo,
    Explain,
    Explained,
    Failed,
    FromEngine,
    Inspect,
    Inspected,
    Record,
    Recorded,
    Shutdown,
    Start,
    Stats,
    Submit,
    decode_from_engine,
)
from ropeway.engine.spawn import SpawnedEngine
from ropeway.engine.submission import Submitter
from ropeway.errors import ConfigError, EngineDead, QueueFull, RopewayError
from ropeway.loading.sources import resolve as resolve_source
from ropeway.outcome import Finished, Refusal, StepOutput
from ropeway.request import FinishReason, SamplingParams, Timeline
from ropeway.scheduling.tiers_file import tiers_of
from ropeway.text.tokenizer import Tokenizer
from ropeway.wire import encode

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_IDLE_SILENCE_S = 5.0
"""An idle engine reports every second, and says at once that it has got work."""
_BUSY_SILENCE_S = 60.0
"""A busy one reports every step, and a step of a long prompt on a slow machine takes its time."""
_SHUTDOWN_S = 5.0
_EXPLAIN_S = 2.0
"""How long a question about requests under way waits; the engine answers between steps."""


@dataclass(frozen=True, slots=True)
class _Left:
    """A completion that was ended on this side, at ``at_s``."""

    generation: ProcessGeneration
    index: int
    at_s: float


class EngineProcess:
    """Implements ``AsyncEngine``. Lives on the asyncio loop that ``start_engine`` ran on."""

    def __init__(self, config: Config, tokenizer: Tokenizer | None, spawned: SpawnedEngine) -> None:
        """``spawned`` is closed with this."""
        self.tokenizer = tokenizer
        self.stats = Stats()
        self.info: EngineInfo
        self._max_queue = config.server.max_queue
        self._router: Router[ProcessGeneration] = Router()
        self._left: dict[int, _Left] = {}
        """Completions ended on this side whose timeline has not come yet."""
        self._asked: deque[Callable[[Mapping[int, Timeline]], None]] = deque()
        """Who takes the next ``Explained``, and those after it."""
        self._recorded: deque[asyncio.Future[bytes]] = deque()
        """Who takes the next ``Recorded``, and those after it."""
        self._inspected: deque[asyncio.Future[Inspected]] = deque()
        """Who takes the next ``Inspected``, and those after it."""
        self._submitter: Submitter
        self._failure: str | None = None
        self._dead = asyncio.Event()
        self._heard_s = time.monotonic()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)  # bounded by the number of requests
        self._spawned = spawned
        self._ended: asyncio.Task[int] | None = None
        self._listener: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Process id of the engine process."""
        return self._spawned.process.pid

    @property
    def failure(self) -> str | None:
        """Why the engine is dead or does not answer; None: it lives."""
        silence = time.monotonic() - self._heard_s
        busy = self.stats.running + self.stats.waiting > 0
        if self._failure is None and silence > (_BUSY_SILENCE_S if busy else _IDLE_SILENCE_S):
            return f"the engine process has not answered for {silence:.0f} s"
        return self._failure

    async def died(self) -> str:
        """See ``AsyncEngine.died``."""
        await self._dead.wait()
        assert self._failure is not None
        return self._failure

    async def start(self, start: Start) -> None:
        """Tell the child what to load and wait until it is ready; raises what its loading raised."""
        address = self._spawned.address
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot make a socket at {address}: {error}; set TMPDIR to a short, writable path"
            ) from error
        self._ended = asyncio.create_task(self._spawned.wait())
        self._send(encode(start))
        match await self._receive():
            case EngineInfo() as info:
                self.info = info
            case Failed() as failed:
                raise _error(failed)
            case _:
                code = self._spawned.process.returncode
                raise EngineDead(f"the engine process ended before it was ready (exit code {code})")
        self._submitter = Submitter(self.info)
        self._listener = asyncio.create_task(self._listen())

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, options: RequestOptions = RequestOptions()
    ) -> ProcessGeneration:
        """Hand a request to the engine; see ``AsyncEngine.submit``."""
        if self.failure is not None:
            raise EngineDead(self.failure)
        arrival_s = time.monotonic() if options.arrival_s is None else options.arrival_s
        group = self._submitter.prepare(
            prompt,
            params,
            salt=options.cache_salt,
            tier=options.tier,
            tenant=options.tenant,
            arrival_s=arrival_s,
            deadline_s=options.deadline_s,
        )
        waiting = len(self._router) - self.info.max_num_seqs
        if not params.beam_step and waiting + len(group) > self._max_queue:
            raise QueueFull(
                f"{max(waiting, 0)} requests are waiting and {len(group)} more were asked; the queue holds "
                f"{self._max_queue}: try again later"
            )
        message = encode(Submit(group))
        usage = Usage(prompt_tokens=len(prompt))
        generation = ProcessGeneration(self, [new.id for new in group], usage, arrival_s)
        for index, new in enumerate(group):
            self._router.add(new.id, generation, CompletionText(index, params, self.tokenizer), usage)
        self._send(message)
        return generation

    def abort(self, ids: Sequence[int]) -> None:
        """Abort those of these completions that have not ended; their readers get ``FinishReason.ABORT``."""
        now = time.monotonic()
        left = {}
        for request_id, generation, completion in self._router.find(ids):
            self._router.drop(request_id)
            generation.put(completion.end(Finished(request_id, FinishReason.ABORT)))
            left[request_id] = _Left(generation, completion.index, now)
        if left and self._failure is None:
            self._leave(left, "cancel")

    async def explain(self, ids: Sequence[int]) -> Mapping[int, Timeline]:
        """Where the time of these completions goes; what the engine does not know, or does not tell in time, is
        missing."""
        if self._failure is not None:
            return {}
        answer: asyncio.Future[Mapping[int, Timeline]] = asyncio.get_running_loop().create_future()
        self._ask(ids, lambda timelines: None if answer.done() else answer.set_result(timelines))
        try:
            return await asyncio.wait_for(answer, _EXPLAIN_S)
        except TimeoutError:
            return {}

    async def record(self, on: bool) -> bytes:
        """See ``AsyncEngine.record``."""
        if self._failure is not None:
            raise EngineDead(self._failure)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._recorded.append(answer)
        self._send(encode(Record(on)))
        return await answer

    async def inspect(self) -> Inspected:
        """See ``AsyncEngine.inspect``."""
        if self._failure is not None:
            raise EngineDead(self._failure)
        answer: asyncio.Future[Inspected] = asyncio.get_running_loop().create_future()
        self._inspected.append(answer)
        self._send(encode(Inspect()))
        return await answer

    async def close(self) -> None:
        """End the engine process; what is under way ends with an error. May be called twice."""
        if self._listener is not None:
            self._listener.cancel()
        self._fail("the engine was shut down")
        if self._listener is not None and self._ended is not None and not self._ended.done():
            self._send(encode(Shutdown()))
            await asyncio.wait({self._ended}, timeout=_SHUTDOWN_S)
        # If it is loading it listens to nobody.
        self._spawned.close()
        if self._ended is not None:
            await self._ended
        if not self._socket.closed:
            self._socket.close(linger=0)
            self._context.term()

    def _send(self, message: bytes) -> None:
        self._socket.send(message)

    async def _receive(self) -> FromEngine | None:
        """The next message; None when the process has ended and left nothing more to read."""
        assert self._ended is not None
        receiving = asyncio.ensure_future(self._socket.recv())
        try:
            await asyncio.wait({receiving, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                await asyncio.wait({receiving}, timeout=0.2)  # its last words may still be in the socket
            if not receiving.done():
                return None
            self._heard_s = time.monotonic()
            return decode_from_engine(receiving.result())
        finally:
            receiving.cancel()

    async def _listen(self) -> None:
        """Deliver what the engine says until it ends."""
        try:
            while (message := await self._receive()) is not None:
                self._take(message)
        except Exception as error:
            log.exception("the engine's messages cannot be read")
            self._fail(f"the engine's messages cannot be read: {type(error).__name__}: {error}")
        else:
            code = self._spawned.process.returncode
            self._fail(f"the engine process ended unexpectedly (exit code {code})")

    def _take(self, message: FromEngine) -> None:
        match message:
            case StepOutput():
                self._deliver(message)
            case Stats():
                self.stats = message
            case Explained(timelines):
                self._asked.popleft()(timelines)
            case Recorded(trace):
                _set(self._recorded.popleft(), trace)
            case Inspected():
                _set(self._inspected.popleft(), message)
            case Failed():
                self._fail(message.message)
            case EngineInfo():
                raise RuntimeError("the engine became ready twice")

    def _deliver(self, output: StepOutput) -> None:
        for request_id, generation, _ in self._router.find(output.accepted):
            generation.answer(request_id)
        for finished in output.finished:
            if finished.timeline is not None:
                self._explain_left(finished.id, finished.timeline)
        news, stopped = self._router.receive(output)
        for generation, delta in news:
            generation.put(delta)
        if stopped:
            now, ids = time.monotonic(), set(stopped)
            ended = [(g, g.ids[delta.index], delta.index) for g, delta in news if delta.finish_reason is not None]
            left = {request_id: _Left(g, index, now) for g, request_id, index in ended if request_id in ids}
            self._leave(left, "stop_string")

    def _leave(self, left: dict[int, _Left], reason: str) -> None:
        """Tell the engine that these completions have ended here. It publishes nothing of what it aborts, so where
        their time went has to be asked first."""
        ids = list(left)
        self._left |= left

        def note(timelines: Mapping[int, Timeline]) -> None:
            for request_id in ids:
                if request_id in timelines:
                    self._explain_left(request_id, timelines[request_id])
                self._left.pop(request_id, None)  # the engine knows nothing of it

        self._ask(ids, note)
        self._send(encode(Abort(ids, reason)))

    def _explain_left(self, request_id: int, timeline: Timeline) -> None:
        left = self._left.pop(request_id, None)
        if left is not None:
            left.generation.ended_here(left.index, timeline, left.at_s)

    def _ask(self, ids: Sequence[int], tell: Callable[[Mapping[int, Timeline]], None]) -> None:
        """``tell`` gets the answer. The engine answers questions in their order."""
        self._asked.append(tell)
        self._send(encode(Explain(list(ids))))

    def _fail(self, why: str) -> None:
        """Every reader gets an error; nothing more is accepted."""
        self._failure = self._failure or why
        self._dead.set()
        refusal = Refusal("EngineDead", f"the engine failed: {self._failure}")
        for request_id, generation, completion in self._router.owners():
            self._router.drop(request_id)
            generation.put(completion.end(Finished(request_id, FinishReason.ERROR, refusal=refusal)))
        while self._asked:
            self._asked.popleft()({})
        answers: list[asyncio.Future[Any]] = [*self._recorded, *self._inspected]
        self._recorded.clear()
        self._inspected.clear()
        for answer in answers:
            if not answer.done():
                answer.set_exception(EngineDead(self._failure))


async def start_engine(config: Config, spawned: SpawnedEngine | None = None) -> EngineProcess:
    """Fetch the model if need be, load its tokenizer here and its weights in an engine process, and wait until
    that is ready. ``spawned`` is that process, if it has been started already.
    Raises ``ConfigError``, ``ModelNotFound``, ``LoadError``, ``OutOfMemory``, ``EngineDead``."""
    tiers_of(config.scheduler)  # what is wrong with them is told before anything is fetched
    spawned = spawned or SpawnedEngine()
    try:
        path = await asyncio.to_thread(resolve_source, config.model.model)
        tokenizer = await asyncio.to_thread(Tokenizer.from_path, path)
        engine = EngineProcess(config, tokenizer, spawned)
    except BaseException:
        spawned.close()
        raise
    try:
        await engine.start(
            Start(
                config=config,
                path=str(path),
                end_ids=[] if tokenizer is None else list(tokenizer.eos_ids),
                vocab_size=None if tokenizer is None else tokenizer.vocab_size,
            )
        )
    except BaseException:
        await asyncio.shield(engine.close())
        raise
    return engine


def _set(answer: asyncio.Future[Answer], value: Answer) -> None:
    if not answer.done():  # whoever asked may have gone
        answer.set_result(value)


def _error(failed: Failed) -> RopewayError:
    kind: type[RopewayError] = getattr(errors, failed.error, EngineDead)
    return kind(failed.message, param=failed.param)
