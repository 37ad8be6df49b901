"""The engine in a process of its own, seen from the process that serves it.

    server process                                    engine process (engine/child.py)
    EngineProcess --- Start, Submit, Abort, ... --->  Engine.step, Engine.step, ...
                  <-- EngineInfo | Failed -----------
                  <-- StepOutput, Stats -------------

over one private ipc socket (a pair, in a folder only this user can enter), msgspec on the wire.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import zmq
import zmq.asyncio

from ropeway import errors
from ropeway.config import Config
from ropeway.engine.client import Delta, Usage
from ropeway.engine.completions import CompletionText, Router
from ropeway.engine.messages import (
    Abort,
    EngineInfo,
    Failed,
    FromEngine,
    Shutdown,
    Start,
    Stats,
    Submit,
    decode_from_engine,
    encode,
)
from ropeway.engine.submission import Submitter
from ropeway.errors import ConfigError, EngineDead, QueueFull, RopewayError
from ropeway.loading.sources import resolve as resolve_source
from ropeway.outcome import Finished, StepOutput
from ropeway.request import FinishReason, SamplingParams
from ropeway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_IDLE_SILENCE_S = 5.0
"""An idle engine reports every second, and says at once that it has got work."""
_BUSY_SILENCE_S = 60.0
"""A busy one reports every step, and a step of a long prompt on a slow machine takes its time."""
_SHUTDOWN_S = 5.0


class ProcessGeneration:
    """Implements ``Generation``: a mailbox of deltas that an ``EngineProcess`` fills."""

    def __init__(self, engine: EngineProcess, ids: list[int], usage: Usage) -> None:
        self.usage = usage
        self._engine = engine
        self._ids = ids
        self._open = len(ids)
        self._mail: deque[Delta] = deque()
        self._news = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            while self._mail:
                delta = self._mail.popleft()
                self._open -= delta.finish_reason is not None
                yield delta
            if not self._open:
                return
            self._news.clear()
            await self._news.wait()

    def put(self, delta: Delta) -> None:
        self._mail.append(delta)
        self._news.set()

    def cancel(self) -> None:
        """Abort what is unfinished. Idempotent."""
        self._engine.abort(self._ids)


class EngineProcess:
    """Implements ``AsyncEngine``. Lives on the asyncio loop that ``start_engine`` ran on."""

    def __init__(self, config: Config, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.stats = Stats()
        self.info: EngineInfo
        self._max_queue = config.server.max_queue
        self._router: Router[ProcessGeneration] = Router()
        self._submitter: Submitter
        self._failure: str | None = None
        self._heard_s = time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix="ropeway-"))
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)  # bounded by the number of requests
        self._process: asyncio.subprocess.Process | None = None
        self._ended: asyncio.Task[int] | None = None
        self._listener: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the engine process."""
        return None if self._process is None else self._process.pid

    @property
    def failure(self) -> str | None:
        """Why the engine is dead or does not answer; None: it lives."""
        silence = time.monotonic() - self._heard_s
        busy = self.stats.running + self.stats.waiting > 0
        if self._failure is None and silence > (_BUSY_SILENCE_S if busy else _IDLE_SILENCE_S):
            return f"the engine process has not answered for {silence:.0f} s"
        return self._failure

    async def start(self, start: Start) -> None:
        """Start the child and wait until it is ready; raises what its loading raised."""
        address = f"ipc://{self._folder}/engine"
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot make a socket in {self._folder}: {error}; set TMPDIR to a short, writable path"
            ) from error
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "ropeway.engine.child", address, stdin=asyncio.subprocess.PIPE
        )
        self._ended = asyncio.create_task(self._process.wait())
        self._send(encode(start))
        match await self._receive():
            case EngineInfo() as info:
                self.info = info
            case Failed() as failed:
                raise _error(failed)
            case _:
                raise EngineDead(f"the engine process ended before it was ready (exit code {self._process.returncode})")
        self._submitter = Submitter(self.info)
        self._listener = asyncio.create_task(self._listen())

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, cache_salt: str | None = None
    ) -> ProcessGeneration:
        """Hand a request to the engine; see ``AsyncEngine.submit``."""
        if self.failure is not None:
            raise EngineDead(self.failure)
        group = self._submitter.prepare(prompt, params, salt=cache_salt)
        waiting = len(self._router) - self.info.max_num_seqs
        if waiting + len(group) > self._max_queue:
            raise QueueFull(
                f"{max(waiting, 0)} requests are waiting and {len(group)} more were asked; the queue holds "
                f"{self._max_queue}: try again later"
            )
        message = encode(Submit(group))
        usage = Usage(prompt_tokens=len(prompt))
        generation = ProcessGeneration(self, [new.id for new in group], usage)
        for index, new in enumerate(group):
            self._router.add(new.id, generation, CompletionText(index, params, self.tokenizer), usage)
        self._send(message)
        return generation

    def abort(self, ids: Sequence[int]) -> None:
        """Abort those of these completions that have not ended; their readers get ``FinishReason.ABORT``."""
        dropped = []
        for request_id, generation, completion in self._router.find(ids):
            self._router.drop(request_id)
            generation.put(completion.end(Finished(request_id, FinishReason.ABORT)))
            dropped.append(request_id)
        if dropped and self._failure is None:
            self._send(encode(Abort(dropped, "cancel")))

    async def close(self) -> None:
        """End the engine process; what is under way ends with an error. May be called twice."""
        if self._listener is not None:
            self._listener.cancel()
        self._fail("the engine was shut down")
        process = self._process
        if process is not None and process.returncode is None:
            if self._listener is None:
                process.kill()  # it is loading, and listens to nobody
            else:
                self._send(encode(Shutdown()))
            try:
                await asyncio.wait_for(process.wait(), _SHUTDOWN_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        if not self._socket.closed:
            self._socket.close(linger=0)
            self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

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
            assert self._process is not None
            self._fail(f"the engine process ended unexpectedly (exit code {self._process.returncode})")

    def _take(self, message: FromEngine) -> None:
        match message:
            case StepOutput():
                self._deliver(message)
            case Stats():
                self.stats = message
            case Failed():
                self._fail(message.message)
            case EngineInfo():
                raise RuntimeError("the engine became ready twice")

    def _deliver(self, output: StepOutput) -> None:
        news, stopped = self._router.receive(output)
        for generation, delta in news:
            generation.put(delta)
        if stopped:
            self._send(encode(Abort(stopped, "stop_string")))

    def _fail(self, why: str) -> None:
        """Every reader gets an error; nothing more is accepted."""
        self._failure = self._failure or why
        for request_id, generation, completion in self._router.owners():
            self._router.drop(request_id)
            generation.put(completion.end(Finished(request_id, FinishReason.ERROR, error=self._failure)))


async def start_engine(config: Config) -> EngineProcess:
    """Fetch the model if need be, load its tokenizer here and its weights in an engine process, and wait until
    that is ready. Raises ``ModelNotFound``, ``LoadError``, ``OutOfMemory``, ``EngineDead``."""
    path = await asyncio.to_thread(resolve_source, config.model.model)
    tokenizer = await asyncio.to_thread(Tokenizer.from_path, path)
    engine = EngineProcess(config, tokenizer)
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


def _error(failed: Failed) -> RopewayError:
    kind: type[RopewayError] = getattr(errors, failed.error, EngineDead)
    return kind(failed.message, param=failed.param)
