"""How long answers get: observed output lengths per class of requests, and what they say about running ones.

A class is a tier and a tenant. Its lengths are counted in a histogram with logarithmic bins, in which older
observations fade. A class that has seen fewer than OWN answers goes by its tier's distribution, and such a tier by
everybody's; beyond that, each is mixed with the wider one:

    class     (counts + MIXED * tier)      / (total + MIXED)
    tier      (counts + MIXED * everybody) / (total + MIXED)
    everybody (counts + MIXED * prior)     / (total + MIXED)

The prior is an exponential with a small heavy tail, of 256 tokens in the mean. Of a request that has outlived
everything observed, only that tail is left: as likely as not it goes on for as long again.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]
Floats = NDArray[np.float64]

LONGEST = 1 << 20
"""Lengths beyond count as this one."""
MAX_TENANTS = 256
"""Tenants with a class of their own, over all tiers; the others share their tiers' classes."""
MAX_TIERS = 64
OWN = 8
"""Observations from which on a class has a distribution of its own."""
MIXED = 32.0
"""Observations that the wider distribution counts for."""
HALF_LIFE = 2000.0
_GROWTH = 1.07
_PRIOR_BODY = 226.0
_PRIOR_TAIL = 1 / 64
_PRIOR_SCALE = 256.0
_STALE = 32
"""A class's tables are made anew when one in so many of its observations is not in them."""


def _bin_edges() -> list[int]:
    """First length of each bin, and LONGEST + 1 at the end."""
    edges = [1]
    while edges[-1] <= LONGEST:
        edges.append(min(max(edges[-1] + 1, int(edges[-1] * _GROWTH)), LONGEST + 1))
    return edges


_EDGES = _bin_edges()
_BINS = len(_EDGES) - 1
_STARTS = np.array(_EDGES, dtype=np.float64)
_WIDTHS = np.diff(_STARTS)
_BIN_OF = np.repeat(np.arange(-1, _BINS, dtype=np.int16), [1, *np.diff(_EDGES)])
"""int16 [LONGEST + 1]: the bin of each length; lengths start at 1."""


def _prior() -> Floats:
    """Probability of each bin before anything was observed."""
    before = _STARTS - 1
    survival = (1 - _PRIOR_TAIL) * np.exp(-before / _PRIOR_BODY) + _PRIOR_TAIL / (1 + before / _PRIOR_SCALE)
    survival[-1] = 0.0
    return -np.diff(survival)


_PRIOR = _prior()

# Distributions are inverted by tables over t = -log P(longer): in steps of 1/128 up to t = 4, the bulk, then of 1/8 up
# to t = 36, so that what is drawn for a request far out in the tail is as good as for a young one.
_CELLS = 768
_CELL = np.arange(_CELLS + 1)
_GRID_SURVIVAL = np.exp(-np.where(_CELL <= 512, _CELL / 128, (_CELL - 480) / 8))


class _SavedClass(msgspec.Struct, forbid_unknown_fields=True):
    tier: str | None
    """None: everybody."""
    tenant: str | None
    """None: the whole tier."""
    counts: list[tuple[int, float]]
    """(first length of the bin, weight), without the empty bins."""


class _SavedHeading(msgspec.Struct):
    """What tells whether the rest can be read."""

    format: str
    version: int
    model: str


class _SavedProfiles(_SavedHeading, forbid_unknown_fields=True):
    classes: list[_SavedClass]


_FORMAT = "ropeway length profile"
_VERSION = 1


