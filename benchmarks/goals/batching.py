"""Goal 1: what continuous batching buys over static batching."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.goals.models import small_model
from benchmarks.goals.verdict import Check, Outcome, table_of
from ropeway.bench.driver import Driver, StepObserver
from ropeway.bench.workload import WorkloadRequest
from ropeway.cache.pool import BlockPool
from ropeway.config import SchedulerConfig
from ropeway.engine.engine import Engine
from ropeway.engine.messages import NewRequest
from ropeway.execution.timer import TimerExecutor
from ropeway.outcome import StepOutput
from ropeway.request import SamplingParams
from ropeway.scheduling.scheduler import Scheduler
from ropeway.settings import resolve
from ropeway.tiers import DEFAULT_TIERS

SLOTS = 16
PROMPT = 16
KINDS: dict[str, dict[str, Any]] = {
    "continuous": {"batching": "continuous"},
    "static, finished rows dropped": {"batching": "static"},
    "static, padded rows": {"batching": "static", "padded_rows": True},
    "dynamic": {"batching": "dynamic"},
}
TIMED = ("continuous", "static, finished rows dropped")
_BLOCK = 16


@dataclass(frozen=True)
class TimedRun:
    """One kind of batching over the timer device."""

    wall_s: float
    steps: int
    output_tokens: int
    slot_use: float
    """Until the queue is empty."""
    bubble: float


def exponential_lengths(requests: int, mean: float, seed: int = 0) -> list[int]:
    """Output lengths from 1 on."""
    rng = random.Random(seed)
    return [max(round(rng.expovariate(1 / mean)), 1) for _ in range(requests)]


def mixed_lengths(requests: int, seed: int = 0) -> list[int]:
    """Answers of 20 tokens, every tenth on average one of 2,000."""
    rng = random.Random(seed)
    return [2000 if rng.random() < 0.1 else 20 for _ in range(requests)]


def run_on_timer(lengths: Sequence[int], step_s: float, **batching: Any) -> TimedRun:
    """All requests at once through the production loop, over a device on which every step takes ``step_s``."""
    longest = PROMPT + max(lengths)
    pool = BlockPool(SLOTS * -(-longest // _BLOCK), _BLOCK)
    config = SchedulerConfig(max_num_seqs=SLOTS, max_batched_tokens=512, **batching)
    scheduler = Scheduler(config, pool, longest)
    timer = TimerExecutor(lambda plan: step_s)
    observer = StepObserver(timer, scheduler)
    tokens = [0]

    def count(output: StepOutput) -> None:
        tokens[0] += len(output.ids)

    engine = Engine(scheduler, observer, count, max_model_len=longest, prefix_cache=False)
    prompt = np.ones(PROMPT, dtype=np.int32)
    engine.submit(
        NewRequest(
            id=number,
            prompt=prompt,
            params=SamplingParams(max_tokens=length, ignore_eos=True),
            seed=0,
            tier=len(DEFAULT_TIERS) - 1,
        )
        for number, length in enumerate(lengths, start=1)
    )
    began = time.perf_counter()
    while engine.has_work:
        engine.step(ahead=1)
        if scheduler.stuck:
            time.sleep(engine.patience_s())
    wall_s = time.perf_counter() - began
    steps = observer.steps()
    return TimedRun(wall_s, len(steps.rows), tokens[0], steps.slot_use(SLOTS), timer.stream.bubble)


def run_on_cpu(model: str, lengths: Sequence[int], repeat: int) -> dict[str, list[float]]:
    """Output tokens per second of every kind, ``repeat`` times in alternation."""
    workload = [WorkloadRequest(2 * PROMPT, length) for length in lengths]
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(repeat):
        for kind in list(KINDS) if number % 2 == 0 else list(KINDS)[::-1]:
            fields = {"model": model, "max_num_seqs": SLOTS, "max_model_len": 2048, **KINDS[kind]}
            with Driver(resolve(fields, environ={}, given_as="argument").config) as driver:
                driver.run([WorkloadRequest(PROMPT, 4)] * 2, seed=1)
                run = driver.run(workload)
            rates[kind].append(sum(lengths) / run.wall_s)
    return rates


def measure(
    *,
    requests: int = 1024,
    mean: float = 64.0,
    step_s: float = 0.002,
    mixed_requests: int = 512,
    cpu_requests: int = 48,
    repeat: int = 2,
) -> Outcome:
    """Steps are counted for every kind of batching; that they pass at their pace is shown by the clock for two."""
    lengths, mixed = exponential_lengths(requests, mean), mixed_lengths(mixed_requests)
    timed = {kind: run_on_timer(lengths, step_s, **KINDS[kind]) for kind in TIMED}
    counted = {kind: run_on_timer(lengths, 0.0, **fields) for kind, fields in KINDS.items()}
    counted_mixed = {kind: run_on_timer(mixed, 0.0, **fields) for kind, fields in KINDS.items()}
    model, name = small_model()
    rates = run_on_cpu(model, [min(n, 512) for n in exponential_lengths(cpu_requests, 32.0, seed=1)], repeat)
    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    ideal, ideal_mixed = sum(1 / n for n in range(1, SLOTS + 1)), 2000 * (1 - 0.9**SLOTS) / 218
    outcome = Outcome(
        checks=[
            Check(f"exponential lengths (ideal {ideal:.1f}x), by the clock", _gain(timed, "wall_s"), 3.0, unit="x"),
            Check("the same, in steps", _gain(counted, "steps"), 3.0, unit="x"),
            Check("slot use until the queue is empty", counted["continuous"].slot_use, 0.97, unit="%"),
            Check(
                f"answers of 20 and 2,000 tokens (ideal {ideal_mixed:.1f}x), in steps",
                _gain(counted_mixed, "steps"),
                5.0,
                unit="x",
            ),
        ],
        figures={
            "slots": SLOTS,
            "exponential": {
                "requests": requests,
                "mean_output_tokens": sum(lengths) / requests,
                "ideal": ideal,
                "step_s": step_s,
                "by_the_clock": {kind: asdict(run) for kind, run in timed.items()},
                "steps_back_to_back": {kind: asdict(run) for kind, run in counted.items()},
            },
            "mixed": {
                "requests": mixed_requests,
                "mean_output_tokens": sum(mixed) / mixed_requests,
                "ideal": ideal_mixed,
                "steps_back_to_back": {kind: asdict(run) for kind, run in counted_mixed.items()},
            },
            "cpu": {"model": name, "requests": cpu_requests, "output_tokens_per_s": rates, "medians": medians},
        },
    )
    outcome.tables = [
        _timer_table(f"{requests} answers, exponential, mean {mean:g} tokens, steps of {step_s * 1000:g} ms", timed),
        _timer_table("the same, steps back to back", counted),
        _timer_table(f"{mixed_requests} answers of 20 tokens, a tenth of 2,000, steps back to back", counted_mixed),
        table_of(
            f"{name} on the CPU: {cpu_requests} answers, exponential, mean 32 tokens",
            ["batching", "output tokens/s", "continuous is"],
            [[kind, rate, f"{medians['continuous'] / rate:.2f}x"] for kind, rate in medians.items()],
        ),
    ]
    return outcome


def _gain(runs: dict[str, TimedRun], cost: str) -> float:
    """How much the cheapest other kind costs, in units of what continuous batching does."""
    return float(min(getattr(run, cost) for kind, run in runs.items() if kind != "continuous")) / float(
        getattr(runs["continuous"], cost)
    )


def _timer_table(title: str, runs: dict[str, TimedRun]) -> Any:
    base = runs["continuous"]
    return table_of(
        title,
        ["batching", "s", "steps", "continuous saves", "slot use"],
        [
            [kind, run.wall_s, run.steps, f"{run.steps / base.steps:.2f}x", f"{run.slot_use:.1%}"]
            for kind, run in runs.items()
        ],
    )
