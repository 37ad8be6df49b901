"""Goal 4: a prompt of 2,048 tokens, against the machine's best matrix products and against the other engines."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.compare.checkpoints import ModelFiles
from benchmarks.compare.competition import default_cache
from benchmarks.goals.raced import LARGE, against, outcome_of, race
from benchmarks.goals.verdict import Check, Outcome
from benchmarks.random_model import random_model
from ropeway.bench.latency import Latency, measure_latency
from ropeway.settings import resolve

_PROMPT_TOKENS = 2048


def measure() -> Outcome:
    folder = random_model(LARGE)
    int8_file = ModelFiles(folder, default_cache() / "models", name=LARGE).gguf("Q8_0")
    bf16, int8 = _latency(str(folder)), _latency(str(int8_file), activations="int8")
    report = race(LARGE, ("bf16", "int8", "int4"))
    checks = [
        Check(f"{LARGE}, arithmetic / best product, bf16", bf16.matmul_fraction, 0.90, unit="%"),
        Check(f"{LARGE}, arithmetic / best product, int8", int8.matmul_fraction, 0.75, unit="%"),
        against(report, "prefill", ("vllm",), 1.3, "bf16"),
        against(report, "prefill", ("openvino",), 1.05, "bf16"),
        against(report, "prefill", ("openvino",), 1.15, "int8"),
    ]
    return outcome_of(checks, (report,), latency={"bf16": asdict(bf16), "int8": asdict(int8)})


def _latency(model: str, **settings: str) -> Latency:
    config = resolve({"model": model, "prefix_cache": False, **settings}).config
    return measure_latency(config, prompt_tokens=_PROMPT_TOKENS, output_tokens=2)
