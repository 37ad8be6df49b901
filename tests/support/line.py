"""A scheduler driven by hand, step by step; the test plays the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ropeway.cache.host import HostTier
from ropeway.cache.keys import root_key
from ropeway.cache.pool import BlockPool
from ropeway.cache.transfer import BlockStore
from ropeway.config import SchedulerConfig
from ropeway.outcome import Finished, Refusal, StepOutput
from ropeway.plan import Plan, Result
from ropeway.request import Request, SamplingParams, Timeline
from ropeway.scheduling.cost import StepCost
from ropeway.scheduling.scheduler import Scheduler
from ropeway.tiers import DEFAULT_TIERS, Tier, find_tier

TOKEN = 7
"""What the device says unless told otherwise."""


class Line:
    """Checks the scheduler's invariants after every plan and every settle."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        block_size: int = 4,
        seats: int = 8,
        budget: int = 64,
        chunked: bool = True,
        max_len: int = 256,
        host_blocks: int = 0,
        store: BlockStore | None = None,
        tiers: Sequence[Tier] = DEFAULT_TIERS,
        cost: StepCost | None = None,
        step_s: float = 0.0,
        block_bytes: int = 1 << 20,
        **config: Any,
    ) -> None:
        """``config``: further fields of ``SchedulerConfig``. Admission is greedy unless it says otherwise. ``step_s``:
        how far ``step`` moves the time."""
        self.pool = BlockPool(blocks, block_size)
        self.now = 0.0
        """The time; the test moves it."""
        self.step_s = step_s
        settings = {"admission": "greedy", **config}
        self.host = HostTier(BlockPool(host_blocks, block_size), store) if host_blocks else None
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=seats, max_batched_tokens=budget, chunked_prefill=chunked, **settings),
            self.pool,
            max_len,
            tiers=tiers,
            host=self.host,
            cost=cost,
            block_bytes=block_bytes,
        )
        self.outputs: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        """Request -> ``cached_tokens`` as told with its first token."""
        self.finished: dict[int, Finished] = {}
        """How requests ended; those aborted say nothing."""
        self._next_id = 0

    def request(
        self,
        prompt: int | Sequence[int],
        output: int = 4,
        *,
        keys: list[bytes] | None = None,
        leader: Request | None = None,
        end_ids: tuple[int, ...] = (),
        preemptions: int = 0,
        tier: str | int = "standard",
        tenant: str = "",
        deadline_s: float | None = None,
        arrival_s: float | None = None,
        beam_step: int | None = None,
    ) -> Request:
        """A new request with this prompt (or one of this length, of its own) and at most ``output`` tokens."""
        self._next_id += 1
        if isinstance(prompt, int):
            prompt = [1000 * self._next_id + i for i in range(prompt)]
        request = Request(
            id=self._next_id,
            tokens=np.array(prompt, dtype=np.int32),
            prompt_tokens=len(prompt),
            params=SamplingParams(max_tokens=output, beam_step=beam_step),
            limit=len(prompt) + output,
            end_ids=end_ids,
            keys=keys,
            leader=leader,
            preemptions=preemptions,
            tier=find_tier(self.scheduler.tiers, tier),
            tenant=tenant,
            arrival_s=self.now if arrival_s is None else arrival_s,
            deadline_s=deadline_s,
        )
        assert self.scheduler.fits(request.limit)
        return request

    def add(self, prompt: int | Sequence[int], output: int = 4, **fields: Any) -> Request:
        """Queue a request, whatever the queue looks like; arguments as of ``request``."""
        request = self.request(prompt, output, **fields)
        self.scheduler.add(request, self.now)
        return request

    def offer(self, prompt: int | Sequence[int], output: int = 4, **fields: Any) -> Refusal | None:
        """Knock at the door with a request; arguments as of ``request``."""
        return self.scheduler.offer(self.request(prompt, output, **fields), self.now)

    def add_group(self, prompt: Sequence[int], n: int, *, prefix_cache: bool, **fields: Any) -> list[Request]:
        """``n`` completions of a prompt, as the engine queues them."""
        private = None if prefix_cache else self._next_id + 1
        leader = self.add(prompt, keys=[root_key(private=private)], **fields)
        others = range(n - 1)
        return [leader, *(self.add(prompt, keys=[root_key(private=private)], leader=leader, **fields) for _ in others)]

    def plan(self) -> Plan:
        plan = self.scheduler.plan(self.now)
        assert plan is not None
        self.scheduler.check()
        return plan

    def settle(self, plan: Plan, tokens: Mapping[int, int] | None = None, elapsed_s: float = 0.0) -> StepOutput:
        """Settle a step in which the device sampled ``TOKEN``, or for some requests what ``tokens`` says."""
        sampled = [(tokens or {}).get(i, TOKEN) for i in plan.request[plan.samples].tolist()]
        result = Result(np.array(sampled, dtype=np.int32), elapsed_s=elapsed_s)
        output = self.scheduler.settle(plan, result, self.now)
        self.scheduler.check()
        for started in output.started:
            self.cached[started.id] = started.cached_tokens
        for request_id, token in zip(output.ids.tolist(), output.tokens.tolist(), strict=True):
            self.outputs.setdefault(request_id, []).append(token)
        self._end(output.finished)
        return output

    def step(self, tokens: Mapping[int, int] | None = None) -> Plan:
        """Plan a step and settle it, ``step_s`` later."""
        plan = self.plan()
        self.now += self.step_s
        self.settle(plan, tokens)
        return plan

    def run(self) -> list[Plan]:
        """Step until nobody is left."""
        plans = []
        while self.scheduler.has_work:
            plan = self.scheduler.plan(self.now)
            self.scheduler.check()
            if plan is None:  # the last plan drops the padding of a batch
                assert not self.scheduler.has_work, "stuck"
                break
            self.now += self.step_s
            self.settle(plan)
            plans.append(plan)
        return plans

    def expire(self) -> list[Finished]:
        """End whoever's time is over."""
        finished = self.scheduler.expire(self.now)
        self.scheduler.check()
        self._end(finished)
        return finished

    def explain(self, request: Request) -> Timeline:
        """Where the time of a request under way has gone."""
        return self.scheduler.explain([request.id], self.now)[request.id]

    def timeline(self, request: Request) -> Timeline:
        """That of one that has ended."""
        timeline = self.finished[request.id].timeline
        assert timeline is not None
        return timeline

    def seated(self) -> list[int]:
        """Ids of the seated, in the order of ranks."""
        seats = self.scheduler.seats
        ids: list[int] = seats.request_id[seats.ranked].tolist()
        return ids

    @staticmethod
    def rows(plan: Plan) -> dict[int, tuple[int, int]]:
        """Request -> (start, count) of its row."""
        rows = zip(plan.request.tolist(), plan.start.tolist(), plan.count.tolist(), strict=True)
        return {request: (start, count) for request, start, count in rows}

    @staticmethod
    def order(plan: Plan) -> list[int]:
        """Requests of the rows, in batch order."""
        order: list[int] = plan.request.tolist()
        return order

    def _end(self, finished: Sequence[Finished]) -> None:
        for each in finished:
            assert each.id not in self.finished, "ended twice"
            self.finished[each.id] = each
