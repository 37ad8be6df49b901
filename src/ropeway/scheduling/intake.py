"""The door: what is refused on arrival, and what is given up while it waits or runs.

A request is refused when its tier's queue is full, and *shed* when it would miss its tier's TTFT target by waiting: it
then costs nothing and its client can go elsewhere, while serving it late would make others late, too. What a request
takes by itself is not held against it: one that nobody is ahead of is never shed.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from ropeway.config import SchedulerConfig
from ropeway.outcome import Finished, Refusal
from ropeway.request import Request
from ropeway.scheduling.cost import StepCost
from ropeway.scheduling.lifecycle import Lifecycle

_MEMORY_S = 30.0
"""Time constant with which measured service rates are forgotten."""
_ENOUGH_S = 2.0
"""Least time of full load after which a measured rate counts."""
_MOST_RETRY_S = 120.0
_FEW = 64
"""Expiries of requests that are gone, beside as many as there are requests, that are not worth clearing away."""
_ON_TIME = 0.97
"""Share of first tokens that are to come within the prediction times the caution."""
_LEARNS = 0.1
_MOST_CAUTION = 5.0
_TELLING = 0.2
"""Predictions below this share of the target say little about those near it."""


class Intake:
    """Queue bounds, shedding, deadlines."""

    def __init__(self, config: SchedulerConfig, lifecycle: Lifecycle, cost: StepCost) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._cost = cost
        self._expiries: list[tuple[float, int, str]] = []
        """Heap of (when, request, "deadline_exceeded" or "queue_timeout")."""
        self._rate = _ServiceRate()
        self._caution = 1.0
        """Factor on predictions, so that most first tokens come no later."""

    # ------------------------------------------------------------------ arrivals

    def refusal(self, request: Request, now: float, leader_refused: Refusal | None = None) -> Refusal | None:
        """Why the request's tier cannot take it now; None: it can. A beam search is let in with its first step."""
        if request.params.beam_step:
            return None
        refusal = leader_refused or self._full(request)
        if refusal is None and request.leader is None:  # what its own group takes is not held against a sibling
            refusal = self._late(request, now)
        if refusal is not None:
            code = "shed" if refusal.error == "Shed" else "queue_full"
            self._lifecycle.ledgers[request.tier].refused[code] += 1
        return refusal

    def accepted(self, request: Request, now: float) -> None:
        """Note when to give the request up."""
        if request.deadline_s is not None:
            heapq.heappush(self._expiries, (request.deadline_s, request.id, "deadline_exceeded"))
        limit = self._lifecycle.tiers[request.tier].queue_limit_s
        if limit is not None and not request.params.beam_step:
            heapq.heappush(self._expiries, (request.arrival_s + limit, request.id, "queue_timeout"))
        if len(self._expiries) > 4 * len(self._lifecycle.requests) + _FEW:
            # Deadlines may be far away, and most requests are gone long before theirs.
            self._expiries = [each for each in self._expiries if self._concerned(each[1], each[2]) is not None]
            heapq.heapify(self._expiries)

    def seated(self, request: Request, now: float) -> None:
        """A request gets a seat."""
        if not request.started:
            self._rate.count(_work(request), request.since_s, now)

    def first_token(self, request: Request, now: float) -> None:
        """A request's first token has come: learn how far predictions are to be trusted.

        The factor follows the quantile ``_ON_TIME`` of true over predicted times by steps up and down that balance
        there (Robbins and Monro, "A stochastic approximation method", 1951)."""
        target = self._lifecycle.tiers[request.tier].ttft_s
        expected = request.expected_ttft_s
        if target is None or expected is None or expected < _TELLING * target:
            return
        on_time = now - request.arrival_s <= expected * self._caution
        step = _ON_TIME - 1.0 if on_time else _ON_TIME
        self._caution = min(max(self._caution * (1.0 + _LEARNS * step), 1.0), _MOST_CAUTION)

    def window_ends_s(self) -> float:
        """Dynamic batching: when the first of those waiting has waited long enough."""
        lines = self._lifecycle.waiting.lines
        return min(line.oldest_s() for line in lines if line.count) + self._config.batch_window_s

    # ------------------------------------------------------------------ expiry

    @property
    def next_expiry_s(self) -> float:
        return self._expiries[0][0] if self._expiries else math.inf

    def _concerned(self, request_id: int, code: str) -> Request | None:
        """Whom an entry of the heap is still about."""
        request = self._lifecycle.find(request_id)
        return None if request is None or (code == "queue_timeout" and request.started) else request

    def expire(self, now: float) -> list[Finished]:
        """End whoever's time is over."""
        finished = []
        while self._expiries and self._expiries[0][0] <= now:
            _, request_id, code = heapq.heappop(self._expiries)
            request = self._concerned(request_id, code)
            if request is None:
                continue
            tier = self._lifecycle.tiers[request.tier]
            if code == "queue_timeout":
                refusal = Refusal(
                    "QueueTimeout",
                    f"no seat within {tier.queue_limit_s:g} s, the longest wait of tier {tier.name}; try again later",
                    retry_after_s=tier.queue_limit_s,
                )
            else:
                assert request.deadline_s is not None
                asked = request.deadline_s - request.arrival_s
                refusal = Refusal(
                    "DeadlineExceeded",
                    f"the request was not done {asked:.3g} s after it came, as its timeout says; allow more time or "
                    "ask for fewer tokens",
                )
            finished.append(self._lifecycle.refuse(request, refusal, code, now))
        return finished

    # ------------------------------------------------------------------ reasons

    def _full(self, request: Request) -> Refusal | None:
        lifecycle = self._lifecycle
        tier, waiting = lifecycle.tiers[request.tier], lifecycle.ledgers[request.tier].waiting
        waiting -= lifecycle.seats.vacant  # those need not wait for anybody
        if waiting < 0:
            return None
        if tier.max_queue is not None and waiting >= tier.max_queue:
            asked = f"{waiting} requests of tier {tier.name} are waiting, and its queue holds {tier.max_queue}"
        elif tier.max_queue_tokens is not None and (
            (tokens := sum(r.prompt_tokens for r in lifecycle.waiting if r.tier == request.tier))
            + request.prompt_tokens
            > tier.max_queue_tokens
        ):
            asked = (
                f"prompts of {tokens} tokens of tier {tier.name} are waiting, {request.prompt_tokens} more were asked, "
                f"and its queue holds {tier.max_queue_tokens}"
            )
        else:
            return None
        return Refusal("QueueFull", f"{asked}: try again later", retry_after_s=self._retry_s(self.ttft_s(request)))

    def _late(self, request: Request, now: float) -> Refusal | None:
        target = self._lifecycle.tiers[request.tier].ttft_s
        if not self._config.shed or target is None or not self._must_wait(request):
            return None
        request.expected_ttft_s = now - request.arrival_s + self.ttft_s(request)
        late = request.expected_ttft_s * self._caution - target
        if late <= 0:
            return None
        tier = self._lifecycle.tiers[request.tier].name
        return Refusal(
            "Shed",
            f"the first token would come about {target + late:.3g} s after the request, and tier {tier} promises it "
            f"within {target:g} s; try again later or use a lower tier",
            retry_after_s=self._retry_s(late),
        )

    @staticmethod
    def _retry_s(seconds: float) -> float:
        return min(max(math.ceil(seconds), 1.0), _MOST_RETRY_S)

    # ------------------------------------------------------------------ predictions

    def ttft_s(self, request: Request) -> float:
        """Predicted time from now to the request's first token: until those ahead have gone on or their prompts are
        computed, whichever is later, then its own prompt."""
        ahead = self._ahead(request)
        prefill = self._prefill_token_s()
        backlog = (self._seated_prompts(request) + ahead.prompt_tokens) * prefill
        return max(self._wait_s(request, ahead), backlog) + request.prompt_tokens * prefill

    def _wait_s(self, request: Request, ahead: _Ahead) -> float:
        """Predicted time until the request gets a seat, by the rate at which work was seated lately."""
        lifecycle = self._lifecycle
        needed = lifecycle.blocks_for(ahead.prompt_tokens + request.prompt_tokens) + ahead.requests + 1
        if ahead.requests < lifecycle.seats.vacant and needed <= lifecycle.pool.available:
            return 0.0
        rate = self._rate.tokens_per_s
        if rate is None:
            return self._first_end_s(request, ahead)
        return (ahead.work + _work(request)) / rate if rate > 0 else 0.0

    def _must_wait(self, request: Request) -> bool:
        """Whether somebody is ahead of it, or there is no seat or no block for it."""
        lifecycle = self._lifecycle
        line = lifecycle.policy.line(request)
        if any(each.count for each in lifecycle.waiting.lines[: line + 1]):
            return True
        seats = lifecycle.seats
        if len(lifecycle.waiting.lines) > 1 and seats.taken and line < int(seats.line[seats.ranked[-1]]):
            return False  # a lower tier gives way
        return not seats.vacant or lifecycle.pool.available < lifecycle.blocks_for(request.prompt_tokens + 1)

    def _ahead(self, request: Request) -> _Ahead:
        """The waiting that will go before it. Of its own line, each tenant goes before it with as much as its own
        tenant has waiting."""
        lifecycle = self._lifecycle
        line, key = lifecycle.policy.line(request), (request.urgency, request.order)
        before: list[Request] = []
        shares: defaultdict[str, list[Request]] = defaultdict(list)
        for number, each in enumerate(lifecycle.waiting.lines[: line + 1]):
            for other in each:
                if number < line or other.started:
                    before.append(other)
                elif (other.urgency, other.order) < key:
                    shares[other.tenant].append(other)
        own = len(shares[request.tenant]) + 1
        for requests in shares.values():
            before += requests[:own]
        return _Ahead(len(before), sum(map(_work, before)), sum(other.prompt_tokens for other in before))

    def _seated_prompts(self, request: Request) -> int:
        """Prompt tokens still to compute of the seated that go before it."""
        lifecycle = self._lifecycle
        seats = lifecycle.seats
        if not seats.prefilling:
            return 0
        slots = seats.ranked
        slots = slots[seats.line[slots] <= lifecycle.policy.line(request)]
        return int(np.maximum(seats.goal[slots] - seats.computed[slots], 0).sum())

    def _prefill_token_s(self) -> float:
        """Seconds per prompt token while the present batch decodes."""
        if not self._cost.known:
            return 0.0
        seats, budget = self._lifecycle.seats, self._config.max_batched_tokens
        kv_tokens = int(seats.computed[seats.ranked].sum())
        room = max(budget - seats.taken, 1)
        return self._cost.predict(budget, kv_tokens) / room

    def _first_end_s(self, request: Request, ahead: _Ahead) -> float:
        """The same while nothing has been measured: until as many of the seated have ended, by their predicted lengths,
        as it takes for those ahead and for this one."""
        lifecycle = self._lifecycle
        seats = lifecycle.seats
        if not seats.taken or not self._cost.known:
            return 0.0
        slots = seats.ranked
        length, generated = seats.length[slots], np.maximum(seats.length[slots] - seats.prompt[slots], 0)
        cap = np.maximum(seats.limit[slots] - seats.prompt[slots], generated + 1)
        remaining = lifecycle.lengths.draw(seats.length_class[slots], generated, cap, seats.luck[slots])
        order = np.argsort(remaining)
        freed = np.cumsum((length + remaining)[order])
        wanted = ahead.work + _work(request) - lifecycle.pool.available * lifecycle.pool.block_size
        ends = max(ahead.requests + 1 - seats.vacant, int(np.searchsorted(freed, wanted)) + 1)
        rounds, last = divmod(ends - 1, len(slots))
        steps = rounds * int(remaining[order[-1]]) + int(remaining[order[last]])
        return steps * self._cost.predict(seats.taken, int(length.sum()))


