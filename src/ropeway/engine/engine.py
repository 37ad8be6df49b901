"""The step loop. Synchronous and asynchronous scheduling are one path:

    ahead = 0    | settle n-1 | plan n | forward n .......... sample n |
    ahead = 1    | plan n+1, forward n+1 queued | settle n | sample n+1 queued | ...
      device         |------- n -------|------ n+1 ------|

The host holds only tokens it knows; the device's rows hold the future.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from ropeway.cache.keys import root_key
from ropeway.engine.messages import NewRequest, Stats
from ropeway.execution.executor import Executor, Work
from ropeway.outcome import Finished, StepOutput
from ropeway.request import FinishReason, Request
from ropeway.scheduling.scheduler import Scheduler


class Engine:
    """Owns a scheduler and an executor; every method is called on one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        outbox: Callable[[StepOutput], None],
        *,
        max_model_len: int,
        end_ids: tuple[int, ...] = (),
        prefix_cache: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.outbox = outbox
        self.max_model_len = max_model_len
        self.end_ids = end_ids
        self.prefix_cache = prefix_cache
        self.steps = 0
        self._pending: deque[Work] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self._pending) or self.scheduler.has_work

    def submit(self, requests: Iterable[NewRequest]) -> None:
        """Queue completions. One that cannot be served ends at once with ``FinishReason.ERROR``."""
        refused = []
        leaders: dict[int, Request] = {}
        for new in requests:
            request = self._request(new, leaders)
            if request is None:
                refused.append(Finished(new.id, FinishReason.ERROR, error=self._refusal(new)))
            else:
                leaders[new.id] = request
                self.scheduler.add(request)
        if refused:
            none = np.empty(0, dtype=np.int64)
            self.outbox(StepOutput(ids=none, tokens=none.astype(np.int32), finished=refused))

    def abort(self, ids: Iterable[int], reason: str) -> None:
        """Drop requests between steps; nothing more of them is published."""
        for request_id in ids:
            self.scheduler.abort(request_id, reason)

    def step(self, ahead: int) -> None:
        """Plan and start one step, and settle those before it down to ``ahead`` in flight."""
        if not ahead:
            self._settle(keep=0)
        plan = self.scheduler.plan()
        work = self.executor.forward(plan) if plan else None
        try:
            if ahead:
                self._settle(keep=ahead - 1 if plan else 0)
        finally:  # whatever interrupts the wait, the step that has begun is finished and kept
            if work:
                self.steps += 1
                work.sample()
                self._pending.append(work)

    def drain(self) -> None:
        """Settle every step in flight and plan no other."""
        self._settle(keep=0)

    def stats(self) -> Stats:
        scheduler, pool = self.scheduler, self.scheduler.pool
        return Stats(
            running=scheduler.seats.taken,
            waiting=len(scheduler.waiting),
            blocks_live=pool.live,
            blocks_cached=pool.cached,
            blocks_free=pool.free,
            steps=self.steps,
            preemptions=scheduler.preemptions,
            prefix_queries=scheduler.prefixes.queries,
            prefix_hits=scheduler.prefixes.hits,
            wasted_rows=dict(scheduler.wasted_rows),
        )

    def close(self) -> None:
        """Finish what the device is doing and give it back."""
        self.executor.close()

    def _settle(self, keep: int) -> None:
        while len(self._pending) > keep:
            work = self._pending[0]
            result = work.result()
            self._pending.popleft()
            self.outbox(self.scheduler.settle(work.plan, result))

    def _request(self, new: NewRequest, leaders: dict[int, Request]) -> Request | None:
        prompt, params = new.prompt, new.params
        limit = self.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        if not 0 < len(prompt) < limit or not self.scheduler.fits(limit):
            return None
        leader = None if new.leader is None else leaders.get(new.leader)
        shared = self.prefix_cache or new.group
        return Request(
            id=new.id,
            tokens=prompt,
            prompt_tokens=len(prompt),
            params=params,
            limit=limit,
            end_ids=tuple(dict.fromkeys((*(() if params.ignore_eos else self.end_ids), *params.stop_token_ids))),
            seed=new.seed,
            keys=[self._root(new)] if shared else None,
            leader=leader,
        )

    def _root(self, new: NewRequest) -> bytes:
        """Siblings share among themselves even when the prefix cache is off."""
        group = None if self.prefix_cache else new.id if new.leader is None else new.leader
        return root_key(salt=new.salt, private=group)

    def _refusal(self, new: NewRequest) -> str:
        size = self.scheduler.pool.num_blocks * self.scheduler.pool.block_size
        return (
            f"a prompt of {len(new.prompt)} tokens and one token more do not fit the context of "
            f"{self.max_model_len} tokens and the KV pool of {size}; shorten the prompt"
        )
