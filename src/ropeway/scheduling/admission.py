"""Whether the blocks suffice for one more request, now and over its whole life.

Admission by profile follows the idea of the Past-Future scheduler (Gong et al., "Past-Future Scheduler for LLM Serving
under SLA Guarantees", ASPLOS 2025): from the lengths of past answers, draw how long each running request goes on, and
look for the moment at which they hold the most blocks together. What is held grows with every token until somebody ends
and frees all of its blocks, so only the moments just before an end can be the peak:

    blocks
      |          /|
      |    /|   / |
      |   / |  /  |   /|     three requests; the most is held
      |  /  | /   |  / |     just before the second one ends
      | /   |/    | /  |
      |/          |/   |
      +-----+-----+----+---> steps
           end   end  end
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ropeway.scheduling.lengths import LengthProfiles

Column = NDArray[np.int64]
Floats = NDArray[np.float64]
Number = TypeVar("Number", int, Column)

FUTURES = 8
"""How many futures admission by profile looks at."""
REDRAWN = 16
"""Tokens after which a seated request's futures are drawn anew."""
_SHIFTS = np.arange(FUTURES)[:, None] / FUTURES
_GOLDEN = 0.6180339887498949
_BITS = 31
"""A length is less than 2 ** _BITS."""


def fixed_draw(order: int) -> float:
    """The number in [0, 1) that a request's lengths are drawn with, from its order of arrival. Any run of consecutive
    requests covers the interval evenly (multiples of the golden ratio), so that sums over them come close to their
    means."""
    return order * _GOLDEN % 1.0


