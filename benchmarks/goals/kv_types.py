"""Goal 13: quantised keys and values: room, exactness on real weights, speed over long contexts."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.goals.models import REAL
from benchmarks.goals.verdict import Check, Outcome, table_of
from ropeway.bench.kv import KVFigures, measure_kv
from ropeway.devices.base import KVDtype
from ropeway.errors import LoadError, ModelNotFound
from ropeway.loading.sources import resolve as resolve_source
from ropeway.settings import resolve

CAPACITY: dict[KVDtype, float] = {"int8": 1.9, "int4": 2.3, "int4-full": 3.3}
PERPLEXITY: dict[KVDtype, float] = {"int8": 0.002, "int4": 0.015, "int4-full": 0.02}
"""Largest change. That of int4-full is to be stated; from 2 % on it is told at start, too."""
CONTEXT = 4096


def measure(models: Sequence[str] = REAL, *, context: int = CONTEXT, batch: int = 4, repeat: int = 7) -> Outcome:
    outcome = Outcome()
    for model in models:
        try:
            resolve_source(model)
        except (LoadError, ModelNotFound) as error:
            outcome.checks.append(Check(model, None, 0.0, note=f"not to be had here: {error.message}"))
            continue
        config = resolve({"model": model}, environ={}, given_as="argument").config
        figures = measure_kv(config, context=context, batch=batch, repeat=repeat)
        costs = {dtype: _perplexity(model, dtype) for dtype in CAPACITY}
        outcome.checks += _checks(model, figures, costs)
        outcome.figures[model] = asdict(figures) | {"perplexity": costs}
        outcome.tables.append(
            table_of(
                f"{model}: {batch} sequences of {context} tokens",
                ["", "bytes a token", "room / bf16", "decode, tokens/s", "decode / bf16"],
                [
                    [each.dtype, each.bytes_per_token, each.capacity, each.decode_tokens_per_s, each.decode_over_base]
                    for each in figures.types
                ],
            )
        )
    return outcome


def _checks(model: str, figures: KVFigures, costs: dict[KVDtype, dict[str, Any]]) -> list[Check]:
    checks = []
    for each in figures.types:
        name = f"{model}, {each.dtype}: "
        if each.dtype not in CAPACITY:
            continue
        cost = costs[each.dtype]
        checks.append(Check(name + "room / bf16", each.capacity, CAPACITY[each.dtype], unit="x", note=each.note))
        if each.note:
            continue
        checks.append(Check(name + "decode / bf16", each.decode_over_base, 1.0, unit="x"))
        change = cost.get("change_percent")
        figure = None if change is None else change / 100
        note = cost.get("failed") or f"standard error {cost['change_error_percent'] / 100:.2%}"
        checks.append(Check(name + "perplexity", figure, PERPLEXITY[each.dtype], "at most", "%", note=note))
    return checks


def _perplexity(model: str, dtype: KVDtype) -> dict[str, Any]:
    """What ``ropeway bench perplexity`` writes, or why it wrote nothing, as ``failed``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "perplexity.json"
        command = [sys.executable, "-m", "ropeway", "bench", "perplexity", model, "--kv-dtype", dtype]
        done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, check=False)
        if done.returncode:
            return {"failed": (done.stderr or done.stdout).strip().splitlines()[-1]}
        report: dict[str, Any] = json.loads(file.read_text())
    return {name: value for name, value in report.items() if name != "by_chunk"}
