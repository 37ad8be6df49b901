"""What the prefix cache gives where prompts share a beginning, and what it costs where they don't."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ropeway.bench.driver import Driver
from ropeway.bench.overhead import measure_overhead
from ropeway.bench.workload import WorkloadRequest, mixed_workload
from ropeway.config import Config
from ropeway.errors import ConfigError

_WARM_UP_SEED = 1 << 20
_WARM_UP_RUNS = 3
"""As many as use up a pool of twice the workload, and one more."""


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
    device_cost_fraction: float
    """What the device takes longer with the cache. Both play the same steps in every run; of each step the lower
    quartile over the runs counts, so that what disturbs a run here and there does not."""
    host_us_on: float
    """CPU microseconds of plan and settle per step, over the timer device; medians."""
    host_us_off: float
    step_us: float
    """What a step takes on the real device, in the mean over the workload."""
    host_cost_fraction: float
    """(host_us_on - host_us_off) / step_us: what it would cost if nothing of it were hidden behind the device."""
    throughput_cost_fraction: float
    """Both together: what the cache costs at most."""


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
    and ``sequences`` equal requests over the timer device, with the cache and without in alternation.

    The pool holds twice what the workload can need, and is used up before anything is measured: memory that no process
    had before costs time when it is first written, and only the cache, which keeps what is done with, would go on to
    ever new blocks. Raises what loading raises."""
    workload = mixed_workload() if workload is None else workload
    ratios: list[float] = []
    device: dict[bool, list[NDArray[np.float64]]] = {True: [], False: []}
    host: dict[bool, list[float]] = {True: [], False: []}
    size = config.cache.block_size
    blocks = 2 * sum(-(-(request.prompt_tokens + request.output_tokens) // size) for request in workload)
    with ExitStack() as stack:
        drivers = {
            on: stack.enter_context(
                Driver(
                    dataclasses.replace(
                        config, cache=dataclasses.replace(config.cache, prefix_cache=on, kv_blocks=blocks)
                    )
                )
            )
            for on in (True, False)
        }
        for driver in drivers.values():
            for number in range(_WARM_UP_RUNS):
                driver.run(workload, seed=_WARM_UP_SEED + number)
        for number in range(repeat):
            walls: dict[bool, float] = {}
            for on in (True, False) if number % 2 == 0 else (False, True):
                run = drivers[on].run(workload, seed=number)
                walls[on] = run.wall_s
                device[on].append(run.steps.elapsed_s)
                costs = measure_overhead(sequences, async_scheduling=True, step_ms=0.0, prefix_cache=on)
                host[on].append(costs.host_us_per_step.p50)
            ratios.append(walls[False] / walls[True])
            if progress is not None:
                progress(number + 1, repeat)
    on_us, off_us = statistics.median(host[True]), statistics.median(host[False])
    device_on, device_off = (np.percentile(np.stack(device[on]), 25, axis=0) for on in (True, False))
    step_us = float(device_off.mean()) * 1e6
    device_cost = 1 - float(device_off.sum() / device_on.sum())
    host_cost = (on_us - off_us) / step_us
    return ZeroHitCost(
        throughput_ratios=ratios,
        device_cost_fraction=device_cost,
        host_us_on=on_us,
        host_us_off=off_us,
        step_us=step_us,
        host_cost_fraction=host_cost,
        throughput_cost_fraction=device_cost + host_cost,
    )


def _exactly(ids: list[int]) -> WorkloadRequest:
    return WorkloadRequest(len(ids), 1, prompt_token_ids=tuple(ids))
