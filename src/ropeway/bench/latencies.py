"""What users waited for: latencies, goodput and attainment of many requests, measured or simulated.

Definitions. All times are seconds on one clock.

- TTFT: from sending a request to its first streamed token, queueing included.
- TPOT: (E2E - TTFT) / (n - 1) of a request of n output tokens; a request of one token has none.
- ITL: the gap between two streamed tokens, pooled over all requests; tokens that come together have gaps of 0.
- E2E: from sending a request to its last token.
- A request met its targets if it was served to its end, its TTFT is within the target, and so is its TPOT: the mean of
  its gaps, not each of them. How many kept even their largest gap within that target is told beside it.
- Goodput: requests that met all their targets per second, from the first arrival to the end of the last request.
- Attainment: requests that met all their targets / all requests, those shed and those failed included.

Latencies are those of requests served to their end; ITL counts every gap that was streamed.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

_PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0}
_NO_TIER = ""


class Status(enum.IntEnum):
    """How a request ended."""

    FAILED = 0
    """With an error, or not at all."""
    SHED = 1
    """Refused because it would have come too late (429)."""
    OK = 2


@dataclass(frozen=True)
class Targets:
    """What a request must keep to be good; None: anything goes."""

    ttft_s: float | None = None
    tpot_s: float | None = None


class PooledGaps:
    """Any number of gaps in constant memory: an exact mean, largest gap and count, and percentiles within 0.2 %.

    A histogram with bins in geometric progression: each is 0.4 % wider than the one before, from 1 us to a day; a gap
    below 1 us counts as 0."""

    _LOW = 1e-6
    _LOG_RATIO = np.log1p(0.004)
    _BINS = int(np.ceil(np.log(86_400 / _LOW) / _LOG_RATIO)) + 1
    _PENDING = 1 << 16

    def __init__(self) -> None:
        self._counts = np.zeros(self._BINS, dtype=np.int64)
        self._sum = 0.0
        self._pending: list[Floats] = []
        self._pending_count = 0
        self.count = 0
        self.largest_s = 0.0

    def add(self, gaps_s: ArrayLike) -> None:
        """Count gaps of at least 0 seconds, of any shape."""
        gaps = np.array(gaps_s, dtype=np.float64).reshape(-1)
        if not len(gaps):
            return
        self.count += len(gaps)
        self._sum += float(gaps.sum())
        self.largest_s = max(self.largest_s, float(gaps.max()))
        self._pending.append(gaps)
        self._pending_count += len(gaps)
        if self._pending_count >= self._PENDING:
            self._bin()

    def merge(self, other: PooledGaps) -> None:
        """Count the gaps of ``other``, too."""
        other._bin()
        self._counts += other._counts
        self._sum += other._sum
        self.count += other.count
        self.largest_s = max(self.largest_s, other.largest_s)

    @property
    def mean_s(self) -> float:
        """NaN when there is none."""
        return self._sum / self.count if self.count else float("nan")

    def percentiles(self, percents: ArrayLike) -> Floats:
        """As ``numpy.percentile`` gives them, linear between two gaps; NaN when there is none."""
        wanted = np.asarray(percents, dtype=np.float64)
        if not self.count:
            return np.full(wanted.shape, np.nan)
        rank = wanted / 100 * (self.count - 1)
        below = np.floor(rank)
        low, high = self._ranked(below), self._ranked(np.ceil(rank))
        return low + (rank - below) * (high - low)

    def _ranked(self, ranks: Floats) -> Floats:
        """The gaps with these ranks in order of size, each as the geometric middle of its bin."""
        self._bin()
        bins = np.searchsorted(np.cumsum(self._counts), ranks, side="right")
        middle = np.where(bins == 0, 0.0, self._LOW * np.exp((bins - 0.5) * self._LOG_RATIO))
        return np.where(ranks >= self.count - 1, self.largest_s, np.minimum(middle, self.largest_s))

    def _bin(self) -> None:
        if not self._pending:
            return
        gaps = np.concatenate(self._pending)
        bins = np.floor(np.log(np.maximum(gaps, self._LOW) / self._LOW) / self._LOG_RATIO).astype(np.int64) + 1
        bins[gaps < self._LOW] = 0
        self._counts += np.bincount(np.minimum(bins, self._BINS - 1), minlength=self._BINS)
        self._pending.clear()
        self._pending_count = 0


class Recorder:
    """When the tokens of ``n`` requests came. Requests are rows in [0, n); each column has an entry per request."""

    def __init__(self, n: int, tiers: Sequence[str] | None = None) -> None:
        """``tiers``: the tier of each request, if they have any."""
        named = [_NO_TIER] * n if tiers is None else list(tiers)
        self.tiers = list(dict.fromkeys(named))
        """In the order in which they first occur."""
        code = {name: index for index, name in enumerate(self.tiers)}
        self.tier: Ints = np.array([code[name] for name in named], dtype=np.int64)
        """Index into ``tiers``."""
        self.gaps = [PooledGaps() for _ in self.tiers]
        """Those of each tier."""
        self.arrival_s: Floats = np.full(n, np.nan)
        self.first_token_s: Floats = np.full(n, np.nan)
        self.last_token_s: Floats = np.full(n, np.nan)
        self.ended_s: Floats = np.full(n, np.nan)
        self.output_tokens: Ints = np.zeros(n, dtype=np.int64)
        self.largest_gap_s: Floats = np.zeros(n)
        self.status: Ints = np.full(n, int(Status.FAILED), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.tier)

    def arrived(self, requests: ArrayLike, at_s: ArrayLike) -> None:
        """These requests were sent then: one moment for all, or one for each."""
        self.arrival_s[np.asarray(requests)] = at_s

    def step(self, requests: ArrayLike, at_s: float) -> None:
        """Each of these requests got a token at ``at_s``; one named k times got k of them. Times never fall."""
        rows, counts = np.unique(np.asarray(requests, dtype=np.int64), return_counts=True)
        begun = self.output_tokens[rows] > 0
        self.first_token_s[rows[~begun]] = at_s
        later = rows[begun]
        gaps = at_s - self.last_token_s[later]
        self.largest_gap_s[later] = np.maximum(self.largest_gap_s[later], gaps)
        self.last_token_s[rows] = at_s
        self.output_tokens[rows] += counts
        together = np.repeat(rows, counts - 1)
        self._pool(np.concatenate([later, together]), np.concatenate([gaps, np.zeros(len(together))]))

    def stream(self, request: int, tokens_s: ArrayLike, output_tokens: int | None = None) -> None:
        """All that was streamed of one request came at these times, which never fall. ``output_tokens``: how many
        tokens it was, if not one each time."""
        times = np.asarray(tokens_s, dtype=np.float64)
        if not len(times):
            return
        gaps = np.diff(times)
        self.first_token_s[request], self.last_token_s[request] = times[0], times[-1]
        self.output_tokens[request] = len(times) if output_tokens is None else output_tokens
        self.largest_gap_s[request] = gaps.max(initial=0.0)
        self.gaps[self.tier[request]].add(gaps)

    def ended(self, requests: ArrayLike, status: Status, at_s: ArrayLike) -> None:
        """These requests ended then."""
        rows = np.asarray(requests)
        self.status[rows] = int(status)
        self.ended_s[rows] = at_s

    @property
    def ttft_s(self) -> Floats:
        """Of each request; NaN without a token."""
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> Floats:
        return self.last_token_s - self.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """NaN with fewer than two tokens."""
        gaps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return (self.last_token_s - self.first_token_s) / gaps

    @property
    def duration_s(self) -> float:
        """From the first arrival to the end of the last request; NaN when nothing has ended."""
        ended = self.ended_s[~np.isnan(self.ended_s)]
        return float(ended.max() - np.nanmin(self.arrival_s)) if len(ended) else float("nan")

    def _pool(self, rows: Ints, gaps: Floats) -> None:
        if len(self.gaps) == 1:
            self.gaps[0].add(gaps)
            return
        tiers = self.tier[rows]
        for code in np.unique(tiers):
            self.gaps[code].add(gaps[tiers == code])


def figures(
    recorder: Recorder, targets: Targets | Mapping[str, Targets] | None = None, *, duration_s: float | None = None
) -> dict[str, Any]:
    """The figures of a run as JSON holds them, those of each named tier under ``tiers``.

    ``targets``: the same for all, or by tier (a tier not named has none). ``duration_s``: what rates are per; default:
    from the first arrival to the last end. A figure that nothing gives, such as the TPOT of requests that were all
    shed, is None."""
    wanted = {
        name: targets.get(name, Targets()) if isinstance(targets, Mapping) else targets for name in recorder.tiers
    }
    duration = recorder.duration_s if duration_s is None else duration_s
    good, smooth = np.zeros(len(recorder), dtype=np.bool_), np.zeros(len(recorder), dtype=np.bool_)
    for code, name in enumerate(recorder.tiers):
        mine = recorder.tier == code
        for met, pace in ((good, recorder.tpot_s), (smooth, recorder.largest_gap_s)):
            met[mine] = _met(recorder, pace, wanted[name] or Targets())[mine]
    pooled = PooledGaps()
    for gaps in recorder.gaps:
        pooled.merge(gaps)
    everyone = np.ones(len(recorder), dtype=np.bool_)
    result = {"duration_s": _number(duration), **_figures(recorder, everyone, good, smooth, pooled, duration)}
    if recorder.tiers != [_NO_TIER]:
        result["tiers"] = {
            name: _figures(recorder, recorder.tier == code, good, smooth, recorder.gaps[code], duration)
            for code, name in enumerate(recorder.tiers)
        }
    return result


def summary(values: ArrayLike) -> dict[str, float | None]:
    """mean, p50, p90 and p99 of the values that are numbers; None each when there is none."""
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[~np.isnan(numbers)]
    if not len(numbers):
        return dict.fromkeys(("mean", *_PERCENTILES))
    percentiles = np.percentile(numbers, list(_PERCENTILES.values()))
    return {"mean": float(numbers.mean()), **dict(zip(_PERCENTILES, percentiles.tolist(), strict=True))}


def _met(recorder: Recorder, pace_s: Floats, targets: Targets) -> Mask:
    met: Mask = recorder.status == Status.OK
    if targets.ttft_s is not None:
        met = met & (recorder.ttft_s <= targets.ttft_s)
    if targets.tpot_s is not None:
        met = met & ((recorder.output_tokens < 2) | (pace_s <= targets.tpot_s))
    return met


def _figures(
    recorder: Recorder, of: Mask, good: Mask, smooth: Mask, gaps: PooledGaps, duration_s: float
) -> dict[str, Any]:
    served = of & (recorder.status == Status.OK)
    met = int((of & good).sum())
    percentiles = gaps.percentiles(list(_PERCENTILES.values())).tolist()
    return {
        "requests": int(of.sum()),
        "completed": int(served.sum()),
        "shed": int((of & (recorder.status == Status.SHED)).sum()),
        "failed": int((of & (recorder.status == Status.FAILED)).sum()),
        "output_tokens": int(recorder.output_tokens[of].sum()),
        "requests_per_s": _rate(int(served.sum()), duration_s),
        "output_tokens_per_s": _rate(int(recorder.output_tokens[of].sum()), duration_s),
        "goodput_per_s": _rate(met, duration_s),
        "attainment": met / int(of.sum()) if of.any() else None,
        "met": met,
        "met_by_largest_gap": int((of & smooth).sum()),
        "ttft_s": summary(recorder.ttft_s[served]),
        "tpot_s": summary(recorder.tpot_s[served]),
        "itl_s": {
            "mean": _number(gaps.mean_s),
            **dict(zip(_PERCENTILES, map(_number, percentiles), strict=True)),
            "max": gaps.largest_s if gaps.count else None,
        },
        "e2e_s": summary(recorder.e2e_s[served]),
    }


def _rate(count: int, duration_s: float) -> float | None:
    return count / duration_s if duration_s > 0 else None


def _number(value: float) -> float | None:
    """As JSON has it, which knows no NaN."""
    return None if np.isnan(value) else float(value)
