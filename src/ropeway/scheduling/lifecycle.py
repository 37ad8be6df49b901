"""A request's ways in, on and out: the bookkeeping of every change of state, without a decision in it.

             enqueue            seat                 finish
(arrival) ------------> waiting ------> seated ---------------> (gone)
                           ^   \\          |                        ^
                           |    `--------------- end -------------'
                           `--- preempt ---'   (blocks dropped, or pinned in host memory)
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from ropeway.cache.host import HostTier
from ropeway.cache.pool import BlockPool
from ropeway.outcome import Finished, Refusal
from ropeway.plan import Plan, Seat
from ropeway.request import FinishReason, Gate, Phase, Request, Swapped, Timeline
from ropeway.scheduling.admission import fixed_draw
from ropeway.scheduling.ledger import TierLedger
from ropeway.scheduling.lengths import LengthProfiles
from ropeway.scheduling.policy import Policy
from ropeway.scheduling.prefixes import PrefixCache
from ropeway.scheduling.queue import WaitingQueue
from ropeway.scheduling.seats import Seats
from ropeway.scheduling.waits import Reason, WaitAccounts
from ropeway.tiers import Tier

MAX_PREEMPTIONS = 3


class Lifecycle:
    """Owns the requests, their seats, the waiting lines and the references on blocks."""

    def __init__(
        self,
        slots: int,
        max_model_len: int,
        pool: BlockPool,
        host: HostTier | None,
        tiers: Sequence[Tier],
        policy: Policy,
        lengths: LengthProfiles,
    ) -> None:
        lines = len(tiers) if policy.tiered else 1
        self.pool = pool
        self.host = host
        self.tiers = tiers
        self.policy = policy
        self.lengths = lengths
        self.seats = Seats(slots, max_model_len, pool.block_size)
        self.waiting = WaitingQueue(lines)
        self.prefixes = PrefixCache(pool, host)
        self.waits = WaitAccounts(lines)
        self.ledgers = [TierLedger() for _ in tiers]
        self.wasted_rows: Counter[str] = Counter()
        """Rows computed in vain, by reason."""
        self.in_flight: deque[Plan] = deque()
        """Plans not settled yet."""
        self.requests: dict[int, Request] = {}
        """Everyone waiting, seated, or gone with a row in flight."""
        self.protected_life = 0
        """Blocks that the seated protected requests may come to need in all."""
        self.padding = 0
        """Seats of requests that have finished."""
        self._left_for: dict[int, str] = {}
        """Why requests that are gone left, while rows of theirs are in flight."""
        self._order = 0

    def find(self, request_id: int) -> Request | None:
        """A request that has not ended, by its internal id."""
        request = self.requests.get(request_id)
        return request if request is not None and request.finish is None else None

    def seated(self, slot: int) -> Request:
        request = self.seats.requests[slot]
        assert request is not None
        return request

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    @staticmethod
    def protected(request: Request) -> bool:
        """Preempted so often that it is no victim any more."""
        return request.preemptions >= MAX_PREEMPTIONS

    # ------------------------------------------------------------------ in

    def estimate(self, request: Request) -> None:
        """Fill in what is predicted of a request on its arrival."""
        tier = self.tiers[request.tier].name
        self._order += 1
        request.order = self._order
        request.luck = fixed_draw(self._order)
        request.length_class = self.lengths.handle(tier, request.tenant)
        most = request.limit - request.prompt_tokens
        request.predicted_tokens = max(round(self.lengths.mean(request.length_class, most)), 1)
        request.urgency = self.policy.urgency(request)

    def enqueue(self, request: Request, now: float) -> None:
        """Put a new request into its line. One with a leader waits for its prefill, one with a prefix on disk for
        that; it may come with a gate of its own."""
        self.requests[request.id] = request
        # A step of a beam search came with the search; what the steps before took is in their own accounts.
        request.phase, request.since_s = "queued", now if request.params.beam_step else min(request.arrival_s, now)
        leader = request.leader
        if leader is not None and leader.finish is None and not self.has_output(leader):
            self._gate(request)
            leader.followers.append(request)
        elif leader is None and self.prefixes.fetch(request, lambda: self.open_gate(request)):
            self._gate(request)
        self._wait(request, now)

    def _wait(self, request: Request, now: float) -> None:
        line = self.policy.line(request)
        self.waits.advance(now)
        if not self.waiting.lines[line].count:
            self.waits.waits_for(line, "step")
        self.waits.begin(request, line)
        self.waiting.add(request, line)
        self.ledgers[request.tier].waiting += 1

    def _wait_no_more(self, request: Request) -> None:
        line = self.policy.line(request)
        self.waits.end(request, line)
        self.waiting.remove(request, line)
        self.ledgers[request.tier].waiting -= 1

    @staticmethod
    def _gate(request: Request) -> None:
        """It waits for one thing more."""
        if request.gate is None:
            request.gate = Gate()
        else:
            request.gate.waits += 1

    def open_gate(self, request: Request) -> None:
        """One of the things that the request waited for is there."""
        assert request.gate is not None
        if request.gate.waits == 1 and request.finish is None:
            self.waits.end(request, self.policy.line(request))
        request.gate.waits -= 1
        self.waiting.changes += 1

    # ------------------------------------------------------------------ on

    def seat(self, request: Request, hits: list[int], in_host: Sequence[int], now: float) -> Seat:
        """Give a waiting request a slot. Its first blocks are ``hits``, found on the device; a swapped one gets the
        rest of what it had copied back, another one what is cached under ``in_host``."""
        self._wait_no_more(request)
        if not request.started:
            prompt_tokens = 0 if request.params.beam_step else request.prompt_tokens  # a search's counts once
            self.waiting.lines[self.policy.line(request)].charge(
                request.tenant, prompt_tokens=prompt_tokens, output_tokens=request.predicted_tokens
            )
        self._enter(request, "prefill", now)
        self.pool.acquire(hits)
        self.prefixes.count(request, len(hits), len(in_host))
        blocks, computed = self._bring_back(request, hits, in_host)
        protected = self.protected(request)
        if protected:
            self.protected_life += self.blocks_for(request.limit - 1)
        slot = self.seats.seat(request, self.policy.rank(request), blocks, computed=computed, protected=protected)
        request.published = len(hits)
        return Seat(
            slot=slot,
            token_ids=request.tokens,
            prompt_tokens=request.prompt_tokens,
            params=request.params,
            seed=request.seed,
            end_ids=request.end_ids,
            blocks=np.array(blocks, dtype=np.int32),
        )

    def _bring_back(self, request: Request, hits: list[int], in_host: Sequence[int]) -> tuple[list[int], int]:
        """(the blocks it starts with, the positions computed in them)."""
        size, swapped = self.pool.block_size, request.swapped
        places, computed = in_host, (len(hits) + len(in_host)) * size
        if swapped is not None:
            places = swapped.host_blocks[len(hits) :]
            computed = max(swapped.computed, len(hits) * size)
        if not places:
            self._drop_swapped(request)
            return hits, computed
        assert self.host is not None
        fresh = self.pool.take(len(places))
        self.host.read(places, fresh)
        if swapped is not None:
            self.host.swaps_in += len(places)
        self._drop_swapped(request)
        return hits + fresh, computed

    def preempt(self, slot: int, now: float, *, swap: bool) -> None:
        """Take the seat of a request and put it back into its line. With ``swap`` its blocks are copied to host memory
        if they fit there; else they are to be computed again."""
        request = self.seated(slot)
        if swap and self.host is not None:
            self._swap_out(request, self.host)
        self._leave_seat(request)
        phase: Phase = "preempted" if request.swapped is None else "swapped"
        kind = "recompute" if request.swapped is None else "swap"
        request.preemptions += 1
        request.timeline.preemptions[kind] = request.timeline.preemptions.get(kind, 0) + 1
        ledger = self.ledgers[request.tier]
        ledger.preemptions[kind] += 1
        ledger.swapped += request.swapped is not None
        self._enter(request, phase, now)
        self._wait(request, now)

    def _swap_out(self, request: Request, host: HostTier) -> None:
        blocks = self.seats.held(request.slot)
        keys = [] if request.keys is None or request.private else request.keys[1 : request.published + 1]
        places = host.swap_out(blocks, keys) if blocks else None
        if places is not None:
            request.swapped = Swapped(places, int(self.seats.computed[request.slot]))

    def _drop_swapped(self, request: Request) -> None:
        if request.swapped is not None:
            assert self.host is not None
            self.host.unpin(request.swapped.host_blocks)
            request.swapped = None
            self.ledgers[request.tier].swapped -= 1

    def _leave_seat(self, request: Request) -> None:
        slot = request.slot
        blocks, served = self.seats.held(slot), self.seats.served[slot]
        self.seats.unseat(slot, self.policy.rank(request))
        plans = [plan for plan in self.in_flight if plan.seq <= served]
        request.unsettled = sum(bool((plan.request == request.id).any()) for plan in plans)
        if self.protected(request):
            self.protected_life -= self.blocks_for(request.limit - 1)
        self.pool.release(blocks)

    def saw_token(self, request: Request, now: float) -> None:
        """Its first token since it was seated has come."""
        if request.phase == "prefill":
            self._enter(request, "decode", now)

    def _enter(self, request: Request, phase: Phase, now: float) -> None:
        name = f"{request.phase}_s"
        timeline = request.timeline
        setattr(timeline, name, getattr(timeline, name) + max(now - request.since_s, 0.0))
        request.phase, request.since_s = phase, max(now, request.since_s)

    # ------------------------------------------------------------------ out

    def finish(self, request: Request, token: int, now: float, *, pad: bool = False) -> Finished:
        """End a request that met an end token or its length limit with ``token``. With ``pad`` its row goes on."""
        met = token in request.end_ids
        length = int(self.seats.length[request.slot]) if request.slot >= 0 else len(request.tokens)
        output = length - request.prompt_tokens
        tier, ledger = self.tiers[request.tier], self.ledgers[request.tier]
        if request.params.beam_step is None:  # its length says nothing of how long answers get
            self.lengths.observe(tier.name, request.tenant, output)
        ledger.finished += 1
        ledger.predicted_tokens += request.predicted_tokens
        ledger.output_tokens += output
        reason = FinishReason.STOP if met else FinishReason.LENGTH
        timeline = self.end(request, reason, "eos", now, pad=pad and request.slot >= 0)
        return Finished(request.id, reason, token if met else None, timeline=timeline)

    def refuse(self, request: Request, refusal: Refusal, code: str, now: float) -> Finished:
        """End a request that is in here with an error."""
        self.ledgers[request.tier].refused[code] += 1
        timeline = self.end(request, FinishReason.ERROR, "refused", now)
        return Finished(request.id, FinishReason.ERROR, refusal=refusal, timeline=timeline)

    def end(self, request: Request, finish: FinishReason, left_for: str, now: float, *, pad: bool = False) -> Timeline:
        """Forget a request. Rows of it in flight count as wasted for ``left_for``."""
        self.waits.advance(now)
        self._enter(request, request.phase, now)
        timeline = self.timeline(request, now)
        timeline.phase = "finished"
        if request.started:
            beyond = timeline.output_tokens - request.predicted_tokens
            self.waiting.lines[self.policy.line(request)].charge(request.tenant, output_tokens=beyond)
        if pad:
            self.seats.pad(request.slot)
            self.padding += 1
            left_for = "padding"
        elif request.slot >= 0:
            self._leave_seat(request)
        else:
            self._wait_no_more(request)
            self._drop_swapped(request)
        request.finish = finish
        self._hand_over(request)
        self._left_for[request.id] = left_for
        self._forget_when_settled(request)
        return timeline

    def drop_padding(self, slot: int) -> None:
        """End the row of a request that has finished."""
        request = self.seated(slot)
        self._leave_seat(request)
        self.padding -= 1
        self._forget_when_settled(request)

    def settled_in_vain(self, request: Request) -> None:
        """A row of a request that has ended was computed."""
        self.wasted_rows[self._left_for[request.id]] += 1
        self._forget_when_settled(request)

    def _forget_when_settled(self, request: Request) -> None:
        if request.slot < 0 and not request.unsettled:
            del self.requests[request.id], self._left_for[request.id]

    def open_followers(self, request: Request) -> None:
        """Its prompt is in the cache."""
        for follower in request.followers:
            self.open_gate(follower)
        request.followers.clear()

    def _hand_over(self, leader: Request) -> None:
        """A leader that ends before its first token: one of its siblings goes ahead instead."""
        followers = [follower for follower in leader.followers if follower.finish is None]
        leader.followers.clear()
        if followers:
            heir, *others = followers
            heir.leader = leader if leader.started else leader.leader  # what that one has computed is no prefix hit
            self.open_gate(heir)
            for other in others:
                other.leader = heir
            heir.followers = others

    # ------------------------------------------------------------------ telling

    def has_output(self, request: Request) -> bool:
        length = self.seats.length[request.slot] if request.slot >= 0 else len(request.tokens)
        return bool(length > request.prompt_tokens)

    def timeline(self, request: Request, now: float) -> Timeline:
        """Where its time has gone up to now."""
        length = int(self.seats.length[request.slot]) if request.slot >= 0 else len(request.tokens)
        known, waits = request.timeline, request.timeline.waits
        if request.slot < 0 and request.finish is None:
            self.waits.advance(now)
            waits = self.waits.since(request, self.policy.line(request))
        timeline = Timeline(
            tier=self.tiers[request.tier].name,
            phase=request.phase,
            queued_s=known.queued_s,
            prefill_s=known.prefill_s,
            decode_s=known.decode_s,
            preempted_s=known.preempted_s,
            swapped_s=known.swapped_s,
            waits=dict(waits),
            preemptions=dict(known.preemptions),
            output_tokens=length - request.prompt_tokens,
            cached_tokens=request.cached_tokens or 0,
        )
        name = f"{request.phase}_s"
        setattr(timeline, name, getattr(timeline, name) + max(now - request.since_s, 0.0))
        return timeline

    def waits_for(self, line: int, reason: Reason) -> None:
        self.waits.waits_for(line, reason)

    # ------------------------------------------------------------------ invariants

    def check(self) -> None:
        """Raise ``AssertionError`` unless blocks, seats, lines and requests agree."""
        seats = self.seats
        seats.check()
        seated = seats.ranked.tolist()
        self.pool.check([seats.held(slot) for slot in seated])
        assert self.padding == int(seats.padding[seated].sum())
        ranks = []
        for slot in seated:
            request = self.seated(slot)
            ranks.append(self.policy.rank(request))
            assert request.slot == slot
            assert request.swapped is None
            assert request.preemptions <= MAX_PREEMPTIONS
            assert seats.protected[slot] == self.protected(request)
            assert self.requests[request.id] is request
            assert seats.blocks_held[slot] == self.blocks_for(int(seats.computed[slot]))
            assert seats.length[slot] <= seats.limit[slot]
            assert bool(seats.padding[slot]) == (request.finish is not None)
        assert ranks == sorted(ranks)
        lives = [self.blocks_for(self.seated(slot).limit - 1) for slot in seated if seats.protected[slot]]
        assert sum(lives) == self.protected_life <= self.pool.num_blocks
        waiting = list(self.waiting)
        assert len(waiting) == len(self.waiting) == sum(ledger.waiting for ledger in self.ledgers)
        for request in waiting:
            assert request.slot < 0
            assert request.finish is None
            assert self.requests[request.id] is request
        assert sum(ledger.swapped for ledger in self.ledgers) == sum(r.swapped is not None for r in waiting)
        if not self.requests:
            assert self.pool.live == 0
