"""Goal 15: the simulator comes out as real engines did, and is fast enough for fleets of hundreds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.goals.simulated import CONVERSATION, TRACES, at_rate, engine_of, recorded, run
from benchmarks.goals.verdict import Check, Outcome, table_of
from ropeway.bench.traces import read_trace
from ropeway.simulation.cost_model import read_cost_model, shipped_cost_models
from ropeway.simulation.validate import Validation, validate

FILES = (
    "measured_vllm_RTX4090_Llama-3.1-8B.csv",
    "measured_vllm_RTXPRO6000_Llama-3.1-8B.csv",
    "measured_vllm_RTXPRO6000_Qwen3-32B.csv",
    "measured_vllm_RTXPRO6000_Qwen3-30B-A3B-Instruct-2507.csv",
)
BOUNDS = {"mean": 0.05, "p99": 0.10}
ROUTERS = ("least-tokens",)
_RATE_PER_ENGINE = 3.0
"""Requests per second: below what one can serve, so that the fleet is busy and nobody is refused."""
_MINUTES = 10.0


def validated(file: str) -> Validation:
    """Fitted on the first half of a measured run and compared with the second. The engine's sizes are those of the
    shipped cost model made from that run; its coefficients count for nothing."""
    shipped = {model.measured: model for model in map(read_cost_model, shipped_cost_models())}
    return validate(read_trace([TRACES / file]), shipped.get(file, engine_of()))


def fleet(requests: int, engines: int, router: str) -> dict[str, Any]:
    """Conversations, repeated, on a busy fleet: how long simulating them takes."""
    trace = at_rate(recorded(CONVERSATION, requests), _RATE_PER_ENGINE * engines)
    began = time.perf_counter()
    figures = run(trace, engine_of(), how={"engines": engines, "router": router, "prefix_cache": True}).figures()
    minutes = (time.perf_counter() - began) / 60
    kept = ("completed", "shed", "steps", "busy_fraction", "mean_batch", "scheduler_us_per_step", "requests_per_s")
    return {"router": router, "minutes": minutes, **{name: figures[name] for name in kept}}


def measure(
    *, files: Sequence[str] = FILES, requests: int = 50_000, engines: int = 256, routers: Sequence[str] = ROUTERS
) -> Outcome:
    found = {file: validated(file) for file in files}
    fleets = [fleet(requests, engines, router) for router in routers]
    worst = {
        each: max(abs(values[each]) for validation in found.values() for values in validation.errors.values())
        for each in BOUNDS
    }
    outcome = Outcome(
        checks=[
            *(
                Check(
                    f"largest error of {each} TTFT, TPOT, E2E on {len(files)} held-out halves",
                    worst[each],
                    bound,
                    "at most",
                    "%",
                )
                for each, bound in BOUNDS.items()
            ),
            *(
                Check(
                    f"{requests:,} requests on {engines} engines, router {row['router']}",
                    row["minutes"],
                    _MINUTES,
                    "at most",
                    "min",
                )
                for row in fleets
            ),
        ],
        figures={"runs": {file: validation.to_json() for file, validation in found.items()}, "fleets": fleets},
    )
    outcome.tables = [
        table_of(
            "second halves, simulated against measured",
            ["run", *(f"{name} {each}" for name in ("TTFT", "TPOT", "E2E") for each in BOUNDS)],
            [
                [
                    file.removeprefix("measured_vllm_").removesuffix(".csv"),
                    *(f"{values[each]:+.1%}" for values in validation.errors.values() for each in BOUNDS),
                ]
                for file, validation in found.items()
            ],
        ),
        table_of(
            f"{requests:,} requests on {engines} engines",
            ["router", "minutes", "steps", "requests/s", "mean batch", "shed"],
            [
                [row["router"], row["minutes"], row["steps"], row["requests_per_s"], row["mean_batch"], row["shed"]]
                for row in fleets
            ],
        ),
    ]
    return outcome