class _Ahead(NamedTuple):
    """Those that will go before a request."""

    requests: int
    work: float
    prompt_tokens: int


class _ServiceRate:
    """Work seated per second while somebody waits."""

    def __init__(self) -> None:
        self._work = 0.0
        self._time_s = 0.0
        self._before_s = self._last_s = -math.inf
        """The last two moments at which somebody was seated."""
        self._uncounted_s = 0.0
        """The time between them, until it is counted."""

    def count(self, work: float, arrival_s: float, now: float) -> None:
        """A request that came at ``arrival_s`` is seated now, maybe with others. The time since anybody was seated
        before counts if this one was waiting all along; else neither that nor its work does."""
        if now > self._last_s:
            self._before_s, self._last_s, self._uncounted_s = self._last_s, now, now - self._last_s
        if arrival_s <= self._before_s:
            kept = math.exp(-self._uncounted_s / _MEMORY_S)
            self._work = self._work * kept + work
            self._time_s = self._time_s * kept + self._uncounted_s
            self._uncounted_s = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """None: not enough has been seen."""
        return self._work / self._time_s if self._time_s >= _ENOUGH_S else None


def _work(request: Request) -> float:
    """Tokens that the request will hold at its end, as predicted."""
    return request.prompt_tokens + request.predicted_tokens
