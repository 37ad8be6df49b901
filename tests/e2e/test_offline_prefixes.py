"""The prefix cache through the whole line in one process: hits where they should be, and answers as without it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from ropeway import LLM, SamplingParams
from tests.support.llms import idle, one, tiny_llm, tokens

BLOCK = 16
A, B, C, D = ([seed * 40 + i for i in range(BLOCK)] for seed in (1, 2, 3, 4))


@pytest.fixture(scope="module")
def uncached() -> Iterator[LLM]:
    with tiny_llm(prefix_cache=False) as llm:
        yield llm


@pytest.fixture
def cached() -> Iterator[LLM]:
    with tiny_llm() as llm:
        yield llm
        assert idle(llm)


@pytest.mark.report("vllm-project/vllm#8229")
def test_a_block_after_another_prefix_is_another_block(cached: LLM, uncached: LLM) -> None:
    for prompt, before in ((A + B + C, 0), (A + D + C, BLOCK), (D + B + C, 0), (A + B + C, 3 * BLOCK)):
        for tail, hits in (([5], before), ([6], 3 * BLOCK)):
            output = one(cached, prompt + tail, max_tokens=8, ignore_eos=True)
            assert output.token_ids == one(uncached, prompt + tail, max_tokens=8, ignore_eos=True).token_ids
            assert output.cached_tokens == hits


@pytest.mark.report("openvinotoolkit/openvino.genai#4047")
def test_a_prompt_of_many_chunks_is_answered_cached_or_not(cached: LLM, uncached: LLM) -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(3, 390) for _ in range(1000)]  # sixteen times the budget of a step
    want = one(uncached, prompt, max_tokens=10, ignore_eos=True)
    assert len(want.token_ids) == 10
    for hits in (0, 992):
        output = one(cached, prompt, max_tokens=10, ignore_eos=True)
        assert output.token_ids == want.token_ids
        assert output.cached_tokens == hits


@pytest.mark.report("ml-explore/mlx-lm#244")
def test_two_dialogues_of_almost_the_same_length_never_mix(cached: LLM, uncached: LLM) -> None:
    rng = random.Random(1)
    system = [rng.randrange(3, 390) for _ in range(37)]
    dialogues = [[*system, 50], [*system, 60, 61]]
    hits = 0
    for turn in range(50):
        who = rng.randrange(2)
        dialogues[who] += [70 + who, 80 + turn]
        output = one(cached, dialogues[who], max_tokens=3 + who, ignore_eos=True)
        assert output.token_ids == one(uncached, dialogues[who], max_tokens=3 + who, ignore_eos=True).token_ids
        dialogues[who] += output.token_ids
        hits += output.cached_tokens
    assert hits > 50 * BLOCK


@pytest.mark.parametrize("ahead", [True, False])
def test_prompts_at_once_that_share_a_prefix_are_answered_as_alone(uncached: LLM, ahead: bool) -> None:
    prompts = [A + B + [100 + i] * (i % 5 + 1) for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)
    want = [tokens(uncached, prompt, params)[0] for prompt in prompts]
    with tiny_llm(async_scheduling=ahead, kv_blocks=14) as llm:
        for _ in range(3):
            assert tokens(llm, prompts, params) == want
        assert llm.engine.stats().prefix_hits > 0
        assert idle(llm)
