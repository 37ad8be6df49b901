"""Prometheus metrics, in a registry of their own per application.

Gauges and counters of the engine are read when somebody asks; latencies and tokens are measured where responses
are made, so they are what clients see. Names and suffixes are those vLLM's dashboards know.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ropeway.engine.client import AsyncEngine, Delta
from ropeway.request import FinishReason

_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_E2E_BUCKETS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)

_NO_WASTE = dict.fromkeys(("end_token", "stop_string", "disconnect", "cancel"), 0)
"""Reasons that are always shown."""


class Metrics:
    def __init__(self, engine: AsyncEngine) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_EngineCollector(engine))
        self.time_to_first_token = Histogram(
            "ropeway_time_to_first_token_seconds",
            "From a request's arrival to its first token, queueing included; once per prompt.",
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.inter_token_latency = Histogram(
            "ropeway_inter_token_latency_seconds",
            "Gap between tokens of one choice, as they reach the server.",
            buckets=_ITL_BUCKETS,
            registry=self.registry,
        )
        self.e2e_request_latency = Histogram(
            "ropeway_e2e_request_latency_seconds",
            "From a request's arrival to its last token; once per prompt that finished.",
            buckets=_E2E_BUCKETS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "ropeway_prompt_tokens", "Prompt tokens of requests that got a first token.", registry=self.registry
        )
        self.generation_tokens = Counter("ropeway_generation_tokens", "Tokens generated.", registry=self.registry)
        self.request_success = Counter(
            "ropeway_request_success",
            "Prompts whose choices all finished, by the reason of the one that ended last.",
            ["finished_reason"],
            registry=self.registry,
        )

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class Stopwatch:
    """Measures the generation of one prompt."""

    def __init__(self, metrics: Metrics, arrival: float, prompt_tokens: int, n: int) -> None:
        """``arrival`` on the clock of ``time.perf_counter``."""
        self._metrics = metrics
        self._arrival = arrival
        self._prompt_tokens = prompt_tokens
        self._unfinished = n
        self._last: dict[int, float] = {}

    def saw(self, delta: Delta) -> None:
        now = time.perf_counter()
        if delta.token_ids:
            self._metrics.generation_tokens.inc(len(delta.token_ids))
            if not self._last:
                self._metrics.time_to_first_token.observe(now - self._arrival)
                self._metrics.prompt_tokens.inc(self._prompt_tokens)
            elif delta.index in self._last:
                self._metrics.inter_token_latency.observe(now - self._last[delta.index])
            self._last[delta.index] = now
        if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._unfinished -= 1
            if not self._unfinished:
                self._metrics.e2e_request_latency.observe(now - self._arrival)
                self._metrics.request_success.labels(delta.finish_reason.value).inc()


class _EngineCollector(Collector):
    """The engine's latest figures. Counters are held at the highest value seen: a restarted engine counts from zero,
    a scraper must not see it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._highest: dict[tuple[str, str], float] = {}

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield GaugeMetricFamily("ropeway_num_requests_running", "Requests in the batch.", value=stats.running)
        yield GaugeMetricFamily("ropeway_num_requests_waiting", "Requests that wait for a seat.", value=stats.waiting)
        blocks = GaugeMetricFamily("ropeway_kv_blocks", "Blocks of the KV pool, by what they hold.", labels=["state"])
        for state in ("live", "cached", "free"):
            blocks.add_metric([state], getattr(stats, f"blocks_{state}"))
        yield blocks
        for name, text, value in (
            ("num_preemptions", "Requests put back into the queue for want of blocks.", stats.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
            ("engine_steps", "Steps of the engine.", stats.steps),
        ):
            yield CounterMetricFamily(f"ropeway_{name}", text, value=self._risen(name, "", value))
        wasted = CounterMetricFamily("ropeway_wasted_rows", "Rows computed in vain, by reason.", labels=["reason"])
        for reason, rows in {**_NO_WASTE, **stats.wasted_rows}.items():
            wasted.add_metric([reason], self._risen("wasted_rows", reason, rows))
        yield wasted

    def _risen(self, name: str, label: str, value: float) -> float:
        highest = max(value, self._highest.get((name, label), 0))
        self._highest[name, label] = highest
        return highest
