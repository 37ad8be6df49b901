"""Goal 9: urgent requests hardly notice a saturating batch load, which hardly notices them; nobody starves, and tenants
get equal shares.

On the simulated engine, and on a real server with SmolLM2 (``served``)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.goals import served
from benchmarks.goals.simulated import CODE, CONVERSATION, at_once, engine_of, joined, recorded, run, service_rate
from benchmarks.goals.verdict import Check, Outcome, table_of
from ropeway.bench.latencies import Recorder
from ropeway.bench.traces import Trace
from ropeway.config import SchedulerConfig
from ropeway.scheduling.fairness import OUTPUT_WEIGHT, PROMPT_WEIGHT
from ropeway.scheduling.scheduler import MAX_PREEMPTIONS
from ropeway.simulation.cost_model import CostModel
from ropeway.tiers import DEFAULT_TIERS, Tier

STEP_S = 0.05
BOUNDED = (
    Tier(name="interactive", weight=6.0, tpot_s=STEP_S),
    Tier(name="batch", weight=0.0, tpot_s=STEP_S),
)
"""Both bound the steps, so that the batch load alone has the same steps."""
_INTERACTIVE = (512, 24)
"""Prompt and output tokens of an interactive request."""
_SWAP_GIB = 8.0
_FLOOD = (400, 300)
"""Prompt and output tokens of an interactive request of the flood."""
_FLOOD_SAMPLE = 1000
_FLOOD_RAMP_S = 30.0
_BATCH_GAP_S = 150.0

Floats = NDArray[np.float64]


def once_a_second(requests: int) -> Trace:
    """Interactive requests about a second apart."""
    prompt, output = _INTERACTIVE
    lengths = Trace(np.full(requests, prompt), np.full(requests, output))
    return lengths.at_rate(1.0, cv=0.2).with_tier("interactive")


def measure(*, requests: int = 1500, flood_s: float = 600.0, real: bool = True) -> Outcome:
    cost = engine_of()
    outcome = Outcome(figures={"cost_model": cost.name, "step_bound_s": STEP_S})
    for part in (_interference(requests, cost), _starvation(cost, flood_s), _shares(requests, cost)):
        _add(outcome, part)
    if real:
        part = served.measure()
        part.checks = [dataclasses.replace(check, name=f"real engine: {check.name}") for check in part.checks]
        part.figures = {"real_engine": part.figures}
        _add(outcome, part)
    return outcome


def _add(outcome: Outcome, part: Outcome) -> None:
    outcome.checks += part.checks
    outcome.figures |= part.figures
    outcome.tables += part.tables


# --------------------------------------------------------------------------- interactive over batch


def _interference(requests: int, cost: CostModel) -> Outcome:
    batch = at_once(recorded(CONVERSATION, requests)).with_tier("batch")
    how: dict[str, Any] = {"tiers": BOUNDED, "swap_space": _SWAP_GIB}
    alone = run(batch, cost, how=how, step_budget="tpot").recording.recorder
    batch_s = _last_s(alone, "batch")
    interactive = once_a_second(max(round(1.3 * batch_s), 1))
    idle = run(interactive, cost, how=how, step_budget="tpot").recording.recorder
    both = run(joined(batch, interactive), cost, how=how, step_budget="tpot").recording.recorder
    # Once the batch is done, interactive requests are alone again.
    over = _ttft(both, "interactive")[_arrivals(both, "interactive") < _last_s(both, "batch")]
    extra = float(np.percentile(over, 99) - np.percentile(idle.ttft_s, 99))
    lost = 1 - batch_s / _last_s(both, "batch")
    missing = int(alone.output_tokens.sum() - both.output_tokens[_of(both, "batch")].sum())
    percentiles = {
        name: [float(np.percentile(times, q)) for q in (50, 90, 99)]
        for name, times in (("idle", idle.ttft_s), ("over the batch load", over))
    }
    return Outcome(
        checks=[
            Check(
                f"interactive P99 TTFT at saturation, beyond idle, in steps of {1000 * STEP_S:g} ms",
                extra / STEP_S,
                2.2,
                "at most",
            ),
            Check("batch throughput lost to interactive requests", lost, 0.1, "at most", "%"),
            Check("batch tokens lost", float(missing), 0.0, "at most"),
        ],
        figures={
            "interactive_requests": len(interactive),
            "interactive_ttft_s_p50_p90_p99": percentiles,
            "batch_requests": requests,
            "batch_s": {"alone": batch_s, "with_interactive": _last_s(both, "batch")},
        },
        tables=[
            table_of(
                f"interactive TTFT, ms, over {requests} batch requests that are all there from the start",
                ["", "p50", "p90", "p99"],
                [[name, *(1000 * value for value in values)] for name, values in percentiles.items()],
            )
        ],
    )


# --------------------------------------------------------------------------- starvation


def _starvation(cost: CostModel, flood_s: float) -> Outcome:
    """Twice as many interactive requests as the engine can serve, for ``flood_s``; and now and then a batch request
    whose prompt takes two fifths of the memory.

    Ageing puts a batch request before the interactive ones that come ``aging_s`` times the difference of weights after
    it. Those before it wait for at most their target, or are shed; then it may have to wait until what is running has
    ended, and again each time that it is preempted."""
    prompt, output = _FLOOD
    lengths = Trace(np.full(_FLOOD_SAMPLE, prompt), np.full(_FLOOD_SAMPLE, output))
    capacity = service_rate(lengths, cost).figures()["requests_per_s"]
    count = round(2 * capacity * flood_s)
    flood = Trace(np.full(count, prompt), np.full(count, output)).at_rate(2 * capacity).with_tier("interactive")
    times = np.arange(_FLOOD_RAMP_S, flood_s - _FLOOD_RAMP_S, _BATCH_GAP_S)
    batch = Trace(np.full(len(times), cost.kv_tokens * 2 // 5), np.full(len(times), 100), arrival_s=times)
    recorder = run(joined(flood, batch.with_tier("batch")), cost, how={"swap_space": _SWAP_GIB}).recording.recorder
    waits = _ttft(recorder, "batch")
    heavy, light = DEFAULT_TIERS[0], DEFAULT_TIERS[-1]
    assert heavy.ttft_s is not None
    running_s = float(np.nanpercentile((recorder.e2e_s - recorder.ttft_s)[_of(recorder, "interactive")], 99))
    ageing_s = SchedulerConfig().aging_s * (heavy.weight - light.weight)
    bound = ageing_s + heavy.ttft_s + (1 + MAX_PREEMPTIONS) * running_s
    return Outcome(
        checks=[
            Check(
                "longest TTFT of a large batch request in a flood of interactive ones",
                float(waits.max()) if not np.isnan(waits).any() else math.inf,
                bound,
                "at most",
                "s",
            )
        ],
        figures={
            "starvation": {
                "flood_per_s": 2 * capacity,
                "capacity_per_s": capacity,
                "batch_prompt_tokens": int(batch.input_tokens[0]),
                "batch_ttft_s": waits.tolist(),
                "bound_s": bound,
            }
        },
    )


# --------------------------------------------------------------------------- tenants


def _shares(requests: int, cost: CostModel) -> Outcome:
    """Two tenants with all their requests there from the start, one with long answers, the other with long prompts."""
    parts = [(name, at_once(recorded(files, requests))) for name, files in (("talk", CONVERSATION), ("code", CODE))]
    trace = joined(*(dataclasses.replace(part, tenant=[name] * len(part)).with_tier("batch") for name, part in parts))
    recorder = run(trace, cost).recording.recorder
    assert trace.tenant is not None
    mine = np.array(trace.tenant) == "talk"
    # Both have requests waiting until the first of them has got the last one seated.
    until = min(float(np.nanmax(recorder.first_token_s[part])) for part in (mine, ~mine))
    moments = np.linspace(0.0, until, 400)
    talk, code = (_service(recorder, trace, part, moments) for part in (mine, ~mine))
    gap = float(np.abs(talk - code).max())
    bound = 2 * max(PROMPT_WEIGHT * float(trace.input_tokens.max()), OUTPUT_WEIGHT * cost.kv_tokens)
    return Outcome(
        checks=[Check("gap between the services of two tenants, of the bound", gap / bound, 1.0, "at most", "%")],
        figures={
            "tenants": {
                "gap_tokens": gap,
                "bound_tokens": bound,
                "service_tokens": {"talk": float(talk[-1]), "code": float(code[-1])},
            }
        },
    )


def _service(recorder: Recorder, trace: Trace, mine: NDArray[np.bool_], moments: Floats) -> Floats:
    """Weighted tokens served up to each moment: a prompt with its first token, the output evenly from there on."""
    prompts, outputs = trace.input_tokens[mine], trace.output_tokens[mine]
    first, last = recorder.first_token_s[mine], recorder.last_token_s[mine]
    begun = (first <= moments[:, None]).astype(np.float64)
    share = np.clip((moments[:, None] - first) / np.maximum(last - first, 1e-9), 0.0, 1.0)
    service: Floats = PROMPT_WEIGHT * (begun @ prompts) + OUTPUT_WEIGHT * (share @ outputs)
    return service


# --------------------------------------------------------------------------- a recorder's tiers


def _of(recorder: Recorder, tier: str) -> NDArray[np.bool_]:
    mine: NDArray[np.bool_] = recorder.tier == recorder.tiers.index(tier)
    return mine


def _ttft(recorder: Recorder, tier: str) -> Floats:
    return recorder.ttft_s[_of(recorder, tier)]


def _arrivals(recorder: Recorder, tier: str) -> Floats:
    return recorder.arrival_s[_of(recorder, tier)]


def _last_s(recorder: Recorder, tier: str) -> float:
    return float(np.nanmax(recorder.last_token_s[_of(recorder, tier)]))
