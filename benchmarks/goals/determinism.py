"""Goal 14: a request gives the same tokens with the same log-probabilities, bit for bit, whatever goes on around it.

Every setting serves the same requests on the native kernels: alone and one after the other on one thread, which is what
the others are compared with; then many at once, in small chunks, on more threads, with everything found in the prefix
cache, and with too few blocks, so that they are preempted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.goals.models import small_model
from benchmarks.goals.verdict import Check, Outcome, table_of
from ropeway.bench.workload import WorkloadRequest, mixed_workload
from ropeway.devices.processor import available_cores
from ropeway.engine.assembly import assemble
from ropeway.engine.messages import NewRequest
from ropeway.engine.submission import Submitter
from ropeway.errors import RopewayError
from ropeway.loading.sources import resolve as resolve_source
from ropeway.outcome import StepOutput
from ropeway.request import SamplingParams
from ropeway.settings import resolve

KV_DTYPES = ("bf16", "int8", "int4", "int4-full")
_BLOCK_SIZE = 32
_PROMPT, _OUTPUT = (8, 300), (8, 64)
_ALONE: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_batched_tokens": 4096,
    "async_scheduling": False,
    "prefix_cache": False,
    "threads": 1,
}
_AGAIN = "the prompts found in the prefix cache"
_PREEMPTED = ("preempted, copied to host memory", "preempted, computed again")


def _settings(blocks: int) -> dict[str, dict[str, Any]]:
    """``blocks``: a pool that is too small for all at once."""
    crowd: dict[str, Any] = {"max_num_seqs": 16, "max_batched_tokens": 512, "prefix_cache": False}
    scarce = crowd | {"kv_blocks": blocks, "admission": "greedy"}
    return {
        "16 at once": crowd,
        "16 at once, planned without looking ahead": crowd | {"async_scheduling": False},
        f"one thread more than the {available_cores()} cores": crowd | {"threads": available_cores() + 1},
        "chunks of at most 37 tokens": crowd | {"max_batched_tokens": 37},
        "whole prompts": crowd | {"chunked_prefill": False},
        "padded batches": {**crowd, "batching": "static", "padded_rows": True},
        _AGAIN: crowd | {"prefix_cache": True},
        _PREEMPTED[0]: scarce | {"preemption": "swap", "swap_space": 1.0},
        _PREEMPTED[1]: scarce | {"preemption": "recompute"},
    }


@dataclass
class _Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    """float32 of every token."""


def measure(*, requests: int = 24, kv_dtypes: Sequence[str] = KV_DTYPES, model: str | None = None) -> Outcome:
    source, label = (model, model) if model is not None else small_model()
    workload = mixed_workload(requests, prompt_tokens=_PROMPT, output_tokens=_OUTPUT)
    lengths = [-(-(request.prompt_tokens + request.output_tokens) // _BLOCK_SIZE) for request in workload]
    scarce = max(max(lengths) + 1, sum(lengths) // 4)
    outcome = Outcome(figures={"model": label, "requests": requests})
    rows: list[list[object]] = []
    for kv_dtype in kv_dtypes:
        common = {"model": source, "kv_dtype": kv_dtype, "block_size": _BLOCK_SIZE}
        expected, _ = _answers(common | _ALONE, workload)
        for name, setting in _settings(scarce).items():
            got, happened = _answers(common | setting, workload, rounds=2 if name == _AGAIN else 1)
            same = sum(a == b for a, b in zip(expected, got, strict=True)) / requests
            outcome.checks.append(Check(f"KV {kv_dtype}, {name}: answers of the same bits", same, 1.0, unit="%"))
            if name == _AGAIN:
                outcome.checks.append(Check(f"KV {kv_dtype}: prompt tokens found again", happened["cached"], 1))
            if name in _PREEMPTED:
                outcome.checks.append(Check(f"KV {kv_dtype}, {name}: preemptions", happened["preemptions"], 1))
            rows.append([kv_dtype, name, f"{same:.0%}", happened["cached"], happened["preemptions"]])
    tokens = sum(request.output_tokens for request in workload)
    outcome.figures |= {"output_tokens": tokens, "settings": rows}
    outcome.tables = [
        table_of(
            f"{label}: {requests} requests, {tokens} output tokens, half of them sampled",
            ["KV cache", "setting", "same bits", "found in the cache", "preemptions"],
            rows,
        )
    ]
    return outcome


def _answers(
    given: dict[str, Any], workload: Sequence[WorkloadRequest], *, rounds: int = 1
) -> tuple[list[_Answer], Counter[str]]:
    """The answers in the last of some rounds, and how many tokens were found cached, and requests preempted, in it.

    Requests come two steps after each other, so that prompts and answers share steps."""
    config = resolve({**given, "shed": False}, environ={}).config
    answers: dict[int, _Answer] = {}
    happened: Counter[str] = Counter()

    def receive(output: StepOutput) -> None:
        chosen = output.logprobs
        assert chosen is not None or not len(output.ids)
        if chosen is not None:
            assert chosen.row.tolist() == list(range(len(output.ids)))
            for request_id, token, logprob in zip(
                output.ids.tolist(), output.tokens.tolist(), chosen.chosen, strict=True
            ):
                answers[request_id].tokens.append(token)
                answers[request_id].logprobs.append(np.float32(logprob).tobytes())
        for finished in output.finished:
            if finished.refusal is not None:
                raise RopewayError(f"the engine refused a request: {finished.refusal.message}")
            if finished.timeline is not None:
                happened["cached"] += finished.timeline.cached_tokens
                happened["preemptions"] += sum(finished.timeline.preemptions.values())

    assembly = assemble(config, resolve_source(config.model.model), receive)
    try:
        submitter = Submitter(assembly.info)
        for _ in range(rounds):
            answers.clear()
            happened.clear()
            for index, request in enumerate(workload):
                new = _prepared(submitter, request, index)
                answers[new.id] = _Answer()
                assembly.engine.submit([new])
                for _ in range(2):
                    assembly.engine.step(int(config.engine.async_scheduling))
            while assembly.engine.has_work:
                assembly.engine.step(int(config.engine.async_scheduling))
    finally:
        assembly.close()
    return list(answers.values()), happened


def _prepared(submitter: Submitter, request: WorkloadRequest, index: int) -> NewRequest:
    prompt = request.prompt(index, submitter.info.vocab_size, 0)
    params = SamplingParams(
        temperature=0.8 if index % 2 else 0.0,
        top_p=0.95,
        max_tokens=request.output_tokens,
        ignore_eos=True,
        seed=index,
        logprobs=0,
    )
    (new,) = submitter.prepare(prompt.tolist(), params, tier=len(submitter.info.tiers) - 1)
    return new
