"""Rank 0's hold on the others: starts their processes, speaks to them in order, and watches that they live."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import TypeVar

import zmq

from ropeway import errors
from ropeway.config import Config
from ropeway.errors import ConfigError, EngineDead, RopewayError
from ropeway.execution.local import LocalExecutor
from ropeway.execution.part import ModelPart
from ropeway.execution.ranks.cutting import CutTable, Cutter, measure
from ropeway.execution.ranks.executor import RanksExecutor
from ropeway.execution.ranks.links import Links, identity_of, rank_of
from ropeway.execution.ranks.meeting import meet
from ropeway.execution.ranks.messages import (
    BEAT_S,
    SILENCE_S,
    Alive,
    Join,
    Load,
    MakePool,
    MakeWorker,
    Meeting,
    RankFailed,
    Ready,
    Rehearse,
    RunStep,
    Stop,
    ToRank,
    decode_from_rank,
    decode_sign,
    meeting_of,
)
from ropeway.execution.ranks.processes import Process, end, ending, start_rank
from ropeway.execution.sizes import Loaded, PoolSizes
from ropeway.execution.worker import Worker
from ropeway.parallel.communicator import Communicator, SingleProcess
from ropeway.plan import Plan
from ropeway.version import __version__
from ropeway.wire import encode

M = TypeVar("M", Join, Loaded, Ready)

log = logging.getLogger(__name__)

_STOP_S = 5.0
_LINGER_MS = 1000
"""For what is still on its way to other hosts."""
_LAST_WORDS_MS = 500
"""A process that tells why it ends may be seen ended first."""
_CAUSE_S = 2.0
"""A broken collective is seen before its cause; how long to wait for that."""


class Leader:
    """All but ``check`` and ``failure`` belong to the engine's thread."""

    def __init__(self, config: Config, path: Path) -> None:
        """Starts the processes of this host. Raises ``ConfigError`` where the system does not let it."""
        parallel = config.parallel
        self.size = parallel.tensor_parallel_size
        self.local_ranks = len(parallel.ranks_of_node)
        self.processes: dict[int, Process] = {}
        """Of this host's other ranks."""
        self._config, self._path = config, path
        self._failure: RopewayError | None = None
        self._communicator: Communicator | None = None
        self._ready = False
        self._closed = threading.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="ropeway-ranks-"))
        self._shared: int | None = None
        self._links = Links(self._meeting(0).secret)
        try:
            self._control = self._links.listen(self._meeting(0).control)
            self._signs = self._links.listen(self._meeting(0).signs)
            if parallel.nnodes == 1 and parallel.collectives in ("auto", "shared"):
                from ropeway.parallel.shared_memory import shared_memory

                self._shared = shared_memory(self.size)
            for rank in range(1, self.local_ranks):
                self.processes[rank] = start_rank(self._meeting(rank))
        except BaseException:
            end(self.processes.values())
            self._clean_up()
            raise
        self._watch = threading.Thread(target=self._watch_ranks, name="rank-watch", daemon=True)
        self._watch.start()

    # ------------------------------------------------------------------ loading, step by step

    def gather(self) -> Communicator:
        """Wait until all ranks are there, and meet them. Tells them what to load, which they do from here on.

        Raises ``RopewayError`` naming a rank that does not come in time, or is another version."""
        joined = self._receive(Join, self._config.parallel.join_timeout_s, "has not joined")
        for join in joined.values():
            if join.version != __version__:
                raise ConfigError(f"rank {join.rank} runs Ropeway {join.version}, rank 0 {__version__}; install one")
        for rank in range(1, self.size):
            path = str(self._path) if rank < self.local_ranks else None
            self._send_to(rank, Load(self._config, path, self.local_ranks))
        self._communicator = meet(self._meeting(0), self._config.parallel)
        return self._communicator

    def loaded(self, part: ModelPart) -> list[Loaded]:
        """Wait for the others' parts -> all ranks', in their order. Raises ``ConfigError`` where one has loaded
        something else than rank 0, and what its loading has raised."""
        mine = part.loaded(part.digest(self._path))
        parts = self._receive(Loaded, None, "has not loaded")
        for rank, loaded in sorted(parts.items()):
            if loaded.digest != mine.digest:
                raise ConfigError(
                    f"rank {rank} has loaded other weights, another config or kernels for another instruction set than "
                    f"rank 0; all hosts need the same model at the same version, and processors of one kind"
                )
        return [mine, *(parts[rank] for rank in sorted(parts))]

    def make_pools(self, sizes: PoolSizes) -> None:
        """Each rank makes its pool, as this one is about to do."""
        self._send(MakePool(sizes))

    def make_workers(self, host_blocks: int) -> None:
        """Each rank makes its worker; waits until all are ready for steps."""
        self._send(MakeWorker(host_blocks))
        self._receive(Ready, None, "is not ready")
        self._ready = True

    def executor(self, worker: Worker, sizes: PoolSizes) -> RanksExecutor:
        """Cuts steps in two where that was configured and, with ``auto``, pays: which is tried here."""
        executor = RanksExecutor(self, worker)
        mode, scheduler = self._config.parallel.micro_batch, self._config.scheduler
        if not sizes.micro_batches or mode == "off":
            return executor
        table = CutTable()
        if mode == "auto":
            table = measure(
                executor.rehearse,
                max_tokens=scheduler.max_batched_tokens,
                max_model_len=sizes.max_model_len,
                max_num_seqs=scheduler.max_num_seqs,
                num_blocks=sizes.num_blocks,
                block_size=self._config.cache.block_size,
            )
        executor.cutter = Cutter(mode, worker.model.spec, table)
        return executor

    # ------------------------------------------------------------------ steps

    def run(self, plan: Plan) -> None:
        """Hand a plan to all ranks."""
        self._send(RunStep(plan))

    def rehearse(self, plan: Plan, fused: bool) -> None:
        """The same of one that is only to be timed."""
        self._send(Rehearse(plan, fused))

    @property
    def failure(self) -> RopewayError | None:
        """Why the ranks cannot go on."""
        return self._failure

    def check(self) -> None:
        """Raise why the ranks cannot go on, if they can't."""
        if self._failure is not None:
            raise self._failure

    def explain(self, error: Exception) -> Exception:
        """The cause of an error in a collective, if one becomes known."""
        until = time.monotonic() + _CAUSE_S
        while self._failure is None and time.monotonic() < until:
            time.sleep(0.02)
        return self._failure or error

    def close(self) -> None:
        """End all ranks: after their steps, or at once where one has failed or there are no steps yet. May be called
        twice."""
        if self._closed.is_set():
            return
        orderly = self._ready and self._failure is None
        if orderly:
            with contextlib.suppress(zmq.ZMQError):
                self._send(Stop())
        self._closed.set()
        self._watch.join()
        end(self.processes.values(), _STOP_S if orderly else 0.0)
        self._clean_up(_LINGER_MS if orderly else 0)

    # ------------------------------------------------------------------ inside

    def _meeting(self, rank: int) -> Meeting:
        return meeting_of(self._config.parallel, rank, str(self._folder), self._shared)

    def _send(self, message: ToRank) -> None:
        data = encode(message)
        for rank in range(1, self.size):
            self._send_to(rank, data)

    def _send_to(self, rank: int, message: ToRank | bytes) -> None:
        data = message if isinstance(message, bytes) else encode(message)
        try:
            self._control.send_multipart([identity_of(rank), data])
        except zmq.ZMQError as error:
            raise self.explain(EngineDead(f"rank {rank} cannot be reached: {error}")) from error

    def _receive(self, kind: type[M], patience_s: float | None, missing: str) -> dict[int, M]:
        """One message of this kind from every other rank."""
        got: dict[int, M] = {}
        began = time.monotonic()
        while len(got) < self.size - 1:
            self.check()
            if patience_s is not None and time.monotonic() - began > patience_s:
                ranks = ", ".join(str(rank) for rank in range(1, self.size) if rank not in got)
                raise EngineDead(f"rank {ranks} {missing} within {patience_s:g} s")
            if not self._control.poll(100):
                continue
            identity, data = self._control.recv_multipart()
            message = decode_from_rank(data)
            if not isinstance(message, kind):
                raise EngineDead(f"rank {rank_of(identity)} sent {type(message).__name__} out of turn")
            got[rank_of(identity)] = message
        return got

    def _watch_ranks(self) -> None:
        """On a thread of its own: exchange signs of life."""
        heard: dict[int, float] = {}
        poller_ms = int(1000 * BEAT_S / 2)
        told_s = 0.0
        while not self._closed.is_set():
            if self._signs.poll(poller_ms):
                identity, data = self._signs.recv_multipart()
                heard[rank_of(identity)] = time.monotonic()
                match decode_sign(data):
                    case RankFailed(name, message, param):
                        kind: type[RopewayError] = getattr(errors, name, EngineDead)
                        self._fail(kind(f"rank {rank_of(identity)}: {message}", param=param))
            now = time.monotonic()
            if now - told_s >= BEAT_S:
                told_s = now
                for rank in heard:
                    with contextlib.suppress(zmq.ZMQError):
                        self._signs.send_multipart([identity_of(rank), encode(Alive())])
            self._look(heard, now)

    def _look(self, heard: dict[int, float], now: float) -> None:
        for rank, process in self.processes.items():
            code = process.poll()
            if code is not None and not self._closed.is_set():
                self._fail(EngineDead(f"the process of rank {rank} ended unexpectedly ({ending(code)})"), last=True)
        for rank, at in heard.items():
            if now - at > SILENCE_S:
                self._fail(EngineDead(f"rank {rank} has not been heard of for {now - at:.1f} s"))

    def _fail(self, error: RopewayError, last: bool = False) -> None:
        """The first reason counts. ``last``: unless the rank's last words are still on their way."""
        if self._failure is not None:
            return
        if last and self._signs.poll(_LAST_WORDS_MS):
            return
        log.error("%s", error.message)
        self._failure = error
        if self._communicator is not None:
            self._communicator.fail()

    def _clean_up(self, linger_ms: int = 0) -> None:
        self._links.close(linger_ms)
        if self._shared is not None:
            os.close(self._shared)
            self._shared = None
        shutil.rmtree(self._folder, ignore_errors=True)


class Alone:
    """As ``Leader``, for a model on one rank."""

    size = local_ranks = 1

    def gather(self) -> Communicator:
        return SingleProcess()

    def loaded(self, part: ModelPart) -> list[Loaded]:
        return [part.loaded()]

    def make_pools(self, sizes: PoolSizes) -> None:
        """Only this one's."""

    def make_workers(self, host_blocks: int) -> None:
        """Only this one's."""

    def executor(self, worker: Worker, sizes: PoolSizes) -> LocalExecutor:
        return LocalExecutor(worker)

    def check(self) -> None:
        """The device tells of itself through the work that it is given."""

    def close(self) -> None:
        """There is nobody to end."""
