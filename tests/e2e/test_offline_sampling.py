"""Sampling parameters through the whole line in one process: they hold in every step, asynchronous or not."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ropeway import LLM, FinishReason, SamplingParams
from tests.support.chat_model import VOCAB, tiny_chat_model
from tests.support.llms import idle, model_copy, one, tiny_llm, tokens

REPEATING = [17, 18] * 6
ENDS = (2, 7)
"""End tokens: the tokenizer's, and one that only the generation config knows of."""


@pytest.fixture(scope="module")
def asynchronous() -> Iterator[LLM]:
    with tiny_llm(prefix_cache=False) as llm:
        yield llm
        assert idle(llm)


@pytest.fixture(scope="module")
def synchronous() -> Iterator[LLM]:
    with tiny_llm(prefix_cache=False, async_scheduling=False) as llm:
        yield llm
        assert idle(llm)


@pytest.fixture(scope="module")
def two_ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = model_copy(tmp_path_factory.mktemp("ends"), generation_config={"eos_token_id": list(ENDS)})
    with tiny_llm(folder) as llm:
        yield llm
        assert idle(llm)


# ---------------------------------------------------------------------- penalties and biases

CHANGES: list[dict[str, Any]] = [
    *({name: value} for name in ("presence_penalty", "frequency_penalty") for value in (0.5, 1.0, 2.0)),
    *({"repetition_penalty": value} for value in (1.2, 1.8)),
    {"logit_bias": {17: -100.0, 18: 4.0}},
    {"frequency_penalty": 2.0, "repetition_penalty": 1.5, "logit_bias": {30: 6.0}},
]


@pytest.mark.report("vllm-project/vllm#27878")
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_asynchronous_penalties_and_biases_see_every_token(
    asynchronous: LLM, synchronous: LLM, change: dict[str, Any]
) -> None:
    sampling = {"temperature": 0.8, "seed": 3, "max_tokens": 40, "ignore_eos": True}
    prompts = [REPEATING, [17] * 9, [40, 41, 40, 41, 40]]
    changed, plain = SamplingParams(**sampling, **change), SamplingParams(**sampling)
    together = tokens(asynchronous, prompts, changed)
    assert together == tokens(synchronous, prompts, changed)
    assert together != tokens(asynchronous, prompts, plain)


@functools.cache
def oracle() -> transformers.PreTrainedModel:
    torch.set_num_threads(1)  # tiny matrices: threads only wait for each other
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_chat_model(), dtype=torch.float32).eval()


@torch.inference_mode()
def greedy_by_formula(prompt: list[int], count: int, change: dict[str, float]) -> list[int]:
    """Greedy tokens after transformers' logits, penalised as the papers and the OpenAI API say."""
    out: list[int] = []
    for _ in range(count):
        logits = oracle()(torch.tensor([[*prompt, *out]])).logits[0, -1]
        for token in {*prompt, *out}:
            factor = change.get("repetition_penalty", 1.0)
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token, times in Counter(out).items():
            logits[token] -= change.get("presence_penalty", 0.0) + times * change.get("frequency_penalty", 0.0)
        out.append(int(logits.argmax()))
    return out


@pytest.mark.report("vllm-project/vllm-ascend#7785")
@pytest.mark.parametrize("prompt", [[17] * 5, REPEATING])
@pytest.mark.parametrize(
    "change",
    [{"repetition_penalty": 1.8}, {"frequency_penalty": 1.0}, {"presence_penalty": 2.0, "repetition_penalty": 1.1}],
    ids=str,
)
def test_penalties_are_those_of_the_formula_in_every_step(
    asynchronous: LLM, prompt: list[int], change: dict[str, float]
) -> None:
    plain = one(asynchronous, prompt, max_tokens=25, ignore_eos=True).token_ids
    penalised = one(asynchronous, prompt, max_tokens=25, ignore_eos=True, **change).token_ids
    assert plain == greedy_by_formula(prompt, 25, {})
    assert penalised == greedy_by_formula(prompt, 25, change)
    assert penalised != plain
    assert max(Counter(penalised).values()) <= max(Counter(plain).values())


# ---------------------------------------------------------------------- where a completion ends


