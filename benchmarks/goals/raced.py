"""The race behind goals 2, 2b, 3 and 4: ``benchmarks.compare`` on two shapes. They share its rounds: what one of them
has run, the others take from disk, as long as Ropeway is the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from benchmarks.compare.competition import ENGINES, Options, compare, default_cache
from benchmarks.compare.engines.base import SCENARIOS, ScenarioName
from benchmarks.compare.report import OURS, Row, fastest
from benchmarks.goals.verdict import Check, Outcome, table_of

LARGE, SMALL = "qwen3-0.6b", "smollm2-135m"
"""Shapes; the weights are random."""
PEERS = tuple(name for name in ENGINES if name != OURS)

Report = dict[str, Any]


def race(shape: str, weights: Sequence[str]) -> Report:
    """``benchmarks.compare.report.report_of`` a race, most of it from disk if it has run before."""
    options = Options(shape=shape, weights=tuple(weights), resume=True, cache=default_cache())
    return compare(options, lambda text: typer.echo(text, err=True))


def against(report: Report, scenario: ScenarioName, peers: Sequence[str], target: float, weights: str) -> Check:
    """Ropeway's rate divided by the best rate of the peers, all with weights of one precision."""
    rows = report["entries"]
    found = [row for peer in peers if (row := fastest(rows, peer, scenario, weights))]
    return _ratio(report, scenario, fastest(rows, OURS, scenario, weights), found, peers, target)


def against_fastest(report: Report, scenario: ScenarioName, target: float) -> Check:
    """Ropeway's rate divided by the best of the others', each at its fastest setting. Ropeway's must cost at most 1 %
    of perplexity; the others' need not."""
    rows = report["entries"]
    found = [row for peer in PEERS if (row := fastest(rows, peer, scenario))]
    precise = [row for row in rows if row["precise"]]
    return _ratio(report, scenario, fastest(precise, OURS, scenario), found, PEERS, target)


def outcome_of(checks: list[Check], reports: Sequence[Report], **figures: Any) -> Outcome:
    """Checks with the races they come from."""
    outcome = Outcome(checks, {"races": list(reports), **figures})
    for report in reports:
        ran = [row for row in report["entries"] if row["medians"]]
        rows = [[f"{row['engine']} {row['setting']}", *(row["medians"][name] for name in SCENARIOS)] for row in ran]
        outcome.tables.append(table_of(f"{report['model']}, tokens/s", ["", *SCENARIOS], rows))
    return outcome


def _ratio(
    report: Report, scenario: ScenarioName, ours: Row | None, found: Sequence[Row], peers: Sequence[str], target: float
) -> Check:
    best = max(found, key=lambda row: row["medians"][scenario], default=None)
    if ours is None or best is None:
        missing = (OURS,) if ours is None else peers
        reasons = [row["out"].splitlines()[0] for row in report["entries"] if row["engine"] in missing and row["out"]]
        name = f"{report['model']}, {scenario}, against {' and '.join(peers)}"
        return Check(name, None, target, unit="x", note="; ".join([f"{' and '.join(missing)} not run", *reasons[:1]]))
    name = f"{report['model']}, {scenario}, {ours['setting']} against {best['engine']} {best['setting']}"
    return Check(name, ours["medians"][scenario] / best["medians"][scenario], target, unit="x")