def peak_blocks(length: Column, remaining: Column, block_size: int) -> Column:
    """The most blocks that sequences hold together at any time, if each grows by a token per step and frees all its
    blocks at its end.

    ``length``: int64 [n], tokens now, below 2**31. ``remaining``: int64 [S, n], tokens still to come, a row per future.
    Returns int64 [S]. Every sequence's last block counts as half full, so that the result is at most n / 2 blocks off.
    """
    if not len(length):
        return np.zeros(len(remaining), dtype=np.int64)
    return -(-_peaks(np.sort(_packed(length, remaining), axis=1), block_size) // (2 * block_size))


def _packed(length: Column | int, remaining: Column) -> Column:
    """Lengths and remaining lengths in one number each, in ascending order those that end last first: sorting numbers
    is several times as fast as finding an order and following it."""
    packed = -remaining
    packed <<= _BITS
    packed += length
    return packed


def _peaks(packed: Column, block_size: int) -> Column:
    """Peak of each future, of sorted packed sequences [S, n]: int64 [S], in half slots as ``_half_slots`` counts."""
    left = packed >> _BITS  # remaining, negative
    alive = np.arange(1, packed.shape[1] + 1)
    tokens = np.cumsum(packed & (1 << _BITS) - 1, axis=1)
    left *= alive
    tokens -= left
    peaks: Column = _half_slots(tokens, alive, block_size).max(axis=1)
    return peaks


def _half_slots(tokens: Number, sequences: Number, block_size: int) -> Number:
    """What sequences take that have so many tokens in all, with last blocks that are half full, in halves of a slot."""
    return tokens * 2 + sequences * block_size


class Reservation:
    """Share of the pool that predictions may not use. It grows with every preemption for want of blocks, by a tenth of
    what is left to ``high``, and shrinks slowly back to ``low`` while there are none."""

    def __init__(self, low: float = 0.02, high: float = 0.3, grow: float = 0.1, shrink: float = 0.002) -> None:
        """Raises ``ValueError`` unless 0 <= low <= high <= 1 and the rates are in (0, 1)."""
        if not (0 <= low <= high <= 1 and 0 < grow < 1 and 0 < shrink < 1):
            raise ValueError(f"a reservation from {low} to {high}, rates {grow} and {shrink}")
        self.share = low
        self._low, self._high, self._grow, self._shrink = low, high, grow, shrink

    def preempted(self) -> None:
        """Somebody had to give way because blocks ran out."""
        self.share += (self._high - self.share) * self._grow

    def calm(self) -> None:
        """A step went by, or a request was admitted, without that."""
        self.share += (self._low - self.share) * self._shrink


class Candidate(msgspec.Struct, frozen=True):
    """A waiting request."""

    length: int
    """Tokens known: its prompt, and the output it had before a preemption."""
    generated: int
    """Of them, output."""
    cap: int
    """Most output tokens in all."""
    handle: int
    """Its class in the ``LengthProfiles``."""
    u: float
    """In [0, 1), the same all its life: ``fixed_draw``."""
    shared: int = 0
    """Blocks of its prefix that are in block tables of seated requests."""

    @property
    def limit(self) -> int:
        """The most tokens it may come to hold."""
        return self.length - self.generated + self.cap


class Forecasts:
    """Output lengths drawn for the seated, FUTURES each. They are kept from step to step, and drawn anew, under the
    condition that the request has come so far, after REDRAWN tokens or when it has outlived the shortest of them."""

    def __init__(self, slots: int, lengths: LengthProfiles) -> None:
        self._lengths = lengths
        self._owner = np.full(slots, -1, dtype=np.int64)
        """int64 [slots]: the request that a slot's were drawn for."""
        self._until = np.zeros(slots, dtype=np.int64)
        """int64 [slots]: output tokens at which they are to be drawn anew."""
        self._drawn = np.zeros((FUTURES, slots), dtype=np.int64)
        """int64 [FUTURES, slots]: output tokens in all."""

    def of(self, slots: Column, owner: Column, generated: Column, cap: Column, handle: Column, u: Floats) -> Column:
        """Remaining output tokens, int64 [FUTURES, n], of the requests ``owner`` in ``slots``; the other columns, of n
        entries too, are those of ``LengthProfiles.draw``."""
        stale = np.flatnonzero((self._owner[slots] != owner) | (generated >= self._until[slots]))
        if len(stale):
            known, places = generated[stale], slots[stale]
            drawn = self._lengths.draw(handle[stale], known, cap[stale], (u[stale] + _SHIFTS) % 1.0)
            drawn += known
            self._drawn[:, places] = drawn
            self._until[places] = np.minimum(drawn.min(axis=0), known + REDRAWN)
            self._owner[places] = owner[stale]
        remaining = self._drawn.take(slots, axis=1)
        remaining -= generated
        return remaining


@dataclass(slots=True, eq=False)
class RunningColumns:
    """Seated requests, a column per property. Made once per plan; whoever is seated then joins by ``add``. What one
    question about them has cost serves the next one."""

    length: Column
    """int64 [n]: tokens known, those still to be prefilled included."""
    generated: Column
    """int64 [n]: output tokens so far."""
    cap: Column
    """int64 [n]: most output tokens in all."""
    handle: Column
    """int64 [n]: classes in the ``LengthProfiles``."""
    u: Floats
    """float64 [n]: as of a ``Candidate``."""
    shared: int = 0
    """How many blocks fewer they hold than the sum over their block tables."""
    forecast: Callable[[], Column] | None = None
    """Their remaining lengths, int64 [FUTURES, n], without those that have joined; None: they are drawn when needed."""
    _outlook: _Outlook | None = field(default=None, init=False, repr=False)
    _joined: tuple[Candidate, _Outlook] | None = field(default=None, init=False, repr=False)
    """The last candidate asked about, and the outlook with it."""

    def add(self, candidate: Candidate) -> None:
        """The candidate is seated."""
        self.length = np.append(self.length, candidate.length)
        self.generated = np.append(self.generated, candidate.generated)
        self.cap = np.append(self.cap, candidate.cap)
        self.handle = np.append(self.handle, candidate.handle)
        self.u = np.append(self.u, candidate.u)
        self.shared += candidate.shared
        joined, self._joined = self._joined, None
        self._outlook = joined[1] if joined is not None and joined[0] is candidate else None


@dataclass(slots=True, eq=False)
class _Outlook:
    """What is known about the future of some sequences. Sums are in tokens."""

    now: int
    capped: int
    """With everybody at the most tokens allowed."""
    drawn: int | None = None
    """With everybody at the longest of the lengths drawn."""
    futures: Column | None = None
    """int64 [FUTURES, n]: packed and sorted."""


class Admission:
    """Decides about one waiting request at a time.

    - ``greedy``: what is known of it fits;
    - ``watermark``: and that share of the pool stays free;
    - ``profile``: it fits, and of the futures drawn, at least the share ``quantile`` has a peak that fits beside the
      reservation.

    A request that fits while nobody is seated is always admitted.
    """

    def __init__(
        self,
        mode: Literal["greedy", "watermark", "profile"],
        num_blocks: int,
        block_size: int,
        watermark: float,
        quantile: float,
        lengths: LengthProfiles,
        context: int,
    ) -> None:
        """The pool has ``num_blocks`` of ``block_size`` tokens; the longest sequence has ``context`` tokens. Raises
        ``ValueError`` unless ``watermark`` is in [0, 1) and ``quantile`` in (0, 1]."""
        if not (0 <= watermark < 1 and 0 < quantile <= 1):
            raise ValueError(f"watermark {watermark} must be in [0, 1), admission quantile {quantile} in (0, 1]")
        self.reservation = Reservation()
        self._mode = mode
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._watermark = watermark
        self._futures_needed = quantile * FUTURES - 1e-9
        self._lengths = lengths
        self._context = context

    def ample(self, sequences: int, tokens: int) -> bool:
        """Whether so many sequences can be seated together whatever happens, ``tokens`` being the sum of the most that
        they may get to hold."""
        if self._mode != "profile":
            return self._mode == "greedy"
        pool = int(self._num_blocks * (1.0 - self.reservation.share))
        return _half_slots(tokens, sequences, self._block_size) <= 2 * self._block_size * pool

    def admits(self, need: int, available: int, running: RunningColumns, candidate: Candidate) -> bool:
        """Whether the candidate may be seated. It must get ``need`` blocks for what is known of it and the next token;
        ``available`` are free or evictable, and not promised to others."""
        if need > available:
            return False
        if self._mode == "greedy" or not len(running.length):
            return True
        if self._mode == "watermark":
            return need <= available - self._watermark * self._num_blocks
        return self._lasts(running, candidate)

    def _lasts(self, running: RunningColumns, candidate: Candidate) -> bool:
        """Whether the futures fit. Bounds that are cheap to get answer first."""
        outlook = running._outlook
        if outlook is None:
            now = int(running.length.sum())
            outlook = running._outlook = _Outlook(now, now + int(self._most(running).sum()))
        most = max(min(candidate.cap - candidate.generated, self._context - candidate.length), 1)
        joined = _Outlook(outlook.now + candidate.length, outlook.capped + candidate.length + most)
        running._joined = candidate, joined
        # As _half_slots counts. Prefixes held together are taken to stay so.
        pool = int(self._num_blocks * (1.0 - self.reservation.share)) + running.shared + candidate.shared
        limit = 2 * self._block_size * pool
        slots = (limit - (len(running.length) + 1) * self._block_size) // 2
        if joined.capped <= slots:
            return True
        if joined.now > slots:
            return False
        remaining = self._draw_one(candidate)
        if outlook.futures is None:
            everybody: Column | None = None
            if outlook.drawn is None:
                everybody = self._remaining(running)
                outlook.drawn = outlook.now + int(everybody.max(axis=0).sum())
            joined.drawn = outlook.drawn + candidate.length + int(remaining.max())
            if joined.drawn <= slots:
                return True
            outlook.futures = _packed(running.length, self._remaining(running) if everybody is None else everybody)
            outlook.futures.sort(axis=1)
        joined.futures = _inserted(outlook.futures, _packed(candidate.length, remaining))
        fitting = np.count_nonzero(_peaks(joined.futures, self._block_size) <= limit)
        return bool(fitting >= self._futures_needed)

    def _most(self, running: RunningColumns) -> Column:
        """int64 [n]: the most tokens that may still come."""
        most: Column = np.minimum(running.cap - running.generated, self._context - running.length)
        np.maximum(most, 1, out=most)
        return most

    def _remaining(self, running: RunningColumns) -> Column:
        """Remaining output tokens of all, int64 [FUTURES, n]."""
        if running.forecast is None:
            return self._draw(running, 0)
        seated = running.forecast()
        if seated.shape[1] == len(running.length):
            return seated
        return np.concatenate((seated, self._draw(running, seated.shape[1])), axis=1)

    def _draw(self, running: RunningColumns, first: int) -> Column:
        """The same of those from the column ``first`` on, drawn now."""
        length, generated = running.length[first:], running.generated[first:]
        cap = np.minimum(running.cap[first:], self._context - length + generated)
        return self._lengths.draw(running.handle[first:], generated, cap, (running.u[first:] + _SHIFTS) % 1.0)

    def _draw_one(self, candidate: Candidate) -> Column:
        """int64 [FUTURES, 1]."""
        cap = min(candidate.cap, self._context - candidate.length + candidate.generated)
        u = (candidate.u + _SHIFTS) % 1.0
        return self._lengths.draw(np.array([candidate.handle]), np.array([candidate.generated]), np.array([cap]), u)


def _inserted(packed: Column, one: Column) -> Column:
    """Sorted rows [S, n] with one more number [S, 1] in each."""
    rows, count = packed.shape
    result = np.empty((rows, count + 1), dtype=np.int64)
    np.minimum(packed, one, out=result[:, :-1])
    result[:, -1:] = one
    np.maximum(result[:, 1:], packed, out=result[:, 1:])
    return result
