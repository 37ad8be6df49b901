"""A scheduler driven by hand, step by step; the test plays the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ropeway.cache.keys import root_key
from ropeway.cache.pool import BlockPool
from ropeway.config import SchedulerConfig
from ropeway.outcome import StepOutput
from ropeway.plan import Plan, Result
from ropeway.request import Request, SamplingParams
from ropeway.scheduling.scheduler import Scheduler

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
    ) -> None:
        self.pool = BlockPool(blocks, block_size)
        config = SchedulerConfig(max_num_seqs=seats, max_batched_tokens=budget, chunked_prefill=chunked)
        self.scheduler = Scheduler(config, self.pool, max_len)
        self.outputs: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        """Request -> ``cached_tokens`` as told with its first token."""
        self._next_id = 0

    def add(
        self,
        prompt: int | Sequence[int],
        output: int = 4,
        *,
        keys: list[bytes] | None = None,
        leader: Request | None = None,
        end_ids: tuple[int, ...] = (),
        preemptions: int = 0,
    ) -> Request:
        """Queue a request with this prompt (or one of this length, of its own) and at most ``output`` tokens."""
        self._next_id += 1
        if isinstance(prompt, int):
            prompt = [1000 * self._next_id + i for i in range(prompt)]
        request = Request(
            id=self._next_id,
            tokens=np.array(prompt, dtype=np.int32),
            prompt_tokens=len(prompt),
            params=SamplingParams(max_tokens=output),
            limit=len(prompt) + output,
            end_ids=end_ids,
            keys=keys,
            leader=leader,
            preemptions=preemptions,
        )
        assert self.scheduler.fits(request.limit)
        self.scheduler.add(request)
        return request

    def add_group(self, prompt: Sequence[int], n: int, *, prefix_cache: bool) -> list[Request]:
        """``n`` completions of a prompt, as the engine queues them."""
        private = None if prefix_cache else self._next_id + 1
        leader = self.add(prompt, keys=[root_key(private=private)])
        return [leader, *(self.add(prompt, keys=[root_key(private=private)], leader=leader) for _ in range(n - 1))]

    def plan(self) -> Plan:
        plan = self.scheduler.plan()
        assert plan is not None
        self.scheduler.check()
        return plan

    def settle(self, plan: Plan, tokens: Mapping[int, int] | None = None) -> StepOutput:
        """Settle a step in which the device sampled ``TOKEN``, or for some requests what ``tokens`` says."""
        sampled = [(tokens or {}).get(i, TOKEN) for i in plan.request[plan.samples].tolist()]
        output = self.scheduler.settle(plan, Result(np.array(sampled, dtype=np.int32)))
        self.scheduler.check()
        for started in output.started:
            self.cached[started.id] = started.cached_tokens
        for request_id, token in zip(output.ids.tolist(), output.tokens.tolist(), strict=True):
            self.outputs.setdefault(request_id, []).append(token)
        return output

    def step(self, tokens: Mapping[int, int] | None = None) -> Plan:
        """Plan a step and settle it."""
        plan = self.plan()
        self.settle(plan, tokens)
        return plan

    def run(self) -> list[Plan]:
        """Step until nobody is left."""
        plans = []
        while self.scheduler.has_work:
            plans.append(self.step())
        return plans

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
