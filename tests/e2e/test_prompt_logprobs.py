"""Log-probabilities of prompts, from the kernels to the client: right, whole, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers

from ropeway import LLM, SamplingParams
from ropeway.request import MAX_LOGPROBS, TokenLogprob
from tests.e2e.test_serving import QUESTION, complete, ids, token_ids
from tests.support.chat_model import CONTEXT, tiny_chat_model
from tests.support.llms import idle, one, tiny_llm
from tests.support.server_process import ServerProcess

Told = list[TokenLogprob | None]


def told(llm: LLM, prompt: list[int] | str, most: int = 3, **params: Any) -> Told:
    """Whole, or the test fails."""
    output = one(llm, prompt, **{"prompt_logprobs": most, "max_tokens": 2, **params})
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    first, *others = output.prompt_logprobs
    assert first is None
    assert [each.token_id for each in others if each is not None] == output.prompt_token_ids[1:]
    return output.prompt_logprobs


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm() as llm:
        yield llm
        assert idle(llm)


# ------------------------------------------------------------------------------ offline


def test_they_are_those_of_transformers() -> None:
    prompt = ids(1, 150)
    with tiny_llm(dtype="fp32", kv_dtype="fp32") as llm:
        ours = told(llm, prompt)[1:]
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_chat_model(), dtype=torch.float32)
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1).numpy()
    for position, each in enumerate(ours):
        assert each is not None
        row = logprobs[position]
        assert each.logprob == pytest.approx(float(row[each.token_id]), abs=1e-3)
        assert [value for _, value in each.top] == pytest.approx(sorted(row, reverse=True)[:3], abs=1e-3)
        assert each.rank is not None
        near = np.count_nonzero(np.abs(row - row[each.token_id]) < 2e-3)
        assert abs(each.rank - 1 - np.count_nonzero(row > row[each.token_id])) < near


@pytest.mark.report("vllm-project/vllm#14239")
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("budget", [16, 32, 4096])
def test_they_are_whole_and_the_same_however_the_prompt_is_cut(llm: LLM, budget: int, ahead: bool) -> None:
    prompts = [ids(2, 100), ids(3, 1), ids(4, 2), ids(5, 333)]
    with tiny_llm(max_batched_tokens=budget, async_scheduling=ahead) as other:
        for prompt in prompts:
            assert told(other, prompt) == told(llm, prompt)


def test_asking_changes_no_answer(llm: LLM) -> None:
    for seed in range(6):
        params = {"max_tokens": 12, "temperature": 0.9, "seed": seed, "logprobs": 2, "ignore_eos": True}
        plain, asked = (one(llm, ids(seed, 90), **params, **more) for more in ({}, {"prompt_logprobs": 4}))
        assert plain.outputs == asked.outputs
        assert plain.prompt_logprobs is None


@pytest.mark.report("vllm-project/vllm#3251")
@pytest.mark.report("vllm-project/vllm#5344")
@pytest.mark.report("vllm-project/vllm#8268")
@pytest.mark.report("vllm-project/vllm#13105")
@pytest.mark.report("vllm-project/vllm#5162")
@pytest.mark.parametrize("length", [16, 17, 33, 200])
def test_a_prompt_whose_blocks_are_cached_is_told_of_whole(llm: LLM, length: int) -> None:
    prompt = ids(100 + length, length)
    first = told(llm, prompt)
    one(llm, prompt, max_tokens=1)
    assert told(llm, prompt) == first
    # What it computed is in the cache for others.
    assert one(llm, prompt, max_tokens=1).cached_tokens == (length - 1) // 16 * 16


@pytest.mark.report("vllm-project/vllm#42245")
@pytest.mark.report("vllm-project/vllm#42019")
def test_the_order_of_prompts_with_a_common_beginning_does_not_matter() -> None:
    common = ids(6, 48)
    one_way, other_way = [], []
    for found, tails in ((one_way, (7, 8)), (other_way, (8, 7))):
        with tiny_llm() as llm:
            found += [told(llm, [*common, tail]) for tail in tails]
    assert one_way == other_way[::-1]
    assert one_way[0][:48] == one_way[1][:48]


def test_of_n_completions_one_tells_for_all_and_the_others_share_its_blocks(llm: LLM) -> None:
    prompt = ids(9, 120)
    alone = told(llm, prompt)
    steps = llm.engine.steps
    assert told(llm, prompt, n=4, temperature=1.0, seed=3) == alone
    assert llm.engine.steps - steps <= 5  # two for the prompt, of which the others have eight tokens to compute


@pytest.mark.parametrize("fields", [{}, {"preemption": "swap", "swap_space": 0.1}], ids=["recompute", "swap"])
def test_the_same_bits_in_a_crowd_that_makes_room_by_preemption(llm: LLM, fields: dict[str, Any]) -> None:
    prompts = [ids(20 + seed, 30 + 23 * seed) for seed in range(8)]
    crowd = [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, prompt_logprobs=seed % 4 if seed % 3 else None)
        for seed in range(8)
    ]
    alone = [llm.generate(prompt, params, progress=False)[0] for prompt, params in zip(prompts, crowd, strict=True)]
    with tiny_llm(kv_blocks=26, admission="greedy", max_batched_tokens=32, **fields) as small:
        together = small.generate(prompts, crowd, progress=False)
        assert small.engine.stats().preemptions > 0
        assert idle(small)
    for ours, theirs, params in zip(together, alone, crowd, strict=True):
        assert (ours.token_ids, ours.prompt_logprobs) == (theirs.token_ids, theirs.prompt_logprobs)
        assert (ours.prompt_logprobs is None) == (params.prompt_logprobs is None)
        for each in (ours.prompt_logprobs or [])[1:]:
            assert each is not None
            assert len(each.top) == params.prompt_logprobs


# ------------------------------------------------------------------------------ served


@pytest.mark.report("ggml-org/llama.cpp#27537")
@pytest.mark.report("ggml-org/llama.cpp#27174")
def test_echo_with_logprobs_has_an_entry_for_every_token(server: ServerProcess, client: openai.OpenAI) -> None:
    prompt = ids(30, 300)
    for _ in range(2):
        choice = complete(client, prompt, max_tokens=1, echo=True, logprobs=1, temperature=0).choices[0]
        assert choice.logprobs is not None
        tokens, values, tops = choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
        assert tokens is not None
        assert values is not None
        assert tops is not None
        assert len(tokens) == len(values) == len(tops) == 301
        assert [place for place, value in enumerate(values) if value is None] == [0]
        assert [place for place, top in enumerate(tops) if top is None] == [0]


@pytest.mark.report("vllm-project/vllm#6521")
@pytest.mark.report("EleutherAI/lm-evaluation-harness#1903")
@pytest.mark.parametrize("streamed", [False, True])
def test_a_text_is_scored_with_max_tokens_0(client: openai.OpenAI, streamed: bool) -> None:
    text = "Verdict: no, the line 🚀 moves"
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "temperature": 0}
    if streamed:
        chunks = list(
            complete(client, text, max_tokens=0, stream=True, stream_options={"include_usage": True}, **fields)
        )
        (scored,) = [chunk for chunk in chunks if chunk.choices]
        usage = chunks[-1].usage
    else:
        scored = complete(client, text, max_tokens=0, **fields)
        usage = scored.usage
    (choice,) = scored.choices
    assert choice.text == text
    assert choice.finish_reason == "length"
    assert token_ids(scored) == []
    assert usage is not None
    assert usage.completion_tokens == 0
    assert usage.total_tokens == usage.prompt_tokens
    longer = complete(client, text, max_tokens=3, echo=True, logprobs=1, temperature=0).choices[0].logprobs
    assert choice.logprobs is not None
    assert longer is not None
    assert choice.logprobs.tokens is not None
    assert len(choice.logprobs.tokens) == usage.prompt_tokens
    assert longer.token_logprobs is not None
    assert choice.logprobs.token_logprobs == longer.token_logprobs[: usage.prompt_tokens]


@pytest.mark.report("vllm-project/vllm#5334")
@pytest.mark.parametrize("prompt", ["\n2. Ben owns 30", "the line the line", " x\n\n\ty"])
def test_the_tokens_of_an_echo_are_its_text(client: openai.OpenAI, prompt: str) -> None:
    choice = complete(client, prompt, max_tokens=5, echo=True, logprobs=1, temperature=0).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.text_offset is not None
    assert choice.text.startswith(prompt)
    pieces = [piece for piece in choice.logprobs.tokens if "\N{REPLACEMENT CHARACTER}" not in piece]
    if len(pieces) == len(choice.logprobs.tokens):
        assert "".join(pieces) == choice.text
    for piece, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        if "\N{REPLACEMENT CHARACTER}" in piece:
            break  # what comes after half a character begins where that does
        assert choice.text[offset : offset + len(piece)] == piece


@pytest.mark.report("deepjavalibrary/djl-serving#2299")
@pytest.mark.parametrize("echo", [False, True])
def test_chunks_of_a_prompt_are_no_chunks_of_an_answer(client: openai.OpenAI, echo: bool) -> None:
    """Of a prompt that takes four steps, nothing is told before the last one; and a stream tells what is told whole."""
    prompt = ids(31, 200)
    fields: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "echo": echo, "logprobs": 2}
    chunks = [chunk.choices[0] for chunk in complete(client, prompt, stream=True, **fields)]
    made = [token for chunk in chunks for token in chunk.model_extra["token_ids"]]  # type: ignore[index]
    whole = complete(client, prompt, **fields)
    assert made == token_ids(whole)
    assert min(made) >= 0
    assert all(chunk.model_extra["token_ids"] for chunk in chunks)  # type: ignore[index]
    assert "".join(chunk.text for chunk in chunks) == whole.choices[0].text
    assert whole.choices[0].logprobs is not None
    for column, want in whole.choices[0].logprobs.model_dump().items():
        assert [each for chunk in chunks for each in getattr(chunk.logprobs, column)] == want
    assert len(whole.choices[0].logprobs.tokens or ()) == 6 + 200 * echo


@pytest.mark.report("local-inference-lab/vllm#264")
@pytest.mark.report("pegainfer-project/pegainfer#416")
def test_long_prompts_are_told_of_in_bounded_memory_and_too_many_alternatives_refused(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    for most in (-1, MAX_LOGPROBS + 1, 100_000):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(client, ids(32, 9), max_tokens=1, extra={"prompt_logprobs": most})
        assert refused.value.param == "prompt_logprobs"
        assert str(MAX_LOGPROBS) in str(refused.value)

    def ask(seed: int) -> int:
        answer = complete(client, ids(seed, CONTEXT - 1), max_tokens=1, extra={"prompt_logprobs": 5})
        return len(answer.choices[0].model_extra["prompt_logprobs"])  # type: ignore[index]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(40, 48))) == [CONTEXT - 1] * 8


def test_vllms_field_tells_of_prompts_in_vllms_shape(client: openai.OpenAI) -> None:
    prompts = [ids(50, 40), ids(51, 5)]
    extra = {"prompt_logprobs": 2}
    answer = complete(client, prompts, max_tokens=2, n=2, temperature=0, extra=extra)  # type: ignore[arg-type]
    for choice in answer.choices:
        entries = choice.model_extra["prompt_logprobs"]  # type: ignore[index]
        prompt = prompts[choice.index // 2]
        assert entries[0] is None
        assert len(entries) == len(prompt)
        for token, entry in zip(prompt[1:], entries[1:], strict=True):
            assert entry[str(token)].keys() == {"logprob", "rank", "decoded_token"}
            ranked = sorted(entry.values(), key=lambda one: one["rank"])
            assert [one["rank"] for one in ranked[:2]] == [1, 2]
            assert [one["logprob"] for one in ranked] == sorted((one["logprob"] for one in ranked), reverse=True)
    chat = client.chat.completions.create(
        model="tiny",
        messages=QUESTION,  # type: ignore[arg-type]
        max_tokens=2,
        extra_body={**extra, "return_token_ids": True},
    )
    assert chat.model_extra is not None
    assert len(chat.model_extra["prompt_logprobs"]) == len(chat.model_extra["prompt_token_ids"])
    with pytest.raises(openai.BadRequestError, match="cannot be streamed"):
        complete(client, prompts[0], stream=True, extra=extra)
