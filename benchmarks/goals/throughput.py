"""Goal 2: 32 mixed requests at once, every engine with bfloat16 weights."""

from __future__ import annotations

from benchmarks.goals.raced import LARGE, PEERS, SMALL, against, outcome_of, race
from benchmarks.goals.verdict import Outcome

_TARGETS = {"vllm": 1.5, "openvino": 1.5, "llama.cpp": 3.0, "transformers": 6.0}


def measure() -> Outcome:
    large, small = (race(shape, ("bf16",)) for shape in (LARGE, SMALL))
    checks = [against(large, "batch", (peer,), target, "bf16") for peer, target in _TARGETS.items()]
    checks.append(against(small, "batch", PEERS, 2.0, "bf16"))
    return outcome_of(checks, (large, small))
