"""The real engine in a made-up world: a fake device, a fake disk, a clock that the test moves, and a watchdog.

After every step the "Never" list of the scheduler is looked through:

- running == 0 and waiting > 0 while the blocks would suffice
- running > max_num_seqs; a request preempted more than ``MAX_PREEMPTIONS`` times; a lone request that preempts itself
- an accounting leak: in the pools, in the ledgers, in what requests are told about their time
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ropeway import errors
from ropeway.cache.host import HostTier
from ropeway.cache.pool import BlockPool
from ropeway.cache.transfer import BlockStore
from ropeway.config import SchedulerConfig
from ropeway.engine.engine import Engine
from ropeway.engine.messages import NewRequest
from ropeway.outcome import Finished, StepOutput
from ropeway.plan import Plan
from ropeway.request import FinishReason, Request, SamplingParams, Timeline
from ropeway.scheduling.cost import StepCost
from ropeway.scheduling.scheduler import MAX_PREEMPTIONS, Scheduler
from ropeway.tiers import DEFAULT_TIERS, Tier
from tests.support.fake_device import END, FakeDevice, FakeWork, HostBlock, alone
from tests.support.fake_store import FakeStore

MAX_LEN = 48
STEP_COST = (0.01, 0.001, 1e-5)
"""Seconds of a step, per token, per cached token, by which the device's steps are said to last."""
_TICK_S = 1e-6
_CODES = {
    "Shed": "shed",
    "QueueFull": "queue_full",
    "QueueTimeout": "queue_timeout",
    "DeadlineExceeded": "deadline_exceeded",
}
"""Error -> the name under which refusals are counted."""

StoreOf = Callable[[MutableSequence[HostBlock | None]], BlockStore]


class Clock:
    """Seconds; every look at it takes a moment, so that no two are the same."""

    def __init__(self) -> None:
        self.now = 0.0
        """What the last look has shown, unless it was moved since."""

    def __call__(self) -> float:
        self.now += _TICK_S
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True)
class Setup:
    """An engine."""

    blocks: int = 24
    block_size: int = 4
    max_num_seqs: int = 4
    budget: int = 32
    chunked: bool = True
    prefix_cache: bool = True
    policy: str = "priority"
    admission: str = "greedy"
    batching: str = "continuous"
    padded_rows: bool = False
    preemption: str = "auto"
    step_budget: str = "constant"
    shed: bool = True
    aging_s: float = 10.0
    batch_window_s: float = 0.1
    cost_known: bool = True
    """Whether step times are known from the start."""
    copy_s: float = 0.0
    """What copying a block is said to take; 0: it is not measured."""
    tiers: tuple[Tier, ...] = DEFAULT_TIERS
    host_blocks: int = 0

    def config(self) -> SchedulerConfig:
        fields: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                *("policy", "admission", "batching", "padded_rows", "preemption", "step_budget", "shed", "aging_s"),
                "batch_window_s",
            )
        }
        return SchedulerConfig(
            max_num_seqs=min(self.max_num_seqs, self.budget),
            max_batched_tokens=self.budget,
            chunked_prefill=self.chunked,
            **fields,
        )


@dataclass(frozen=True)
class Arrival:
    """A call for ``params.n`` completions."""

    prompt: tuple[int, ...]
    params: SamplingParams
    salt: bytes = b""
    tier: int = 0
    """Modulo the number of tiers."""
    tenant: str = ""
    early_s: float = 0.0
    """How long before the engine hears of it it came."""
    timeout_s: float | None = None


@dataclass
class Record:
    """What is known of a request, and what was said to it."""

    arrival: Arrival
    new: NewRequest
    arrival_s: float
    request: Request | None = None
    """The scheduler's; None: it was refused at once, or its time was over when the engine heard of it."""
    aborted: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int | None = None
    finished: Finished | None = None
    ended_s: float = 0.0

    @property
    def live(self) -> bool:
        return self.finished is None and not self.aborted


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


