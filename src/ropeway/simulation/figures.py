"""The report of a simulation: what is written as JSON, and the plots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ropeway.bench.html import Chart, Lines, latency_charts
from ropeway.bench.traces import Trace
from ropeway.simulation.replay import Replayed, ReplaySettings, replay

_MOST_POINTS = 400
"""Of a series in JSON."""
_SWEPT = (
    "requests_per_s",
    "output_tokens_per_s",
    "goodput_per_s",
    "attainment",
    "shed",
    "evictions_per_request",
    "kv_waste",
    "ttft_s",
    "tpot_s",
    "itl_s",
    "e2e_s",
    "pause_s",
)


def report_of(replayed: Replayed) -> dict[str, Any]:
    """Figures, settings, and the fleet over time."""
    return {
        **replayed.figures(),
        "settings": settings_of(replayed.settings),
        "series": {name: _thinned(values) for name, values in replayed.series.columns().items()},
    }


def settings_of(settings: ReplaySettings) -> dict[str, Any]:
    """By name, flat but for tiers and cost model."""
    engine = settings.engine
    return {
        "engines": settings.engines,
        "router": settings.router,
        "concurrency": settings.concurrency,
        "max_tokens": settings.max_tokens,
        "tier_mix": settings.tier_mix,
        "seed": settings.seed,
        "kv_tokens": engine.num_blocks * engine.block_size,
        "block_size": engine.block_size,
        "max_model_len": engine.max_model_len,
        "prefix_cache": engine.prefix_cache,
        "host_blocks": engine.host_blocks,
        **dataclasses.asdict(engine.scheduler),
        "tiers": [msgspec.to_builtins(tier) for tier in engine.tiers],
        "cost_model": msgspec.to_builtins(engine.cost),
    }


def sweep(
    trace: Trace, settings: ReplaySettings, scales: Sequence[float], told: Callable[[int, int], None] | None = None
) -> list[dict[str, Any]]:
    """The same requests at several multiples of their rate: the main figures of each. ``told``: called with (runs done,
    runs in all)."""
    rows = []
    for done, scale in enumerate(scales):
        if told is not None:
            told(done, len(scales))
        scaled = trace.scaled(scale)
        measured = replay(scaled, settings).figures()
        rate = (len(scaled) - 1) / scaled.duration_s if scaled.duration_s else None
        rows.append({"rate_scale": scale, "rate_per_s": rate, **{name: measured[name] for name in _SWEPT}})
    return rows


def charts_of(replayed: Replayed, swept: Sequence[dict[str, Any]] = ()) -> list[Chart]:
    """Queue, batch and KV use over time, latencies, and what a sweep gave."""
    series = replayed.series
    charts: list[Chart] = [
        Lines(
            "Queue and batch",
            "seconds of virtual time",
            "requests",
            {"waiting": (series.t_s, series.requests_waiting), "running": (series.t_s, series.requests_running)},
        ),
        Lines("KV use", "seconds of virtual time", "share of blocks", {"in use": (series.t_s, series.kv_used)}),
        *latency_charts(replayed.recording.recorder),
    ]
    points = [row for row in swept if row["rate_per_s"] is not None]
    if points:
        rate = [row["rate_per_s"] for row in points]
        axis = "requests per second that come"
        goodput = {"good": (rate, [row["goodput_per_s"] or 0.0 for row in points]), "all that come": (rate, rate)}
        charts.append(Lines("Goodput against rate", axis, "requests per second", goodput, markers=True))
        for name, title in (("ttft_s", "TTFT"), ("itl_s", "ITL")):
            lines = {
                each: (rate, [row[name][each] if row[name][each] is not None else float("nan") for row in points])
                for each in ("p50", "p99")
            }
            charts.append(Lines(f"{title} against rate", axis, "seconds", lines, markers=True, log_y=True))
    return charts


def _thinned(values: Sequence[float]) -> Sequence[float]:
    every = -(-len(values) // _MOST_POINTS) if values else 1
    return values[::every]
