"""The step loop: what it asks of the executor in which order, and what it tells the outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ropeway.cache.host import HostTier
from ropeway.cache.pool import BlockPool
from ropeway.config import SchedulerConfig
from ropeway.engine.engine import Engine
from ropeway.engine.messages import NewRequest
from ropeway.outcome import StepOutput
from ropeway.plan import Masks, Plan, Result
from ropeway.request import FinishReason, SamplingParams
from ropeway.scheduling.scheduler import Scheduler
from ropeway.tiers import DEFAULT_TIERS, Tier, find_tier
from tests.support.fake_device import END, FakeDevice, alone
from tests.support.fake_store import FakeStore
from tests.support.line import TOKEN


class RecordedWork:
    def __init__(self, calls: list[str], plan: Plan) -> None:
        self.plan = plan
        self._calls = calls

    def sample(self, masks: Masks | None = None) -> None:
        self._calls.append(f"sample {self.plan.seq}")

    def result(self) -> Result:
        self._calls.append(f"settle {self.plan.seq}")
        return Result(np.full(int(self.plan.samples.sum()), TOKEN, dtype=np.int32))


class Recorder:
    """Implements ``Executor``: writes down what it is asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self, plan: Plan) -> RecordedWork:
        self.calls.append(f"forward {plan.seq}")
        return RecordedWork(self.calls, plan)

    def close(self) -> None:
        self.calls.append("close")


class Bench:
    """An engine over an executor, and everything it has said."""

    def __init__(
        self,
        executor: Recorder | FakeDevice,
        *,
        blocks: int = 32,
        block_size: int = 4,
        budget: int = 64,
        seats: int = 8,
        prefix_cache: bool = True,
        tiers: Sequence[Tier] = DEFAULT_TIERS,
        host: HostTier | None = None,
    ) -> None:
        max_len = min(128, blocks * block_size)
        config = SchedulerConfig(max_num_seqs=seats, max_batched_tokens=budget)
        self.said: list[StepOutput] = []
        self.now = 0.0
        """The engine's clock; the test moves it."""
        self.scheduler = Scheduler(config, BlockPool(blocks, block_size), max_len, tiers=tiers, host=host)
        self.engine = Engine(
            self.scheduler,
            executor,
            self.said.append,
            max_model_len=max_len,
            end_ids=(END,),
            prefix_cache=prefix_cache,
            clock=lambda: self.now,
        )

    def submit(self, request_id: int, prompt: list[int], *, tier: str = "standard", **fields: Any) -> NewRequest:
        """``fields``: of ``NewRequest`` or of ``SamplingParams``."""
        of_request = {name: fields.pop(name) for name in ("deadline_s", "arrival_s", "tenant") if name in fields}
        new = NewRequest(
            id=request_id,
            prompt=np.array(prompt, dtype=np.int32),
            params=SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **fields}),
            seed=request_id,
            tier=find_tier(self.scheduler.tiers, tier),
            **of_request,
        )
        self.engine.submit([new])
        return new

    def run(self, ahead: int) -> None:
        while self.engine.has_work:
            self.engine.step(ahead)
            self.scheduler.check()

    def tokens(self, request_id: int) -> list[int]:
        return [
            token
            for output in self.said
            for owner, token in zip(output.ids.tolist(), output.tokens.tolist(), strict=True)
            if owner == request_id
        ]

    def finish(self, request_id: int) -> FinishReason | None:
        found = [f.reason for output in self.said for f in output.finished if f.id == request_id]
        assert len(found) <= 1
        return found[0] if found else None


def test_synchronous_every_step_is_settled_before_the_next_is_planned() -> None:
    recorder = Recorder()
    bench = Bench(recorder)
    bench.submit(1, [5, 6], max_tokens=3)
    bench.run(ahead=0)
    assert recorder.calls == [
        *("forward 1", "sample 1", "settle 1"),
        *("forward 2", "sample 2", "settle 2"),
        *("forward 3", "sample 3", "settle 3"),
    ]


def test_asynchronous_a_step_is_queued_then_the_one_before_settled_then_it_is_sampled() -> None:
    recorder = Recorder()
    bench = Bench(recorder)
    bench.submit(1, [5, 6], max_tokens=3)
    bench.run(ahead=1)
    assert recorder.calls == [
        *("forward 1", "sample 1"),
        *("forward 2", "settle 1", "sample 2"),
        *("forward 3", "settle 2", "sample 3"),
        "settle 3",
    ]


