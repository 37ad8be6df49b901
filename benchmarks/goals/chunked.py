"""Goal 6: how much more load an engine carries at a strict inter-token latency when it cuts prompts into chunks."""

from __future__ import annotations

from typing import Any

from benchmarks.goals.simulated import CONVERSATION, at_rate, engine_of, recorded, run, service_rate
from benchmarks.goals.verdict import Check, Outcome, table_of
from ropeway.bench.traces import Trace
from ropeway.simulation.cost_model import CostModel

KINDS: dict[str, dict[str, Any]] = {
    "chunked, 256 tokens a step": {"max_batched_tokens": 256},
    "prefill first": {"chunked_prefill": False},
}
_TTFT_S = 10.0
"""P99 beyond which a load counts as more than the engine can serve, however even its tokens come."""
_PRECISION = 0.04
_LOWEST = 0.2


def decode_step_s(cost: CostModel, batch: float) -> float:
    """A step of decodes only: ``batch`` rows, the whole KV pool attended to."""
    return cost.step_s(round(batch), cost.kv_tokens)


def capacity(trace: Trace, cost: CostModel, highest: float, itl_s: float, **scheduler: Any) -> tuple[float, list[Any]]:
    """The highest rate at which the P99 of the gaps between tokens is within ``itl_s`` and the load is served, found by
    bisection on a logarithmic scale; and the rates tried."""
    tried = []

    def serves(rate: float) -> bool:
        figures = run(at_rate(trace, rate), cost, shed=False, **scheduler).figures()
        itl, ttft = figures["itl_s"]["p99"], figures["ttft_s"]["p99"]
        tried.append({"rate_per_s": rate, "itl_s_p99": itl, "ttft_s_p99": ttft})
        return bool(itl <= itl_s and ttft <= _TTFT_S)

    low, high = _LOWEST, highest
    if serves(high):
        return high, tried
    if not serves(low):
        return 0.0, tried
    while high / low > 1 + _PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if serves(middle) else (low, middle)
    return low, tried


def measure(*, requests: int = 800) -> Outcome:
    trace, cost = recorded(CONVERSATION, requests), engine_of()
    full = {kind: service_rate(trace, cost, **fields).figures() for kind, fields in KINDS.items()}
    step_s = decode_step_s(cost, full["prefill first"]["mean_batch"])
    highest = max(figures["requests_per_s"] for figures in full.values())
    found = {kind: capacity(trace, cost, highest, 2 * step_s, **fields) for kind, fields in KINDS.items()}
    (chunked, _), (first, _) = (found[kind] for kind in KINDS)
    throughput = {kind: figures["output_tokens_per_s"] for kind, figures in full.items()}
    chunked_tokens, first_tokens = throughput.values()
    outcome = Outcome(
        checks=[
            Check(
                f"capacity at a P99 ITL of {2000 * step_s:.0f} ms, over prefill first", chunked / first, 3.0, unit="x"
            ),
            Check("throughput at full load, of prefill first", chunked_tokens / first_tokens, 0.95, unit="%"),
        ],
        figures={
            "trace": list(CONVERSATION),
            "requests": requests,
            "cost_model": cost.name,
            "decode_step_s": step_s,
            "itl_target_s": 2 * step_s,
            "ttft_target_s": _TTFT_S,
            "capacity_per_s": {kind: rate for kind, (rate, _) in found.items()},
            "output_tokens_per_s": throughput,
            "tried": {kind: tried for kind, (_, tried) in found.items()},
        },
    )
    rows = [
        [kind, found[kind][0], figures["requests_per_s"], throughput[kind], 1000 * figures["itl_s"]["p99"]]
        for kind, figures in full.items()
    ]
    columns = ["", "capacity, requests/s", "all at once: requests/s", "output tokens/s", "P99 ITL, ms"]
    outcome.tables = [table_of(f"Azure conversation on {cost.name}", columns, rows)]
    return outcome
