"""Host memory below the device, and a store below that: what is copied when, what is found, and whom it holds up."""

from __future__ import annotations

import random
from collections.abc import MutableSequence, Sequence

import pytest

from ropeway.cache.host import HostTier
from ropeway.cache.keys import root_key
from ropeway.cache.pool import BlockPool
from ropeway.request import FinishReason, SamplingParams
from ropeway.tiers import Tier
from tests.support.fake_device import HostBlock, alone
from tests.support.fake_store import FakeStore
from tests.support.line import Line
from tests.support.world import Arrival, Setup, World

SIZE = 4


def key(number: int) -> bytes:
    return bytes([number]) * 32


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def tier_with(blocks: int, *, held: Sequence[bytes] = ()) -> tuple[HostTier, FakeStore]:
    """A host tier over a store that holds these keys and works when it is told to."""
    contents: list[HostBlock | None] = [[[number]] for number in range(blocks)]
    store = FakeStore(contents, held={each: [[0]] for each in held})
    return HostTier(BlockPool(blocks, SIZE), store), store


def published(host: HostTier, *blocks: int) -> dict[bytes, int]:
    """Device blocks that have just been published, under keys of their own numbers."""
    current = {key(block): block for block in blocks}
    for each, block in current.items():
        host.published(block, each)
    return current


def cached(host: HostTier, *numbers: int) -> list[int]:
    """Fill host blocks by write-through, one plan each; returns them, oldest first."""
    for number in numbers:
        host.write_through(1, published(host, number).get)
        host.take_copies()
        host.settled()
    return [place for each in keys(*numbers) for place in host.find([each])]


# ---------------------------------------------------------------------- write-through


def test_published_blocks_are_copied_oldest_first_as_many_as_a_plan_may_hold() -> None:
    host = HostTier(BlockPool(8, SIZE))
    current = published(host, 10, 11, 12)
    host.write_through(2, current.get)
    out, back = host.take_copies()
    assert [block for block, _ in out] == [10, 11]
    assert back == []
    assert host.has_work
    host.write_through(2, current.get)
    assert [block for block, _ in host.take_copies()[0]] == [12]
    assert not host.has_work
    assert (host.pool.live, host.pool.cached) == (0, 3)


def test_a_block_evicted_before_its_turn_is_passed_over() -> None:
    host = HostTier(BlockPool(8, SIZE))
    current = published(host, 10, 11, 12)
    current[key(10)] = 3  # computed again elsewhere
    del current[key(11)]
    host.write_through(1, current.get)
    assert [block for block, _ in host.take_copies()[0]] == [12]


def test_what_is_here_already_is_not_copied_again() -> None:
    host = HostTier(BlockPool(8, SIZE))
    cached(host, 10)
    host.write_through(5, published(host, 10, 11).get)
    assert [block for block, _ in host.take_copies()[0]] == [11]


def test_the_least_recently_used_copy_makes_room_and_reading_counts_as_use() -> None:
    host = HostTier(BlockPool(3, SIZE))
    places = cached(host, 10, 11, 12)
    host.read([places[0]], [5])
    host.take_copies()
    cached(host, 13)
    assert host.find(keys(10)) == [places[0]]
    assert host.find(keys(11)) == []
    assert host.find(keys(13)) == [places[1]]


def test_pinned_copies_are_never_evicted_and_write_through_gives_up_when_all_are_pinned() -> None:
    host = HostTier(BlockPool(2, SIZE))
    pinned = host.swap_out([7, 8], keys(7))
    assert pinned is not None
    host.take_copies()
    current = published(host, 10)
    host.write_through(5, current.get)
    assert host.take_copies() == ([], [])
    assert not host.has_work
    assert host.find(keys(7)) == [pinned[0]]
    host.unpin(pinned)
    assert (host.pool.live, host.pool.cached) == (0, 1)


def test_the_longest_prefix_that_is_here_is_found() -> None:
    host = HostTier(BlockPool(8, SIZE))
    places = cached(host, 1, 2, 4)
    assert host.find(keys(1, 2, 3, 4)) == places[:2]
    assert host.find(keys(3)) == []
    assert host.pool.live == 0


