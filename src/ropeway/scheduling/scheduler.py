"""Continuous batching: every step, who gets which tokens of the budget, which seat and which blocks.

``plan`` makes three passes: seats (waiting requests take free slots, or those of lower tiers), decodes (every running
request without prompt left gets its next token), chunks (the rest of the budget goes to prompts). ``settle`` takes a
step's tokens in, ends what has ended, and publishes full blocks. Between the two, one more step may be
planned: nothing here depends on a token that is not known yet.

When blocks run out, somebody behind in rank that has no row in this plan gives way: the lowest tier, there the one
whose resume is cheapest, of these the youngest; its blocks go to host memory or are recomputed later. A request
preempted ``MAX_PREEMPTIONS`` times is protected: once seated again it is no victim any more and may itself preempt any
that is not. Protected requests are seated together only as far as their whole lives fit into the pool, so they never
need each other's blocks; one that must wait for that lets others pass. So somebody can always get on, preemptions are
bounded, and a lone request never preempts itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ropeway.cache.host import HostTier
from ropeway.cache.pool import BlockPool
from ropeway.config import SchedulerConfig
from ropeway.outcome import Finished, Refusal, StepOutput
from ropeway.plan import NO_COPIES, Plan, Result, Seat
from ropeway.request import FinishReason, Request, Timeline
from ropeway.scheduling.admission import Admission, Candidate, Forecasts, RunningColumns
from ropeway.scheduling.cost import CopyCost, StepCost
from ropeway.scheduling.intake import Intake
from ropeway.scheduling.lengths import LengthProfiles
from ropeway.scheduling.lifecycle import MAX_PREEMPTIONS, Lifecycle
from ropeway.scheduling.plan_rows import PlanRows
from ropeway.scheduling.policy import Policy
from ropeway.scheduling.preemption import Preemption
from ropeway.scheduling.settlement import Settlement
from ropeway.scheduling.waits import Reason
from ropeway.tiers import DEFAULT_TIERS, Tier

__all__ = ["MAX_PREEMPTIONS", "Scheduler"]

_WRITE_SHARE = 0.05
"""Share of a step that copies of published blocks to host memory may take."""
_TRANSFER_S = 0.001
"""Time between two looks at whether a block has come from disk."""
_TPOT_SHARE = 0.95
"""Share of the tightest target that a step is planned to take."""


class Scheduler:
    """One engine's scheduler. Not thread-safe; knows no device and no text, and the time only as it is told."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        max_model_len: int,
        *,
        tiers: Sequence[Tier] = DEFAULT_TIERS,
        host: HostTier | None = None,
        cost: StepCost | None = None,
        lengths: LengthProfiles | None = None,
        block_bytes: int = 1 << 20,
    ) -> None:
        """``host``: memory for swapped requests and cached prefixes. ``cost`` and ``lengths`` may bring what was learnt
        before. ``block_bytes``: of one KV block, from which the first guess of a copy's time is made."""
        self.config = config
        self.pool = pool
        self.tiers = tuple(tiers)
        self.host = host
        self.cost = StepCost() if cost is None else cost
        self.copy_cost = CopyCost(block_bytes)
        self.lengths = LengthProfiles() if lengths is None else lengths
        self.policy = Policy(config, self.tiers, self.cost)
        self.lifecycle = Lifecycle(
            config.max_num_seqs, max_model_len, pool, host, self.tiers, self.policy, self.lengths
        )
        self.seats = self.lifecycle.seats
        self.waiting = self.lifecycle.waiting
        self.prefixes = self.lifecycle.prefixes
        self.wasted_rows = self.lifecycle.wasted_rows
        self.admission = Admission(
            config.admission,
            pool.num_blocks,
            pool.block_size,
            watermark=config.watermark,
            quantile=config.admission_quantile,
            lengths=self.lengths,
            context=max_model_len,
        )
        self.intake = Intake(config, self.lifecycle, self.cost)
        self.preemption = Preemption(config, self.lifecycle, self.cost, self.copy_cost, self.admission.reservation)
        self._shift = pool.block_size.bit_length() - 1
        self._refused: dict[int, tuple[int, int, bytes | None]] = {}
        """Line -> (request, pool.releases, key of the first block it did not find) of the last head that did not fit:
        nothing has changed until a release, or until that block is published."""
        self._stands: tuple[int, int] | None = None
        """(pool.releases, waiting.changes) when the last pass over the waiting found that all lack slots or blocks."""
        self._forecasts = Forecasts(config.max_num_seqs, self.lengths)
        self._running: RunningColumns | None = None
        """The seated as admission sees them, for the pass that is being made."""
        self._departures: deque[int] = deque()
        """``seats.departures`` when the plans in flight were made."""
        self._now = 0.0
        self._seq = 0
        self.stuck = False
        """Whether the last call of ``plan`` found nothing to do, and nothing has happened since."""

    # ------------------------------------------------------------------ arrivals and departures

    @property
    def has_work(self) -> bool:
        """Whether anyone waits or is seated, or blocks are to be copied."""
        return self.seats.taken > 0 or len(self.waiting) > 0 or (self.host is not None and self.host.has_work)

    @property
    def preemptions(self) -> int:
        return sum(ledger.preemptions[kind] for ledger in self.lifecycle.ledgers for kind in ("swap", "recompute"))

    def fits(self, limit: int) -> bool:
        """Whether a sequence of ``limit`` tokens can ever be served."""
        blocks = self.lifecycle.blocks_for(limit - 1)
        return limit <= self.seats.tokens.shape[1] and blocks <= self.pool.num_blocks

    def find(self, request_id: int) -> Request | None:
        """A request that has not ended, by its internal id."""
        return self.lifecycle.find(request_id)

    def offer(self, request: Request, now: float, *, leader_refused: Refusal | None = None) -> Refusal | None:
        """``add`` the request, or say why its tier cannot take it now. Siblings fare as their leader did."""
        self.lifecycle.estimate(request)
        refusal = self.intake.refusal(request, now, leader_refused)
        if refusal is None:
            self._enqueue(request, now)
        return refusal

    def add(self, request: Request, now: float) -> None:
        """Queue a request, whatever the queue looks like; ``fits(request.limit)`` holds. One with a leader waits for
        its prefill."""
        self.lifecycle.estimate(request)
        self._enqueue(request, now)

    def _enqueue(self, request: Request, now: float) -> None:
        self.stuck = False
        self.lifecycle.enqueue(request, now)
        self.intake.accepted(request, now)

    def abort(self, request_id: int, reason: str, now: float) -> bool:
        """Forget a request at once; rows of it in flight count as wasted for ``reason``. False: not here."""
        request = self.find(request_id)
        if request is None:
            return False
        self.stuck = False
        self.lifecycle.end(request, FinishReason.ABORT, reason, now)
        return True

    def open_gate(self, request_id: int) -> bool:
        """What the request came with a gate for is there. False: it has ended."""
        request = self.find(request_id)
        if request is None:
            return False
        self.stuck = False
        self.lifecycle.open_gate(request)
        return True

    def expire(self, now: float) -> list[Finished]:
        """End the requests whose deadline has passed, or that have waited for their first seat as long as their tier
        allows."""
        finished = self.intake.expire(now)
        self.stuck = self.stuck and not finished
        return finished

    def explain(self, ids: Iterable[int], now: float) -> dict[int, Timeline]:
        """Where the time of those that have not ended has gone."""
        found = {request_id: self.find(request_id) for request_id in ids}
        return {i: self.lifecycle.timeline(request, now) for i, request in found.items() if request is not None}

    def next_change_s(self) -> float:
        """When something may change that neither an arrival nor a settled step brings about: somebody's time is over, a
        batch has waited long enough, a copy is done."""
        if self.host is not None and self.host.has_work:
            return self._now + _TRANSFER_S
        expiry = self.intake.next_expiry_s
        if self.config.batching == "dynamic" and len(self.waiting) and not self.seats.taken:
            return min(expiry, self.intake.window_ends_s())
        return expiry

    # ------------------------------------------------------------------ planning

    def plan(self, now: float) -> Plan | None:
        """The next step; None when nobody can get a row before the next settle. ``now``: seconds on any clock that
        never goes back."""
        self._now = now
        if len(self.waiting):
            self.lifecycle.waits.advance(now)
        if self.host is not None:
            self.host.poll()
        if self.lifecycle.padding:
            self._end_padded_batch()
        seats = self._fill_seats()
        rows = PlanRows()
        budget = self._budget()
        if self.config.chunked_prefill:
            budget -= self._plan_decodes(rows, budget)
            self._plan_chunks(rows, budget)
        else:
            budget -= self._plan_chunks(rows, budget)
            self._plan_decodes(rows, budget)
        to_host, to_device = self._copies()
        self.admission.reservation.calm()
        self.stuck = not rows and not seats and not len(to_host) and not len(to_device)
        if self.stuck:
            return None
        seats = [seat for seat in seats if self.seats.request_id[seat.slot] >= 0]
        return self._make_plan(rows, seats, to_host, to_device)

    def _budget(self) -> int:
        """Tokens of this step: as configured, or fewer, so that it is over in time for the tightest TPOT target among
        the running. Every running request gets its token, and some prompt goes on, whatever the target."""
        most = self.config.max_batched_tokens
        if self.config.step_budget == "constant" or not self.seats.taken or not self.cost.known:
            return most
        running = np.unique(self.seats.tier[self.seats.ranked]).tolist()
        targets = [target for tier in running if (target := self.tiers[tier].tpot_s) is not None]
        if not targets:
            return most
        kv_tokens = int(self.seats.computed[self.seats.ranked].sum())
        fits = self.cost.tokens_within(min(targets) * _TPOT_SHARE, kv_tokens)
        return min(most, max(fits, self.seats.taken + self.pool.block_size))

    def _end_padded_batch(self) -> None:
        """Padding goes on until all of its batch have finished."""
        if self.lifecycle.padding == self.seats.taken:
            for slot in self.seats.ranked.tolist():
                self.lifecycle.drop_padding(slot)

    # ------------------------------------------------------------------ first pass: seats

    def _fill_seats(self) -> list[Seat]:
        """Seat waiting requests while there are slots, budget and blocks for all that they know, line by line."""
        seated: list[Seat] = []
        self._running = None
        if not len(self.waiting) or not self._boards() or self._as_before():
            return seated
        demand, promised = self._demand()
        continuous = self.config.batching == "continuous"
        open_lines = len(self.waiting.lines)
        short = False  # whether somebody more urgent waits for blocks
        lasting = True  # whether all that stands in the way is a lack of slots or blocks
        while open_lines and len(self.waiting):
            found = self._next_waiting(open_lines)
            if found is None:
                break
            line, request = found
            reason: Reason | None = None
            if request.unsettled:
                reason = "step"  # it holds the line until it is settled
            elif continuous and demand[line] >= self.config.max_batched_tokens:
                reason = "budget"
            else:
                fresh = [each.slot for each in seated]
                if short and not self.preemption.outranks(line, fresh):
                    reason = "blocks"
                else:
                    seat, reason = self._try_seat(request, line, promised[line], fresh)
            if reason is None:
                assert seat is not None
                seated.append(seat)
                slot = seat.slot
                known = min(len(request.tokens) + 1, request.limit - 1)
                tokens = max(known - 1 - int(self.seats.computed[slot]), 0)
                blocks = self.lifecycle.blocks_for(known) - int(self.seats.blocks_held[slot])
                for lower in range(line, len(demand)):
                    demand[lower] += tokens
                    promised[lower] += blocks
                continue
            # Nobody of its line passes a head that does not fit, nor of a lower one. A higher one, though less urgent,
            # takes the place of a lower one that is seated, but not the blocks that the head waits for.
            short = short or reason == "blocks"
            lasting = lasting and reason in ("slots", "blocks")
            self.lifecycle.waits_for(line, reason)
            for lower in range(line + 1, open_lines):
                self.lifecycle.waits_for(lower, "tier")
            open_lines = line
        for line in range(open_lines):  # whoever is left there waits at a gate, or for another protected one's end
            if self.waiting.lines[line].count:
                ungated = any(not request.gated for request in self.waiting.lines[line])
                self.lifecycle.waits_for(line, "blocks" if ungated else "step")
                lasting = False
        self._stands = (self.pool.releases, self.waiting.changes) if lasting and not seated else None
        return seated

    def _as_before(self) -> bool:
        """Whether the last pass seated nobody, and would not now: nothing was given back, nobody has come or gone, and
        no block was published that a head had missed."""
        if self._stands != (self.pool.releases, self.waiting.changes):
            return False
        return all(
            releases != self.pool.releases or missing is None or self.pool.find(missing) is None
            for _, releases, missing in self._refused.values()
        )

    def _boards(self) -> bool:
        """Whether the batching policy lets anybody on now."""
        config = self.config
        if config.batching == "continuous":
            return True
        if self.seats.taken:
            for line in range(len(self.waiting.lines)):
                self.lifecycle.waits_for(line, "slots")
            return False
        if config.batching == "static" or len(self.waiting) >= config.max_num_seqs:
            return True
        return self._now >= self.intake.window_ends_s()

    def _next_waiting(self, open_lines: int) -> tuple[int, Request] | None:
        """(line, request) of the most urgent one whose turn it is."""
        best: tuple[int, Request] | None = None
        for line in range(open_lines):
            if not self.waiting.lines[line].count:
                continue
            head = next(filter(self._may_board, self.waiting.lines[line]), None)
            if head is not None and (best is None or (head.urgency, head.order) < (best[1].urgency, best[1].order)):
                best = line, head
        return best

    def _may_board(self, request: Request) -> bool:
        """Those with a closed gate, and protected ones whose life does not fit beside the protected ones seated, let
        others pass."""
        if request.gated:
            return False
        if request.preemptions < MAX_PREEMPTIONS:
            return True
        life = self.lifecycle.blocks_for(request.limit - 1)
        return self.lifecycle.protected_life + life <= self.pool.num_blocks

    def _try_seat(
        self, request: Request, line: int, promised: int, fresh: Collection[int], *, way_made: bool = False
    ) -> tuple[Seat | None, Reason | None]:
        """Seat the request, at the cost of lower tiers if need be; else why it must wait. ``way_made``: somebody has
        given way to it."""
        if not self.seats.vacant and not self.preemption.outranks(line, fresh):
            return None, "slots"
        if self.seats.vacant and self._still_refused(request, line):
            return None, "blocks"
        hits = self.prefixes.find(request)
        need = self.lifecycle.blocks_for(min(len(request.tokens) + 1, request.limit - 1)) - len(hits)
        idle = self.pool.idle(hits)
        available = self.pool.available - idle - promised
        candidate = _candidate(request, shared=len(hits) - idle)
        admitted = need <= available if way_made else self._admits(candidate, need, available, line)
        if not self.seats.vacant or not admitted:
            way_made = self.preemption.make_way(need - available, hits, line, fresh, self._now)
            self._running = None
            if not way_made:
                if not self.seats.vacant:
                    return None, "slots"
                if not fresh:  # those are no victims in this pass, but may be in the next one
                    keys = request.keys or []
                    missing = keys[len(hits) + 1] if len(keys) > len(hits) + 1 else None
                    self._refused[line] = (request.id, self.pool.releases, missing)
                return None, "blocks"
            return self._try_seat(request, line, promised, fresh, way_made=True)
        in_host = () if request.swapped is not None else self.prefixes.find_in_host(request, len(hits))
        if self._running is not None:
            self._running.add(candidate)
        self.intake.seated(request, self._now)
        return self.lifecycle.seat(request, hits, in_host, self._now), None

    def _still_refused(self, request: Request, line: int) -> bool:
        """Whether nothing has changed for a head that did not fit."""
        head, releases, missing = self._refused.get(line, (-1, -1, None))
        return (head, releases) == (request.id, self.pool.releases) and (
            missing is None or self.pool.find(missing) is None
        )

    def _admits(self, candidate: Candidate, need: int, available: int, line: int) -> bool:
        """Whether one of this line may have blocks. Where lower tiers can give way later, only the present counts."""
        if need > available:
            return False
        seats = self.seats
        if self.admission.ample(seats.taken + 1, seats.limits + candidate.limit) or self.preemption.outranks(line):
            return True
        if self._running is None:
            self._running = self._running_columns()
        return self.admission.admits(need, available, self._running, candidate)

    def _running_columns(self) -> RunningColumns:
        seats = self.seats
        slots = seats.ranked
        if self.lifecycle.padding:
            slots = slots[~seats.padding[slots]]
        length = np.maximum(seats.length[slots], seats.computed[slots])
        generated = length - seats.prompt[slots]
        cap = seats.limit[slots] - seats.prompt[slots]
        handle, u = seats.length_class[slots], seats.luck[slots]
        owner = seats.request_id[slots]
        return RunningColumns(
            length=length,
            generated=generated,
            cap=cap,
            handle=handle,
            u=u,
            forecast=lambda: self._forecasts.of(slots, owner, generated, cap, handle, u),
            shared=max(int(seats.blocks_held[slots].sum()) - self.pool.live, 0),
        )

    def _demand(self) -> tuple[list[int], list[int]]:
        """What the seated could use in this step, [lines] each, summed over a line and those above it: tokens
        (decodes of all lines count everywhere), and the blocks they still need for all that they know."""
        seats, lines = self.seats, len(self.waiting.lines)
        if not seats.taken:
            return [0] * lines, [0] * lines
        slots = seats.ranked
        computed, held, last = seats.computed[slots], seats.blocks_held[slots], seats.last[slots]
        decoding = computed < last
        if not seats.prefilling:
            growing = slots[decoding & (computed >= held << self._shift)]
            return [int(np.count_nonzero(decoding))] * lines, self._summed(growing, None)
        goal = seats.goal[slots]
        prompt = np.maximum(goal - computed, 0)
        decodes = int(np.count_nonzero(decoding & (prompt == 0)))
        horizon = np.minimum(np.maximum(computed, goal) + 1, last)
        needed = np.maximum((horizon + self.pool.block_size - 1 >> self._shift) - held, 0)
        return [tokens + decodes for tokens in self._summed(slots, prompt)], self._summed(slots, needed)

    def _summed(self, slots: NDArray[np.int64], weights: NDArray[np.int64] | None) -> list[int]:
        """Of each line, the weights (default: one each) of these slots that are its own or of those above it."""
        lines = len(self.waiting.lines)
        if not len(slots):
            return [0] * lines
        sums = np.bincount(self.seats.line[slots], weights=weights, minlength=lines).cumsum()
        return [int(total) for total in sums.tolist()]

    # ------------------------------------------------------------------ second pass: decodes

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
        """The same when blocks are short: in the order of ranks, so that those behind give way; padding comes last."""
        seats = self.seats
        if self.lifecycle.padding:
            slots = slots[np.argsort(seats.padding[slots], kind="stable")]
        used = 0
        for slot in slots.tolist():
            if seats.request_id[slot] < 0:  # gave way to one before it
                continue
            grows = seats.computed[slot] >= seats.blocks_held[slot] << self._shift
            if grows and not self.preemption.make_room(1, slot, rows, self._now):
                continue
            self._add_row(rows, slot, 1, int(grows))
            used += 1
        return used

    # ------------------------------------------------------------------ third pass: chunks

    def _plan_chunks(self, rows: PlanRows, budget: int) -> int:
        """Give what is left of the budget to prompts, in the order of ranks; one that has let higher tiers go first for
        too long goes before them. Returns the tokens used.

        Without chunked prefill a prompt goes whole or not at all; the first one may exceed the budget."""
        seats = self.seats
        used = 0
        if not seats.prefilling:
            return used
        slots = seats.ranked
        slots = slots[seats.computed[slots] < seats.goal[slots]]
        order = slots.tolist()
        highest = seats.line[order[0]]
        if seats.line[order[-1]] > highest:
            order.sort(key=lambda slot: seats.line[slot] == highest or not self._is_overdue(slot))
        for slot in order:
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
            need = self.lifecycle.blocks_for(computed + count) - held
            if not self.preemption.make_room(need, slot, rows, self._now):
                count = (held + self.pool.available << self._shift) - computed
                if count <= 0 or not self.config.chunked_prefill:
                    continue
                need = self.lifecycle.blocks_for(computed + count) - held
            self._add_row(rows, slot, count, max(need, 0))
            used += count
        return used

    def _is_overdue(self, slot: int) -> bool:
        """Whether a prompt has let higher tiers go first, since it was seated, for as long as they may."""
        request = self.lifecycle.seated(slot)
        return self._now - request.since_s > self.policy.gives_precedence_s(request.tier)

    # ------------------------------------------------------------------ the plan

    def _add_row(self, rows: PlanRows, slot: int, count: int, new_blocks: int) -> None:
        blocks = self.pool.take(new_blocks)
        self.seats.append_blocks(slot, blocks)
        rows.add(slot, count, blocks)

    def _copies(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(device to host, host to device), int32 [m, 2]."""
        host = self.host
        if host is None:
            return NO_COPIES, NO_COPIES
        step_s = self.cost.predict(self.seats.taken, 0)
        most = int(_WRITE_SHARE * step_s / max(self.copy_cost.seconds(1), 1e-9))
        host.write_through(max(most, 1), self.pool.find)
        to_host, to_device = host.take_copies()
        return _columns(to_host), _columns(to_device)

    def _make_plan(
        self, rows: PlanRows, seated: list[Seat], to_host: NDArray[np.int32], to_device: NDArray[np.int32]
    ) -> Plan:
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
            to_host=to_host,
            to_device=to_device,
        )
        self.lifecycle.in_flight.append(plan)
        self._departures.append(seats.departures)
        return plan

    # ------------------------------------------------------------------ settling

    def settle(self, plan: Plan, result: Result, now: float) -> StepOutput:
        """Take in what a step computed; plans are settled in their order."""
        oldest = self.lifecycle.in_flight.popleft()
        assert oldest is plan, "plans are settled in their order"
        self._now = now
        self.stuck = False
        if len(self.waiting):
            self.lifecycle.waits.advance(now)
        if result.elapsed_s > 0 and len(plan.slot):
            self.cost.observe(plan.num_tokens, plan.kv_tokens, result.elapsed_s)
        copies = len(plan.to_host) + len(plan.to_device)
        if copies:
            assert self.host is not None
            self.host.settled()
            if result.copy_s > 0:
                self.copy_cost.observe(copies, result.copy_s)
        pad = self.config.padded_rows and self.config.batching != "continuous"
        settlement = Settlement(self.lifecycle, now, pad=pad)
        output = settlement.settle(plan, result, intact=self._departures.popleft() == self.seats.departures)
        for request in settlement.first_tokens:
            self.intake.first_token(request, now)
        return output

    # ------------------------------------------------------------------ invariants

    def check(self) -> None:
        """Raise ``AssertionError`` unless all bookkeeping agrees. For tests and for idle moments."""
        self.lifecycle.check()
        assert len(self._departures) == len(self.lifecycle.in_flight)
        if self._stands == (self.pool.releases, self.waiting.changes):
            assert len(self.waiting)
        if self.host is not None:
            self.host.check([r.swapped.host_blocks for r in self.waiting if r.swapped is not None])


def _candidate(request: Request, shared: int) -> Candidate:
    known, prompt = len(request.tokens), request.prompt_tokens
    return Candidate(known, known - prompt, request.limit - prompt, request.length_class, request.luck, shared)


def _columns(copies: list[tuple[int, int]]) -> NDArray[np.int32]:
    return np.array(copies, dtype=np.int32) if copies else NO_COPIES
