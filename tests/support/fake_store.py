"""A disk without a disk: late, out of step with the engine, and sometimes wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, MutableSequence
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Literal

from ropeway.cache.transfer import Transferred
from tests.support.fake_device import HostBlock

_PATIENCE = 6
"""Calls of ``finished`` without progress, after which everything is done."""


@dataclass
class _Job:
    kind: Literal["save", "load"]
    key: bytes
    place: int
    begun_with: HostBlock | None
    """Copy of the host block when it was handed over."""


class FakeStore:
    """Implements ``BlockStore`` over a fake device's host blocks.

    A host block that is being loaded is poisoned at once, as the real store may write it at any time; one that is being
    saved is read last of all. If anybody else has touched it meanwhile, the end of the transfer raises
    ``AssertionError``.
    """

    def __init__(
        self,
        host: MutableSequence[HostBlock | None],
        *,
        random: Random | None = None,
        faults: float = 0.0,
        capacity: int = 1 << 20,
        held: dict[bytes, HostBlock] | None = None,
    ) -> None:
        """``random``: decides how many transfers each call of ``finished`` brings to their ends, and which of them
        fail, a share of ``faults``; None: ``work`` must be called. ``capacity``: blocks, of which the oldest make room.
        ``held``: what an earlier store left, to be used and added to."""
        self.held = {} if held is None else held
        self.pending: deque[_Job] = deque()
        self.failed_loads = 0
        self.failed_saves = 0
        self.loaded = 0
        self.saved = 0
        self.full = False
        """Whether saving fails at once, as on a full disk."""
        self._host = host
        self._random = random
        self._faults = faults
        self._capacity = capacity
        self._done: list[Transferred] = []
        self._errors = 0
        self._idle_calls = 0
        self._closed = False

    def find(self, key: bytes) -> bool:
        return key in self.held

    def save(self, key: bytes, host_block: int) -> None:
        assert not self._closed
        assert self._host[host_block] is not None, "a block that holds nothing is saved"
        if self.full:
            self._end(_Job("save", key, host_block, None), ok=False)
        else:
            self.pending.append(_Job("save", key, host_block, deepcopy(self._host[host_block])))

    def load(self, key: bytes, host_block: int) -> None:
        assert not self._closed
        self.pending.append(_Job("load", key, host_block, None))
        self._host[host_block] = None

    def finished(self) -> Collection[Transferred]:
        if self._random is not None:
            self._make_progress(self._random)
        done, self._done = self._done, []
        return done

    @property
    def blocks(self) -> int:
        return len(self.held)

    @property
    def errors(self) -> int:
        return self._errors

    @property
    def failure(self) -> str | None:
        return "the disk is full" if self.full else None

    def close(self) -> None:
        while self.pending:
            self._end(self.pending.popleft(), ok=False)
        self._closed = True

    # ------------------------------------------------------------------ the test's side

    def work(self, count: int = 1 << 20, *, ok: bool = True) -> int:
        """End up to ``count`` transfers, in their order; without ``ok`` they fail. Returns how many."""
        ended = 0
        while self.pending and ended < count:
            job = self.pending.popleft()
            self._end(job, ok=ok and self._transfer(job))
            ended += 1
        return ended

    def lose(self, key: bytes) -> None:
        """Somebody removes the block's file."""
        self.held.pop(key, None)

    @property
    def loading(self) -> int:
        return sum(job.kind == "load" for job in self.pending)

    # ------------------------------------------------------------------ inside

    def _make_progress(self, random: Random) -> None:
        if self.held and random.random() < self._faults / 4:
            self.lose(random.choice(sorted(self.held)))
        self.full = random.random() < (0.7 if self.full else self._faults / 8)
        count = random.choice((0, 0, 0, 1, 2, 5))
        if count == 0 and self.pending:
            self._idle_calls += 1
            if self._idle_calls >= _PATIENCE:
                count = len(self.pending)
        if count:
            self._idle_calls = 0
        for _ in range(count):
            self.work(1, ok=random.random() >= self._faults)

    def _transfer(self, job: _Job) -> bool:
        now = self._host[job.place]
        if job.kind == "save":
            assert now == job.begun_with, "a host block was changed while it was saved"
            self.held.pop(job.key, None)
            while len(self.held) >= self._capacity:
                self.lose(next(iter(self.held)))
            self.held[job.key] = deepcopy(now) or []
            return True
        assert now is None, "a host block was written while it was loaded"
        if job.key not in self.held:
            return False
        self._host[job.place] = deepcopy(self.held[job.key])
        return True

    def _end(self, job: _Job, *, ok: bool) -> None:
        if job.kind == "load":
            self.loaded += ok
            self.failed_loads += not ok
            if not ok:  # damaged: removed, as the real store does
                self.held.pop(job.key, None)
                self._errors += 1
        else:
            self.saved += ok
            self.failed_saves += not ok
        self._done.append(Transferred(job.kind, job.key, job.place, ok))
