"""The step loop. Synchronous and asynchronous scheduling are one path:

    ahead = 0    | settle n-1 | plan n | forward n .......... sample n |
    ahead = 1    | plan n+1, forward n+1 queued | settle n | sample n+1 queued | ...
      device         |------- n -------|------ n+1 ------|

The host holds only tokens it knows; the device's rows hold the future.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from ropeway.cache.keys import root_key
from ropeway.engine.masking import Masking
from ropeway.engine.messages import Inspected, NewRequest, Stats
from ropeway.engine.pace import Pace
from ropeway.engine.telling import inspected, stats_of
from ropeway.execution.executor import Executor, Work
from ropeway.outcome import Finished, Refusal, StepOutput
from ropeway.request import FinishReason, Gate, Request, Timeline
from ropeway.scheduling.scheduler import Scheduler
from ropeway.trace import HOST, Trace

_STUCK_S = 0.05
"""Longest time between two looks at whether something can go on."""
_COMPILING_S = 0.002
"""The same while a grammar is compiled."""


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
        masking: Masking | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``masking``: of requests with a constraint; None: there are none. ``clock``: seconds; what arrival times and
        deadlines of requests are told in."""
        self.scheduler = scheduler
        self.executor = executor
        self.outbox = outbox
        self.max_model_len = max_model_len
        self.end_ids = end_ids
        self.prefix_cache = prefix_cache
        self.masking = masking
        self.clock = clock
        self.steps = 0
        self.trace: Trace | None = None
        """Takes what the host does when, and where requests' time went."""
        self._pending: deque[Work] = deque()
        self._pace = Pace(scheduler.cost)

    @property
    def has_work(self) -> bool:
        return bool(self._pending) or self.scheduler.has_work

    def submit(self, requests: Iterable[NewRequest]) -> None:
        """Queue completions, and tell which were accepted: one with a constraint, when that has been compiled. One that
        can never be served, that its tier cannot take now, or whose time is over already, ends at once with
        ``FinishReason.ERROR``."""
        now = self.clock()
        accepted, refused = [], []
        leaders: dict[int, Request] = {}
        refusals: dict[int | None, Refusal] = {}
        for new in requests:
            request = self._request(new, leaders, now)
            if request is None:
                refusal: Refusal | None = self._never(new)
            else:
                refusal = self.scheduler.offer(request, now, leader_refused=refusals.get(new.leader))
            if request is None or refusal is not None:
                assert refusal is not None
                refusals[new.id] = refusal
                timeline = Timeline(tier=self.scheduler.tiers[new.tier].name, phase="finished")
                refused.append(Finished(new.id, FinishReason.ERROR, refusal=refusal, timeline=timeline))
            else:
                leaders[new.id] = request
                if self.masking is not None and new.params.constrained:
                    self.masking.begin(request)
                else:
                    accepted.append(new.id)
        # A step may have kept the engine from hearing of a request until its time was over.
        expired = self.scheduler.expire(now)
        over = {finished.id for finished in expired}
        self._tell([*refused, *expired], [request_id for request_id in accepted if request_id not in over])

    def abort(self, ids: Iterable[int], reason: str) -> None:
        """Drop requests between steps; nothing more of them is published."""
        now = self.clock()
        for request_id in ids:
            self.scheduler.abort(request_id, reason, now)
            if self.masking is not None:
                self.masking.drop([request_id])

    def step(self, ahead: int) -> None:
        """Plan and start one step, and settle those before it down to ``ahead`` in flight."""
        if self.masking is not None:
            self._follow_constraints(self.masking, self.clock())  # first: a step in flight may hold a row that failed
        if not ahead:
            self._settle(keep=0)
        began = self.clock()
        self._tell(self.scheduler.expire(began))
        plan = self.scheduler.plan(began)
        planned = self.clock()
        work = self.executor.forward(plan) if plan else None
        if self.trace is not None and plan:
            self.trace.add(HOST, "plan", began, planned, step=plan.seq, rows=len(plan.slot), tokens=plan.num_tokens)
            self.trace.add(HOST, "submit", planned, self.clock(), step=plan.seq)
        try:
            if ahead:
                self._pace.planned(plan, began, self.clock())
                self._settle(keep=ahead - 1 if plan else 0)
        finally:  # whatever interrupts the wait, the step that has begun is finished and kept
            if work:
                self.steps += 1
                work.sample(None if self.masking is None else self.masking.masks(work.plan))
                self._pending.append(work)

    def patience_s(self) -> float:
        """How long whoever calls ``step`` may wait for arrivals before: until just before the running step ends, as far
        as that can be told; when nothing runs, until something can change by itself."""
        now = self.clock()
        if self._pending:
            return self._pace.patience_s(now)
        if self.scheduler.has_work and self.scheduler.stuck:
            compiling = self.masking is not None and self.masking.compiling
            return min(max(self.scheduler.next_change_s() - now, 0.0), _COMPILING_S if compiling else _STUCK_S)
        return 0.0

    def explain(self, ids: Iterable[int]) -> dict[int, Timeline]:
        """Where the time of those of these requests that have not ended has gone."""
        return self.scheduler.explain(ids, self.clock())

    def inspect(self) -> Inspected:
        """What it looks like now."""
        return inspected(self.scheduler, self.clock())

    def drain(self) -> None:
        """Settle every step in flight and plan no other."""
        self._settle(keep=0)

    def stats(self) -> Stats:
        host = self.scheduler.host
        if host is not None and not self.has_work:
            host.poll()  # no plan does; nobody waits for what comes of it
        return stats_of(self.scheduler, self.steps)

    def close(self) -> None:
        """Finish what the device is doing and give it back."""
        if self.masking is not None:
            self.masking.close()
        self.executor.close()

    def _settle(self, keep: int) -> None:
        while len(self._pending) > keep:
            work = self._pending[0]
            result = work.result()
            self._pending.popleft()
            now = self.clock()
            self._pace.settled(now)
            output = self.scheduler.settle(work.plan, result, now)
            if self.masking is not None:
                self.masking.settled(output)
            self.outbox(output)
            if self.trace is not None:
                self.trace.add(HOST, "settle", now, self.clock(), step=work.plan.seq)
                self._trace_requests(self.trace, output.finished, now)

    def _follow_constraints(self, masking: Masking, now: float) -> None:
        """Let those go on whose constraint is there, and end those that cannot go on with theirs."""
        accepted, refused = [], masking.failed()
        for request_id, refusal in masking.ready():
            if refusal is not None:
                refused.append((request_id, refusal))
            elif self.scheduler.open_gate(request_id):
                accepted.append(request_id)
        finished = []
        for request_id, refusal in refused:
            if self.scheduler.abort(request_id, "constraint", now):
                finished.append(Finished(request_id, FinishReason.ERROR, refusal=refusal))
        self._tell(finished, accepted)

    def _tell(self, finished: list[Finished], accepted: list[int] | None = None) -> None:
        """Events that are no step's."""
        if self.masking is not None:
            self.masking.drop(each.id for each in finished)
        if finished or accepted:
            none = np.empty(0, dtype=np.int64)
            self.outbox(StepOutput(ids=none, tokens=none.astype(np.int32), finished=finished, accepted=accepted or []))

    def _trace_requests(self, trace: Trace, finished: list[Finished], now: float) -> None:
        for each in finished:
            if (timeline := each.timeline) is not None:
                parts = ("queued", "prefill", "preempted", "swapped", "decode")
                phases = [(part, getattr(timeline, f"{part}_s")) for part in parts]
                details = {"tier": timeline.tier, "output_tokens": timeline.output_tokens, "reason": each.reason.value}
                trace.add_request(f"request {each.id}", now - timeline.total_s, phases, **details)

    def _request(self, new: NewRequest, leaders: dict[int, Request], now: float) -> Request | None:
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
            private=not self.prefix_cache,
            tier=new.tier,
            tenant=new.tenant,
            arrival_s=now if new.arrival_s is None else min(new.arrival_s, now),
            deadline_s=new.deadline_s,
            leader=leader,
            gate=Gate() if self.masking is not None and params.constrained else None,
        )

    def _root(self, new: NewRequest) -> bytes:
        """Siblings share among themselves even when the prefix cache is off."""
        group = None if self.prefix_cache else new.id if new.leader is None else new.leader
        return root_key(salt=new.salt, private=group)

    def _never(self, new: NewRequest) -> Refusal:
        size = self.scheduler.pool.num_blocks * self.scheduler.pool.block_size
        return Refusal(
            "ContextLengthExceeded",
            f"a prompt of {len(new.prompt)} tokens and one token more do not fit the context of "
            f"{self.max_model_len} tokens and the KV pool of {size}; shorten the prompt",
        )
