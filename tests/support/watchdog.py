"""What must never happen in a step of the scheduler, told by what was before the step and what is after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ropeway.request import Request
from ropeway.scheduling.scheduler import MAX_PREEMPTIONS

if TYPE_CHECKING:
    from tests.support.world import World

_SETTLING = 2
"""Steps for which nobody may run though somebody could: while the last ones are settled."""


@dataclass(frozen=True)
class _Waiting:
    """One who waited before a step."""

    request: Request
    key: tuple[float, int]
    line: int
    started: bool
    held: bool
    """Behind a gate."""
    preemptions: int


class Watchdog:
    """Looks before and after each step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stalled = 0
        self.before()

    def before(self) -> None:
        scheduler = self._world.scheduler
        self._began = self._world.clock.now
        self._waiting = [
            _Waiting(r, (r.urgency, r.order), scheduler.policy.line(r), r.started, r.gated, r.preemptions)
            for r in scheduler.waiting
        ]
        self._preemptions, self._for_tier = self._count_preemptions()

    def after(self, ahead: int) -> None:
        self._check_victims()
        self._check_lone()
        self._check_order()
        self._check_expiry()
        self._check_progress(ahead)

    def _count_preemptions(self) -> tuple[dict[int, int], int]:
        """(how often each was preempted, how often somebody gave way to a higher tier)."""
        lifecycle = self._world.scheduler.lifecycle
        each = {i: request.preemptions for i, request in lifecycle.requests.items() if request.finish is None}
        return each, sum(ledger.preemptions["admission"] for ledger in lifecycle.ledgers)

    def _check_victims(self) -> None:
        """Nobody gave way but to one ahead of it, or to one that is protected; nor in vain."""
        world, scheduler = self._world, self._world.scheduler
        requests, rank = scheduler.lifecycle.requests, scheduler.policy.rank
        before = self._preemptions
        victims = [requests[i] for i, count in before.items() if i in requests and requests[i].preemptions > count]
        if not victims:
            return
        assert world.plan is not None, "somebody gave way in vain"
        seats = [int(scheduler.seats.request_id[seat.slot]) for seat in world.plan.seats]
        planned = [world.records[i].request for i in {*world.plan.request.tolist(), *seats} if i >= 0]
        gained = [request for request in planned if request is not None]
        if any(request.preemptions >= MAX_PREEMPTIONS for request in gained):
            return
        for victim in victims:
            assert any(rank(request) < rank(victim) for request in gained), "a request gave way to one behind it"
        if self._count_preemptions()[1] > self._for_tier:
            assert world.plan.seats, "a request gave way in vain to a higher tier"

    def _check_lone(self) -> None:
        """The only request there was did not preempt itself."""
        if len(self._preemptions) == 1:
            ((request_id, count),) = self._preemptions.items()
            request = self._world.records[request_id].request
            assert request is not None
            assert request.preemptions == count, "a lone request preempts itself"

    def _check_order(self) -> None:
        """Nobody was passed by one behind it in its line, but with a closed gate, or protected."""
        left = [w for w in self._waiting if w.request.finish is None and w.request.slot < 0 and not w.held]
        left = [w for w in left if w.preemptions == w.request.preemptions < MAX_PREEMPTIONS]
        seated = [w for w in self._waiting if w.request.slot >= 0]
        for ahead in left:
            for behind in seated:
                if ahead.line != behind.line:
                    continue
                if ahead.started == behind.started and ahead.request.tenant == behind.request.tenant:
                    assert behind.key < ahead.key, "a request was passed by one behind it"
                else:
                    assert behind.started or not ahead.started, "a resumed request was passed by a new one"

    def _check_expiry(self) -> None:
        for record in self._world.records.values():
            if not record.live:
                continue
            assert record.new.deadline_s is None or record.new.deadline_s > self._began, "a deadline was overlooked"
            limit = self._world.setup.tiers[record.new.tier].queue_limit_s
            if limit is not None and record.request is not None and not record.request.started:
                assert record.arrival_s + limit > self._began, "the time limit of a queue was overlooked"

    def _check_progress(self, ahead: int) -> None:
        """Whoever can run does."""
        scheduler, config = self._world.scheduler, self._world.config
        if not ahead:  # every token was known, so that nothing was to be waited for
            assert self._world.plan is not None or not scheduler.seats.taken, "nobody of those who run can go on"
        able = any(not request.gated and not request.unsettled for request in scheduler.waiting)
        if able and config.batching == "dynamic":
            able = self._began >= scheduler.intake.window_ends_s()
        self._stalled = self._stalled + 1 if able and not scheduler.seats.taken else 0
        assert self._stalled <= _SETTLING, "nobody runs, somebody waits, and the blocks would suffice"