def test_the_depth_may_change_between_steps() -> None:
    recorder = Recorder()
    bench = Bench(recorder)
    bench.submit(1, [5, 6], max_tokens=4)
    for ahead in (1, 1, 0, 1, 0):
        bench.engine.step(ahead)
    assert [call for call in recorder.calls if call.startswith("settle")] == [f"settle {i}" for i in (1, 2, 3, 4)]
    assert bench.tokens(1) == [TOKEN] * 4
    assert not bench.engine.has_work


def test_a_step_without_work_asks_nothing() -> None:
    recorder = Recorder()
    bench = Bench(recorder)
    bench.engine.step(0)
    bench.engine.step(1)
    assert recorder.calls == []
    assert bench.engine.steps == 0


@pytest.mark.parametrize(
    ("length", "max_tokens", "served"), [(15, 1, True), (16, 1, False), (1, 100, True), (40, 1, False), (0, 1, False)]
)
def test_what_cannot_fit_is_refused_at_once_with_the_numbers_and_stops_nobody(
    length: int, max_tokens: int, served: bool
) -> None:
    bench = Bench(FakeDevice(4, 4), blocks=4)
    bench.submit(1, [5] * length, max_tokens=max_tokens)
    bench.submit(2, [7, 8])
    if served:
        bench.run(ahead=1)
        assert bench.finish(1) is FinishReason.LENGTH
        assert len(bench.tokens(1)) == min(max_tokens, 16 - length)
    else:
        (refused,) = bench.said[0].finished
        assert refused.reason is FinishReason.ERROR
        assert refused.refusal is not None
        assert refused.refusal.error == "ContextLengthExceeded"
        assert refused.refusal.retry_after_s is None, "no later time is better"
        for number in (f"{length} tokens", "16"):
            assert number in refused.refusal.message
        bench.run(ahead=1)
    assert bench.finish(2) is FinishReason.LENGTH


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_after_an_abort_between_steps_nothing_more_is_said_of_a_request(ahead: int, steps: int) -> None:
    bench = Bench(FakeDevice(32, 4), budget=8)
    gone = bench.submit(1, list(range(1, 14)), max_tokens=20)
    stays = bench.submit(2, [7, 8], max_tokens=9)
    for _ in range(steps):
        bench.engine.step(ahead)
    before = bench.tokens(1)
    bench.engine.abort([gone.id, 99], "disconnect")
    bench.run(ahead)
    assert bench.tokens(1) == before
    assert bench.finish(1) is None
    assert bench.tokens(2) == alone([7, 8], stays.params, 2, (), 11)
    assert bench.scheduler.pool.live == 0
    assert bench.scheduler.wasted_rows == ({"disconnect": 1} if steps else {})


@pytest.mark.parametrize(("prefix_cache", "hits"), [(True, [0, 24]), (False, [0, 0])])
def test_only_what_was_cached_before_a_group_counts_as_a_hit(prefix_cache: bool, hits: list[int]) -> None:
    bench = Bench(FakeDevice(32, 4), prefix_cache=prefix_cache)
    prompt = np.arange(1, 12, dtype=np.int32)  # two full blocks, and three tokens more
    params = SamplingParams(n=3, max_tokens=4, ignore_eos=True)
    found = []
    for leader in (1, 4):
        group = range(leader, leader + 3)
        bench.engine.submit(
            NewRequest(id=i, prompt=prompt, params=params, seed=i, leader=None if i == leader else leader, group=True)
            for i in group
        )
        bench.run(ahead=1)
        found.append(bench.scheduler.prefixes.hits)
    assert found == hits
    for i in range(1, 7):
        assert bench.tokens(i) == alone(prompt.tolist(), params, i, (), 15)


def test_stats_are_those_of_scheduler_and_pool() -> None:
    bench = Bench(FakeDevice(32, 4), seats=1)
    bench.submit(1, list(range(1, 10)))
    bench.submit(2, list(range(1, 10)))
    bench.engine.step(0)
    stats = bench.engine.stats()
    assert (stats.running, stats.waiting, stats.steps) == (1, 1, 1)
    assert (stats.blocks_live, stats.blocks_cached, stats.blocks_free) == (3, 0, 29)
    bench.run(ahead=0)
    stats = bench.engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.blocks_live == 0
    assert stats.blocks_live + stats.blocks_cached + stats.blocks_free == 32
    assert (stats.prefix_queries, stats.prefix_hits) == (18, 8)


