"""A trace on a fleet: from a load and settings to figures."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropeway.bench.latencies import Status, Targets, figures, summary
from ropeway.bench.traces import Trace
from ropeway.engine.messages import NewRequest, Stats
from ropeway.errors import ConfigError, InvalidRequest
from ropeway.request import SamplingParams
from ropeway.simulation.engine import EngineSettings, Usage
from ropeway.simulation.fleet import Fleet, MakeRequest
from ropeway.simulation.load import ClosedLoad, Load, OpenLoad
from ropeway.simulation.recording import Progress, Recording, Series
from ropeway.simulation.router import RouterName, make_router
from ropeway.tiers import Tier, find_tier

_VOCABULARY = 32_000
"""Ids that made-up prompts are of."""
_LEAST_MAX_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """A fleet, and what its clients ask for."""

    engine: EngineSettings
    engines: int = 1
    router: RouterName = "round-robin"
    group_size: int = 1
    """So many engines each step together."""
    concurrency: int | None = None
    """Closed loop: users for each engine; None: requests come at the trace's times."""
    max_tokens: int
    """What every request asks for at most. How long its answer really is, nobody but the device knows."""
    tier_mix: Mapping[str, float] | None = None
    """Tier -> share of the requests, for a trace that names no tiers."""
    seed: int = 0
    """Chooses token ids and, with ``tier_mix``, tiers."""


@dataclass(frozen=True, eq=False)
class Replayed:
    """What came of it."""

    recording: Recording
    series: Series
    usage: Usage
    """Over all engines."""
    stats: list[Stats]
    """Of each engine, at the end."""
    settings: ReplaySettings
    wall_s: float
    """Real time that it took."""

    def figures(self) -> dict[str, Any]:
        """Those of ``latencies.figures`` and of the engines, as JSON holds them. Targets are those of each tier.

        ``slot_use``: rows that some request needed, as a share of all slots, over the steps that left somebody
        waiting; 1 if none did. ``kv_waste``: 1 - computed positions / room in the blocks held for them, over time.
        ``pause_s``: the largest gap between two tokens of a request. ``evictions_per_request``: preemptions / requests
        taken in. ``phases_s`` and ``waits_s``: where the time of a served request went and what it waited for, in the
        mean. ``scheduler_us_per_step``: CPU time of planning and settling on this machine."""
        recording, usage, recorder = self.recording, self.usage, self.recording.recorder
        targets = {tier.name: Targets(tier.ttft_s, tier.tpot_s) for tier in self.settings.engine.tiers}
        measured = figures(recorder, targets)
        tiers: dict[str, dict[str, Any]] = measured.pop("tiers")
        for name, values in tiers.items():
            values.update(self._hindered(recorder.tier == recorder.tiers.index(name), self._preempted(name)))
        completed = measured["completed"]
        slots = self.settings.engine.scheduler.max_num_seqs
        return {
            **measured,
            **self._hindered(recorder.tier >= 0, sum(map(self._preempted, tiers))),
            "kv_waste": _share(usage.allocated_token_s - usage.live_token_s, usage.allocated_token_s),
            "slot_use": usage.queued_rows / (usage.queued_steps * slots) if usage.queued_steps else 1.0,
            "mean_batch": _share(usage.rows, usage.steps),
            "prefix_hit_fraction": _share(
                sum(each.prefix_hits for each in self.stats), sum(each.prefix_queries for each in self.stats)
            ),
            "preemptions": {kind: self._preemptions_by(kind) for kind in ("swap", "recompute", "admission")},
            "refused": dict(recording.refused),
            "phases_s": {name: _share(total, completed) for name, total in recording.phases_s.items()},
            "waits_s": {name: _share(total, completed) for name, total in recording.waits_s.items()},
            "steps": usage.steps,
            "busy_fraction": _share(usage.step_s, (measured["duration_s"] or 0.0) * self.settings.engines),
            "scheduler_us_per_step": _percentiles(usage.scheduler_us),
            "sim_wall_s": self.wall_s,
            "tiers": tiers,
        }

    def _hindered(self, mine: NDArray[np.bool_], preempted: int) -> dict[str, Any]:
        """What came between the tokens of these requests; bool [requests]."""
        recording, recorder = self.recording, self.recording.recorder
        several = mine & (recorder.status == Status.OK) & (recorder.output_tokens > 1)
        return {
            "evictions_per_request": _share(preempted, int((mine & recording.accepted).sum())),
            "pause_s": summary(recorder.largest_gap_s[several]),
        }

    def _preempted(self, tier: str) -> int:
        return sum(each.tiers[tier].preemptions.get(kind, 0) for each in self.stats for kind in ("swap", "recompute"))

    def _preemptions_by(self, kind: str) -> int:
        return sum(tier.preemptions.get(kind, 0) for each in self.stats for tier in each.tiers.values())


