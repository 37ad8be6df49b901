"""Any mix of arrivals, tiers, policies, pool sizes, prefix hits, preemptions, swaps, disk faults and aborts,
synchronous or not: every request that is served gets the tokens it gets alone, and the scheduler's invariants hold
after every step.

A workload follows from a number, so that no two are alike. A failing one is reduced, and printed with the command that
replays it:

    python -m pytest tests/property/test_step_loop.py --hypothesis-seed=N
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator, MutableSequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Literal

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ropeway.execution.disk import DiskStore, Layout
from tests.support.fake_device import LAYERS, HostArray, HostBlock
from tests.support.fake_store import FakeStore
from tests.support.setups import AHEADS, PURPOSES, SECONDS, random_arrival, random_setup
from tests.support.world import Arrival, Setup, World

WORKLOADS = 600
ON_A_REAL_DISK = 8
REDUCING_S = 60.0
ABORTS = (None,) * 20 + (0, 2, 5, 10, 20)
seen: Counter[str] = Counter()
"""What the workloads of this module have gone through."""
on_disk: Counter[str] = Counter()
"""And those over a real disk."""


@dataclass(frozen=True)
class Event:
    """A call that comes before a step, and may be given up later."""

    step: int
    arrival: Arrival
    abort_after: int | None


@dataclass(frozen=True)
class Disk:
    seed: int
    faults: float
    capacity: int


@dataclass(frozen=True)
class Workload:
    setup: Setup
    disk: Disk | None
    """Needs host blocks."""
    restart: bool
    """Whether the second half of the calls goes to a second engine, which finds what the first one left on disk."""
    abort_when: Literal["swapped", "loading"] | None
    """The first one found in this state is given up."""
    aheads: tuple[int, ...]
    seconds: tuple[float, ...]
    events: tuple[Event, ...]


def workload_of(seed: int, purpose: str | None = None) -> Workload:
    random = Random(seed)
    purpose = purpose or random.choice(PURPOSES)
    setup = random_setup(random, purpose)
    disk = None
    if setup.host_blocks and (purpose == "disk" or random.random() < 0.4):
        faults, capacity = random.choice((0.0, 0.1, 0.4)), random.choice((4, 12, 1000, 1000))
        disk = Disk(random.getrandbits(30), faults, capacity)
    some = range(random.randint(1, 4))
    last = random.choice((0, 4, 15, 30))
    return Workload(
        setup=setup,
        disk=disk,
        restart=random.random() < 0.7,
        abort_when=random.choice((None, None, None, "swapped", "loading")),
        aheads=tuple(random.choice(AHEADS) for _ in some),
        seconds=tuple(random.choice(SECONDS) for _ in some),
        events=tuple(
            Event(
                random.randint(0, last),
                random_arrival(random, purpose),
                random.choice((None,) * 20 + (0, 2, 5, 10, 20)),
            )
            for _ in range(random.randint(1, 20))
        ),
    )


def run(workload: Workload) -> Counter[str]:
    """All engines' lives, one after the other; what has happened in them."""
    setup, disk = workload.setup, workload.disk
    happened = Counter[str]()
    held: dict[bytes, HostBlock] = {}
    halves = [workload.events]
    if disk is not None and workload.restart:
        middle = len(workload.events) // 2
        halves = [workload.events[:middle], workload.events[middle:]]
        happened["restarts"] += 1

    def store_of(host: MutableSequence[HostBlock | None]) -> FakeStore:
        assert disk is not None
        return FakeStore(host, random=Random(disk.seed), faults=disk.faults, capacity=disk.capacity, held=held)

    before: list[World] = []
    for events in halves:
        world = World(setup, None if disk is None else store_of, before=before)
        live(world, workload, events)
        world.check_end()
        world.close()
        happened.update(world.seen)
        before.append(world)
    return happened


def live(world: World, workload: Workload, events: tuple[Event, ...], *, wait_s: float = 0.0) -> None:
    """``wait_s``: how long to wait for others when there is nothing to do."""
    todo = sorted(events, key=lambda event: event.step)
    aborts: dict[int, int] = {}
    while todo or world.engine.has_work:
        step = world.steps
        while todo and todo[0].step <= step:
            event = todo.pop(0)
            for request_id in world.submit(event.arrival):
                if event.abort_after is not None:
                    aborts[request_id] = step + event.abort_after
        for request_id in [r for r, when in aborts.items() if when <= step]:
            del aborts[request_id]
            if world.records[request_id].live:
                world.abort(request_id)
        if workload.abort_when is not None and (found := world.find(workload.abort_when)) is not None:
            world.abort(found)
            workload = replace(workload, abort_when=None)
        world.step(workload.aheads[step % len(workload.aheads)], workload.seconds[step % len(workload.seconds)])
        if step % 4 == 0:
            world.check_timelines()
            world.check_stats()
        if wait_s and world.scheduler.stuck:
            time.sleep(wait_s)
        assert step < 4000, "livelock"


