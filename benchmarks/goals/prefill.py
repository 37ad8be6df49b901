"""Goal 4: a prompt of 2,048 tokens, against the machine's best matrix products and against the other engines."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from benchmarks.compare.competition import Options, default_cache, files_of
from benchmarks.goals.raced import LARGE, against, outcome_of, race
from benchmarks.goals.verdict import Check, Outcome
from ropeway.bench.latency import Latency, measure_latency
from ropeway.settings import resolve

_PROMPT_TOKENS = 2048


def measure() -> Outcome:
    files = files_of(Options(shape=LARGE, cache=default_cache()))
    bf16, int8 = _latency(files.folder), _latency(files.gguf("Q8_0"), activations="int8")
    report = race(LARGE, ("bf16", "int8", "int4"))
    checks = [
        Check(f"{LARGE}, arithmetic / best product, bf16", bf16.matmul_fraction, 0.90, unit="%"),
        Check(f"{LARGE}, arithmetic / best product, int8", int8.matmul_fraction, 0.75, unit="%"),
        against(report, "prefill", ("vllm",), 1.3, "bf16"),
        against(report, "prefill", ("openvino",), 1.05, "bf16"),
        against(report, "prefill", ("openvino",), 1.15, "int8"),
    ]
    return outcome_of(checks, (report,), latency={"bf16": asdict(bf16), "int8": asdict(int8)})


def _latency(model: Path, **settings: str) -> Latency:
    config = resolve({"model": str(model), "prefix_cache": False, **settings}).config
    return measure_latency(config, prompt_tokens=_PROMPT_TOKENS, output_tokens=2)