@pytest.mark.report("vllm-project/vllm#15407")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("least", [1, 20])
def test_min_tokens_holds_back_every_end_token_of_the_model(two_ends: LLM, end: int, least: int) -> None:
    at_once = one(two_ends, [5, 6], max_tokens=40, logit_bias={end: 50.0})
    assert (at_once.token_ids, at_once.finish_reason) == ([end], FinishReason.STOP)
    held = one(two_ends, [5, 6], max_tokens=40, logit_bias={end: 50.0}, min_tokens=least)
    assert not set(held.token_ids[:least]) & set(ENDS)
    assert held.token_ids[least:] == [end]
    assert held.finish_reason is FinishReason.STOP


@pytest.mark.report("vllm-project/vllm#4589")
@pytest.mark.parametrize("end", ENDS)
def test_ignore_eos_covers_every_end_token_of_the_model(two_ends: LLM, end: int) -> None:
    output = one(two_ends, [5, 6], max_tokens=200, logit_bias={end: 50.0}, ignore_eos=True)
    assert output.token_ids == [end] * 200
    assert output.finish_reason is FinishReason.LENGTH


def test_a_stop_token_id_of_the_request_counts_under_ignore_eos(two_ends: LLM) -> None:
    (output,) = two_ends.generate(
        [5, 6],
        SamplingParams(temperature=0, max_tokens=30, logit_bias={7: 50.0}, ignore_eos=True, stop_token_ids=(7,)),
        progress=False,
    )
    assert (output.token_ids, output.finish_reason) == ([7], FinishReason.STOP)
    assert output.outputs[0].stop_reason == 7


@pytest.mark.report("NVIDIA/TensorRT-LLM#10824")
@pytest.mark.parametrize(("least", "most"), [(0, 1), (1, 1), (10, 10), (10, 30), (33, 33)])
def test_min_tokens_and_max_tokens_are_kept_whatever_ends_there_are(two_ends: LLM, least: int, most: int) -> None:
    prompts = [[i, i + 1] for i in range(20, 40)]
    likely_ends = {2: 3.0, 7: 3.0, 9: 3.0}
    params = SamplingParams(
        seed=1, min_tokens=least, max_tokens=most, logit_bias=likely_ends, stop_token_ids=(9,), temperature=1.0
    )
    outputs = two_ends.generate(prompts, params, progress=False)
    for output in outputs:
        assert least <= len(output.token_ids) <= most
        assert not set(output.token_ids[:least]) & {2, 7, 9}
        if output.finish_reason is FinishReason.STOP:
            assert output.token_ids[-1] in (2, 7, 9)
        else:
            assert len(output.token_ids) == most
    if most == 30:
        assert FinishReason.STOP in {output.finish_reason for output in outputs}


@pytest.mark.report("vllm-project/vllm#21987")
def test_stop_strings_among_the_first_min_tokens_do_not_end_a_completion(asynchronous: LLM) -> None:
    plain = one(asynchronous, [5, 6], max_tokens=50, ignore_eos=True)
    stop = tuple(sorted(set(plain.text)))[:16]
    early = one(asynchronous, [5, 6], max_tokens=50, ignore_eos=True, stop=stop)
    assert len(early.token_ids) < 50
    held = one(asynchronous, [5, 6], max_tokens=50, ignore_eos=True, stop=stop, min_tokens=50)
    assert held.token_ids == plain.token_ids


# ---------------------------------------------------------------------- the vocabulary


@pytest.mark.report("vllm-project/vllm#13175")
def test_rows_that_pad_the_head_beyond_the_tokenizer_are_never_sampled() -> None:
    with tiny_llm(tiny_chat_model(512)) as llm:
        assert llm.info.vocab_size == VOCAB
        params = [SamplingParams(temperature=5.0, seed=seed, max_tokens=200, ignore_eos=True) for seed in range(20)]
        sampled = [token for ids in tokens(llm, [[5, 6]] * 20, params) for token in ids]
        assert len(sampled) == 4000
        assert max(sampled) < VOCAB
        assert len(set(sampled)) > VOCAB // 2  # hot enough to have met the padding
        output = one(llm, [5], max_tokens=1, logprobs=20)
        assert output.logprobs is not None
        assert all(token < VOCAB for token, _ in output.logprobs[0].top)


def test_without_a_tokenizer_every_row_of_the_head_may_be_sampled(tmp_path: Path) -> None:
    with tiny_llm(model_copy(tmp_path, without="tokenizer")) as llm:
        assert llm.info.vocab_size == VOCAB
        assert one(llm, [5], max_tokens=1, logit_bias={VOCAB - 1: 100.0}).token_ids == [VOCAB - 1]