def smaller(workload: Workload) -> Iterator[Workload]:
    """What might fail in the same way and is easier to understand."""
    return (candidate for candidate in _simpler(workload) if candidate != workload)


def _simpler(workload: Workload) -> Iterator[Workload]:
    events, setup, plain = workload.events, workload.setup, Setup()
    for i in range(len(events)):
        yield replace(workload, events=events[:i] + events[i + 1 :])
    yield replace(workload, disk=None)
    yield replace(workload, restart=False)
    yield replace(workload, abort_when=None)
    yield replace(workload, aheads=(0,))
    if len(workload.aheads) > 1:
        yield replace(workload, aheads=(1,))
    yield replace(workload, seconds=(0.0,))
    for field in fields(Setup):
        yield replace(workload, setup=replace(setup, **{field.name: getattr(plain, field.name)}))
    for i, event in enumerate(events):
        arrival = event.arrival
        for other in (
            replace(event, step=0),
            replace(event, abort_after=None),
            *(
                replace(event, arrival=replace(arrival, **{name: getattr(Arrival((), arrival.params), name)}))
                for name in ("salt", "tier", "tenant", "early_s", "timeout_s")
            ),
        ):
            yield replace(workload, events=(*events[:i], other, *events[i + 1 :]))


def reduced(workload: Workload, error: type[BaseException]) -> Workload:
    """A smaller workload with the same error, as far as one is found in time."""
    until = time.monotonic() + REDUCING_S
    candidates = smaller(workload)
    while time.monotonic() < until and (candidate := next(candidates, None)) is not None:
        try:
            run(candidate)
        except error:
            workload, candidates = candidate, smaller(candidate)
        except Exception:
            continue
    return workload


@settings(
    max_examples=WORKLOADS,
    deadline=None,
    derandomize=False,
    print_blob=True,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(st.integers(0, (1 << 48) - 1))
def test_every_request_gets_the_tokens_it_gets_alone(seed: int) -> None:
    workload = workload_of(seed)
    try:
        seen.update(run(workload))
    except Exception as error:
        error.add_note(f"reduced: {reduced(workload, type(error))}")
        raise
    seen["workloads"] += 1


@pytest.mark.parametrize("seed", range(ON_A_REAL_DISK))
def test_every_request_gets_the_tokens_it_gets_alone_over_a_disk_whose_files_are_damaged(
    seed: int, tmp_path: Path
) -> None:
    random = Random(seed)
    workload = workload_of(seed, "disk")
    setup = workload.setup
    layout = Layout("ab" * 32, "fp32", "fake-1", setup.block_size, layers=LAYERS, kv_heads=1, head_dim=1)
    middle = len(workload.events) // 2
    before: list[World] = []
    for events in (workload.events[:middle], workload.events[middle:], workload.events):
        memory = HostArray(setup.host_blocks, setup.block_size)
        with closing(DiskStore(tmp_path, layout, memory.data, 1 << 20)) as store:
            world = World(setup, lambda host, store=store: store, memory, before)
            live(world, workload, events, wait_s=0.0005)
            world.check_end(wait=lambda: time.sleep(0.002))
            world.close()
            before.append(world)
            on_disk.update(saved=store.saved, loaded=store.loaded, errors=store.errors)
        for path in sorted(tmp_path.rglob("*.kv")):
            if random.random() < 0.2:
                damage(path, random)


def damage(path: Path, random: Random) -> None:
    """What disks and people do to files."""
    content = bytearray(path.read_bytes())
    match random.randrange(4):
        case 0:
            path.unlink()
        case 1:
            path.write_bytes(content[: random.randrange(len(content))])
        case 2:
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
            path.write_bytes(content)
        case _:
            shutil.copy(random.choice(sorted(path.parent.parent.rglob("*.kv"))), path.with_suffix(".other"))
            path.with_suffix(".other").replace(path)


def test_the_damaged_disk_was_used() -> None:
    print(dict(on_disk))
    for event in ("saved", "loaded", "errors"):
        assert on_disk[event] > 0, event


def test_the_workloads_went_through_everything() -> None:
    print(dict(sorted(seen.items())))
    assert seen["workloads"] >= WORKLOADS * 0.9
    for event in (
        *("prefix hits", "cut prompts", "wasted: eos", "wasted: disconnect", "wasted: refused"),
        *("swapped out", "swapped in", "swap preemptions", "recompute preemptions", "admission preemptions"),
        *("shed", "queue_full", "queue_timeout", "deadline_exceeded", "wasted: padding"),
        *("host hits", "disk hits", "disk loads", "failed disk loads", "failed disk saves", "restarts"),
        *("aborts", "aborts while swapped", "aborts while a prefix is loaded", "aborts of siblings"),
    ):
        assert seen[event] > 0, event
