"""The process of a rank other than 0: ``python -m ropeway.execution.ranks.follower``, with its ``Meeting`` as the first
line of its standard input.

It joins before its imports, which take seconds; loads its part of the model; then takes plans from rank 0 in their
order, and hands each to its device: the forward, and after it the tokens that rank 0 has chosen. It ends when told to,
when it fails, when the process that started it is gone, and when it has heard nothing from rank 0 for a while.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from ropeway.errors import EngineDead, RopewayError
from ropeway.execution.ranks.links import Links, Socket
from ropeway.execution.ranks.messages import (
    BEAT_S,
    SILENCE_S,
    Alive,
    FromRank,
    Join,
    Load,
    MakePool,
    MakeWorker,
    Meeting,
    RankFailed,
    Ready,
    Rehearse,
    RunStep,
    Sign,
    Stop,
    decode_to_rank,
)
from ropeway.lifeline import hold_to_parent
from ropeway.version import __version__
from ropeway.wire import encode

log = logging.getLogger("ropeway.execution.ranks.follower")
"""This module's name is __main__ when it runs."""

_CONSEQUENCE_S = 1.0
"""A collective that breaks does so because another rank has failed, mostly: so long rank 0 has to find out which, and
to end this one."""

_LINGER_MS = 1000
"""For the last words to reach rank 0's machine."""

M = TypeVar("M", Load, MakePool, MakeWorker)


class Signs:
    """Signs of life, on a thread of their own that has its socket to itself."""

    def __init__(self, meeting: Meeting) -> None:
        self._links = Links(meeting.secret)
        """Not those of the rest of the process: it ends when these last words are out, wherever the rest stands."""
        self._socket = self._links.connect(meeting.signs, meeting.rank)
        self._patience_s = meeting.timeout_s
        """How long rank 0 may keep this one waiting for its first sign."""
        self._failures: queue.SimpleQueue[RankFailed] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._exchange, name="signs", daemon=True)
        self._thread.start()

    def fail(self, failure: RankFailed) -> None:
        """Tell rank 0, and end this process. From any thread; does not return."""
        self._failures.put(failure)
        self._thread.join()
        os._exit(1)

    def _exchange(self) -> None:
        heard_s, silence_s = time.monotonic(), self._patience_s
        sent_s = 0.0
        while True:
            now = time.monotonic()
            with contextlib.suppress(queue.Empty):
                self._send(self._failures.get_nowait())
                self._links.close(_LINGER_MS)
                return
            if now - sent_s >= BEAT_S:
                sent_s = now
                self._send(Alive())
            if now - heard_s > silence_s:
                log.error("rank 0 has not been heard of for %.1f s; this rank ends", now - heard_s)
                os._exit(1)  # rank 0 cannot be told
            if self._socket.poll(int(1000 * BEAT_S / 5)):
                self._socket.recv()
                heard_s, silence_s = time.monotonic(), SILENCE_S

    def _send(self, sign: Sign) -> None:
        self._socket.send(encode(sign))


class Follower:
    """Takes rank 0's messages one after the other."""

    def __init__(self, meeting: Meeting, control: Socket, signs: Signs) -> None:
        self._meeting = meeting
        self._control = control
        self._signs = signs

    def run(self) -> None:
        """Returns after ``Stop``. Raises what loading raises."""
        from ropeway.execution.part import ModelPart
        from ropeway.execution.ranks.meeting import meet
        from ropeway.loading.sources import resolve

        load = self._receive(Load)
        communicator = meet(self._meeting, load.config.parallel)
        path = resolve(load.config.model.model) if load.path is None else Path(load.path)
        part = ModelPart(load.config, path, communicator, local_ranks=load.local_ranks)
        self._send(part.loaded(part.digest(path)))
        sizes = self._receive(MakePool).sizes
        pool, _ = part.make_pool(sizes)
        count = self._receive(MakeWorker).host_blocks
        host = part.device.host_blocks(count, part.block_bytes) if count else None
        worker = part.make_worker(sizes, pool, host)
        gc.collect()
        gc.freeze()
        self._send(Ready())
        stream = worker.device.stream
        expected: int | None = None
        while isinstance(message := self._next(), RunStep | Rehearse):
            plan = message.plan
            if isinstance(message, RunStep):
                if expected not in (None, plan.seq):
                    raise EngineDead(f"step {plan.seq} came where step {expected} was due")
                expected = plan.seq + 1
            else:
                stream.submit(partial(worker.fuse, message.fused))
            step = worker.begin(plan)
            stream.submit(self._guarded(step.forward))
            stream.submit(self._guarded(step.follow))
        if not isinstance(message, Stop):
            raise EngineDead(f"{type(message).__name__} came where a step was due")
        stream.close()

    def _guarded(self, work: Callable[[], None]) -> Callable[[], None]:
        """On the stream nobody waits for this rank's work: what it raises must end the process."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                fail(self._signs, error)

        return run

    def _next(self) -> object:
        return decode_to_rank(self._control.recv())

    def _receive(self, kind: type[M]) -> M:
        message = self._next()
        if isinstance(message, Stop):
            raise SystemExit(0)
        if not isinstance(message, kind):
            raise EngineDead(f"{type(message).__name__} came where {kind.__name__} was due")
        return message

    def _send(self, message: FromRank) -> None:
        self._control.send(encode(message))


def fail(signs: Signs, error: Exception) -> None:
    """Tell rank 0 of an error, and end."""
    if isinstance(error, RopewayError):
        signs.fail(RankFailed(type(error).__name__, error.message, error.param))
    if isinstance(error, RuntimeError):
        time.sleep(_CONSEQUENCE_S)
    traceback.print_exception(error)
    signs.fail(RankFailed("EngineDead", f"{type(error).__name__}: {error}"))


def main() -> int:
    meeting = msgspec.json.decode(sys.stdin.buffer.readline(), type=Meeting)
    hold_to_parent()
    logging.basicConfig(
        level=logging.INFO, format=f"%(levelname)s rank {meeting.rank} %(name)s: %(message)s", stream=sys.stderr
    )
    links = Links(meeting.secret)
    control = links.connect(meeting.control, meeting.rank)
    signs = Signs(meeting)
    control.send(encode(Join(meeting.rank, __version__)))
    try:
        Follower(meeting, control, signs).run()
    except Exception as error:
        fail(signs, error)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # nothing is left to finish, and the threads that listen never end