# ---------------------------------------------------------------------- swapping out


def test_swapping_out_pins_what_is_here_copies_the_rest_and_publishes_what_has_a_key() -> None:
    host = HostTier(BlockPool(8, SIZE))
    (place,) = cached(host, 1)
    pinned = host.swap_out([21, 22, 23], keys(1, 2))
    assert pinned is not None
    assert pinned[0] == place
    assert host.take_copies() == ([(22, pinned[1]), (23, pinned[2])], [])
    assert host.find(keys(1, 2)) == pinned[:2]
    assert (host.pool.live, host.swaps_out) == (3, 2)
    host.check([pinned])


@pytest.mark.parametrize("room", [0, 1, 2])
def test_swapping_out_takes_all_or_nothing(room: int) -> None:
    host = HostTier(BlockPool(3, SIZE))
    filler = host.swap_out(list(range(3 - room)), [])
    host.take_copies()
    before = host.pool.available
    assert host.swap_out([20, 21, 22], []) is None
    assert host.pool.available == before
    assert host.take_copies() == ([], [])
    assert filler is not None


def test_a_copy_that_is_cached_counts_as_room_once_only() -> None:
    host = HostTier(BlockPool(3, SIZE))
    cached(host, 1, 2, 3)
    assert host.swap_out([1, 2, 3, 9], keys(1, 2, 3)) is None, "three are here, and no block is left for the fourth"
    pinned = host.swap_out([1, 2, 9], keys(1, 2))
    assert pinned is not None
    assert host.take_copies() == ([(9, pinned[2])], [])
    assert host.find(keys(3)) == []


def test_what_is_read_stays_as_it_is_until_the_plan_is_made() -> None:
    host = HostTier(BlockPool(2, SIZE))
    pinned = host.swap_out([7, 8], [])
    assert pinned is not None
    host.take_copies()
    host.read(pinned, [1, 2])
    host.unpin(pinned)
    assert host.swap_out([9], []) is None, "in the same plan nothing may be written over them"
    assert host.take_copies() == ([], [(pinned[0], 1), (pinned[1], 2)])
    assert host.swap_out([9], []) is not None


# ---------------------------------------------------------------------- the store


def test_a_copy_is_saved_when_the_plan_that_wrote_it_has_run() -> None:
    host, store = tier_with(4)
    host.write_through(1, published(host, 10).get)
    host.take_copies()
    assert not store.pending
    host.settled()
    assert [job.key for job in store.pending] == [key(10)]
    assert host.pool.live == 1, "pinned as long as the store reads it"
    store.work()
    host.poll()
    assert host.pool.live == 0
    assert store.find(key(10))


def test_what_the_store_has_is_not_saved_again_nor_what_was_displaced_meanwhile() -> None:
    host, store = tier_with(1, held=keys(10))
    host.write_through(1, published(host, 10).get)
    host.take_copies()
    host.write_through(1, published(host, 11).get)  # into the same place, planned before the first has run
    host.take_copies()
    host.settled()
    assert not store.pending
    host.settled()
    assert [job.key for job in store.pending] == [key(11)]


def test_a_load_makes_its_prefix_findable_and_tells_whoever_waits() -> None:
    host, store = tier_with(8, held=keys(1, 2))
    told: list[str] = []
    assert host.load(keys(1, 2, 3), lambda: told.append("first")) == 2
    assert host.load(keys(1, 2), lambda: told.append("second")) == 2
    assert store.loading == 2, "one load serves both"
    assert host.find(keys(1)) == []
    store.work(1)
    host.poll()
    assert told == []
    assert len(host.find(keys(1, 2))) == 1
    store.work()
    host.poll()
    assert told == ["first", "second"]
    assert len(host.find(keys(1, 2))) == 2
    assert host.pool.live == 0
    assert not host.has_work


def test_there_is_nothing_to_wait_for_where_the_store_has_nothing_or_there_is_no_store_or_no_room() -> None:
    host, _ = tier_with(2, held=keys(2))
    assert host.load(keys(1, 2), list) == 0, "a prefix has no holes"
    assert HostTier(BlockPool(2, SIZE)).load(keys(1), list) == 0
    full, store = tier_with(2, held=keys(1))
    assert full.swap_out([5, 6], []) is not None
    assert full.load(keys(1), list) == 0
    assert not store.pending


