"""No sequence of events, however unlikely, leads to what must never happen.

Hypothesis makes the sequences up: calls of every kind come and are given up, steps are made ahead or not, time passes,
the disk works, fails and fills up, the engine starts anew. After each event the "Never" list of ``tests.support.world``
is looked through; at the end everybody must have got what he would have got alone, and nothing may be left over.

A failing sequence is reduced and printed, as a program of calls to the machine and with the command that replays it:

    python -m pytest tests/property/test_scheduler_machine.py --hypothesis-seed=N
"""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableSequence
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ropeway.request import SamplingParams
from tests.support.fake_device import HostBlock
from tests.support.fake_store import FakeStore
from tests.support.setups import PURPOSES, SECONDS, arrivals, setups
from tests.support.world import Arrival, Record, World

SEQUENCES = 40
EVENTS = 40
_STEPS = 3000
LONG_PROMPT = Arrival(tuple(range(1, 36)), SamplingParams(max_tokens=2, ignore_eos=True))
"""Begins as many of those that are drawn do."""
ONE_TOKEN = Arrival((1,), SamplingParams(max_tokens=1))
SOME_TOKENS = Arrival((1,), SamplingParams(max_tokens=9, ignore_eos=True))

seconds = st.sampled_from(SECONDS)


class SchedulerMachine(RuleBasedStateMachine):
    """One engine after the other, on one disk."""

    world: World

    purpose: str

    @initialize(data=st.data(), disk=st.booleans())
    def start(self, data: st.DataObject, disk: bool) -> None:
        self.setup = data.draw(setups(self.purpose))
        self.held: dict[bytes, HostBlock] = {}
        self.before: list[World] = []
        self.disk = self.setup.host_blocks > 0 and (disk or self.purpose == "disk")
        self._open()
        self._prelude(data)
        self._arrive(data, 4)

    # ------------------------------------------------------------------ clients

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        self._arrive(data, 1)

    @rule(data=st.data(), count=st.integers(2, 6))
    def arrive_together(self, data: st.DataObject, count: int) -> None:
        self._arrive(data, count)

    @precondition(lambda self: self._live())
    @rule(which=st.integers(0, 1 << 10))
    def abort(self, which: int) -> None:
        live = self._live()
        self.world.abort(live[which % len(live)].new.id)

    @precondition(lambda self: self.world.find("swapped") is not None)
    @rule()
    def abort_one_that_is_swapped(self) -> None:
        self._abort_one("swapped")

    @precondition(lambda self: self.world.find("loading") is not None)
    @rule()
    def abort_one_whose_prefix_is_loaded(self) -> None:
        self._abort_one("loading")

    # ------------------------------------------------------------------ the engine

    @rule(seconds=seconds)
    def step(self, seconds: float) -> None:
        self.world.step(0, seconds)

    @rule(seconds=seconds)
    def step_ahead(self, seconds: float) -> None:
        self.world.step(1, seconds)

    @rule(count=st.integers(2, 12), ahead=st.integers(0, 1), seconds=seconds)
    def step_on(self, count: int, ahead: int, seconds: float) -> None:
        for _ in range(count):
            self.world.step(ahead, seconds)

    @rule(seconds=st.sampled_from((0.3, 3.0)))
    def wait(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @rule()
    def tell(self) -> None:
        self.world.check_stats()
        self.world.check_timelines()

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @rule(ahead=st.integers(0, 1))
    def drain(self, ahead: int) -> None:
        """Serve everybody."""
        world = self.world
        for _ in range(_STEPS):
            if not world.engine.has_work:
                break
            if world.store is not None:
                self._store.work(1)
            world.step(ahead, 0.01)
        assert not world.engine.has_work, "livelock"

    @precondition(lambda self: self.disk)
    @rule()
    def start_anew(self) -> None:
        """Another engine finds what this one leaves on disk."""
        self.seen["restarts"] += 1
        self._close()
        self._open()

    # ------------------------------------------------------------------ the disk

    @precondition(lambda self: self.disk and self._store.pending)
    @rule(count=st.integers(1, 4))
    def disk_works(self, count: int) -> None:
        self._store.work(count)

    @precondition(lambda self: self.disk and self._store.pending)
    @rule(count=st.integers(1, 2))
    def disk_fails(self, count: int) -> None:
        self._store.work(count, ok=False)

    @precondition(lambda self: self.disk)
    @rule()
    def disk_is_full_or_is_no_more(self) -> None:
        self._store.full = not self._store.full

    @precondition(lambda self: self.disk and self._store.blocks)
    @rule(which=st.integers(0, 1 << 10))
    def disk_loses_a_block(self, which: int) -> None:
        keys = list(self._store.held)
        self._store.lose(keys[which % len(keys)])

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def what_must_never_happen(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self._close()
            self.seen["sequences"] += 1

    # ------------------------------------------------------------------ inside

    def _open(self) -> None:
        def store_of(host: MutableSequence[HostBlock | None]) -> FakeStore:
            self._store = FakeStore(host, held=self.held)
            return self._store

        self.world = World(self.setup, store_of if self.disk else None, before=self.before)

    def _close(self) -> None:
        world = self.world
        self.drain(1)
        if self.disk:
            self._store.work()
        world.check_end()
        world.close()
        self.seen.update(world.seen)
        self.before.append(world)

    def _live(self) -> list[Record]:
        return [record for record in self.world.records.values() if record.live]

    def _prelude(self, data: st.DataObject) -> None:
        """What makes sure that the sequence is about what it is meant to be about."""
        world, last = self.world, len(self.setup.tiers) - 1
        match self.purpose:
            case "disk":
                world.submit(LONG_PROMPT)
                self.start_anew()
                self.world.submit(LONG_PROMPT)
            case "tiers":
                self._arrive(data, 3, tier=last)
                world.step(0)
                self._arrive(data, 1, tier=0)
            case "shedding":
                world.clock.advance(1.0)
                world.submit(LONG_PROMPT)
                world.submit(replace(LONG_PROMPT, early_s=1.0))
            case "padding":
                world.submit(ONE_TOKEN)
                world.submit(SOME_TOKENS)
                self.drain(1)

    def _arrive(self, data: st.DataObject, count: int, **fixed: int) -> None:
        for _ in range(count):
            self.world.submit(replace(data.draw(arrivals(self.purpose)), **fixed))

    def _abort_one(self, state: Literal["swapped", "loading"]) -> None:
        request_id = self.world.find(state)
        assert request_id is not None
        self.world.abort(request_id)


EXPECTED = {
    "anything": ("prefix hits", "finished"),
    "swap": ("swapped out", "swapped in"),
    "tiers": ("admission preemptions",),
    "shedding": ("shed", "queue_full"),
    "disk": ("disk hits", "disk loads", "host hits"),
    "padding": ("wasted: padding",),
}
"""What sequences of each purpose must have gone through."""


@pytest.mark.timeout(900)  # reducing a failing sequence takes up to five minutes
@pytest.mark.parametrize("purpose", PURPOSES)
def test_no_sequence_of_events_leads_to_what_must_never_happen(purpose: str) -> None:
    class Machine(SchedulerMachine):
        pass

    Machine.purpose = purpose
    Machine.seen = Counter()
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=SEQUENCES,
            stateful_step_count=EVENTS,
            deadline=None,
            derandomize=False,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(dict(sorted(Machine.seen.items())))
    for event in EXPECTED[purpose]:
        assert Machine.seen[event] > 0, event
