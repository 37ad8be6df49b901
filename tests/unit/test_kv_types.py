"""Quantised keys and values with everything else that an engine does: the tokens are those of the request alone."""

from __future__ import annotations

from typing import Any

import pytest

from ropeway.llm import LLM
from ropeway.request import SamplingParams
from tests.support.llms import idle, one, tiny_llm

PROMPTS = [[3 + (i * 7 + j) % 150 for j in range(33 + 5 * i)] for i in range(4)]
SAMPLED = {"max_tokens": 40, "temperature": 0.8, "seed": 4, "ignore_eos": True, "logprobs": 0}
every_type = pytest.mark.parametrize("kv_dtype", ["int8", "int4", "int4-full"])
every_device = pytest.mark.parametrize("device", ["reference", "cpu"])


def llm_of(device: str, kv_dtype: str, **fields: Any) -> LLM:
    return tiny_llm(**{"device": device, "kv_dtype": kv_dtype, "block_size": 32, "max_model_len": 160, **fields})


def answers(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], Any]]:
    outputs = llm.generate(prompts, SamplingParams(**SAMPLED), progress=False)
    return [(output.token_ids, output.logprobs) for output in outputs]


@every_device
@every_type
def test_tokens_and_logprobs_are_the_same_through_chunks_company_swaps_and_recomputation(
    device: str, kv_dtype: str
) -> None:
    with llm_of(device, kv_dtype, max_batched_tokens=512) as alone:
        want = [answers(alone, [prompt])[0] for prompt in PROMPTS]
    for preemption in ("swap", "recompute"):
        crowd = {"kv_blocks": 6, "max_batched_tokens": 27, "admission": "greedy", "shed": False}
        with llm_of(device, kv_dtype, preemption=preemption, swap_space=0.01, **crowd) as llm:
            assert answers(llm, PROMPTS) == want
            assert sum(ledger.preemptions[preemption] for ledger in llm.engine.scheduler.lifecycle.ledgers) > 0
            assert idle(llm)


@every_device
@every_type
def test_a_prefix_found_again_and_siblings_change_nothing(device: str, kv_dtype: str) -> None:
    prompt = PROMPTS[3] + PROMPTS[0]
    with llm_of(device, kv_dtype) as llm:
        first, again = (one(llm, prompt, max_tokens=20) for _ in range(2))
        assert (first.cached_tokens, again.cached_tokens) == (0, 64)
        assert again.token_ids == first.token_ids
        (both,) = llm.generate([prompt], SamplingParams(n=2, temperature=0, max_tokens=20), progress=False)
        assert [each.token_ids for each in both.outputs] == [first.token_ids] * 2


@every_device
def test_blocks_for_int4_full_grow_to_its_groups_by_default(device: str) -> None:
    with tiny_llm(device=device, kv_dtype="int4-full") as llm:
        assert llm.info.block_size == 32
