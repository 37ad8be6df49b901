"""Goal 8: goodput beyond capacity, and what admission by prediction spares its users.

*Capacity* is the rate at which the engine completes the trace's requests when all of them are there from the start and
none is refused: what it can do at best, whatever anybody waits. Targets: a first token within 2 s, and then one every
0.1 s in the mean. A *pause* is how much longer than the longest possible step a request's stream stood still.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.goals.simulated import CONVERSATION, at_rate, engine_of, pause_s, recorded, run, service_rate, slim
from benchmarks.goals.verdict import Check, Outcome, table_of
from ropeway.simulation.replay import Replayed

TARGETS = {"slo_ttft": 2.0, "slo_itl": 0.1}
WATERMARKS = (0.01, 0.02, 0.05, 0.1, 0.2)
SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
BATCHING: dict[str, dict[str, Any]] = {
    "continuous": {},
    "dynamic": {"batching": "dynamic"},
    "static": {"batching": "static", "padded_rows": True},
}
OURS = "profile, shedding, shortest first"
"""Predicted lengths decide who is admitted, who is shed and who goes first."""
_KEPT = (
    *("requests_per_s", "goodput_per_s", "attainment", "completed", "shed", "evictions_per_request", "kv_waste"),
    *("slot_use", "mean_batch", "ttft_s", "itl_s", "tpot_s", "e2e_s", "sim_wall_s"),
)
_CLIFF = 0.95
"""As much of the best goodput at any lower rate must be left at a higher one."""


def rivals() -> dict[str, dict[str, Any]]:
    """What is compared at 1.5 times capacity."""
    return {
        OURS: {"policy": "shortest"},
        "profile, shedding": {},
        "greedy": {"admission": "greedy", "shed": False},
        **{f"watermark {share:.0%}, shedding": {"admission": "watermark", "watermark": share} for share in WATERMARKS},
    }


def measure(*, requests: int = 19_366, sweep_requests: int = 3000) -> Outcome:
    cost = engine_of()
    trace, short = recorded(CONVERSATION, requests), recorded(CONVERSATION, sweep_requests)
    capacity = service_rate(trace, cost).figures()["requests_per_s"]
    over = at_rate(trace, 1.5 * capacity)
    beyond = {name: _figures(run(over, cost, how=TARGETS, **fields)) for name, fields in rivals().items()}
    own_capacity = service_rate(short, cost).figures()["requests_per_s"]
    swept = {
        kind: [
            {"scale": scale, **_figures(run(at_rate(short, scale * own_capacity), cost, how=TARGETS, **fields))}
            for scale in SCALES
        ]
        for kind, fields in BATCHING.items()
    }
    outcome = Outcome(
        checks=[*_beyond_checks(beyond), *_sweep_checks(swept["continuous"])],
        figures={
            "trace": list(CONVERSATION),
            "requests": requests,
            "cost_model": cost.name,
            "targets": TARGETS,
            "capacity_per_s": capacity,
            "at_1.5x_capacity": beyond,
            "sweep": {"requests": sweep_requests, "capacity_per_s": own_capacity, **swept},
        },
    )
    columns = ["", "good/s", "met", "shed", "evictions/request", "P99 pause, s", "TTFT P99, s", "batch"]
    outcome.tables = [
        table_of(
            f"{requests} requests at 1.5 x {capacity:.2f}/s", columns, [_row(name, row) for name, row in beyond.items()]
        ),
        *(
            table_of(
                f"{kind} batching, {sweep_requests} requests at multiples of {own_capacity:.2f}/s",
                ["rate", *columns[1:], "ITL mean, ms"],
                [[*_row(f"{row['scale']:g}x", row), 1000 * row["itl_s"]["mean"]] for row in rows],
            )
            for kind, rows in swept.items()
        ),
    ]
    return outcome


def _figures(replayed: Replayed) -> dict[str, Any]:
    pauses = pause_s(replayed)
    p99 = float(np.percentile(pauses, 99)) if len(pauses) else None
    return {**slim(replayed.figures(), _KEPT), "pause_s_p99": p99}


def _beyond_checks(beyond: dict[str, dict[str, Any]]) -> list[Check]:
    ours, greedy = beyond[OURS], beyond["greedy"]
    name, tuned = max(
        ((name, row) for name, row in beyond.items() if name.startswith("watermark")),
        key=lambda pair: pair[1]["goodput_per_s"],
    )
    return [
        Check("1.5x capacity: goodput over greedy", ours["goodput_per_s"] / greedy["goodput_per_s"], 5.0, unit="x"),
        Check(
            f"goodput over the best watermark ({name})", ours["goodput_per_s"] / tuned["goodput_per_s"], 1.0, unit="x"
        ),
        *(
            Check(f"{what}, of greedy's", _of(ours[name], greedy[name]), 0.1, "at most", "%")
            for what, name in (("evictions", "evictions_per_request"), ("P99 pause", "pause_s_p99"))
        ),
    ]


def _of(figure: float, whole: float) -> float | None:
    return figure / whole if whole else None


def _sweep_checks(rows: list[dict[str, Any]]) -> list[Check]:
    goodput = [row["goodput_per_s"] for row in rows]
    # Beyond that it still grows, since those shed first are the long ones.
    up_to_double = [row["goodput_per_s"] for row in rows if row["scale"] <= 2.0]
    kept = min(good / max(goodput[: place + 1]) for place, good in enumerate(goodput))
    return [
        Check("2x capacity: goodput, of the highest up to there", up_to_double[-1] / max(up_to_double), 0.95, unit="%"),
        Check("0.25x to 3x: goodput, of the highest at any lower rate", kept, _CLIFF, unit="%"),
    ]


def _row(name: str, row: dict[str, Any]) -> list[Any]:
    return [
        name,
        row["goodput_per_s"],
        f"{row['attainment']:.1%}",
        row["shed"],
        row["evictions_per_request"],
        "-" if row["pause_s_p99"] is None else row["pause_s_p99"],
        "-" if row["ttft_s"]["p99"] is None else row["ttft_s"]["p99"],
        row["mean_batch"],
    ]
