"""Decode while another process keeps one core busy, against decode alone, in alternation: throughput must fall by about
what the other process takes, not by an order of magnitude.

python -m benchmarks.busy_core --json benchmarks/results/busy_core.json
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from benchmarks.goals.models import small_model
from benchmarks.goals.verdict import table_of
from ropeway.bench.report import reported_to
from ropeway.bench.surroundings import look_around
from ropeway.cli.failures import told_plainly
from ropeway.devices.processor import available_cores, available_processors
from ropeway.engine.messages import NewRequest
from ropeway.llm import LLM
from ropeway.request import SamplingParams

_PROMPT_TOKENS = 16
_SPIN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass\n"


@contextlib.contextmanager
def busy_core(processor: int) -> Iterator[None]:
    """A process that computes on one processor and nowhere else."""
    process = subprocess.Popen([sys.executable, "-c", _SPIN, str(processor)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()  # it is there
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Decoding:
    """A batch of endless answers, stepped for as long as one asks."""

    def __init__(self, llm: LLM, batch: int) -> None:
        self._llm = llm
        self._batch = batch
        self._next_id = 1 << 32

    def run(self, seconds: float) -> list[float]:
        """Seconds of the decode steps that began within ``seconds``; then the batch is dropped."""
        engine = self._llm.engine
        params = SamplingParams(max_tokens=self._llm.info.max_model_len - _PROMPT_TOKENS, ignore_eos=True)
        ids = range(self._next_id, self._next_id + self._batch)
        self._next_id += self._batch
        engine.submit(
            [
                NewRequest(id=i, prompt=np.arange(5, 5 + _PROMPT_TOKENS, dtype=np.int32), params=params, seed=0)
                for i in ids
            ]
        )
        for _ in range(4):  # the prompts
            engine.step(ahead=0)
        steps = []
        until = time.monotonic() + seconds
        while (began := time.monotonic()) < until:
            engine.step(ahead=0)
            steps.append(time.monotonic() - began)
        engine.abort(list(ids), "cancel")
        engine.drain()
        return steps


def measure(model: str, batches: Sequence[int], *, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """A row per batch: tokens per second alone and beside a busy core, medians over rounds, and their ratio."""
    processor = min(available_processors())
    threads = available_cores()
    rows = []
    with LLM(model, max_model_len=2048) as llm:
        for batch in batches:
            decoding = Decoding(llm, batch)
            decoding.run(seconds / 2)  # warm
            rates: dict[str, list[float]] = {"alone": [], "busy": []}
            steps: dict[str, list[float]] = {"alone": [], "busy": []}
            for _ in range(rounds):
                for kind in rates:
                    with busy_core(processor) if kind == "busy" else contextlib.nullcontext():
                        took = decoding.run(seconds)
                    rates[kind].append(batch * len(took) / sum(took))
                    steps[kind] += took
            ratios = [busy / alone for alone, busy in zip(rates["alone"], rates["busy"], strict=True)]
            rows.append(
                {
                    "batch": batch,
                    "threads": threads,
                    **{f"{kind}_tokens_per_s": statistics.median(rates[kind]) for kind in rates},
                    "ratio": statistics.median(ratios),
                    "ratios": ratios,
                    # Two runnable threads share the busy processor in equal parts.
                    "fair_ratio": (threads - 0.5) / threads,
                    **{f"{kind}_step_p50_s": float(np.percentile(steps[kind], 50)) for kind in rates},
                    **{f"{kind}_step_p99_s": float(np.percentile(steps[kind], 99)) for kind in rates},
                }
            )
    return rows


@told_plainly
def _main(
    model: Annotated[str | None, typer.Argument(help="Default: SmolLM2-135M.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Requests at once; default: 1, 8 and 32.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of runs.")] = 7,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each run.")] = 1.5,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every figure here, too.")] = None,
) -> None:
    """Throughput of decode beside a busy core, and alone."""
    logging.basicConfig(level=logging.ERROR)
    path, label = small_model() if model is None else (model, model)
    with reported_to(json) as report:
        report["load"] = asdict(look_around().load)  # before anything runs: others make both sides slower
        rows = measure(path, batch or (1, 8, 32), rounds=rounds, seconds=seconds)
        report.update({"model": label, "rounds": rounds, "seconds": seconds, "runs": rows})
    columns = ["requests", "alone, tok/s", "busy, tok/s", "ratio", "fair share", "step P99 alone, ms", "busy, ms"]
    table = [
        [
            row["batch"],
            row["alone_tokens_per_s"],
            row["busy_tokens_per_s"],
            f"{row['ratio']:.2f}",
            f"{row['fair_ratio']:.2f}",
            row["alone_step_p99_s"] * 1e3,
            row["busy_step_p99_s"] * 1e3,
        ]
        for row in rows
    ]
    Console().print(table_of(f"{label}: decode beside a busy core", columns, table))


if __name__ == "__main__":
    typer.run(_main)
