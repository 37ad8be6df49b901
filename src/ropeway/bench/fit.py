"""What steps take on a real engine, as a cost model for the simulator: ``a + b * tokens + c * kv_tokens`` seconds.

The requests come in batches of growing size, each begun when the one before has ended: so there are steps of few rows
and of many, with short and long prefixes, with prompts and without.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ropeway.bench.driver import Driver
from ropeway.bench.workload import WorkloadRequest, mixed_workload
from ropeway.config import Config
from ropeway.errors import RopewayError
from ropeway.simulation.cost_model import CostModel
from ropeway.version import __version__

_WARM_UP_SEED = 1 << 20
_PROMPTS = (32, 512)
_OUTPUTS = (16, 128)
"""Shortest and longest, as far as the context allows."""
_LEAST_STEPS = 30
_ROUNDS = 10
_OUTLIER = 3.0
"""Times the median error from which on a step counts less."""
_COPIED_BYTES = 1 << 26

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StepFit:
    """Coefficients, and how well they give the times of the steps they were fitted to."""

    a_s: float
    b_s_per_token: float
    c_s_per_kv_token: float
    steps: int
    mean_error_fraction: float
    """Mean of |measured / fitted - 1|."""
    p99_error_fraction: float
    total_error_fraction: float
    """Of all steps together: fitted / measured - 1."""


def fit_steps(tokens: Floats, kv_tokens: Floats, seconds: Floats) -> StepFit:
    """The coefficients, none negative, with the least squares of errors relative to the fitted times (relative to the
    measured ones, a step that was stalled would hardly count, and a lucky one too much), with Huber's weights for
    outliers. All float64 [steps]; steps without a positive time are left out.

    Raises ``RopewayError`` when fewer than three sizes of steps are left, from which nothing can be told."""
    timed = seconds > 0
    tokens, kv_tokens, seconds = tokens[timed], kv_tokens[timed], seconds[timed]
    columns = np.stack([np.ones_like(seconds), tokens, kv_tokens], axis=1)
    if len(np.unique(columns, axis=0)) < 3:
        raise RopewayError(
            f"{len(seconds)} steps of too few sizes were timed to tell what a step takes; run more requests"
        )
    weights = 1.0 / seconds
    for _ in range(_ROUNDS):
        found = _non_negative(columns * weights[:, None], seconds * weights)
        fitted = np.maximum(columns @ found, 1e-12)
        errors = np.abs(seconds / fitted - 1.0)
        limit = max(_OUTLIER * float(np.median(errors)), 1e-9)
        weights = np.sqrt(np.minimum(1.0, limit / np.maximum(errors, 1e-12))) / fitted
    a, b, c = found.tolist()
    return StepFit(
        a_s=a,
        b_s_per_token=b,
        c_s_per_kv_token=c,
        steps=len(seconds),
        mean_error_fraction=float(errors.mean()),
        p99_error_fraction=float(np.percentile(errors, 99)),
        total_error_fraction=float((columns @ found).sum() / seconds.sum() - 1),
    )


def measure_fit(
    config: Config, *, requests: int = 64, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> tuple[CostModel, StepFit]:
    """Run ``requests`` requests on the configured engine and fit the times of its steps. ``progress``: called with
    (output tokens so far, output tokens in all).

    Raises what loading raises, and ``RopewayError`` when too few steps were timed."""
    steps = []
    done = 0

    def told(so_far: int, _: int) -> None:
        if progress is not None:
            progress(done + so_far, total)

    # What is cached takes no time, and a device's own times are wanted, not those of a host that waits for arrivals.
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, prefix_cache=False))
    with Driver(config) as driver:
        driver.run([WorkloadRequest(prompt_tokens=16, output_tokens=4)] * 2, seed=_WARM_UP_SEED)
        workload = _workload(requests, driver.info.max_model_len, seed)
        total = sum(request.output_tokens for request in workload)
        for number, batch in enumerate(_batches(workload, config.scheduler.max_num_seqs)):
            steps.append(driver.run(batch, seed=seed + number, progress=told).steps)
            done += sum(request.output_tokens for request in batch)
        pool = driver.engine.scheduler.pool
        kv_tokens = pool.num_blocks * pool.block_size
        kv_bytes_per_token = -(-driver.worker.cache.nbytes // kv_tokens)
    fit = fit_steps(
        np.concatenate([each.tokens for each in steps]).astype(np.float64),
        # All that are seated have a row in nearly every step, so what they hold is what its rows attend to.
        np.concatenate([each.live_slots for each in steps]).astype(np.float64),
        np.concatenate([each.elapsed_s for each in steps]),
    )
    if fit.steps < _LEAST_STEPS:
        raise RopewayError(f"only {fit.steps} steps were timed, {_LEAST_STEPS} are needed; run more requests")
    model = CostModel(
        name=f"{Path(config.model.model).name}-{config.engine.device}",
        a_s=fit.a_s,
        b_s_per_token=fit.b_s_per_token,
        c_s_per_kv_token=fit.c_s_per_kv_token,
        kv_bytes_per_token=kv_bytes_per_token,
        copy_bytes_per_s=_copy_bandwidth(),
        kv_tokens=kv_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_batched_tokens=config.scheduler.max_batched_tokens,
        block_size=config.cache.block_size,
        provenance=f"ropeway bench fit {config.model.model} (Ropeway {__version__}): {requests} requests, {fit.steps} "
        f"steps, mean error {fit.mean_error_fraction:.1%}",
    )
    return model, fit


def _workload(requests: int, context: int, seed: int) -> list[WorkloadRequest]:
    longest = min(_PROMPTS[1], context // 2), min(_OUTPUTS[1], context // 4)
    shortest = min(_PROMPTS[0], longest[0]), min(_OUTPUTS[0], longest[1])
    return mixed_workload(
        requests, prompt_tokens=(shortest[0], longest[0]), output_tokens=(shortest[1], longest[1]), seed=seed
    )


def _batches(workload: list[WorkloadRequest], most: int) -> list[list[WorkloadRequest]]:
    """1, 2, 4, ... requests, ``most`` at most, then the rest in such batches."""
    batches, begin, size = [], 0, 1
    while begin < len(workload):
        batches.append(workload[begin : begin + size])
        begin += size
        size = min(2 * size, most)
    return batches


def _non_negative(columns: Floats, target: Floats) -> Floats:
    """Least squares without a negative coefficient: the best over all sets of columns, of which there are few."""
    width = columns.shape[1]
    best, least = np.zeros(width), float(target @ target)
    for count in range(1, width + 1):
        for chosen in itertools.combinations(range(width), count):
            part = columns[:, chosen]
            scale = np.linalg.norm(part, axis=0)
            if not (scale > 0).all():
                continue
            found = np.linalg.lstsq(part / scale, target, rcond=None)[0] / scale
            error = float(((part @ found - target) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(width), error
                best[list(chosen)] = found
    return best


def _copy_bandwidth() -> float:
    """Bytes per second of a copy in memory, which is what a device without memory of its own swaps with."""
    source = np.ones(_COPIED_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - began)
    return _COPIED_BYTES / best
