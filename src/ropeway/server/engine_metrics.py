"""The engine's gauges and counters for Prometheus, read from its latest ``Stats`` when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ropeway.engine.client import AsyncEngine
from ropeway.engine.messages import Stats, TierStats
from ropeway.engine.supervision import restarts_of

_NO_WASTE = dict.fromkeys(("eos", "stop_string", "disconnect", "cancel"), 0)
_NO_REFUSALS = dict.fromkeys(("shed", "queue_full", "queue_timeout", "deadline_exceeded"), 0)
_NO_PREEMPTIONS = dict.fromkeys(("swap", "recompute"), 0)
"""Labels that are always shown."""

Series = dict[tuple[str, ...], float]
"""Values by their labels."""
Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)


class EngineCollector(Collector):
    """Counters are held at the highest value seen: a restarted engine counts from zero, a scraper must not see it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._highest: dict[tuple[str, ...], float] = {}

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        if self._engine.failure is not None:
            stats = _counters_of(stats)
        yield from self._requests(stats)
        yield from self._tiers(stats)
        yield from self._blocks(stats)
        yield from self._steps(stats)
        yield self._counter("engine_restarts", "Times that a dead engine was started again.", restarts_of(self._engine))
        info = self._engine.info
        parts = GaugeMetricFamily("ropeway_startup_seconds", "Parts of the engine's start.", labels=["part"])
        yield _filled(parts, {(part,): seconds for part, seconds in info.startup.items()})
        yield _gauge("weight_bytes", "Packed weights.", info.weight_bytes)
        yield _gauge("kv_pool_bytes", "The KV pool, whether written or not.", info.kv_pool_bytes)
        warnings = len(self._engine.info.warnings) + (stats.disk_failure is not None)
        yield _gauge("engine_warnings", "What was configured and cannot be had; /health names it.", warnings)

    def _requests(self, stats: Stats) -> Iterator[Metric]:
        yield _gauge("num_requests_running", "Requests in the batch.", stats.running)
        yield _gauge("num_requests_waiting", "Requests that wait for a seat.", stats.waiting)
        yield self._counter("num_preemptions", "Requests that had to give way to others.", stats.preemptions)

    def _tiers(self, stats: Stats) -> Iterator[Metric]:
        tiers = {tier.name: stats.tiers.get(tier.name, TierStats()) for tier in self._engine.info.tiers}

        def gauges(name: str, text: str, field: str) -> Metric:
            family = GaugeMetricFamily(f"ropeway_{name}", text, labels=["tier"])
            return _filled(family, {(tier,): getattr(each, field) for tier, each in tiers.items()})

        yield gauges("tier_requests_running", "Requests in the batch, by tier.", "running")
        yield gauges("tier_requests_waiting", "Requests without a seat, swapped ones included, by tier.", "waiting")
        yield gauges("tier_requests_swapped", "Requests whose blocks are in host memory, by tier.", "swapped")
        for name, text, field in (
            ("finished_requests", "Requests that came to their end in the engine, by tier.", "finished"),
            ("predicted_output_tokens", "Their output lengths, as predicted when they came.", "predicted_tokens"),
            ("actual_output_tokens", "Their output lengths, as they were.", "output_tokens"),
        ):
            yield self._counters(name, text, ["tier"], {(tier,): getattr(each, field) for tier, each in tiers.items()})
        refused: Series = {}
        preempted: Series = {}
        for tier, each in tiers.items():
            refused |= {(tier, code): count for code, count in {**_NO_REFUSALS, **each.refused}.items()}
            preempted |= {(tier, kind): each.preemptions.get(kind, 0) for kind in _NO_PREEMPTIONS}
        yield self._counters("refused_requests", "Requests refused, by their error's code.", ["tier", "code"], refused)
        yield self._counters("tier_preemptions", "Requests that had to give way, by kind.", ["tier", "kind"], preempted)
        for_higher: Series = {(tier,): each.preemptions.get("admission", 0) for tier, each in tiers.items()}
        text = "Of these, for the admission of a request of a higher tier."
        yield self._counters("admission_preemptions", text, ["tier"], for_higher)

    def _blocks(self, stats: Stats) -> Iterator[Metric]:
        blocks = GaugeMetricFamily("ropeway_kv_blocks", "Blocks of the KV pool, by what they hold.", labels=["state"])
        yield _filled(blocks, {(state,): getattr(stats, f"blocks_{state}") for state in ("live", "cached", "free")})
        text = "Blocks of host memory: of swapped requests, of cached prefixes, or free."
        host = GaugeMetricFamily("ropeway_host_blocks", text, labels=["state"])
        yield _filled(
            host, {(state,): getattr(stats, f"host_blocks_{state}") for state in ("pinned", "cached", "free")}
        )
        yield _gauge("disk_blocks", "Blocks in the disk cache.", stats.disk_blocks)
        yield _gauge(
            "disk_failed", "1 when nothing is written to the configured disk cache.", stats.disk_failure is not None
        )
        yield _gauge("kv_reservation", "Share of the KV pool that admission holds back.", stats.reservation)
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
            ("host_cache_hits", "Prompt tokens found in host memory and not on the device.", stats.host_hits),
            ("disk_cache_hits", "Prompt tokens found on disk only.", stats.disk_hits),
            ("disk_errors", "Blocks that could not be written, or were damaged or foreign.", stats.disk_errors),
        ):
            yield self._counter(name, text, value)
        swapped: Series = {("out",): stats.swaps_out, ("in",): stats.swaps_in}
        text = "Blocks of preempted requests copied to host memory and back."
        yield self._counters("swapped_blocks", text, ["direction"], swapped)

    def _steps(self, stats: Stats) -> Iterator[Metric]:
        yield self._counter("engine_steps", "Steps of the engine.", stats.steps)
        yield _gauge("predicted_step_seconds", "Of a step of one token per running request.", stats.step_s)
        wasted: Series = {(reason,): rows for reason, rows in {**_NO_WASTE, **stats.wasted_rows}.items()}
        yield self._counters("wasted_rows", "Rows computed in vain, by reason.", ["reason"], wasted)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return CounterMetricFamily(f"ropeway_{name}", text, value=self._risen(value, name))

    def _counters(self, name: str, text: str, labels: list[str], values: Series) -> Metric:
        risen = {names: self._risen(value, name, *names) for names, value in values.items()}
        return _filled(CounterMetricFamily(f"ropeway_{name}", text, labels=labels), risen)

    def _risen(self, value: float, *series: str) -> float:
        highest = max(value, self._highest.get(series, 0))
        self._highest[series] = highest
        return highest


def _counters_of(stats: Stats) -> Stats:
    """What an engine that is gone has counted: it holds nothing any more."""
    nothing = {name: 0 for name in stats.__struct_fields__ if name.startswith(("blocks_", "host_blocks_"))}
    tiers = {name: msgspec.structs.replace(tier, running=0, waiting=0, swapped=0) for name, tier in stats.tiers.items()}
    return msgspec.structs.replace(stats, running=0, waiting=0, tiers=tiers, reservation=0.0, step_s=0.0, **nothing)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"ropeway_{name}", text, value=value)


def _filled(family: Family, values: Series) -> Family:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
