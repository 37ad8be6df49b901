"""Goal 3: one request's tokens after the first, against the memory's bandwidth and against the other engines."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.goals.raced import LARGE, SMALL, against, outcome_of, race
from benchmarks.goals.verdict import Check, Outcome
from ropeway.bench.latency import measure_latency
from ropeway.bench.random_model import random_model
from ropeway.settings import resolve

_PROMPT_TOKENS, _OUTPUT_TOKENS = 128, 128


def measure() -> Outcome:
    config = resolve({"model": str(random_model(LARGE)), "prefix_cache": False}).config
    latency = measure_latency(config, prompt_tokens=_PROMPT_TOKENS, output_tokens=_OUTPUT_TOKENS)
    large, small = race(LARGE, ("bf16", "int8", "int4")), race(SMALL, ("bf16",))
    checks = [
        Check(f"{LARGE}, weights read / read bandwidth", latency.bandwidth_fraction, 0.85, unit="%"),
        *(against(large, "decode", (peer,), 1.75, "bf16") for peer in ("vllm", "openvino")),
        *(against(large, "decode", ("llama.cpp",), 1.4, weights) for weights in ("bf16", "int8", "int4")),
        *(against(small, "decode", (peer,), 2.0, "bf16") for peer in ("vllm", "openvino")),
        against(small, "decode", ("llama.cpp",), 1.5, "bf16"),
    ]
    return outcome_of(checks, (large, small), latency=asdict(latency))
