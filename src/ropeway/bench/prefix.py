"""What the prefix cache gives where prompts share a beginning, and what it costs where they don't."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from ropeway.bench.driver import Driver
from ropeway.bench.overhead import measure_overhead
from ropeway.bench.workload import WorkloadRequest, mixed_workload
from ropeway.config import Config
from ropeway.errors import ConfigError

_WARM_UP_SEED = 1 << 20


@dataclass(frozen=True)
class PrefixGain:
    """Times of single requests, in seconds from arrival to first token; medians."""

    prompt_tokens: int
    shared_tokens: int
    cached_tokens: int
    """Of the shared ones those in full blocks, which is what a second prompt finds."""
    cold_s: float
    """Of prompts that share nothing with any before."""
    warm_s: float
    """Of prompts whose beginning another one has left in the cache."""
    cut_fraction: float
    """1 - warm_s / cold_s."""


@dataclass(frozen=True)
class ZeroHitCost:
    """The price of looking up and publishing blocks that nobody ever asks for."""

    throughput_ratios: list[float]
    """Output tokens per second with the cache over those without; runs in alternation, one ratio a pair."""
    throughput_cost_fraction: float
    """1 - their median."""
    host_us_on: float
    """CPU microseconds of plan and settle per step, over the timer device; medians."""
    host_us_off: float
    step_us: float
    """What a step takes on the real device, in the mean."""
    host_cost_fraction: float
    """(host_us_on - host_us_off) / step_us: what it would cost if nothing of it were hidden behind the device."""


def measure_prefix(
    config: Config,
    *,
    prompt_tokens: int = 2048,
    shared: float = 0.95,
    repeat: int = 5,
    progress: Callable[[int, int], None] | None = None,
) -> PrefixGain:
    """Prompts in pairs that share their first ``shared * prompt_tokens`` tokens, one request at a time, with the cache.

    Raises what loading raises, ``ConfigError`` for a share that leaves nothing to share or to compute, and
    ``ContextLengthExceeded``."""
    shared_tokens = int(prompt_tokens * shared)
    if not 0 < shared_tokens < prompt_tokens:
        raise ConfigError(
            f"{shared:g} of {prompt_tokens} prompt tokens is {shared_tokens}; at least one token must be shared and "
            "one not",
            param="shared",
        )
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, prefix_cache=True))
    cold: list[float] = []
    warm: list[float] = []
    cached: set[int] = set()
    with Driver(config) as driver:
        vocab = driver.info.vocab_size
        for number in range(repeat + 1):
            rng = np.random.default_rng(number)
            beginning = rng.integers(vocab, size=shared_tokens).tolist()
            for times in (cold, warm):
                tail = rng.integers(vocab, size=prompt_tokens - shared_tokens).tolist()
                (request,) = driver.run([_exactly([*beginning, *tail])]).requests
                assert request.timeline is not None
                if number:  # the first pair warms the engine up
                    times.append(request.first_token_s)
                    cached.update({request.timeline.cached_tokens} if times is warm else ())
            if progress is not None:
                progress(number, repeat)
    cold_s, warm_s = statistics.median(cold), statistics.median(warm)
    return PrefixGain(prompt_tokens, shared_tokens, min(cached), cold_s, warm_s, 1 - warm_s / cold_s)


def measure_zero_hits(
    config: Config,
    *,
    workload: Sequence[WorkloadRequest] | None = None,
    repeat: int = 5,
    sequences: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> ZeroHitCost:
    """``workload`` (default: the mixed one of other benchmarks), with prompts of its own each time, on the real device,
    and ``sequences`` equal requests over the timer device, with the cache and without in alternation."""
    workload = mixed_workload() if workload is None else workload
    ratios: list[float] = []
    steps_s: list[float] = []
    host: dict[bool, list[float]] = {True: [], False: []}
    with ExitStack() as stack:
        drivers = {
            on: stack.enter_context(
                Driver(dataclasses.replace(config, cache=dataclasses.replace(config.cache, prefix_cache=on)))
            )
            for on in (True, False)
        }
        for driver in drivers.values():
            driver.run(workload[:2], seed=_WARM_UP_SEED)
        for number in range(repeat):
            walls: dict[bool, float] = {}
            for on in (True, False) if number % 2 == 0 else (False, True):
                run = drivers[on].run(workload, seed=number)
                walls[on] = run.wall_s
                steps_s.append(float(run.steps.elapsed_s.mean()))
                costs = measure_overhead(sequences, async_scheduling=True, step_ms=0.0, prefix_cache=on)
                host[on].append(costs.host_us_per_step.p50)
            ratios.append(walls[False] / walls[True])
            if progress is not None:
                progress(number + 1, repeat)
    on_us, off_us = statistics.median(host[True]), statistics.median(host[False])
    step_us = statistics.median(steps_s) * 1e6
    return ZeroHitCost(
        throughput_ratios=ratios,
        throughput_cost_fraction=1 - statistics.median(ratios),
        host_us_on=on_us,
        host_us_off=off_us,
        step_us=step_us,
        host_cost_fraction=(on_us - off_us) / step_us,
    )


def _exactly(ids: list[int]) -> WorkloadRequest:
    return WorkloadRequest(len(ids), 1, prompt_token_ids=tuple(ids))
