"""Goal 2b: 32 mixed requests at once, every engine at its fastest setting."""

from __future__ import annotations

from benchmarks.goals.raced import LARGE, against_fastest, outcome_of, race
from benchmarks.goals.verdict import Outcome


def measure() -> Outcome:
    report = race(LARGE, ("bf16", "int8", "int4"))
    return outcome_of([against_fastest(report, "batch", 1.7)], (report,))