def test_closing_gives_the_executor_back() -> None:
    recorder = Recorder()
    Bench(recorder).engine.close()
    assert recorder.calls == ["close"]


@pytest.mark.report("kekzl/imp#1115")
def test_what_stays_after_many_prompts_is_cached_not_live() -> None:
    bench = Bench(FakeDevice(40, 4), blocks=40)
    for request_id in range(48):
        bench.submit(request_id, [request_id % 60 + 1, request_id // 2 + 1, *range(1, 8)])
    bench.run(ahead=1)
    stats = bench.engine.stats()
    assert stats.blocks_live == 0
    assert stats.blocks_cached > 0
    assert stats.blocks_cached + stats.blocks_free == 40


@pytest.mark.report("sgl-project/sglang#6888")
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("ahead", [0, 1])
def test_the_pool_is_exact_after_a_long_output_and_after_an_abort_inside_a_prompt(block_size: int, ahead: int) -> None:
    bench = Bench(FakeDevice(256 // block_size, block_size), blocks=256 // block_size, block_size=block_size, budget=16)
    pool = bench.scheduler.pool
    bench.submit(1, list(range(1, 6)), max_tokens=100)
    bench.run(ahead)
    assert len(bench.tokens(1)) == 100
    assert (pool.live, pool.cached + pool.free) == (0, pool.num_blocks)
    bench.submit(2, [9] * 60)
    for _ in range(2):
        bench.engine.step(ahead)
    assert pool.live > 0
    bench.engine.abort([2], "disconnect")
    bench.run(ahead)
    assert (pool.live, pool.cached + pool.free) == (0, pool.num_blocks)


@pytest.mark.report("openvinotoolkit/openvino.genai#3722")
def test_three_hundred_prompts_of_one_block_never_hit_each_other() -> None:
    bench = Bench(FakeDevice(400, 4), blocks=400)
    prompts = {i: [i % 60 + 1, i // 60 + 1, 5, 6, 7] for i in range(300)}
    news = {i: bench.submit(i, prompt) for i, prompt in prompts.items()}
    bench.run(ahead=1)
    assert bench.scheduler.prefixes.hits == 0
    for i, prompt in prompts.items():
        assert bench.tokens(i) == alone(prompt, news[i].params, i, (), 9)


@pytest.mark.report("vllm-project/vllm#17305")
def test_a_prefix_evicted_while_its_request_waits_is_computed_again() -> None:
    bench = Bench(FakeDevice(12, 4), blocks=12, seats=2)
    prompt = list(range(1, 14))
    bench.submit(1, prompt)
    bench.run(ahead=1)
    assert bench.scheduler.pool.cached >= 3
    for request_id in range(2, 8):
        bench.submit(request_id, [request_id] * 20, max_tokens=20)
    new = bench.submit(8, prompt)
    bench.run(ahead=1)
    assert bench.scheduler.prefixes.hits == 0
    assert bench.tokens(8) == alone(prompt, new.params, 8, (), 17)


@pytest.mark.report("vllm-project/vllm#42490")
def test_a_request_that_starts_while_another_of_its_prefix_ends_never_reads_what_is_not_known_yet() -> None:
    bench = Bench(FakeDevice(64, 4), blocks=64, budget=16)
    shared = list(range(1, 33))
    for round_ in range(200):
        first = bench.submit(2 * round_, [*shared, round_ % 60 + 1], max_tokens=4)
        for _ in range(round_ % 8):
            bench.engine.step(1)
        second = bench.submit(2 * round_ + 1, [*shared, round_ % 59 + 2], max_tokens=4)
        bench.run(ahead=1)
        for new in (first, second):
            assert bench.tokens(new.id) == alone(new.prompt.tolist(), new.params, new.seed, (), 37)
        bench.said.clear()
    assert bench.scheduler.prefixes.hits > 200 * 32


# ---------------------------------------------------------------------- what is told besides tokens


def test_what_is_accepted_is_told_at_once_and_before_any_step() -> None:
    recorder = Recorder()
    bench = Bench(recorder)
    bench.submit(1, [5, 6])
    bench.submit(2, [5] * 500)
    bench.submit(3, [7])
    assert [output.accepted for output in bench.said] == [[1], [], [3]]
    assert [[f.id for f in output.finished] for output in bench.said] == [[], [2], []]
    assert all(len(output.ids) == len(output.tokens) == 0 for output in bench.said)
    assert recorder.calls == []


def test_of_one_message_the_accepted_and_the_refused_are_told_together() -> None:
    bench = Bench(FakeDevice(32, 4), seats=1, tiers=(Tier(name="standard", max_queue=2),))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    prompts = [[5, 6], [7], [8] * 300, [9], [10]]
    bench.engine.submit(
        NewRequest(id=i, prompt=np.array(prompt, dtype=np.int32), params=params, seed=i)
        for i, prompt in enumerate(prompts)
    )
    (told,) = bench.said
    assert told.accepted == [0, 1, 3]  # one for the vacant seat, two for the queue
    assert [(f.id, f.refusal.error) for f in told.finished if f.refusal is not None] == [
        (2, "ContextLengthExceeded"),
        (4, "QueueFull"),
    ]
    bench.run(ahead=1)
    assert bench.tokens(0) == alone([5, 6], params, 0, (), 6)


def test_whoever_ends_is_told_where_its_time_went() -> None:
    bench = Bench(FakeDevice(32, 4), seats=1, tiers=(Tier(name="standard", queue_limit_s=3.0),))
    bench.submit(1, [5, 6], max_tokens=9)
    bench.submit(2, [7, 8])
    bench.submit(3, [5] * 500)
    while bench.engine.has_work:
        bench.now += 1.0
        bench.engine.step(1)
    ends = {f.id: f for output in bench.said for f in output.finished}
    assert sorted(ends) == [1, 2, 3]
    timelines = [f.timeline for f in ends.values()]
    assert all(timeline is not None and timeline.phase == "finished" for timeline in timelines)
    served, refused = ends[1].timeline, ends[2].timeline
    assert served is not None
    assert refused is not None
    assert (served.queued_s, served.total_s, served.output_tokens) == (1.0, 10.0, 9)
    assert (refused.queued_s, refused.total_s) == (3.0, 3.0)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_request_whose_deadline_passes_is_told_before_the_next_step_and_says_nothing_after(ahead: int) -> None:
    bench = Bench(FakeDevice(32, 4))
    bench.submit(1, [5, 6], max_tokens=50, deadline_s=3.5)
    stays = bench.submit(2, [7, 8], max_tokens=9)
    for _ in range(4):
        bench.now += 1.0
        bench.engine.step(ahead)
    (finished,) = [f for output in bench.said for f in output.finished]
    assert (finished.id, finished.reason) == (1, FinishReason.ERROR)
    assert finished.refusal is not None
    assert finished.refusal.error == "DeadlineExceeded"
    before = bench.tokens(1)
    bench.run(ahead)
    assert bench.tokens(1) == before
    assert bench.tokens(2) == alone([7, 8], stays.params, 2, (), 11)
    assert bench.scheduler.pool.live == 0


def test_a_request_whose_time_is_over_when_it_comes_is_refused_and_not_accepted() -> None:
    bench = Bench(FakeDevice(32, 4), tiers=(Tier(name="standard", queue_limit_s=3.0),))
    bench.now = 5.0  # a long step has kept the engine from hearing of them
    bench.submit(1, [5, 6], arrival_s=1.0, deadline_s=4.0)
    bench.submit(2, [5, 6], arrival_s=1.5)
    bench.submit(3, [5, 6], arrival_s=3.0, deadline_s=9.0)
    assert [output.accepted for output in bench.said] == [[], [], [3]]
    ends = {f.id: f for output in bench.said for f in output.finished}
    assert {i: f.refusal.error for i, f in ends.items() if f.refusal is not None} == {
        1: "DeadlineExceeded",
        2: "QueueTimeout",
    }
    assert [f.timeline.queued_s for f in ends.values() if f.timeline is not None] == [4.0, 3.5]
    bench.run(ahead=1)
    assert [bench.finish(i) for i in (1, 2, 3)] == [FinishReason.ERROR, FinishReason.ERROR, FinishReason.LENGTH]


def test_explain_tells_of_requests_under_way_only() -> None:
    bench = Bench(FakeDevice(32, 4), seats=1)
    bench.submit(1, [5, 6], max_tokens=1)
    bench.submit(2, [5, 6], max_tokens=9, tier="batch")
    bench.submit(3, [5, 6], max_tokens=9, tier="batch")
    for _ in range(3):
        bench.now += 1.0
        bench.engine.step(0)
    bench.engine.drain()
    told = bench.engine.explain([1, 2, 3, 99])
    assert {i: (timeline.tier, timeline.phase) for i, timeline in told.items()} == {
        2: ("batch", "decode"),
        3: ("batch", "queued"),
    }
    assert told[3].queued_s == 3.0


def test_stats_are_told_per_tier() -> None:
    bench = Bench(FakeDevice(32, 4), seats=1, tiers=(Tier(name="high", weight=1.0), Tier(name="low", max_queue=1)))
    bench.submit(1, [5, 6], max_tokens=6, tier="low")
    bench.engine.step(0)
    bench.submit(2, [5, 6], max_tokens=2, tier="high")
    bench.engine.step(0)
    bench.submit(3, [5, 6], tier="low")  # the one that gave way is waiting there
    tiers = bench.engine.stats().tiers
    assert list(tiers) == ["high", "low"]
    assert (tiers["high"].running, tiers["high"].waiting) == (1, 0)
    assert (tiers["low"].running, tiers["low"].waiting) == (0, 1)
    assert tiers["low"].preemptions == {"recompute": 1, "admission": 1}
    assert tiers["low"].refused == {"queue_full": 1}
    bench.run(ahead=1)
    tiers = bench.engine.stats().tiers
    assert [(tier.finished, tier.output_tokens) for tier in tiers.values()] == [(1, 2), (1, 6)]
    assert all(tier.predicted_tokens > 0 for tier in tiers.values())
    assert bench.engine.stats().preemptions == 1


def test_the_stats_of_an_idle_engine_hold_no_pins_of_what_the_disk_has_written_since() -> None:
    device = FakeDevice(32, 4, 8)
    store = FakeStore(device.host)
    bench = Bench(device, host=HostTier(BlockPool(8, 4), store))
    bench.submit(1, [5, 6, 7, 8, 9])
    bench.run(ahead=1)
    assert (bench.engine.stats().host_blocks_pinned, len(store.pending)) == (2, 2)
    store.work()
    stats = bench.engine.stats()
    assert (stats.host_blocks_pinned, stats.host_blocks_cached, stats.disk_blocks) == (0, 2, 2)


def test_a_padded_batch_leaves_an_idle_engine_behind() -> None:
    device = FakeDevice(32, 4)
    bench = Bench(device)
    bench.scheduler.config = dataclasses.replace(bench.scheduler.config, batching="static", padded_rows=True)
    bench.submit(1, [5, 6], max_tokens=2)
    bench.submit(2, [7, 8], max_tokens=7)
    bench.run(ahead=1)
    assert bench.scheduler.pool.live == 0
    assert bench.scheduler.wasted_rows["padding"] >= 5
    assert not bench.engine.has_work


class InterruptedWork(RecordedWork):
    """Waiting for its result is interrupted once, as by Ctrl-C."""

    interrupted = False

    def result(self) -> Result:
        if self.plan.seq == 1 and not InterruptedWork.interrupted:
            InterruptedWork.interrupted = True
            raise KeyboardInterrupt
        return super().result()


class InterruptedRecorder(Recorder):
    def forward(self, plan: Plan) -> RecordedWork:
        super().forward(plan)
        return InterruptedWork(self.calls, plan)


def test_an_interrupted_wait_loses_no_step() -> None:
    recorder = InterruptedRecorder()
    bench = Bench(recorder)
    bench.submit(1, [5, 6], max_tokens=4)
    bench.engine.step(1)
    with pytest.raises(KeyboardInterrupt):
        bench.engine.step(1)
    bench.engine.drain()
    bench.run(ahead=1)
    assert bench.tokens(1) == [TOKEN] * 4
    assert [call for call in recorder.calls if call.startswith("settle")] == [f"settle {i}" for i in (1, 2, 3, 4)]
