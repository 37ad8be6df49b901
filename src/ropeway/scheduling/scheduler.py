"""Continuous batching: every step, who gets which tokens of the budget, which seat and which blocks.

``plan`` makes three passes: seats (waiting requests take free slots), decodes (every running request
without prompt left gets its next token), chunks (the rest of the budget goes to prompts). ``settle`` takes a
step's tokens in, ends what has ended, and publishes full blocks. Between the two, one more step may be
planned: nothing here depends on a token that is not known yet.

When blocks run out, whoever is behind in policy order and has no row in this plan gives way and is
recomputed later. A request preempted ``MAX_PREEMPTIONS`` times is protected: it is seated again only when
the blocks of its whole life are there beside those of the other protected ones, and is no victim any more.
So the first in order can always get on, preemptions are bounded, and a lone request never preempts itself.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
from numpy.typing import NDArray

from ropeway.cache.keys import block_key, chain
from ropeway.cache.pool import BlockPool
from ropeway.config import SchedulerConfig
from ropeway.outcome import Finished, LogprobColumns, Started, StepOutput
from ropeway.plan import Plan, Result, Seat
from ropeway.request import FinishReason, Gate, Request
from ropeway.scheduling.queue import WaitingQueue
from ropeway.scheduling.rows import Rows
from ropeway.scheduling.seats import Seats

MAX_PREEMPTIONS = 3


class Scheduler:
    """One engine's scheduler. Not thread-safe; knows no clock, no device and no text."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, max_model_len: int) -> None:
        self.config = config
        self.pool = pool
        self.seats = Seats(config.max_num_seqs, max_model_len, pool.block_size)
        self.waiting = WaitingQueue()
        self.preemptions = 0
        self.prefix_queries = 0
        """Prompt tokens looked up in the prefix cache, once per request."""
        self.prefix_hits = 0
        """Prompt tokens found there."""
        self.wasted_rows: Counter[str] = Counter()
        """Rows computed in vain, by reason."""
        self._shift = pool.block_size.bit_length() - 1
        self._requests: dict[int, Request] = {}
        """Everyone waiting, seated, or gone with a row in flight."""
        self._left_for: dict[int, str] = {}
        """Why requests that are gone left, while rows of theirs are in flight."""
        self._in_flight: deque[Plan] = deque()
        """Plans not settled yet."""
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
            leader.followers.append(request.gate)
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
        rows = Rows()
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
        seated: list[Seat] = []
        if not len(self.waiting) or not self.seats.vacant:
            return seated
        demand, promised = self._demand()
        while self.seats.vacant and demand < self.config.max_batched_tokens:
            request = self.waiting.head()
            if request is None or request.unsettled:  # not again before its last step is settled
                break
            hits = self._prefix_hits(request)
            protected = request.preemptions >= MAX_PREEMPTIONS
            life = request.limit - 1
            horizon = life if protected else min(len(request.tokens) + 1, life)
            need = self._blocks_for(horizon) - len(hits)
            if need + promised > self.pool.available - self.pool.idle(hits):
                break  # nobody passes a head that does not fit
            seated.append(self._seat(request, hits, protected))
            promised += need
            demand += len(request.tokens) - len(hits) * self.pool.block_size
        return seated

    def _demand(self) -> tuple[int, int]:
        """(tokens the seated could use in this step, blocks they still need before anyone else may)."""
        seats = self.seats
        if not seats.taken:
            return 0, 0
        slots = seats.ranked
        computed, last = seats.computed[slots], seats.last[slots]
        wanted = np.minimum(np.maximum(computed + 1, seats.goal[slots] + 1), last)
        horizon = np.where(seats.protected[slots], last, wanted)
        needed = np.maximum((horizon + self.pool.block_size - 1 >> self._shift) - seats.blocks_held[slots], 0)
        tokens = np.maximum(np.minimum(computed + 1, last) - computed, seats.goal[slots] - computed)
        return int(tokens.sum()), int(needed.sum())

    def _prefix_hits(self, request: Request) -> list[int]:
        """Published blocks of its prefix; at least one token is left to compute."""
        keys = request.keys
        if keys is None:
            return []
        full = (len(request.tokens) - 1) // self.pool.block_size
        known = len(keys) - 1
        if known < full:
            rest = request.tokens[known * self.pool.block_size :]
            keys.extend(chain(keys[-1], rest[: (full - known) * self.pool.block_size], self.pool.block_size))
        return self.pool.match(keys[1 : full + 1])

    def _seat(self, request: Request, hits: list[int], protected: bool) -> Seat:
        self.waiting.remove(request)
        self.pool.acquire(hits)
        if request.cached_tokens is None:
            leader = request.leader
            found = len(hits) * self.pool.block_size
            # What a sibling computed for the same call was not there before the request.
            shared = None if leader is None else leader.cached_tokens
            request.cached_tokens = found if shared is None else min(found, shared)
            if request.keys is not None:
                self.prefix_queries += request.prompt_tokens
                self.prefix_hits += found
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

    def _plan_decodes(self, rows: Rows, budget: int) -> int:
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
        rows.add(slots, np.ones_like(slots), grows.astype(np.int64), blocks)
        return len(slots)

    def _plan_decodes_one_by_one(self, rows: Rows, slots: NDArray[np.int64]) -> int:
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

    def _plan_chunks(self, rows: Rows, budget: int) -> int:
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

    def _add_row(self, rows: Rows, slot: int, count: int, new_blocks: int) -> None:
        blocks = self.pool.take(new_blocks)
        self.seats.append_blocks(slot, blocks)
        rows.add_one(slot, count, blocks)

    def _make_plan(self, rows: Rows, seated: list[Seat]) -> Plan:
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

    def _make_room(self, count: int, slot: int, rows: Rows) -> bool:
        """Preempt until ``count`` blocks are available to the request in ``slot``."""
        while count > self.pool.available:
            victim = self._victim(slot, rows)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _victim(self, slot: int, rows: Rows) -> int | None:
        """The last in policy order that may give way: unprotected, without a row in this plan, and behind
        the asker, unless that one is protected."""
        seats = self.seats
        for other in seats.ranked[::-1].tolist():
            if other == slot:
                if not seats.protected[slot]:
                    return None
            elif not seats.protected[other] and other not in rows:
                return int(other)
        return None

    def _preempt(self, slot: int) -> None:
        request = self._leave_seat(slot)
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.add(request)

    def _leave_seat(self, slot: int) -> Request:
        blocks = self.seats.held(slot)
        request = self.seats.unseat(slot)
        request.unsettled = sum(bool((plan.request == request.id).any()) for plan in self._in_flight)
        self.pool.release(blocks)
        return request

    # ------------------------------------------------------------------ settling

    def settle(self, plan: Plan, result: Result) -> StepOutput:
        """Take in what a step computed; plans are settled in their order."""
        assert self._in_flight.popleft() is plan
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
            self._publish(slots[~sampled], end[~sampled])
            slots, end = slots[sampled], end[sampled]
        seats.tokens[slots, end] = new
        watched = end >= seats.watch[slots]
        seats.length[slots] = end + 1
        ended = (seats.end_ids[slots] == new[:, None]).any(axis=1)
        for i in np.flatnonzero(watched | ended).tolist():
            slot = slots[i]
            request = self._seated(slot)
            self._publish_one(slot, request, int(end[i]))
            if end[i] == request.prompt_tokens:
                started.append(self._start(request))
            if ended[i] or end[i] >= seats.last[slot]:
                finished.append(self._finish(request, int(new[i])))
            else:
                seats.set_watch(slot)
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

    def _publish(self, slots: NDArray[np.int32], end: NDArray[np.int32]) -> None:
        """Make the blocks findable that chunks have filled."""
        for slot, position in zip(slots.tolist(), end.tolist(), strict=True):
            self._publish_one(slot, self._seated(slot), position)
            self.seats.set_watch(slot)

    def _publish_one(self, slot: int, request: Request, end: int) -> None:
        """Make the blocks findable that positions below ``end`` have filled."""
        seats, keys, size = self.seats, request.keys, self.pool.block_size
        if keys is None:
            return
        for block in range(int(seats.published[slot]), end >> self._shift):
            if len(keys) == block + 1:
                keys.append(block_key(keys[block], seats.tokens[slot, block * size : (block + 1) * size].tobytes()))
            self.pool.publish(int(seats.blocks[slot, block]), keys[block + 1])
            seats.published[slot] = block + 1

    def _start(self, request: Request) -> Started:
        """Its first token is there, so its prompt is in the cache."""
        self._open_followers(request)
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
        self._open_followers(request)
        self._left_for[request.id] = left_for
        self._forget_when_settled(request)

    def _forget_when_settled(self, request: Request) -> None:
        if not request.unsettled:
            del self._requests[request.id], self._left_for[request.id]

    @staticmethod
    def _open_followers(request: Request) -> None:
        for gate in request.followers:
            gate.open = True
        request.followers.clear()

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
            assert self._requests[request.id] is request
            assert seats.blocks_held[slot] == self._blocks_for(int(seats.computed[slot]))
            assert seats.length[slot] <= seats.limit[slot]
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
