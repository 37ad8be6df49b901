"""Goal 7: a preempted request gives the same tokens, and comes back as cheaply as either way allows.

On the CPU copying a block takes a hundredth of computing it, so swapping always wins. Whether the choice is right where
it is not clear is seen on the simulated engine, with copies from far too slow to nearly free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.goals.models import small_model
from benchmarks.goals.simulated import engine_of, joined, run
from benchmarks.goals.verdict import Check, Outcome, table_of
from ropeway.bench.preemption import KINDS, Kind, ResumeCost, measure_preemption, report
from ropeway.bench.traces import Trace
from ropeway.settings import resolve

LENGTHS = (64, 256, 1024)
SIMULATED_LENGTHS = (256, 1024, 4000)
BANDWIDTHS = (1e8, 1e9, 2e9, 3e9, 4e9, 8e9, 2e10)
"""Bytes per second of copies."""
_FREE = 1e16
_LONGS = 10
_LONG_OUTPUT, _SHORT = 100, (8, 2)
_APART_S, _AFTER_S = 6.0, (0.05, 0.45, 0.85)
"""Between long requests; and after the prompt of each, when short ones take its seat."""
_SWAP_GIB = 8.0


def measure(
    *,
    lengths: Sequence[int] = LENGTHS,
    repeat: int = 6,
    simulated_lengths: Sequence[int] = SIMULATED_LENGTHS,
    bandwidths: Sequence[float] = BANDWIDTHS,
) -> Outcome:
    model, label = small_model()
    config = resolve({"model": model}, environ={}, given_as="argument").config
    costs = {kept: measure_preemption(config, lengths, kept=kept, repeat=repeat) for kept in (False, True)}
    lost = report(costs[False])
    runs = [cost.identical for kinds in costs.values() for cost in kinds]
    simulated = [
        simulated_costs(length, bandwidth, kept=kept)
        for kept in (False, True)
        for length in simulated_lengths
        for bandwidth in bandwidths
    ]
    outcome = Outcome(
        checks=[
            Check("outputs identical to those of requests left alone", sum(runs) / len(runs), 1.0, unit="%"),
            *(
                Check(f"{label}, {length} tokens: auto over the better of the two", ratio, 1.1, "at most", "x")
                for length, ratio in lost["auto_over_better"].items()
            ),
            *(
                Check(
                    f"simulated, whatever copies take, blocks {_fate(kept)}: auto over the better of the two",
                    max(row["ratio"] for row in simulated if row["kept"] == kept),
                    1.1,
                    "at most",
                    "x",
                )
                for kept in (False, True)
            ),
        ],
        figures={"model": label, "blocks_lost": lost, "blocks_kept": report(costs[True]), "simulated": simulated},
    )
    outcome.tables = [
        table_of(
            f"{label}: milliseconds that a preemption costs, medians of {len(costs[False][0].samples_s)}",
            ["tokens, its blocks meanwhile", *KINDS, "auto did"],
            [row for kept, kinds in costs.items() for row in _rows(kinds, _fate(kept))],
        ),
        table_of(
            "simulated engine: milliseconds that a preemption costs",
            ["tokens, its blocks meanwhile", "copies, GB/s", *KINDS, "ratio"],
            [
                [
                    f"{row['context_tokens']}, {_fate(row['kept'])}",
                    row["copy_bytes_per_s"] / 1e9,
                    *(f"{1000 * row['cost_s'][kind]:.1f}" for kind in KINDS),
                    f"{row['ratio']:.2f}",
                ]
                for row in simulated
            ],
        ),
    ]
    return outcome


def simulated_costs(length: int, bandwidth: float, *, kept: bool) -> dict[str, Any]:
    """What a preemption adds to a long request of ``length`` prompt tokens, by kind, in seconds; over requests that
    come one after the other, the first half of which the engine learns from."""
    free_s = _mean_e2e_s(length, _FREE, "swap", kept=kept)
    costs: dict[str, float] = {
        kind: (_mean_e2e_s(length, bandwidth, kind, kept=kept) - free_s) / len(_AFTER_S) for kind in KINDS
    }
    ratio = costs["auto"] / min(costs["swap"], costs["recompute"])
    return {"kept": kept, "context_tokens": length, "copy_bytes_per_s": bandwidth, "cost_s": costs, "ratio": ratio}


def _mean_e2e_s(length: int, bandwidth: float, kind: Kind, *, kept: bool) -> float:
    cost = msgspec.structs.replace(engine_of(), copy_bytes_per_s=bandwidth)
    prompt_s = length * cost.b_s_per_token + 3 * cost.a_s
    begin_s: NDArray[np.float64] = np.arange(_LONGS, dtype=np.float64) * _APART_S
    longs = Trace(np.full(_LONGS, length), np.full(_LONGS, _LONG_OUTPUT), arrival_s=begin_s).with_tier("batch")
    times = (begin_s[:, None] + prompt_s + np.array(_AFTER_S)).reshape(-1)
    prompt, output = _SHORT
    shorts = Trace(np.full(len(times), prompt), np.full(len(times), output), arrival_s=times).with_tier("interactive")
    how: dict[str, Any] = {"swap_space": _SWAP_GIB, "prefix_cache": kept}
    replayed = run(joined(longs, shorts), cost, how=how, max_num_seqs=1, preemption=kind, shed=False)
    recorder = replayed.recording.recorder
    e2e_s = recorder.e2e_s[recorder.tier == recorder.tiers.index("batch")]
    return float(e2e_s[_LONGS // 2 :].mean())


def _fate(kept: bool) -> str:
    return "kept in the prefix cache" if kept else "lost"


def _rows(costs: Sequence[ResumeCost], fate: str) -> list[list[object]]:
    by_length: dict[int, dict[str, ResumeCost]] = {}
    for cost in costs:
        by_length.setdefault(cost.context_tokens, {})[cost.kind] = cost
    return [
        [
            f"{length}, {fate}",
            *(f"{kinds[kind].median_s * 1000:.2f}" for kind in KINDS),
            ", ".join(f"{word} {count}" for word, count in kinds["auto"].done.items()),
        ]
        for length, kinds in by_length.items()
    ]