def test_as_much_of_a_prefix_is_loaded_as_there_is_room_for() -> None:
    host, store = tier_with(3, held=keys(1, 2, 3, 4, 5))
    told: list[int] = []
    assert host.load(keys(1, 2, 3, 4, 5), lambda: told.append(1)) == 3
    store.work()
    host.poll()
    assert told == [1]
    assert len(host.find(keys(1, 2, 3, 4, 5))) == 3


def test_a_load_that_fails_leaves_nothing_to_be_trusted_and_still_tells_whoever_waits() -> None:
    host, store = tier_with(4, held=keys(1))
    told: list[int] = []
    host.load(keys(1), lambda: told.append(1))
    store.work(ok=False)
    host.poll()
    assert told == [1]
    assert host.find(keys(1)) == []
    assert (host.pool.live, host.pool.free) == (0, 4)


def test_a_load_never_writes_a_host_block_that_a_plan_in_flight_still_reads() -> None:
    host, store = tier_with(2, held=keys(5, 6))
    places = cached(host, 1, 2)
    store.work()
    host.poll()
    host.read(places, [30, 31])
    host.take_copies()  # in flight from here on
    assert host.load(keys(5, 6), list) == 2, "into the same places, since there are no others"
    assert not store.loading
    host.settled()
    assert store.loading == 2


def test_a_load_waits_for_the_newest_of_several_plans_in_flight() -> None:
    host, store = tier_with(3, held=keys(5))
    (place,) = cached(host, 1)
    store.work()
    host.poll()
    for block in (30, 31):
        host.read([place], [block])
        host.take_copies()
    host.load(keys(5), list)
    host.settled()
    assert not store.loading
    host.settled()
    assert store.loading == 1


def test_a_block_written_through_while_it_is_loaded_is_kept_once() -> None:
    host, store = tier_with(4, held=keys(10))
    host.load(keys(10), list)
    host.write_through(1, published(host, 10).get)
    ((_, place),) = host.take_copies()[0]
    host.settled()
    store.work()
    host.poll()
    assert host.find(keys(10)) == [place]
    assert (host.pool.live, host.pool.cached) == (0, 1)


# ---------------------------------------------------------------------- requests


def test_a_prefix_evicted_from_the_device_is_found_in_host_memory_and_copied_back() -> None:
    line = Line(blocks=8, host_blocks=16, preemption="swap")
    prompt = list(range(100, 114))
    first = line.add(prompt, 2, keys=[root_key()])
    line.run()
    line.add(28, 2)
    line.run()
    assert line.pool.cached == 0
    again = line.add(prompt, 2, keys=[root_key()])
    plan = line.plan()
    (seat,) = plan.seats
    assert plan.to_device[:, 1].tolist() == seat.blocks.tolist()
    assert line.rows(plan) == {again.id: (12, 2)}
    line.settle(plan)
    assert (line.cached[first.id], line.cached[again.id]) == (0, 12)
    assert (line.scheduler.prefixes.hits, line.scheduler.prefixes.host_hits) == (12, 12)


def test_device_and_host_share_a_prefix_between_them() -> None:
    line = Line(blocks=8, host_blocks=16)
    prompt = list(range(100, 118))
    line.add(prompt, 2, keys=[root_key()])
    line.run()
    other = line.add(22, 2)  # takes the free blocks, and the tail of the prefix
    line.step()
    line.scheduler.abort(other.id, "cancel", line.now)
    on_device = line.pool.cached
    assert 0 < on_device < 4
    again = line.add(prompt, 2, keys=[root_key()])
    plan = line.step()
    assert line.rows(plan) == {again.id: (16, 2)}
    assert len(plan.to_device) == 4 - on_device


def test_an_idle_engine_goes_on_until_everything_published_is_copied() -> None:
    line = Line(host_blocks=32)
    line.add(40, 2, keys=[root_key()])
    line.run()
    assert line.host is not None
    assert line.host.pool.cached == 10
    assert not line.scheduler.has_work


