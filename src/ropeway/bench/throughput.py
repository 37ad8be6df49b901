"""How fast a workload gets done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ropeway.bench.driver import Driver, Progress, Run
from ropeway.bench.machine import PeakMemory
from ropeway.bench.workload import WorkloadRequest
from ropeway.config import Config

_WARM_UP = [WorkloadRequest(prompt_tokens=16, output_tokens=4)] * 2
_WARM_UP_SEED = 1
"""Not the measured prompts': nothing of them may be in the prefix cache."""


@dataclass(frozen=True)
class Throughput:
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt and output tokens."""
    wall_s: float
    """From the first arrival's time zero to the last token."""
    requests: int
    prompt_tokens: int
    output_tokens: int
    steps: int
    mean_batch: float
    """Requests with a row in a step, averaged over steps; those that have finished are not counted, though padded."""
    slot_use: float
    """Rows that some request needed / seats, over the steps in which others waited."""
    kv_waste: float
    """1 - live slots / allocated slots of the KV cache, both summed over steps: what block granularity costs."""
    preemptions: int
    ttft_s_p50: float
    """Seconds from arrival to first token, queueing included."""
    ttft_s_p99: float
    peak_rss_bytes: int
    load_s: float

    @classmethod
    def of(
        cls, run: Run, workload: Sequence[WorkloadRequest], *, max_num_seqs: int, peak_rss_bytes: int, load_s: float
    ) -> Throughput:
        prompt_tokens = sum(request.prompt_tokens for request in workload)
        output_tokens = sum(record.output_tokens for record in run.requests)
        ttft = [record.first_token_s - record.arrival_s for record in run.requests]
        return cls(
            output_tokens_per_s=output_tokens / run.wall_s,
            total_tokens_per_s=(prompt_tokens + output_tokens) / run.wall_s,
            wall_s=run.wall_s,
            requests=len(workload),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            steps=len(run.steps.rows),
            mean_batch=float((run.steps.rows - run.steps.padding).mean()),
            slot_use=run.steps.slot_use(max_num_seqs),
            kv_waste=float(1 - run.steps.live_slots.sum() / run.steps.allocated_slots.sum()),
            preemptions=run.preemptions,
            ttft_s_p50=float(np.percentile(ttft, 50)),
            ttft_s_p99=float(np.percentile(ttft, 99)),
            peak_rss_bytes=peak_rss_bytes,
            load_s=load_s,
        )


def measure_throughput(
    config: Config, workload: Sequence[WorkloadRequest], *, seed: int = 0, progress: Progress | None = None
) -> Throughput:
    """Load the configured model and run ``workload`` once, after a short warm-up. ``seed`` chooses synthetic prompts.

    Raises what loading raises, and ``InvalidRequest`` for a request that the engine can't serve."""
    memory = PeakMemory()
    with Driver(config) as driver:
        driver.run(_WARM_UP, seed=seed + _WARM_UP_SEED)
        run = driver.run(workload, seed=seed, progress=progress)
        seats = config.scheduler.max_num_seqs
        return Throughput.of(run, workload, max_num_seqs=seats, peak_rss_bytes=memory.bytes, load_s=driver.load_s)
