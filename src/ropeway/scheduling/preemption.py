"""Who gives way when blocks run out, or when a higher tier needs a seat; and how: by swap or by recompute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ropeway.config import SchedulerConfig
from ropeway.scheduling.admission import Reservation
from ropeway.scheduling.cost import CopyCost, StepCost
from ropeway.scheduling.lifecycle import Lifecycle
from ropeway.scheduling.plan_rows import PlanRows

_LINE_SHIFT = 40
_PADDING_FIRST = 1 << 60
_NOBODY = np.empty(0, dtype=np.int64)


class Preemption:
    """Chooses victims and takes their seats."""

    def __init__(
        self,
        config: SchedulerConfig,
        lifecycle: Lifecycle,
        cost: StepCost,
        copy_cost: CopyCost,
        reservation: Reservation,
    ) -> None:
        """``reservation`` learns of those that gave way for want of blocks."""
        self._config = config
        self._lifecycle = lifecycle
        self._seats = lifecycle.seats
        self._cost = cost
        self._copy_cost = copy_cost
        self._reservation = reservation
        self._preemptible = np.array([tier.preemptible for tier in lifecycle.tiers])
        """bool [tiers]."""

    # ------------------------------------------------------------------ for a higher tier's sake

    def outranks(self, line: int, fresh: Collection[int] = ()) -> bool:
        """Whether somebody seated may give way at admission to one of this line. ``fresh``: slots given in this very
        pass, which are kept."""
        return bool((~self._seats.protected[self._below(line, fresh)]).any())

    def _below(self, line: int, fresh: Collection[int]) -> NDArray[np.int64]:
        """Seats of lower tiers that are preemptible, without those given in this very pass, in the order of ranks."""
        seats, ranked = self._seats, self._seats.ranked
        if not self._lifecycle.policy.tiered or not len(ranked) or seats.line[ranked[-1]] <= line:
            return _NOBODY
        below = ranked[np.searchsorted(seats.line[ranked], line, side="right") :]
        if not self._preemptible.all():
            below = below[self._preemptible[seats.tier[below]]]
        for slot in fresh:
            below = below[below != slot]
        return below

    def make_way(self, missing: int, hits: Sequence[int], line: int, fresh: Collection[int], now: float) -> bool:
        """Preempt lower tiers until a slot is vacant and ``missing`` blocks more are available, beside ``hits``, which
        are found and will be kept; False, and nobody is preempted, when that is beyond them."""
        victims: list[int] = []
        slots = 0 if self._seats.vacant else 1
        scarce = missing > 0
        freed = self._freed(hits)
        for victim in self._by_cost(self._below(line, fresh)):
            if missing <= 0 and slots <= 0:
                break
            victims.append(victim)
            missing -= freed(victim)
            slots -= 1
        if missing > 0 or slots > 0 or not victims:
            return False
        for victim in victims:
            self.preempt(victim, now, for_tier=True, scarce=scarce)
        return True

    def _by_cost(self, ranked: NDArray[np.int64]) -> list[int]:
        """Of these seats, in the order of ranks, those that are not protected: padding first, then the lowest tier,
        there the one with the least computed, whose resume is cheapest either way, then the last in rank."""
        seats = self._seats
        slots = ranked[~seats.protected[ranked] | seats.padding[ranked]][::-1]
        price = seats.computed[slots] - (seats.line[slots] << _LINE_SHIFT)
        price[seats.padding[slots]] -= _PADDING_FIRST
        chosen: list[int] = slots[np.argsort(price, kind="stable")].tolist()
        return chosen

    # ------------------------------------------------------------------ for want of blocks

    def make_room(self, count: int, slot: int, rows: PlanRows, now: float) -> bool:
        """Preempt until ``count`` blocks are available to the request in ``slot``. False, and nobody is preempted, when
        those that may give way hold too few."""
        missing = count - self._lifecycle.pool.available
        if missing <= 0:
            return True
        if self._seats.padding[slot]:
            return False
        victims: list[int] = []
        freed = self._freed()
        for victim in self._victims(slot, rows):
            victims.append(victim)
            missing -= freed(victim)
            if missing <= 0:
                break
        else:
            return False
        for victim in victims:
            self.preempt(victim, now)
        return True

    def _victims(self, slot: int, rows: PlanRows) -> Iterator[int]:
        """Who may give way to the request in ``slot``, the best first: without a row in this plan, and behind the asker
        in rank, unless that one is protected; and padding."""
        ranked = self._seats.ranked
        if not self._seats.protected[slot]:
            behind = np.arange(len(ranked)) > np.flatnonzero(ranked == slot)[0]
            ranked = ranked[behind | self._seats.padding[ranked]]
        return (other for other in self._by_cost(ranked) if other != slot and other not in rows)

    def _freed(self, kept: Sequence[int] = ()) -> Callable[[int], int]:
        """A function to be called for one seat after the other: how many blocks more become available when that one is
        taken, too. Those that others share do not, nor do those in ``kept``."""
        pool, spared = self._lifecycle.pool, frozenset(kept)
        taken: Counter[int] = Counter()

        def freed(slot: int) -> int:
            blocks = self._seats.held(slot)
            taken.update(blocks)
            return sum(taken[block] == pool.references(block) and block not in spared for block in blocks)

        return freed

    # ------------------------------------------------------------------ how

    def preempt(self, slot: int, now: float, *, for_tier: bool = False, scarce: bool = True) -> None:
        """Take a seat; its request waits again, or was padding and is gone. ``scarce``: its blocks are wanted, and not
        the seat alone."""
        if self._seats.padding[slot]:
            self._lifecycle.drop_padding(slot)
            return
        ledger = self._lifecycle.ledgers[self._seats.tier[slot]]
        self._lifecycle.preempt(slot, now, swap=self._swaps(slot, scarce))
        if for_tier:
            ledger.preemptions["admission"] += 1
        else:
            self._reservation.preempted()

    def _swaps(self, slot: int, scarce: bool) -> bool:
        """Whether copying a request's blocks out and back is thought to cost less than computing them again. Where
        blocks are not scarce, those that are published are taken to be found again."""
        host = self._lifecycle.host
        if host is None or self._config.preemption == "recompute":
            return False
        if self._config.preemption == "swap":
            return True
        request = self._lifecycle.seated(slot)
        blocks, tokens = int(self._seats.blocks_held[slot]), int(self._seats.computed[slot])
        found = 0 if scarce else request.published
        written = 0 if request.keys is None or request.private else host.count(request.keys[1 : request.published + 1])
        copies = blocks - written + blocks - found
        return self._copy_cost.seconds(copies) < (tokens - found * self._lifecycle.pool.block_size) * self._cost.token_s
