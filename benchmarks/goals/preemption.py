"""Goal 7: a preempted request gives the same tokens, and comes back as cheaply as either way allows."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.goals.models import small_model
from benchmarks.goals.verdict import Check, Outcome, table_of
from ropeway.bench.preemption import ResumeCost, measure_preemption, report
from ropeway.settings import resolve

LENGTHS = (64, 256, 1024)


def measure(*, lengths: Sequence[int] = LENGTHS, repeat: int = 6) -> Outcome:
    model, label = small_model()
    config = resolve({"model": model}, environ={}, given_as="argument").config
    lost = measure_preemption(config, lengths, repeat=repeat)
    kept = measure_preemption(config, lengths, kept=True, repeat=repeat)
    figures = report(lost)
    runs = [cost.identical for cost in (*lost, *kept)]
    outcome = Outcome(
        checks=[
            Check("outputs identical to those of requests left alone", sum(runs) / len(runs), 1.0, unit="%"),
            *(
                Check(f"{length} tokens: auto over the better of swap and recompute", ratio, 1.1, "at most", "x")
                for length, ratio in figures["auto_over_better"].items()
            ),
        ],
        figures={"model": label, "blocks_lost": figures, "blocks_kept": report(kept)},
    )
    outcome.tables = [
        table_of(
            f"{label}: milliseconds that a preemption costs, medians of {len(lost[0].samples_s)}",
            ["tokens, its blocks meanwhile", "swap", "recompute", "auto", "auto did"],
            [*_rows(lost, "lost"), *_rows(kept, "kept in the prefix cache")],
        )
    ]
    return outcome


def _rows(costs: Sequence[ResumeCost], fate: str) -> list[list[object]]:
    by_length: dict[int, dict[str, ResumeCost]] = {}
    for cost in costs:
        by_length.setdefault(cost.context_tokens, {})[cost.kind] = cost
    return [
        [
            f"{length}, {fate}",
            *(f"{kinds[kind].median_s * 1000:.2f}" for kind in ("swap", "recompute", "auto")),
            ", ".join(f"{word} {count}" for word, count in kinds["auto"].done.items()),
        ]
        for length, kinds in by_length.items()
    ]