def replay(trace: Trace, settings: ReplaySettings, *, progress: Progress | None = None) -> Replayed:
    """Run the trace to the end of its last request.

    Raises ``ConfigError`` for a tier that is not among the settings', and for a trace without arrival times in an open
    loop."""
    began = time.perf_counter()
    tiers = tiers_of(trace, settings)
    recording = Recording(tiers, progress)
    series = Series()
    engine = settings.engine
    fleet = Fleet(
        engine,
        settings.engines,
        make_router(settings.router, settings.engines, block_size=engine.block_size, num_blocks=engine.num_blocks),
        _load(trace, settings),
        _maker(trace, tiers, settings),
        last_positions(trace),
        recording,
        group_size=settings.group_size,
        watch=series,
    )
    fleet.run()
    return Replayed(
        recording=recording,
        series=series,
        usage=_total([each.usage for each in fleet.engines]),
        stats=[each.engine.stats() for each in fleet.engines],
        settings=settings,
        wall_s=time.perf_counter() - began,
    )


def last_positions(trace: Trace) -> NDArray[np.int64]:
    """int64 [n]: where the last token of each request stands."""
    return trace.input_tokens + trace.output_tokens - 1


def default_max_tokens(trace: Trace) -> int:
    """What clients might ask for who don't know how long answers get: a power of two that suffices for all."""
    return max(_LEAST_MAX_TOKENS, 1 << (int(trace.output_tokens.max()) - 1).bit_length())


def tiers_of(trace: Trace, settings: ReplaySettings) -> list[str]:
    """The tier of each request, by name. Raises ``ConfigError`` for one that there is not."""
    known = settings.engine.tiers
    if trace.tier is not None:
        for name in dict.fromkeys(trace.tier):
            _rank(known, name)
        return trace.tier
    if settings.tier_mix is None:
        return [known[find_tier(known, None)].name] * len(trace)
    for name in settings.tier_mix:
        _rank(known, name)
    names, shares = list(settings.tier_mix), np.array(list(settings.tier_mix.values()))
    drawn = np.random.default_rng(settings.seed).choice(len(names), size=len(trace), p=shares / shares.sum())
    return [names[index] for index in drawn.tolist()]


def _rank(tiers: Sequence[Tier], name: str) -> int:
    try:
        return find_tier(tiers, name)
    except InvalidRequest as error:
        raise ConfigError(error.message, param="tiers") from error


def _load(trace: Trace, settings: ReplaySettings) -> Load:
    if settings.concurrency is None:
        return OpenLoad(trace.times)
    return ClosedLoad(len(trace), settings.concurrency * settings.engines)


def _maker(trace: Trace, tiers: Sequence[str], settings: ReplaySettings) -> MakeRequest:
    rank = {name: _rank(settings.engine.tiers, name) for name in dict.fromkeys(tiers)}
    params = SamplingParams(max_tokens=settings.max_tokens)
    lengths = trace.input_tokens.tolist()
    # Without a prefix cache nobody looks at what prompts say.
    blank = None if settings.engine.prefix_cache else np.ones(max(lengths), dtype=np.int32)

    def make(row: int, now_s: float) -> NewRequest:
        prompt = trace.prompt_ids(row, _VOCABULARY, settings.seed) if blank is None else blank[: lengths[row]]
        return NewRequest(
            id=row,
            prompt=prompt,
            params=params,
            seed=row,
            tier=rank[tiers[row]],
            tenant="" if trace.tenant is None else trace.tenant[row],
            arrival_s=now_s,
        )

    return make


def _total(usages: Sequence[Usage]) -> Usage:
    total = Usage()
    for usage in usages:
        for field in dataclasses.fields(Usage):
            setattr(total, field.name, getattr(total, field.name) + getattr(usage, field.name))
    return total


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(values, [50, 99]).tolist()
    return {"p50": p50, "p99": p99}
