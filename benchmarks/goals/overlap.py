"""Goal 12: how much of two ranks' communication micro-batches hide, over links of three rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from rich.table import Table

from benchmarks.goals.verdict import Check, Outcome, table_of
from ropeway.bench.network import NoNetwork
from ropeway.bench.overlap import OverlapRun, measure_auto, measure_overlap
from ropeway.bench.random_model import random_model
from ropeway.config import Config
from ropeway.settings import resolve

WIDE, SMALL = "llama-2-7b-16-layers", "qwen3-0.6b"
"""Layers as wide as those of models that are spread over hosts; and narrow ones, which compute a quarter as much for
every byte that they communicate."""
TURNS = {WIDE: 4, SMALL: 8}
FRACTIONS = (0.2, 0.35, 0.5)
"""Of the serial step that communication takes."""
TOKENS = 512
AUTO_TOKENS = (32, 64, 128, 256, 512)
AUTO_TURNS = 20


def measure(*, tokens: int = TOKENS, turns: Mapping[str, int] = TURNS, auto_turns: int = AUTO_TURNS) -> Outcome:
    outcome = Outcome(figures={"tokens": tokens, "turns": dict(turns), "auto_turns": auto_turns})
    try:
        for shape, repeat in turns.items():
            runs = measure_overlap(
                two_ranks(shape, tokens), tokens=[tokens], fractions=FRACTIONS, fused=False, repeat=repeat
            )
            outcome.checks += [check for run in runs if run.mode != "serial" for check in _checks(shape, run)]
            outcome.figures[shape] = [asdict(run) for run in runs]
            outcome.tables.append(_table(f"{shape}, {tokens} tokens, medians of {repeat} turns", runs))
        rate = runs[len(runs) // 2].link_rate  # of the middle fraction
        assert rate is not None
        sizes = [size for size in AUTO_TOKENS if size <= tokens]
        table, cut = measure_auto(two_ranks(shape, tokens), rate=rate, tokens=sizes, repeat=auto_turns)
    except NoNetwork as error:
        return Outcome([Check("micro-batches over a link of limited rate", None, 0.95, note=error.message)])
    slowest = max((run.slowest for run in cut), default=1.0)
    name = f"auto / off, {shape} at {rate}, upper 95 % bound of the slowest of {len(sizes)} sizes"
    which = ", ".join(f"{run.tokens:,}" for run in cut) or "none"
    outcome.checks.append(Check(name, slowest, 1.01, "at most", "x", f"cut: {which}"))
    outcome.figures["auto"] = {"link_rate": rate, "table": asdict(table), "cut": [asdict(run) for run in cut]}
    return outcome


def two_ranks(shape: str, tokens: int) -> Config:
    """For steps of so many tokens; random weights."""
    fields = {
        "model": str(random_model(shape)),
        "tensor_parallel_size": 2,
        "kv_blocks": 2 * tokens // 16,
        "max_model_len": tokens,
        "max_batched_tokens": tokens,
    }
    return resolve(fields, environ={}, given_as="argument").config


def _table(title: str, runs: list[OverlapRun]) -> Table:
    columns = ["step", "link", "comm. share", "serial, ms", "overlapped, ms", "kernel", "effective", "speed-up"]
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return table_of(
        title,
        columns,
        [
            [
                *(run.what, run.link_rate, run.comm_fraction, 1e3 * serial.wall_s, 1e3 * run.wall_s),
                *(run.kernel_overlap, run.effective_overlap, run.speedup),
            ]
            for serial, run in pairs
        ],
    )


def _checks(shape: str, run: OverlapRun) -> list[Check]:
    case = f"{shape}, {run.what}, communication {run.comm_fraction:.0%} of the serial step"
    return [
        Check(f"kernel overlap, {case}", run.kernel_overlap, 0.95, unit="%"),
        Check(f"effective overlap, {case}", run.effective_overlap, 0.80, unit="%"),
        Check(f"speed-up, {case}", run.speedup, 1 / (1 - 0.8 * run.comm_fraction), unit="x"),
    ]
