"""Continuous batching: every step, who gets which tokens of the budget, which seat and which blocks.

``plan`` makes three passes: seats (waiting requests take free slots), decodes (every running request
without prompt left gets its next token), chunks (the rest of the budget goes to prompts). ``settle`` takes a
step's tokens in, ends what has ended, and publishes full blocks. Between the two, one more step may be
planned: nothing here depends on a token that is not known yet.

When blocks run out, whoever is behind in policy order and has no row in this plan gives way and is
recomputed later. A request preempted ``MAX_PREEMPTIONS`` times is protected: once seated again it is no victim
any more and may itself preempt any that is not. Protected requests are seated together only as far as their whole
lives fit into the pool, so they never need each other's blocks; one that must wait for that lets others pass.
So somebody can always get on, preemptions are bounded, and a lone request never preempts itself.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ropeway.cache.pool import BlockPool
from ropeway.config import SchedulerConfig
from ropeway.outcome import Finished, LogprobColumns, Started, StepOutput
from ropeway.plan import Plan, Result, Seat
from ropeway.request import FinishReason, Gate, Request
from ropeway.scheduling.plan_rows import PlanRows
from ropeway.scheduling.prefixes import PrefixCache
from ropeway.scheduling.queue import WaitingQueue
from ropeway.scheduling.seats import Seats

MAX_PREEMPTIONS = 3


class Scheduler:
    """One engine's scheduler. Not thread-safe; knows no clock, no device and no text."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, max_model_len: int) -> None:
        self.config = config
        self.pool = pool
        self.seats = Seats(config.max_num_seqs, max_model_len, pool.block_size)
        self.waiting = WaitingQueue()
        self.prefixes = PrefixCache(pool)
        self.preemptions = 0
        self.wasted_rows: Counter[str] = Counter()
        """Rows computed in vain, by reason."""
        self._shift = pool.block_size.bit_length() - 1
        self._requests: dict[int, Request] = {}
        """Everyone waiting, seated, or gone with a row in flight."""
        self._left_for: dict[int, str] = {}
        """Why requests that are gone left, while rows of theirs are in flight."""
        self._in_flight: deque[Plan] = deque()
        """Plans not settled yet."""
        self._protected_life = 0
        """Blocks that the seated protected requests may come to need in all."""
        self._refused: tuple[int, int] | None = None
        """(request, pool.releases) of the last head that did not fit: nothing has changed until a release."""
        self._order = 0
        self._seq = 0

    # ------------------------------------------------------------------ arrivals and departures

    @property
    def has_work(self) -> bool:
        """Whether anyone waits or is seated."""
        return self.seats.taken > 0 or len(self.waiting) > 0

    def fits(self, limit: int) -> bool:
        """Whether a sequence of ``limit`` tokens can ever be served."""
        return limit <= self.seats.tokens.shape[1] and self._blocks_for(limit - 1) <= self.pool.num_blocks

    def find(self, request_id: int) -> Request | None:
        """A request that has not ended, by its internal id."""
        request = self._requests.get(request_id)
        return request if request is not None and request.finish is None else None

    def add(self, request: Request) -> None:
        """Queue a request; ``fits(request.limit)`` holds. One with a leader waits for its prefill."""
        self._order += 1
        request.order = self._order
        self._requests[request.id] = request
        leader = request.leader
        if leader is not None and leader.finish is None and not self._has_output(leader):
            request.gate = Gate()
            leader.followers.append(request)
        self.waiting.add(request)

    def abort(self, request_id: int, reason: str) -> bool:
        """Forget a request at once; rows of it in flight count as wasted for ``reason``. False: not here."""
        request = self.find(request_id)
        if request is None:
            return False
        self._end(request, FinishReason.ABORT, reason)
        return True

    # ------------------------------------------------------------------ planning

    def plan(self) -> Plan | None:
        """The next step; None when nobody can get a row before the next settle."""
        seats = self._fill_seats()
        rows = PlanRows()
        budget = self.config.max_batched_tokens
        if self.config.chunked_prefill:
            budget -= self._plan_decodes(rows, budget)
            self._plan_chunks(rows, budget)
        else:
            budget -= self._plan_chunks(rows, budget)
            self._plan_decodes(rows, budget)
        if not rows and not seats:
            return None
        return self._make_plan(rows, [seat for seat in seats if self.seats.request_id[seat.slot] >= 0])

    def _fill_seats(self) -> list[Seat]:
        """Seat waiting requests while there are slots, budget and blocks for all that they know."""
        seated: list[Seat] = []
        if not len(self.waiting) or not self.seats.vacant:
            return seated
        demand, promised = self._demand()
        while self.seats.vacant and demand < self.config.max_batched_tokens:
            request = self._next_waiting()
            if request is None or (request.id, self.pool.releases) == self._refused:
                break
            hits = self.prefixes.find(request)
            need = self._blocks_for(min(len(request.tokens) + 1, request.limit - 1)) - len(hits)
            if need + promised > self.pool.available - self.pool.idle(hits):
                self._refused = (request.id, self.pool.releases)
                break  # nobody passes a head that does not fit
            seated.append(self._seat(request, hits))
            promised += need
            demand += len(request.tokens) - len(hits) * self.pool.block_size
        return seated

    def _next_waiting(self) -> Request | None:
        """The first whose turn it is. Those with a closed gate, and protected ones whose life does not fit beside
        the protected ones seated, let others pass; one with a step in flight holds the line until it is settled."""
        for request in self.waiting:
            if request.gate is not None and not request.gate.open:
                continue
            if request.unsettled:
                return None
            life = self._blocks_for(request.limit - 1)
            if self._protected(request) and self._protected_life + life > self.pool.num_blocks:
                continue
            return request
        return None

    @staticmethod
    def _protected(request: Request) -> bool:
        return request.preemptions >= MAX_PREEMPTIONS

    def _demand(self) -> tuple[int, int]:
        """(tokens the seated could use in this step, blocks they still need for all that they know)."""
        seats = self.seats
        if not seats.taken:
            return 0, 0
        slots = seats.ranked
        computed, goal, last = seats.computed[slots], seats.goal[slots], seats.last[slots]
        horizon = np.minimum(np.maximum(computed, goal) + 1, last)
        needed = (horizon + self.pool.block_size - 1 >> self._shift) - seats.blocks_held[slots]
        tokens = np.maximum(np.minimum(computed + 1, last), goal) - computed
        return int(tokens.sum()), int(np.maximum(needed, 0).sum())

    def _seat(self, request: Request, hits: list[int]) -> Seat:
        self.waiting.remove(request)
        self.pool.acquire(hits)
        self.prefixes.count(request, hits)
        protected = self._protected(request)
        if protected:
            self._protected_life += self._blocks_for(request.limit - 1)
        slot = self.seats.seat(request, hits, protected=protected)
        return Seat(
            slot=slot,
            token_ids=request.tokens,
            prompt_tokens=request.prompt_tokens,
            params=request.params,
            seed=request.seed,
            end_ids=request.end_ids,
            blocks=np.array(hits, dtype=np.int32),
        )

    def _plan_decodes(self, rows: PlanRows, budget: int) -> int:
        """Give every request without prompt left its next token; the longest unserved first when the budget
        is short. Returns the tokens used."""
        seats = self.seats
        slots = seats.ranked
        computed = seats.computed[slots]
        ready = computed < seats.last[slots]
        if seats.prefilling:
            ready &= computed >= seats.goal[slots]
        if not ready.all():
            slots, computed = slots[ready], computed[ready]
        if len(slots) > budget:
            chosen = np.sort(np.argsort(seats.served[slots], kind="stable")[: max(budget, 0)])
            slots, computed = slots[chosen], computed[chosen]
        if not len(slots):
            return 0
        grows = computed >= seats.blocks_held[slots] << self._shift
        growing = slots[grows]
        if len(growing) > self.pool.available:
            return self._plan_decodes_one_by_one(rows, slots)
        blocks = self.pool.take(len(growing))
        if blocks:
            seats.blocks[growing, seats.blocks_held[growing]] = blocks
            seats.blocks_held[growing] += 1
        rows.add_decodes(slots, grows, blocks)
        return len(slots)

    def _plan_decodes_one_by_one(self, rows: PlanRows, slots: NDArray[np.int64]) -> int:
        """The same when blocks are short: in policy order, so that those behind give way."""
        seats = self.seats
        used = 0
        for slot in slots.tolist():
            if seats.request_id[slot] < 0:  # gave way to one before it
                continue
            grows = seats.computed[slot] >= seats.blocks_held[slot] << self._shift
            if grows and not self._make_room(1, slot, rows):
                continue
            self._add_row(rows, slot, 1, int(grows))
            used += 1
        return used

    def _plan_chunks(self, rows: PlanRows, budget: int) -> int:
        """Give what is left of the budget to prompts, in policy order. Returns the tokens used.

        Without chunked prefill a prompt goes whole or not at all; the first one may exceed the budget."""
        seats = self.seats
        used = 0
        if not seats.prefilling:
            return used
        slots = seats.ranked
        for slot in slots[seats.computed[slots] < seats.goal[slots]].tolist():
            if seats.request_id[slot] < 0:
                continue
            computed, held = int(seats.computed[slot]), int(seats.blocks_held[slot])
            count = int(seats.goal[slot]) - computed
            if self.config.chunked_prefill:
                count = min(count, budget - used)
            elif rows and used + count > budget:
                break
            if count <= 0:
                break
            need = self._blocks_for(computed + count) - held
            if not self._make_room(need, slot, rows):
                count = (held + self.pool.available << self._shift) - computed
                if count <= 0 or not self.config.chunked_prefill:
                    continue
                need = self._blocks_for(computed + count) - held
            self._add_row(rows, slot, count, max(need, 0))
            used += count
        return used

    def _add_row(self, rows: PlanRows, slot: int, count: int, new_blocks: int) -> None:
        blocks = self.pool.take(new_blocks)
        self.seats.append_blocks(slot, blocks)
        rows.add(slot, count, blocks)

    def _make_plan(self, rows: PlanRows, seated: list[Seat]) -> Plan:
        seats = self.seats
        self._seq += 1
        slots, counts, block_counts = rows.columns()
        start = seats.computed[slots]
        end = start + counts
        if seats.prefilling:
            goal = seats.goal[slots]
            samples = end >= goal
            seats.prefilling -= int(np.count_nonzero(samples & (start < goal)))
        else:
            samples = np.ones(len(slots), dtype=np.bool_)
        seats.computed[slots] = end
        seats.served[slots] = self._seq
        plan = Plan(
            seq=self._seq,
            request=seats.request_id[slots],
            slot=slots.astype(np.int32),
            start=start.astype(np.int32),
            count=counts.astype(np.int32),
            samples=samples,
            new_blocks=np.array(rows.blocks, dtype=np.int32),
            new_block_count=block_counts.astype(np.int32),
            seats=tuple(seated),
        )
        self._in_flight.append(plan)
        return plan

    # ------------------------------------------------------------------ blocks

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    def _make_room(self, count: int, slot: int, rows: PlanRows) -> bool:
        """Preempt until ``count`` blocks are available to the request in ``slot``. False when those that may give
        way hold too few; nobody is preempted then, unless blocks they share turn out to stay with others."""
        missing = count - self.pool.available
        if missing <= 0:
            return True
        victims: list[int] = []
        for victim in self._victims(slot, rows):
            victims.append(victim)
            missing -= int(self.seats.blocks_held[victim])
            if missing <= 0:
                break
        else:
            return False
        for victim in victims:
            self._preempt(victim)
        # Blocks that others share do not become available, so it may take more of them.
        return self._make_room(count, slot, rows)

    def _victims(self, slot: int, rows: PlanRows) -> Iterator[int]:
        """Who may give way to the request in ``slot``, the last in policy order first: unprotected, without a row in
        this plan, and behind the asker, unless that one is protected."""
        seats = self.seats
        for other in seats.ranked[::-1].tolist():
            if other == slot:
                if not seats.protected[slot]:
                    return
            elif not seats.protected[other] and other not in rows:
                yield other

    def _preempt(self, slot: int) -> None:
        request = self._leave_seat(slot)
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.add(request)

    def _leave_seat(self, slot: int) -> Request:
        blocks = self.seats.held(slot)
        request = self.seats.unseat(slot)
        request.unsettled = sum(bool((plan.request == request.id).any()) for plan in self._in_flight)
        if self._protected(request):
            self._protected_life -= self._blocks_for(request.limit - 1)
        self.pool.release(blocks)
        return request

    # ------------------------------------------------------------------ settling

    def settle(self, plan: Plan, result: Result) -> StepOutput:
        """Take in what a step computed; plans are settled in their order."""
        oldest = self._in_flight.popleft()
        assert oldest is plan, "plans are settled in their order"
        seats = self.seats
        started: list[Started] = []
        finished: list[Finished] = []
        ids, tokens, logprobs = plan.request, result.token_ids, result.logprobs
        slots, end, sampled, new = plan.slot, plan.start + plan.count, plan.samples, tokens
        if len(tokens) != len(slots):
            ids = ids[sampled]
        alive = seats.request_id[slots] == plan.request
        if not alive.all():
            emitted = self._settle_departed(plan, result, alive, started, finished)
            ids, tokens, logprobs = ids[emitted], tokens[emitted], _keep(logprobs, emitted)
            new = new[alive[sampled]]
            slots, end, sampled = slots[alive], end[alive], sampled[alive]
        if len(new) != len(slots):
            for slot, position in zip(slots[~sampled].tolist(), end[~sampled].tolist(), strict=True):
                self.prefixes.publish(self._seated(slot), seats, position)
            slots, end = slots[sampled], end[sampled]
        seats.tokens[slots, end] = new
        watched = end >= seats.watch[slots]
        seats.length[slots] = end + 1
        ended = (seats.end_ids[slots] == new[:, None]).any(axis=1)
        for i in np.flatnonzero(watched | ended).tolist():
            request, position = self._seated(slots[i]), int(end[i])
            self.prefixes.publish(request, seats, position)
            if position == request.prompt_tokens:
                started.append(self._start(request))
            if ended[i] or position + 1 >= request.limit:
                finished.append(self._finish(request, int(new[i])))
            else:
                seats.watch[request.slot] = self._next_event(request, position + 1)
        return StepOutput(ids=ids, tokens=tokens, finished=finished, started=started, logprobs=logprobs)

    def _settle_departed(
        self,
        plan: Plan,
        result: Result,
        alive: NDArray[np.bool_],
        started: list[Started],
        finished: list[Finished],
    ) -> NDArray[np.bool_]:
        """Rows whose request lost its seat meanwhile. One that was preempted keeps its token; of one that
        has ended nothing is published. Returns bool [sampling rows]: whose tokens go out."""
        emitted = alive[plan.samples].copy()
        place = np.cumsum(plan.samples) - 1
        for row in np.flatnonzero(~alive).tolist():
            request = self._requests[int(plan.request[row])]
            request.unsettled -= 1
            if request.finish is not None:
                self.wasted_rows[self._left_for[request.id]] += 1
                self._forget_when_settled(request)
            elif plan.samples[row]:
                token = result.token_ids[place[row]]
                emitted[place[row]] = True
                request.tokens = np.append(request.tokens, token)
                if request.output_tokens == 1:
                    started.append(self._start(request))
                if token in request.end_ids or len(request.tokens) >= request.limit:
                    finished.append(self._finish(request, int(token)))
        return emitted

    def _next_event(self, request: Request, end: int) -> int:
        """The first position from ``end`` on whose settling is an event: the first output token, a full block, the
        length limit."""
        event = request.limit - 1
        if request.prompt_tokens >= end:
            event = min(event, request.prompt_tokens)
        if request.keys is not None:
            event = min(event, (request.published + 1) * self.pool.block_size)
        return event

    def _start(self, request: Request) -> Started:
        """Its first token is there, so its prompt is in the cache."""
        for follower in request.followers:
            self._open_gate(follower)
        request.followers.clear()
        return Started(request.id, request.cached_tokens or 0)

    def _finish(self, request: Request, token: int) -> Finished:
        """End a request that met an end token or its length limit with ``token``."""
        met = token in request.end_ids
        reason = FinishReason.STOP if met else FinishReason.LENGTH
        self._end(request, reason, "end_token")
        return Finished(request.id, reason, token if met else None)

    def _end(self, request: Request, finish: FinishReason, left_for: str) -> None:
        request.finish = finish
        if request.slot >= 0:
            self._leave_seat(request.slot)
        else:
            self.waiting.remove(request)
        self._hand_over(request)
        self._left_for[request.id] = left_for
        self._forget_when_settled(request)

    def _forget_when_settled(self, request: Request) -> None:
        if not request.unsettled:
            del self._requests[request.id], self._left_for[request.id]

    def _hand_over(self, leader: Request) -> None:
        """A leader that ends before its first token: one of its siblings goes ahead instead."""
        followers = [follower for follower in leader.followers if follower.finish is None]
        leader.followers.clear()
        if followers:
            heir, *others = followers
            heir.leader = leader.leader
            self._open_gate(heir)
            for other in others:
                other.leader = heir
            heir.followers = others

    @staticmethod
    def _open_gate(request: Request) -> None:
        assert request.gate is not None
        request.gate.open = True

    def _seated(self, slot: int) -> Request:
        request = self.seats.requests[slot]
        assert request is not None
        return request

    def _has_output(self, request: Request) -> bool:
        length = self.seats.length[request.slot] if request.slot >= 0 else len(request.tokens)
        return bool(length > request.prompt_tokens)

    # ------------------------------------------------------------------ invariants

    def check(self) -> None:
        """Raise ``AssertionError`` unless blocks, seats and requests agree. For tests and for idle moments."""
        seats = self.seats
        seated = seats.ranked.tolist()
        self.pool.check([seats.held(slot) for slot in seated])
        assert seats.taken + seats.vacant == len(seats.requests)
        assert seats.prefilling == int((seats.computed[seated] < seats.goal[seated]).sum())
        for slot in seated:
            request = self._seated(slot)
            assert request.slot == slot
            assert request.preemptions <= MAX_PREEMPTIONS
            assert seats.protected[slot] == self._protected(request)
            assert self._requests[request.id] is request
            assert seats.blocks_held[slot] == self._blocks_for(int(seats.computed[slot]))
            assert seats.length[slot] <= seats.limit[slot]
        lives = [self._blocks_for(int(seats.last[slot])) for slot in seated if seats.protected[slot]]
        assert sum(lives) == self._protected_life <= self.pool.num_blocks
        for request in self.waiting:
            assert request.slot < 0
            assert self._requests[request.id] is request
        if not self.has_work and not self._requests:
            assert self.pool.live == 0


def _keep(logprobs: LogprobColumns | None, emitted: NDArray[np.bool_]) -> LogprobColumns | None:
    """The log-probabilities of the emitted tokens, indexing those."""
    if logprobs is None:
        return None
    kept = emitted[logprobs.row]
    place = np.cumsum(emitted) - 1
    return LogprobColumns(
        row=place[logprobs.row[kept]].astype(np.int32),
        chosen=logprobs.chosen[kept],
        top_ids=logprobs.top_ids[kept],
        top=logprobs.top[kept],
    )