def test_blocks_of_a_group_without_prefix_cache_are_not_written_through() -> None:
    line = Line(host_blocks=32)
    for request in line.add_group(list(range(100, 120)), 3, prefix_cache=False):
        request.private = True
    line.run()
    assert line.host is not None
    assert line.host.pool.cached == 0


def test_a_prefix_that_only_the_disk_has_holds_the_request_behind_a_gate_until_it_is_in_host_memory() -> None:
    line, store, prompt = with_prefix_on_disk()
    request = line.add(prompt, 2, keys=[root_key()])
    assert request.gated
    other = line.add(4, 2)
    assert line.order(line.step()) == [other.id], "it lets others pass"
    line.now = 3.0
    assert line.scheduler.plan(line.now) is not None
    store.work()
    line.now = 5.0
    plan = line.plan()
    assert not request.gated
    assert line.rows(plan)[request.id] == (12, 2)
    assert len(plan.to_device) == 3
    assert line.explain(request).waits == {"gate": 5.0}
    assert line.scheduler.prefixes.disk_hits == 12


def with_prefix_on_disk(**settings: object) -> tuple[Line, FakeStore, list[int]]:
    """A line whose disk alone has three blocks of a prompt."""
    host_blocks: int = settings.setdefault("host_blocks", 16)  # type: ignore[assignment]
    contents: list[HostBlock | None] = [[[0]] for _ in range(host_blocks)]
    store = FakeStore(contents)
    line = Line(store=store, **settings)  # type: ignore[arg-type]
    prompt = list(range(100, 114))
    line.add(prompt, 2, keys=[root_key()])
    line.run()
    store.work()
    assert line.host is not None
    held = store.held
    assert len(held) == 3
    fresh = FakeStore([[[0]] for _ in range(host_blocks)], held=held)
    return Line(store=fresh, **settings), fresh, prompt  # type: ignore[arg-type]


@pytest.mark.report("vllm-project/vllm#45388")
def test_requests_whose_prefix_is_being_loaded_hold_no_device_blocks_that_the_head_of_the_queue_needs() -> None:
    world, prompts = cached_on_disk(3)
    for prompt in prompts:
        world.submit(Arrival(prompt, params(3), tier=1))
    assert world.pool.live == 0
    assert sum(request.gated for request in world.scheduler.waiting) == 3
    (urgent,) = world.submit(Arrival(tuple(range(5, 41)), params(6), tier=0))  # all but one of the blocks
    while world.records[urgent].live:
        world.step(1, 0.01)
        assert world.steps < 30
    assert len(world.records[urgent].tokens) == 6
    assert world.store is not None
    finish(world)
    world.check_end()
    assert world.seen["host hits"] >= 3 * 8


@pytest.mark.report("vllm-project/vllm#53130")
@pytest.mark.parametrize("arrives", [True, False])
def test_requests_cancelled_while_their_prefix_is_loaded_give_everything_back(arrives: bool) -> None:
    world, prompts = cached_on_disk(4)
    ids = [world.submit(Arrival(prompt, params(3)))[0] for prompt in prompts]
    for _ in range(3):
        world.step(1, 0.01)
    assert world.scheduler.seats.taken == 0
    for request_id in ids:
        world.abort(request_id)
    assert len(world.scheduler.waiting) == 0
    if arrives:
        assert isinstance(world.store, FakeStore)
        world.store.work()
    (plain,) = world.submit(Arrival((9, 8, 7), params(5)))
    for _ in range(8):
        world.step(1, 0.01)
    assert len(world.records[plain].tokens) == 5
    finish(world)
    world.check_end()