class World:
    """Everything around one engine, from its start to its end."""

    def __init__(
        self,
        setup: Setup,
        store_of: StoreOf | None = None,
        host: MutableSequence[HostBlock | None] | None = None,
        before: Sequence[World] = (),
    ) -> None:
        """``store_of``: makes the disk over the device's host blocks. ``host``: the host blocks' memory. ``before``:
        whose disk it is, too."""
        self.setup = setup
        self.before = before
        self.clock = Clock()
        self.records: dict[int, Record] = {}
        self.seen: Counter[str] = Counter()
        blocks, size = setup.blocks, setup.block_size
        self.max_len = min(MAX_LEN, blocks * size)
        self.device = FakeDevice(
            blocks, size, setup.host_blocks if host is None else host, step_s=_step_s, copy_s=setup.copy_s
        )
        self.pool = BlockPool(blocks, size)
        self.store = None if store_of is None else store_of(self.device.host)
        self.host = HostTier(BlockPool(setup.host_blocks, size), self.store) if setup.host_blocks else None
        self.config = setup.config()
        self.scheduler = Scheduler(
            self.config,
            self.pool,
            self.max_len,
            tiers=setup.tiers,
            host=self.host,
            cost=StepCost(*STEP_COST) if setup.cost_known else None,
        )
        self.engine = Engine(
            self.scheduler,
            self,
            self.receive,
            max_model_len=self.max_len,
            end_ids=(END,),
            prefix_cache=setup.prefix_cache,
            clock=self.clock,
        )
        self.steps = 0
        self._plan: Plan | None = None
        """Made in the step at hand."""
        self._stalled = 0
        self._next_id = 0
        self._output_seen = False

    # ------------------------------------------------------------------ between engine and device: an executor

    def forward(self, plan: Plan) -> FakeWork:
        assert len(plan.slot) <= self.config.max_num_seqs
        if self.config.chunked_prefill or len(plan.slot) > 1:
            assert plan.num_tokens <= self.config.max_batched_tokens
        for request_id in plan.request.tolist():
            record = self.records[request_id]
            assert not record.aborted, "a step of a request that was aborted"
            assert record.finished is None or self.config.padded_rows, "a step of a request that has ended"
        host_blocks = self.setup.host_blocks
        for copies, most in ((plan.to_host, (self.pool.num_blocks, host_blocks)), (plan.to_device[:, ::-1], None)):
            del most
            if len(copies):
                assert 0 <= copies[:, 0].min() <= copies[:, 0].max() < self.pool.num_blocks
                assert 0 <= copies[:, 1].min() <= copies[:, 1].max() < host_blocks
        self._plan = plan
        return self.device.forward(plan)

    def close(self) -> None:
        self.device.close()

    # ------------------------------------------------------------------ between engine and clients: the outbox

    def receive(self, output: StepOutput) -> None:
        for request_id in output.accepted:
            assert self.records[request_id].request is None
        for started in output.started:
            record = self.records[started.id]
            assert record.cached is None, "started twice"
            assert not record.tokens
            record.cached = started.cached_tokens
        for request_id, token in zip(output.ids.tolist(), output.tokens.tolist(), strict=True):
            record = self.records[request_id]
            assert record.live, "a token after the end"
            record.tokens.append(token)
        if output.logprobs is not None:
            for row, chosen in zip(output.logprobs.row.tolist(), output.logprobs.chosen.tolist(), strict=True):
                self.records[int(output.ids[row])].logprobs.append(chosen)
        for finished in output.finished:
            record = self.records[finished.id]
            assert record.live, "finished twice"
            record.finished = finished
            record.ended_s = self.clock.now

    # ------------------------------------------------------------------ what happens

    def submit(self, arrival: Arrival) -> list[int]:
        """Ids of the completions asked for."""
        ids = [self._next_id + i for i in range(arrival.params.n)]
        self._next_id += arrival.params.n
        now = self.clock.now
        came = max(now - arrival.early_s, 0.0)
        group = [
            NewRequest(
                id=request_id,
                prompt=np.array(arrival.prompt, dtype=np.int32),
                params=arrival.params,
                seed=request_id * 7,
                salt=arrival.salt,
                leader=None if request_id == ids[0] else ids[0],
                group=arrival.params.n > 1,
                tier=arrival.tier % len(self.setup.tiers),
                tenant=arrival.tenant,
                arrival_s=came,
                deadline_s=None if arrival.timeout_s is None else came + arrival.timeout_s,
            )
            for request_id in ids
        ]
        for new in group:
            self.records[new.id] = Record(arrival, new, came)
        self.engine.submit(group)
        for new in group:
            record = self.records[new.id]
            record.request = self.scheduler.find(new.id)
            assert (record.request is None) == (record.finished is not None), "neither accepted nor refused"
        self.scheduler.check()
        return ids

    def abort(self, request_id: int) -> None:
        record = self.records[request_id]
        if record.live:
            self._note_abort(record)
            record.aborted = True
        self.engine.abort([request_id], "disconnect")
        assert self.scheduler.find(request_id) is None
        self.scheduler.check()

    def find(self, state: Literal["swapped", "loading"]) -> int | None:
        """Id of a request whose blocks are in host memory, or whose prefix is on its way from disk."""
        for request_id, record in self.records.items():
            request = record.request
            if not record.live or request is None:
                continue
            if request.swapped is not None if state == "swapped" else request.gated and request.leader is None:
                return request_id
        return None

    def step(self, ahead: int, seconds: float = 0.0) -> None:
        """One step of the engine, before which time goes on; further if nothing can be done before."""
        self.clock.advance(seconds)
        patience_s = self.engine.patience_s()
        assert patience_s >= 0
        if self.scheduler.stuck:
            self.clock.advance(patience_s)
        began = self.clock.now
        waiting, lone = self._waiting(), self._lone()
        preemptions = self._preemptions()
        self._plan = None
        self.engine.step(ahead)
        self.steps += 1
        self.check()
        self._check_victims(*preemptions)
        self._check_order(waiting)
        self._check_expiry(began)
        self._watch(began)
        if not ahead:
            assert self._plan is not None or not self.scheduler.seats.taken, "nobody of those who run can go on"
        if lone is not None:
            assert self.scheduler.lifecycle.requests.get(lone[0].id) is None or lone[0].preemptions == lone[1], (
                "a lone request preempts itself"
            )

    def settle(self) -> None:
        """Bring in every step in flight."""
        self.engine.drain()
        self.check()

    def finish(self, aheads: tuple[int, ...] = (0,), seconds: float = 0.01, most: int = 4000) -> None:
        """Step until nobody is left."""
        for i in range(most):
            if not self.engine.has_work:
                return
            self.step(aheads[i % len(aheads)], seconds)
        raise AssertionError("livelock")

    # ------------------------------------------------------------------ what must hold at any time

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.check()
        assert scheduler.seats.taken <= self.config.max_num_seqs
        assert self.engine.has_work or not len(scheduler.waiting)
        assert all(r.request.preemptions <= MAX_PREEMPTIONS for r in self.records.values() if r.request is not None)
        live = {request_id for request_id, record in self.records.items() if record.live}
        known = {i for i, request in scheduler.lifecycle.requests.items() if request.finish is None}
        assert live == known, "the engine and its clients differ about who is there"
        by_tier = Counter(request.tier for request in scheduler.waiting)
        assert [ledger.waiting for ledger in scheduler.lifecycle.ledgers] == [
            by_tier[tier] for tier in range(len(self.setup.tiers))
        ]

    def check_timelines(self) -> None:
        """What everybody here would be told about their time."""
        live = [request_id for request_id, record in self.records.items() if record.live]
        timelines = self.engine.explain([*live, -1])
        assert sorted(timelines) == live
        for request_id, timeline in timelines.items():
            record = self.records[request_id]
            assert timeline.phase != "finished"
            self._check_timeline(record, timeline, self.clock.now)

    def check_stats(self) -> None:
        stats = self.engine.stats()
        assert stats.blocks_live + stats.blocks_cached + stats.blocks_free == self.pool.num_blocks
        pinned, cached, free = stats.host_blocks_pinned, stats.host_blocks_cached, stats.host_blocks_free
        assert pinned + cached + free == self.setup.host_blocks
        assert stats.running == sum(tier.running for tier in stats.tiers.values()) == self.scheduler.seats.taken
        assert stats.waiting == sum(tier.waiting for tier in stats.tiers.values())

    # ------------------------------------------------------------------ what must hold at the end

    def check_end(self, wait: Callable[[], None] = lambda: None) -> None:
        """Everybody has ended, as it should, and nothing is held any more. ``wait``: gives the disk time."""
        assert not self.engine.has_work
        assert not self.scheduler.lifecycle.requests
        assert self.pool.live == 0
        assert self.pool.free + self.pool.cached == self.pool.num_blocks
        if self.host is not None:
            for _ in range(1000):
                self.host.poll()
                if not self.host.pool.live:
                    break
                wait()
            assert self.host.pool.live == 0
            self.host.check([])
            assert self.host.pool.free + self.host.pool.cached == self.setup.host_blocks
        for record in self.records.values():
            self._check_record(record)
        self._check_ledgers()
        self._count()

    # ------------------------------------------------------------------ inside: after each step

    def _waiting(self) -> list[_Waiting]:
        policy = self.scheduler.policy
        return [
            _Waiting(r, (r.urgency, r.order), policy.line(r), r.started, r.gated, r.preemptions)
            for r in self.scheduler.waiting
        ]

    def _lone(self) -> tuple[Request, int] | None:
        """The only request there is, and how often it was preempted."""
        scheduler = self.scheduler
        if scheduler.lifecycle.padding or scheduler.seats.taken + len(scheduler.waiting) != 1:
            return None
        (request,) = (r for r in scheduler.lifecycle.requests.values() if r.finish is None)
        return request, request.preemptions

    def _check_order(self, waiting: list[_Waiting]) -> None:
        """Nobody was passed by one behind it in its line, but with a closed gate, or protected."""
        left = [w for w in waiting if w.request.finish is None and w.request.slot < 0 and not w.held]
        left = [w for w in left if w.preemptions == w.request.preemptions < MAX_PREEMPTIONS]
        seated = [w for w in waiting if w.request.slot >= 0]
        for ahead in left:
            for behind in seated:
                if ahead.line != behind.line:
                    continue
                if ahead.started == behind.started and ahead.request.tenant == behind.request.tenant:
                    assert behind.key < ahead.key, "a request was passed by one behind it"
                else:
                    assert behind.started or not ahead.started, "a resumed request was passed by a new one"

    def _preemptions(self) -> tuple[dict[int, int], int]:
        """(how often each was preempted, how often somebody gave way to a higher tier)."""
        lifecycle = self.scheduler.lifecycle
        each = {i: request.preemptions for i, request in lifecycle.requests.items() if request.finish is None}
        return each, sum(ledger.preemptions["admission"] for ledger in lifecycle.ledgers)

    def _check_victims(self, each: dict[int, int], for_tier: int) -> None:
        """Nobody gave way but to one ahead of it, or to one that is protected; nor in vain."""
        requests, rank = self.scheduler.lifecycle.requests, self.scheduler.policy.rank
        victims = [requests[i] for i, count in each.items() if i in requests and requests[i].preemptions > count]
        if not victims:
            return
        assert self._plan is not None, "somebody gave way in vain"
        seats = [self.scheduler.seats.request_id[seat.slot] for seat in self._plan.seats]
        gained = [self.records[i].request for i in {*self._plan.request.tolist(), *seats} if i >= 0]
        protected = [r for r in gained if r is not None and r.preemptions >= MAX_PREEMPTIONS]
        if protected:
            return
        for victim in victims:
            assert any(r is not None and rank(r) < rank(victim) for r in gained), "a request gave way to one behind it"
        if self._preemptions()[1] > for_tier:
            assert self._plan.seats, "a request gave way in vain to a higher tier"

    def _check_expiry(self, began: float) -> None:
        for record in self.records.values():
            if not record.live:
                continue
            assert record.new.deadline_s is None or record.new.deadline_s > began, "a deadline was overlooked"
            limit = self.setup.tiers[record.new.tier].queue_limit_s
            if limit is not None and record.request is not None and not record.request.started:
                assert record.arrival_s + limit > began, "the time limit of a queue was overlooked"

    def _watch(self, began: float) -> None:
        """Nobody runs though somebody could: for one step, while the last ones are settled."""
        scheduler = self.scheduler
        able = [r for r in scheduler.waiting if not r.gated and not r.unsettled]
        window = (
            self.config.batching == "dynamic"
            and len(scheduler.waiting) > 0
            and began < scheduler.intake.window_ends_s()
        )
        stalled = not scheduler.seats.taken and able and not window
        self._stalled = self._stalled + 1 if stalled else 0
        assert self._stalled <= 2, "nobody runs, somebody waits, and the blocks would suffice"

    def _note_abort(self, record: Record) -> None:
        request = record.request
        assert request is not None
        self.seen["aborts"] += 1
        self.seen["aborts while swapped"] += request.swapped is not None
        self.seen["aborts while running"] += request.slot >= 0
        self.seen["aborts of siblings"] += bool(request.followers)
        self.seen["aborts while a prefix is loaded"] += request.gated and request.leader is None

    # ------------------------------------------------------------------ inside: at the end

    def _check_record(self, record: Record) -> None:
        arrival, new = record.arrival, record.new
        limit = min(self.max_len, len(arrival.prompt) + (arrival.params.max_tokens or self.max_len))
        end_ids = (() if arrival.params.ignore_eos else (END,)) + arrival.params.stop_token_ids
        finished = record.finished
        if len(arrival.prompt) >= limit:
            assert finished is not None
            assert finished.refusal is not None
            assert finished.refusal.error == "ContextLengthExceeded"
            assert not record.tokens
            return
        want = alone(arrival.prompt, arrival.params, new.seed, end_ids, limit)
        got = record.tokens
        if arrival.params.logprobs is not None:
            assert record.logprobs == [-float(t) for t in got]
        assert record.cached is None or record.cached <= len(arrival.prompt) - 1
        if record.cached:
            assert self.setup.prefix_cache
            found = arrival.prompt[: record.cached]
            assert self._could_find(record, found), "a prefix was found that nobody could have left"
        if finished is None:
            assert record.aborted
            assert got == want[: len(got)]
            return
        assert not record.aborted
        assert finished.timeline is not None
        assert finished.timeline.phase == "finished"
        self._check_timeline(record, finished.timeline, record.ended_s)
        if finished.reason is FinishReason.ERROR:
            assert got == want[: len(got)]
            self._check_refusal(record, finished)
            return
        assert got == want
        assert finished.reason is (FinishReason.STOP if want[-1] in end_ids else FinishReason.LENGTH)
        assert finished.end_token == (want[-1] if want[-1] in end_ids else None)
        assert finished.refusal is None

    def _could_find(self, record: Record, found: tuple[int, ...]) -> bool:
        """Whether a call other than the record's own may have left this prefix."""
        first = record.new.id if record.new.leader is None else record.new.leader
        others = [r for r in self.records.values() if first not in (r.new.id, r.new.leader)]
        others += [r for world in self.before for r in world.records.values()]
        return any(
            (*r.arrival.prompt, *r.tokens)[: len(found)] == found
            for r in others
            if r.arrival.salt == record.arrival.salt
        )

    def _check_refusal(self, record: Record, finished: Finished) -> None:
        refusal, tier, new = finished.refusal, self.setup.tiers[record.new.tier], record.new
        assert refusal is not None
        assert issubclass(getattr(errors, refusal.error), errors.RopewayError)
        assert refusal.message
        match refusal.error:
            case "Shed":
                assert self.config.shed
                assert tier.ttft_s is not None
            case "QueueFull":
                assert tier.max_queue is not None or tier.max_queue_tokens is not None
            case "QueueTimeout":
                assert tier.queue_limit_s is not None
                assert record.ended_s >= record.arrival_s + tier.queue_limit_s
                assert record.request is None or not record.request.started
            case "DeadlineExceeded":
                assert new.deadline_s is not None
                assert record.ended_s >= new.deadline_s
            case _:
                raise AssertionError(refusal.error)
        if refusal.error in ("Shed", "QueueFull"):
            assert record.request is None
            assert refusal.retry_after_s is not None
            assert refusal.retry_after_s >= 1

    def _check_timeline(self, record: Record, timeline: Timeline, now: float) -> None:
        """The phases sum to the time since its arrival; so do the reasons, to the time without a seat, but for what
        passed before the engine heard of it."""
        request = record.request
        assert timeline.tier == self.setup.tiers[record.new.tier].name
        assert timeline.output_tokens == len(record.tokens)
        if request is None:
            over = record.finished is not None and record.finished.refusal is not None
            over = over and record.finished.refusal.error in ("DeadlineExceeded", "QueueTimeout")
            assert abs(timeline.total_s - (now - record.arrival_s if over else 0)) < 1e-6
            return
        parts = timeline.queued_s, timeline.prefill_s, timeline.decode_s, timeline.preempted_s, timeline.swapped_s
        assert min(parts) >= 0
        assert abs(timeline.total_s - (now - record.arrival_s)) < 1e-6
        assert sum(timeline.preemptions.values()) == request.preemptions
        assert timeline.cached_tokens == (request.cached_tokens or 0)
        unseated, explained = sum(parts) - timeline.prefill_s - timeline.decode_s, sum(timeline.waits.values())
        assert min(timeline.waits.values(), default=0.0) >= 0
        assert explained <= unseated + 1e-6
        if request.gate is None:
            assert "gate" not in timeline.waits
        if request.gated and timeline.phase == "queued":
            assert set(timeline.waits) <= {"gate"}
        assert explained >= unseated - record.arrival.early_s - 1e-4, "time without a seat that nothing explains"

    def _check_ledgers(self) -> None:
        for rank, ledger in enumerate(self.scheduler.lifecycle.ledgers):
            assert (ledger.waiting, ledger.swapped) == (0, 0)
            records = [record for record in self.records.values() if record.new.tier == rank]
            requests = [record.request for record in records if record.request is not None]
            served, refused = [], Counter[str]()
            for record in records:
                finished = record.finished
                if finished is None:
                    continue
                if finished.refusal is None:
                    served.append(record)
                elif finished.refusal.error in _CODES:
                    refused[_CODES[finished.refusal.error]] += 1
            assert +ledger.refused == refused
            assert ledger.finished == len(served)
            assert ledger.output_tokens == sum(len(record.tokens) for record in served)
            assert ledger.predicted_tokens == sum(r.request.predicted_tokens for r in served if r.request is not None)
            kinds = ledger.preemptions
            assert kinds["swap"] + kinds["recompute"] == sum(request.preemptions for request in requests)
            assert kinds["admission"] <= kinds["swap"] + kinds["recompute"]

    def _count(self) -> None:
        scheduler, seen = self.scheduler, self.seen
        for ledger in scheduler.lifecycle.ledgers:
            seen["swap preemptions"] += ledger.preemptions["swap"]
            seen["recompute preemptions"] += ledger.preemptions["recompute"]
            seen["admission preemptions"] += ledger.preemptions["admission"]
            for code, number in ledger.refused.items():
                seen[code] += number
            seen["finished"] += ledger.finished
        seen["requests"] += len(self.records)
        seen["prefix hits"] += scheduler.prefixes.hits
        seen["host hits"] += scheduler.prefixes.host_hits
        seen["cut prompts"] += self.device.cut_rows
        for reason, rows in scheduler.wasted_rows.items():
            seen[f"wasted: {reason}"] += rows
        if self.host is not None:
            seen["swapped out"] += self.host.swaps_out
            seen["swapped in"] += self.host.swaps_in
        if self.store is not None:
            seen["disk hits"] += scheduler.prefixes.disk_hits
        if isinstance(self.store, FakeStore):
            seen["disk loads"] += self.store.loaded
            seen["failed disk loads"] += self.store.failed_loads
            seen["failed disk saves"] += self.store.failed_saves


def _step_s(plan: Plan) -> float:
    a, b, c = STEP_COST
    return a + b * plan.num_tokens + c * int((plan.start + plan.count).sum())