class LengthProfiles:
    """Decayed histograms of output lengths. Not thread-safe."""

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        """``half_life``: observations of a class after which an older one counts half. Raises ``ValueError`` unless
        it is positive."""
        if not half_life > 0:
            raise ValueError(f"a half-life of {half_life} observations; it must be positive")
        self._keep = 0.5 ** (1.0 / half_life)
        self._handles: dict[tuple[str, str | None], int] = {}
        """Classes by (tier, tenant); tenant None: the whole tier. 0 is everybody."""
        self._tiers = 0
        self._tenants = 0
        self._parent = [0]
        self._weight = [0.0]
        """Sums of the counts."""
        self._unseen = [0]
        """Observations that are not in the tables yet."""
        self._due: set[int] = {0}
        """Classes whose tables are to be made anew before they are used."""
        self._source = np.zeros(8, dtype=np.int64)
        """int64 [classes]: the class whose distribution counts for a class."""
        self._counts = np.zeros((8, _BINS))
        self._survival = np.zeros((8, _BINS + 1))
        """Probability of a length from each edge on."""
        self._inverse = np.zeros((8, _CELLS + 1))
        """The length that is outlived with probability exp(-t), for each t of the grid."""

    def handle(self, tier: str, tenant: str) -> int:
        """The class of a tenant's requests in a tier, a small integer that stays the same. Tenants that come after
        MAX_TENANTS others get that of the whole tier."""
        return self._find(tier, tenant)

    def observe(self, tier: str, tenant: str, length: int) -> None:
        """Count an answer of ``length`` tokens; one without any is passed over."""
        if length < 1:
            return
        place = _BIN_OF[min(length, LONGEST)]
        handle = self._find(tier, tenant)
        while True:
            row = self._counts[handle]
            row *= self._keep
            row[place] += 1.0
            self._gained(handle, self._weight[handle] * self._keep + 1.0)
            if not handle:
                return
            handle = self._parent[handle]

    def draw(self, handles: Column, generated: Column, cap: Column, u: Floats) -> Column:
        """Remaining output lengths, drawn by inverting the distributions of lengths beyond ``generated``.

        ``handles``, ``generated`` and ``cap`` are int64 [n]: classes, output tokens so far, and the most there may be
        in all. ``u`` is float64 [..., n] in [0, 1). Returns int64 [..., n]: at least 1, and at most
        ``cap - generated`` where that is at least 1."""
        if self._due:
            self._make_tables()
        source = self._source.take(handles)
        # What is left alive at generated + 1: bins are lines.
        shortest = np.minimum(generated + 1, LONGEST)
        place = _BIN_OF.take(shortest)
        start = source * (_BINS + 1) + place
        alive = self._survival.take(start)
        within = (shortest - _STARTS.take(place)) / _WIDTHS.take(place)
        alive -= (alive - self._survival.take(start + 1)) * within
        t = -np.log(alive * (1.0 - u))
        within = np.minimum(np.minimum(t * 128, t * 8 + 480), _CELLS - 1e-6)
        cell = within.astype(np.int64)
        within -= cell
        cell += source * (_CELLS + 1)
        length = self._inverse.take(cell)
        cell += 1
        length += (self._inverse.take(cell) - length) * within
        remaining: Column = np.minimum(length.astype(np.int64), cap)
        remaining -= generated
        np.maximum(remaining, 1, out=remaining)
        return remaining

    def quantile(self, handle: int, q: float, generated: int = 0, cap: int = LONGEST) -> int:
        """Output tokens still to come that a request of a class stays within with probability ``q`` (in [0, 1)),
        given those it has ``generated``; at least 1, and at most ``cap - generated`` where that is at least 1."""
        drawn = self.draw(np.array([handle]), np.array([generated]), np.array([cap]), np.array([q]))
        return int(drawn[0])

    def mean(self, handle: int, cap: int = LONGEST) -> float:
        """Mean output length of a class when answers end at ``cap`` tokens."""
        if self._due:
            self._make_tables()
        survival = self._survival[self._source[handle]]
        # The sum of P(length >= x) over x = 1..cap; in a bin, that falls on a line.
        count = np.clip(min(max(cap, 1), LONGEST) + 1 - _STARTS[:-1], 0.0, _WIDTHS)
        slope = (survival[:-1] - survival[1:]) / _WIDTHS
        return float(count @ survival[:-1] - slope @ (count * (count - 1)) / 2)

    # ------------------------------------------------------------------ files

    def save(self, path: Path, model: str) -> str | None:
        """Write what was observed for ``model`` to a JSON file, which is replaced as a whole or not at all. Returns
        None, or a sentence saying why it could not be written."""
        names = [(None, None), *self._handles]
        classes = [
            _SavedClass(tier, tenant, self._nonempty(handle))
            for handle, (tier, tenant) in enumerate(names)
            if self._weight[handle] > 0
        ]
        content = msgspec.json.encode(_SavedProfiles(_FORMAT, _VERSION, model, classes))
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(part, path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            return f"the length profile {path} could not be written: {error.strerror or error}"
        return None

    def load(self, path: Path, model: str) -> str | None:
        """Add what was saved for ``model`` to what was observed so far. Of the tenants, the half with the most
        observations is kept, so that there is room for new ones. Returns None, also if there is no such file yet; or
        a sentence saying why nothing was loaded: the file is damaged, or of another model or version."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"the length profile {path} could not be read: {error.strerror or error}"
        try:
            heading = msgspec.json.decode(content, type=_SavedHeading)
            if heading.format != _FORMAT or heading.version != _VERSION:
                return (
                    f"{path} is a {heading.format!r:.50} of version {heading.version}, not a {_FORMAT!r} of version "
                    f"{_VERSION}; it is ignored"
                )
            if heading.model != model:
                return f"the length profile {path} is of the model {heading.model!r:.200}, not {model!r}; it is ignored"
            saved = msgspec.json.decode(content, type=_SavedProfiles)
            rows = [_row(entry.counts) for entry in saved.classes]
        except (msgspec.MsgspecError, ValueError) as error:
            return f"the length profile {path} is damaged ({error}); it is ignored"
        order = sorted(range(len(rows)), key=lambda place: -rows[place].sum())
        tenants = 0
        for place in order:
            entry = saved.classes[place]
            if entry.tier is None:
                self._add(0, rows[place])
                continue
            if entry.tenant is not None:
                tenants += 1
                if tenants > MAX_TENANTS // 2:
                    continue
            handle = self._find(entry.tier, entry.tenant)
            if self._handles.get((entry.tier, entry.tenant)) == handle:
                self._add(handle, rows[place])
        return None

    def _nonempty(self, handle: int) -> list[tuple[int, float]]:
        counts = self._counts[handle].round(6)
        return [(_EDGES[place], float(counts[place])) for place in np.flatnonzero(counts).tolist()]

    def _add(self, handle: int, row: Floats) -> None:
        """Add saved counts to a class, as far as its memory reaches."""
        counts = self._counts[handle]
        counts += row
        excess = counts.sum() * (1 - self._keep)
        if excess > 1:
            counts /= excess
        self._unseen[handle] += round(row.sum())
        self._gained(handle, float(counts.sum()))

    # ------------------------------------------------------------------ classes and tables

    def _find(self, tier: str, tenant: str | None) -> int:
        handle = self._handles.get((tier, tenant))
        if handle is not None:
            return handle
        if tenant is None:
            if self._tiers == MAX_TIERS:
                return 0
            self._tiers += 1
            return self._new_class((tier, None), 0)
        parent = self._find(tier, None)
        if self._tenants == MAX_TENANTS or not parent:
            return parent
        self._tenants += 1
        return self._new_class((tier, tenant), parent)

    def _new_class(self, name: tuple[str, str | None], parent: int) -> int:
        handle = len(self._parent)
        if handle == len(self._counts):
            self._source, self._counts, self._survival, self._inverse = (
                np.concatenate([table, np.zeros_like(table)])
                for table in (self._source, self._counts, self._survival, self._inverse)
            )
        self._handles[name] = handle
        self._parent.append(parent)
        self._weight.append(0.0)
        self._unseen.append(0)
        self._source[handle] = self._source[parent]
        return handle

    def _gained(self, handle: int, weight: float) -> None:
        """A class has a new observation, and now this weight."""
        self._weight[handle] = weight
        self._unseen[handle] += 1
        if self._unseen[handle] * _STALE > weight and (weight >= OWN or not handle):
            self._due.add(handle)

    def _make_tables(self) -> None:
        """Bring the tables of the due classes up to date."""
        for handle in sorted(self._due):
            self._unseen[handle] = 0
            survival, inverse = self._survival[handle], self._inverse[handle]
            # Summed up from the far end, so that the thin tail keeps its precision.
            survival[:-1] = np.cumsum(self._chances(handle)[::-1])[::-1]
            survival /= survival[0]
            place = np.searchsorted(-survival[:-1], -_GRID_SURVIVAL, side="right") - 1
            here = survival[place]
            inverse[:] = (here - _GRID_SURVIVAL) / (here - survival[place + 1])
            np.minimum(inverse, 1.0, out=inverse)
            inverse *= _WIDTHS[place]
            inverse += _STARTS[place]
            if self._source[handle] != handle:
                self._source[handle] = handle
                for child in range(handle + 1, len(self._parent)):  # those below that have no tables of their own
                    if self._source[child] != child:
                        self._source[child] = self._source[self._parent[child]]
        self._due.clear()

    def _chances(self, handle: int) -> Floats:
        """Probability of each bin for a class, mixed with the wider ones."""
        wider = self._chances(self._parent[handle]) if handle else _PRIOR
        mixed: Floats = (self._counts[handle] + MIXED * wider) / (self._weight[handle] + MIXED)
        return mixed


def _row(counts: list[tuple[int, float]]) -> Floats:
    """Saved counts as a histogram. Raises ``ValueError`` for what no run has saved."""
    row = np.zeros(_BINS)
    for length, weight in counts:
        if not 1 <= length <= LONGEST or not 0 <= weight < 1e12:
            raise ValueError(f"weight {weight} of length {length}")
        row[_BIN_OF[length]] += weight
    return row
