"""The real engine in a made-up world: a fake device, a fake disk, a clock that the test moves, and a watchdog.

The scheduler's "Never" list is looked through all the time:

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

from ropeway.cache.host import HostTier
from ropeway.cache.pool import BlockPool
from ropeway.cache.transfer import BlockStore
from ropeway.config import SchedulerConfig
from ropeway.engine.engine import Engine
from ropeway.engine.messages import NewRequest
from ropeway.outcome import Finished, StepOutput
from ropeway.plan import Plan
from ropeway.request import Request, SamplingParams
from ropeway.scheduling.cost import StepCost
from ropeway.scheduling.scheduler import MAX_PREEMPTIONS, Scheduler
from ropeway.tiers import DEFAULT_TIERS, Tier
from tests.support.fake_device import END, FakeDevice, FakeWork, HostBlock
from tests.support.fake_store import FakeStore
from tests.support.verdicts import check_ledgers, check_record, check_timeline
from tests.support.watchdog import Watchdog

MAX_LEN = 48
STEP_COST = (0.01, 0.001, 1e-5)
"""Seconds of a step, per token, per cached token, by which the device's steps are said to last."""
_TICK_S = 1e-6
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
        self.plan: Plan | None = None
        """Made in the step at hand."""
        self._next_id = 0
        self._accepted: set[int] = set()
        self._watchdog = Watchdog(self)

    # ------------------------------------------------------------------ between engine and device: an executor

    def forward(self, plan: Plan) -> FakeWork:
        assert len(plan.slot) <= self.config.max_num_seqs
        if self.config.chunked_prefill or len(plan.slot) > 1:
            assert plan.num_tokens <= self.config.max_batched_tokens
        for request_id in plan.request.tolist():
            record = self.records[request_id]
            assert not record.aborted, "a step of a request that was aborted"
            assert record.finished is None or self.config.padded_rows, "a step of a request that has ended"
        for copies in (plan.to_host, plan.to_device[:, ::-1]):
            if len(copies):
                assert copies.min() >= 0
                assert copies[:, 0].max() < self.pool.num_blocks
                assert copies[:, 1].max() < self.setup.host_blocks
        self.plan = plan
        return self.device.forward(plan)

    def close(self) -> None:
        self.device.close()

    # ------------------------------------------------------------------ between engine and clients: the outbox

    def receive(self, output: StepOutput) -> None:
        self._accepted.update(output.accepted)
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
            assert (new.id in self._accepted) == record.live, "neither accepted nor refused"
            assert (record.request is not None) == record.live
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
        self.plan = None
        self._watchdog.before()
        self.engine.step(ahead)
        self.steps += 1
        self.check()
        self._watchdog.after(ahead)

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
            check_timeline(self, record, timeline, self.clock.now)

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
            check_record(self, record)
        check_ledgers(self)
        self._count()

    # ------------------------------------------------------------------ inside

    def _note_abort(self, record: Record) -> None:
        request = record.request
        assert request is not None
        self.seen["aborts"] += 1
        self.seen["aborts while swapped"] += request.swapped is not None
        self.seen["aborts while running"] += request.slot >= 0
        self.seen["aborts of siblings"] += bool(request.followers)
        self.seen["aborts while a prefix is loaded"] += request.gated and request.leader is None

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
