"""Prometheus metrics, in a registry of their own per application.

Gauges and counters of the engine are read when somebody asks (``engine_metrics.py``); latencies and tokens are measured
where responses are made, so they are what clients see. Names and suffixes are those vLLM's dashboards know.
"""

from __future__ import annotations

import math
import time

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from ropeway.engine.client import AsyncEngine, Delta
from ropeway.request import FinishReason
from ropeway.server.engine_metrics import EngineCollector

_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_E2E_BUCKETS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Metrics:
    def __init__(self, engine: AsyncEngine) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(EngineCollector(engine))
        self.time_to_first_token = Histogram(
            "ropeway_time_to_first_token_seconds",
            "From a request's arrival to its first token, queueing included; once per prompt.",
            ["tier"],
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.inter_token_latency = Histogram(
            "ropeway_inter_token_latency_seconds",
            "Gap between tokens of one choice, as they reach the server.",
            ["tier"],
            buckets=_ITL_BUCKETS,
            registry=self.registry,
        )
        self.e2e_request_latency = Histogram(
            "ropeway_e2e_request_latency_seconds",
            "From a request's arrival to its last token; once per prompt that finished.",
            ["tier"],
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

        for tier in engine.info.tiers:  # there from the start, at zero
            for histogram in (self.time_to_first_token, self.inter_token_latency, self.e2e_request_latency):
                histogram.labels(tier.name)

    def buckets(self, histogram: Histogram) -> list[tuple[float | None, float]]:
        """(upper bound, None being infinite; observations up to it), over all tiers."""
        counts: dict[float, float] = {}
        for metric in histogram.collect():
            for sample in metric.samples:
                if sample.name.endswith("_bucket"):
                    bound = float(sample.labels["le"])
                    counts[bound] = counts.get(bound, 0.0) + sample.value
        return [(bound if math.isfinite(bound) else None, counts[bound]) for bound in sorted(counts)]

    def totals(self) -> dict[str, float]:
        """Tokens so far, of prompts and generated."""
        return {"prompt": _total(self.prompt_tokens), "generation": _total(self.generation_tokens)}

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def _total(counter: Counter) -> float:
    return sum(s.value for metric in counter.collect() for s in metric.samples if s.name.endswith("_total"))


class Stopwatch:
    """Measures the generation of one prompt."""

    def __init__(self, metrics: Metrics, tier: str, arrival_s: float, prompt_tokens: int, n: int) -> None:
        """``arrival_s`` on the clock of ``time.monotonic``."""
        self._metrics = metrics
        self._time_to_first_token = metrics.time_to_first_token.labels(tier)
        self._inter_token_latency = metrics.inter_token_latency.labels(tier)
        self._e2e_request_latency = metrics.e2e_request_latency.labels(tier)
        self.ttft_s: float | None = None
        self._arrival_s = arrival_s
        self._prompt_tokens = prompt_tokens
        self._unfinished = n
        self._last: dict[int, float] = {}

    def saw(self, delta: Delta) -> None:
        now = time.monotonic()
        if delta.token_ids:
            self._metrics.generation_tokens.inc(len(delta.token_ids))
            if not self._last:
                self.ttft_s = now - self._arrival_s
                self._time_to_first_token.observe(self.ttft_s)
                self._metrics.prompt_tokens.inc(self._prompt_tokens)
            elif delta.index in self._last:
                self._inter_token_latency.observe(now - self._last[delta.index])
            self._last[delta.index] = now
        if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._unfinished -= 1
            if not self._unfinished:
                self._e2e_request_latency.observe(now - self._arrival_s)
                self._metrics.request_success.labels(delta.finish_reason.value).inc()