@pytest.mark.report("vllm-project/vllm#46283")
def test_two_hundred_clients_that_leave_during_loads_leave_nothing_behind() -> None:
    world, prompts = cached_on_disk(10)
    rng = random.Random(7)
    assert isinstance(world.store, FakeStore)
    live: list[int] = []
    gone = 0
    for number in range(200):
        live += world.submit(Arrival(prompts[number % 10], params(2)))
        world.step(1, 0.01)
        if rng.random() < 0.4:
            world.store.work(1, ok=rng.random() < 0.9)
        while len(live) > rng.randrange(4):
            world.abort(live.pop(rng.randrange(len(live))))
            gone += 1
    assert gone > 150
    (plain,) = world.submit(Arrival((9, 8, 7), params(5)))
    finish(world)
    assert len(world.records[plain].tokens) == 5
    world.check_end()
    assert world.seen["disk loads"] > 0
    assert world.seen["failed disk loads"] > 0
    assert world.seen["aborts while a prefix is loaded"] > 20


@pytest.mark.parametrize("broken", [1, 2, 3])
def test_what_cannot_be_loaded_is_computed_again_and_the_answer_is_the_same(broken: int) -> None:
    world, (prompt,) = cached_on_disk(1)
    (request,) = world.submit(Arrival(prompt, params(6)))
    world.step(1, 0.01)
    assert isinstance(world.store, FakeStore)
    world.store.work(broken - 1)
    world.store.work(1, ok=False)
    finish(world)
    world.check_end()
    record = world.records[request]
    assert record.tokens == alone(prompt, params(6), record.new.seed, (), len(prompt) + 6)
    assert world.seen["failed disk loads"] == 1
    assert record.cached == 4 * (broken - 1)


def cached_on_disk(count: int) -> tuple[World, list[tuple[int, ...]]]:
    """A world whose disk alone has three blocks each of so many prompts; its store works when it is told to."""
    setup = Setup(
        blocks=12, max_num_seqs=4, host_blocks=3 * count + 4, tiers=(Tier(name="now", weight=1.0), Tier(name="later"))
    )
    prompts = [(*range(number + 1, number + 13), 3) for number in range(count)]
    held: dict[bytes, HostBlock] = {}

    def store_of(host: MutableSequence[HostBlock | None]) -> FakeStore:
        return FakeStore(host, held=held)

    before = World(setup, store_of)
    for prompt in prompts:
        before.submit(Arrival(prompt, params(1)))
        finish(before)
    assert len(held) == 3 * count
    return World(setup, store_of, before=[before]), prompts


def finish(world: World) -> None:
    """Step until nobody is left, while the store works."""
    assert isinstance(world.store, FakeStore)
    for _ in range(500):
        world.store.work()
        if not world.engine.has_work:
            break
        world.step(1, 0.01)
    world.settle()
    world.store.work()


def params(output: int) -> SamplingParams:
    return SamplingParams(max_tokens=output, ignore_eos=True)


@pytest.mark.report("vllm-project/vllm#31210")
@pytest.mark.report("vllm-project/vllm#45704")
@pytest.mark.report("vllm-project/vllm#47282")
@pytest.mark.parametrize("ahead", [0, 1])
def test_prompts_cycled_through_a_small_device_pool_and_a_large_host_pool_are_answered_as_without(ahead: int) -> None:
    world = World(Setup(blocks=30, max_num_seqs=8, host_blocks=300, preemption="swap", shed=False))
    prompts = [tuple((number * 7 + i * i) % 60 + 1 for i in range(30)) for number in range(30)]
    for turn in range(5):
        todo = list(prompts)
        while todo or world.engine.has_work:
            while todo and len(world.scheduler.lifecycle.requests) < 16:
                world.submit(Arrival(todo.pop(), params(3 + turn), tier=turn % 3))
            world.step(ahead, 0.001)
    world.check_end()
    assert world.seen["finished"] == 150
    assert world.seen["host hits"] > 3 * 30 * 28 * 0.7, "they do come from the host"


@pytest.mark.report("vllm-project/vllm#26329")
@pytest.mark.report("vllm-project/vllm#54914")
def test_a_full_host_tier_evicts_and_goes_on() -> None:
    line = Line(host_blocks=10, seats=8)
    requests = []
    for number in range(600):
        requests.append(line.add(8 + number % 5, 1 + number % 3, keys=[root_key()], tier=number % 3))
        line.step()
    line.run()
    assert all(request.finish is FinishReason.LENGTH for request in requests)
    assert line.host is not None
    assert (line.host.pool.live, line.host.pool.cached) == (0, 10)
