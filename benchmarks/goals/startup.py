"""Goal 18: from the command to the first token, and what memory is held then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from benchmarks.goals.models import SMALL, small_model
from benchmarks.goals.verdict import Check, Outcome, table_of
from ropeway.bench.random_model import random_model
from ropeway.bench.startup import StartUpFigures, measure_startup, report, resident_limit

LARGE = "qwen3-0.6b"
_LARGE_S = 5.0
_SMALL_BEYOND_TORCH_S = 2.0


class Measured(NamedTuple):
    label: str
    figures: StartUpFigures


def measure(*, models: Sequence[str] = (LARGE, SMALL), repeat: int = 3) -> Outcome:
    outcome = Outcome()
    for model in models:
        path, label = small_model() if model == SMALL else (str(random_model(model)), f"{model} (random weights)")
        measured = Measured(label, measure_startup([path], repeat=repeat))
        outcome.figures[model] = report(measured.figures)
        outcome.checks += _small(measured) if model == SMALL else _large(measured)
        outcome.checks.append(_memory(measured))
        outcome.tables.append(_parts(measured))
    return outcome


def _large(measured: Measured) -> list[Check]:
    label, figures = measured
    return [
        Check(
            f"{label}: ropeway {kind} to the first token",
            wall_s,
            _LARGE_S,
            "at most",
            "s",
            note=f"{cpu_s:.1f} s of CPU time; importing torch alone: {figures.torch_import_s:.1f} s",
        )
        for kind, wall_s, cpu_s in (
            ("generate", figures.generate_s, figures.generate_cpu_s),
            ("serve", figures.serve_s, figures.serve_cpu_s),
        )
    ]


def _small(measured: Measured) -> list[Check]:
    label, figures = measured
    return [
        Check(
            f"{label}: ropeway {kind} to the first token, beyond importing torch",
            beyond_s,
            _SMALL_BEYOND_TORCH_S,
            "at most",
            "s",
            note=f"CPU time beyond it: {cpu_s - figures.torch_import_cpu_s:.1f} s",
        )
        for kind, beyond_s, cpu_s in (
            ("generate", figures.generate_beyond_torch_s, figures.generate_cpu_s),
            ("serve", figures.serve_beyond_torch_s, figures.serve_cpu_s),
        )
    ]


def _memory(measured: Measured) -> Check:
    label, figures = measured
    return Check(
        f"{label}: resident memory of server and engine over what is allowed",
        figures.resident_bytes / resident_limit(figures),
        1.0,
        "at most",
        note=f"{figures.resident_bytes / 1e6:,.0f} MB; the weights take {figures.weight_bytes / 1e6:,.0f} MB",
    )


def _parts(measured: Measured) -> Table:
    label, figures = measured
    parts = {name: None for kind in (figures.generate_parts_s, figures.serve_parts_s) for name in kind}
    rows: list[list[object]] = [
        [name, *("" if (took := each.get(name)) is None else f"{took:.2f}" for each in _kinds(figures))]
        for name in parts
    ]
    return table_of(f"{label}: parts of a start, seconds", ["", "generate", "serve: engine process"], rows)


def _kinds(figures: StartUpFigures) -> tuple[dict[str, float], dict[str, float]]:
    return figures.generate_parts_s, figures.serve_parts_s
