"""Beam search over a real engine: the true best beams, in time, whatever else is going on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers

from ropeway import LLM, AsyncLLM, BeamSearchParams, Completion, FinishReason
from ropeway.errors import ContextLengthExceeded, InvalidRequest
from tests.e2e.conftest import LIVE
from tests.e2e.test_serving import QUESTION, complete, ids
from tests.support.chat_model import CONTEXT, VOCAB, tiny_chat_model
from tests.support.llms import idle, one, tiny_llm, tokens
from tests.support.reference_beams import Top, reference_beams
from tests.support.server_process import ServerProcess

PROMPT = ids(1, 5)


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    with tiny_llm() as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    assert idle(shared)


def beams(llm: LLM, prompt: list[int] | str = PROMPT, **params: Any) -> list[Completion]:
    (output,) = llm.beam_search(prompt, BeamSearchParams(**params))
    return output.outputs


def told(answers: Sequence[Completion]) -> list[tuple[object, ...]]:
    return [(each.token_ids, each.cumulative_logprob, each.score) for each in answers]


def reference(llm: LLM, prompt: list[int], **how: Any) -> list[tuple[object, ...]]:
    def likeliest(tokens: list[int]) -> Top:
        logprobs = one(llm, tokens, max_tokens=1, logprobs=20, ignore_eos=True).logprobs
        assert logprobs is not None
        return logprobs[0].top[: 2 * how["width"]]

    return [tuple(answer) for answer in reference_beams(prompt, likeliest, **how)]


# ------------------------------------------------------------------------------ offline


@pytest.mark.report("vllm-project/vllm#31081")
@pytest.mark.report("vllm-project/vllm#47126")
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.0])
def test_the_beams_are_those_of_a_search_in_plain_python(llm: LLM, length_penalty: float) -> None:
    answers = beams(llm, beam_width=3, max_tokens=20, length_penalty=length_penalty)
    want = reference(llm, PROMPT, width=3, max_tokens=20, end_ids=llm.info.end_ids, length_penalty=length_penalty)
    assert told(answers) == want
    scores = [answer.score for answer in answers]
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    assert len({tuple(answer.token_ids) for answer in answers}) == 3
    (greedy,) = tokens(llm, PROMPT)
    assert beams(llm, beam_width=1, max_tokens=12, ignore_eos=True)[0].token_ids == greedy


def test_the_sums_are_those_of_transformers() -> None:
    with tiny_llm(dtype="fp32", kv_dtype="fp32") as llm:
        answers = beams(llm, beam_width=3, max_tokens=20, ignore_eos=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_chat_model(), dtype=torch.float32)
    for answer in answers:
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT + answer.token_ids])).logits[0, len(PROMPT) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None])
        assert answer.cumulative_logprob == pytest.approx(float(chosen.sum()), abs=1e-2)
        assert answer.score == pytest.approx(float(chosen.sum()) / 25, abs=1e-3)


@pytest.mark.timeout(30)
@pytest.mark.report("vllm-project/vllm#7965")
@pytest.mark.parametrize("ahead", [True, False])
def test_a_search_with_one_seat_and_a_stop_string_ends_after_as_many_steps_as_tokens(ahead: bool) -> None:
    with tiny_llm(max_num_seqs=1, async_scheduling=ahead) as llm:
        outputs = llm.beam_search(["Hi"], BeamSearchParams(beam_width=2, max_tokens=10, stop=("###",)))
        assert len(outputs) == 1
        assert [len(answer.token_ids) for answer in outputs[0].outputs] == [10, 10]
        assert llm.engine.steps <= 2 * 10
        assert idle(llm)


@pytest.mark.timeout(60)
@pytest.mark.report("vllm-project/vllm#10792")
@pytest.mark.report("vllm-project/vllm#200")
def test_wide_searches_give_an_output_for_every_prompt(llm: LLM) -> None:
    prompts: list[Any] = ["Hello, my name is", ids(2, 40), "The line", ids(3, 3)]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=25, max_tokens=6, ignore_eos=True))
    assert len(outputs) == len(prompts)
    assert [output.prompt for output in outputs] == ["Hello, my name is", None, "The line", None]
    for output, prompt in zip(outputs, prompts, strict=True):
        assert [answer.index for answer in output.outputs] == list(range(25))
        assert len({tuple(answer.token_ids) for answer in output.outputs}) == 25
        assert told(output.outputs) == told(beams(llm, prompt, beam_width=25, max_tokens=6, ignore_eos=True))
    (best,) = llm.beam_search(prompts[:1], BeamSearchParams(beam_width=25, n=1, max_tokens=6, ignore_eos=True))
    assert told(best.outputs) == told(outputs[0].outputs)[:1]
    assert llm.beam_search([], BeamSearchParams(beam_width=2)) == []


@pytest.mark.report("NVIDIA/TensorRT-LLM#7145")
def test_stop_token_ids_beside_the_end_token_end_beams(llm: LLM) -> None:
    plain = beams(llm, beam_width=2, max_tokens=12, ignore_eos=True)
    assert len(beams(llm, beam_width=2, max_tokens=12, stop_token_ids=(5,))) == 2
    stop = plain[0].token_ids[3]
    answers = beams(llm, beam_width=2, max_tokens=12, stop_token_ids=(stop,), length_penalty=0.0)
    assert told(answers) == reference(
        llm, PROMPT, width=2, max_tokens=12, end_ids=(*llm.info.end_ids, stop), length_penalty=0.0
    )
    ended = [answer for answer in answers if answer.stop_reason == stop]
    assert ended
    assert llm.tokenizer is not None
    for answer in ended:
        assert answer.finish_reason is FinishReason.STOP
        assert answer.token_ids[-1] == stop
        assert answer.text.rstrip("�") == llm.tokenizer.decode(answer.token_ids[:-1]).rstrip("�")


def test_texts_and_stop_strings_are_those_of_ordinary_answers(llm: LLM) -> None:
    (whole,) = beams(llm, beam_width=1, max_tokens=30, ignore_eos=True)
    ordinary = one(llm, PROMPT, max_tokens=30, ignore_eos=True)
    assert whole.text == ordinary.text
    stop = next(whole.text[at : at + 2] for at in range(6, len(whole.text)) if "�" not in whole.text[at : at + 2])
    for include in (False, True):
        fields = {"max_tokens": 30, "ignore_eos": True, "stop": (stop,), "include_stop_str_in_output": include}
        (stopped,) = beams(llm, beam_width=1, length_penalty=0.0, **fields)
        same = one(llm, PROMPT, **fields).outputs[0]
        assert (stopped.text, stopped.finish_reason) == (same.text, same.finish_reason)
        assert stopped.stop_reason == same.stop_reason == stop
        assert stopped.token_ids == same.token_ids


def test_log_probabilities_are_told_of_every_token_if_they_are_asked_for(llm: LLM) -> None:
    for answer in beams(llm, beam_width=2, max_tokens=8, logprobs=7, ignore_eos=True):
        assert answer.logprobs is not None
        assert [each.token_id for each in answer.logprobs] == answer.token_ids
        assert {len(each.top) for each in answer.logprobs} == {7}
        assert sum(each.logprob for each in answer.logprobs) == pytest.approx(answer.cumulative_logprob)
    plain, asked = (beams(llm, beam_width=2, max_tokens=8, logprobs=most) for most in (None, 20))
    assert told(plain) == told(asked)
    assert {answer.logprobs for answer in plain} == {None}


@pytest.mark.parametrize(
    "fields",
    [
        {"prefix_cache": False},
        {"kv_blocks": 8},
        {"max_num_seqs": 2, "max_batched_tokens": 16},
        {"async_scheduling": False},
        {"block_size": 4},
    ],
    ids=str,
)
def test_the_beams_are_the_same_whatever_the_engine_is_like(llm: LLM, fields: dict[str, Any]) -> None:
    prompt = ids(4, 50)
    want = told(beams(llm, prompt, beam_width=4, max_tokens=40, ignore_eos=True))
    with tiny_llm(**fields) as other:
        assert told(beams(other, prompt, beam_width=4, max_tokens=40, ignore_eos=True)) == want
        assert idle(other)


def test_a_step_computes_no_more_than_what_its_beams_have_beyond_full_blocks() -> None:
    prompt = ids(5, 160)
    with tiny_llm() as llm:
        beams(llm, prompt, beam_width=4, max_tokens=20, ignore_eos=True)
        stats = llm.engine.stats()
        computed = stats.prefix_queries - stats.prefix_hits
        assert computed <= 160 + 4 * 19 * 16
        (again,) = llm.beam_search([prompt], BeamSearchParams(beam_width=4, max_tokens=2))
        assert again.cached_tokens == 144


def test_steps_say_nothing_of_how_long_answers_get(llm: LLM) -> None:
    lengths = llm.engine.scheduler.lengths
    before = lengths.mean(lengths.handle("batch", ""))
    for _ in range(3):
        beams(llm, beam_width=8, max_tokens=30, ignore_eos=True)
    assert lengths.mean(lengths.handle("batch", "")) == before


def test_what_cannot_be_served_is_refused_before_anything_runs(llm: LLM) -> None:
    before = llm.engine.steps
    with pytest.raises(ContextLengthExceeded, match=str(CONTEXT)):
        llm.beam_search([PROMPT, ids(6, CONTEXT - 3)], BeamSearchParams(beam_width=2, max_tokens=4))
    with pytest.raises(InvalidRequest, match="empty"):
        llm.beam_search([PROMPT, []], BeamSearchParams(beam_width=2))
    with pytest.raises(InvalidRequest, match="vocabulary"):
        llm.beam_search([VOCAB], BeamSearchParams(beam_width=2))
    assert llm.engine.steps == before


async def test_asynchronous_searches_are_the_same_and_one_that_is_left_gives_everything_back(llm: LLM) -> None:
    prompts = [ids(seed, 20) for seed in range(4)]
    params = BeamSearchParams(beam_width=3, n=2, max_tokens=15, logprobs=1)
    want = llm.beam_search(prompts, params)
    fields = {"threads": 1, "max_num_seqs": 8, "max_batched_tokens": 64, "kv_blocks": 512}
    async with await AsyncLLM.start(str(tiny_chat_model()), **fields) as other:
        calls = [other.beam_search(prompt, params) for prompt in prompts]
        outputs = await asyncio.wait_for(asyncio.gather(*calls), 60)
        assert [output.outputs for output in outputs] == [output.outputs for output in want]
        task = asyncio.create_task(other.beam_search([6], BeamSearchParams(beam_width=8, max_tokens=1500)))
        while other.engine.stats.steps < 100:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        steps = -1
        while other.engine.stats.steps != steps:
            steps = other.engine.stats.steps
            await asyncio.sleep(0.2)
        assert steps > 100
        assert (other.engine.stats.running, other.engine.stats.waiting, other.engine.stats.blocks_live) == (0, 0, 0)
        with pytest.raises(ContextLengthExceeded):
            await other.beam_search([6], BeamSearchParams(beam_width=2, max_tokens=CONTEXT))


# ------------------------------------------------------------------------------ served


def search(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    extra = {"use_beam_search": True, **fields.pop("extra", {})}
    return complete(client, prompt, extra=extra, **fields)


def test_the_server_answers_with_the_best_beams(llm: LLM, client: openai.OpenAI) -> None:
    prompts = [ids(10, 30), ids(11, 9)]
    answer = search(client, prompts, n=2, best_of=4, max_tokens=12, temperature=0, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    params = BeamSearchParams(beam_width=4, n=2, max_tokens=12, ignore_eos=True)
    want = [each for output in llm.beam_search(prompts, params) for each in output.outputs]
    for choice, beam in zip(answer.choices, want, strict=True):
        assert choice.model_extra["token_ids"] == beam.token_ids
        assert choice.model_extra["score"] == pytest.approx(beam.score)
        assert choice.model_extra["cumulative_logprob"] == pytest.approx(beam.cumulative_logprob)
        assert choice.text == beam.text
        assert choice.finish_reason == "length"
        assert sum(choice.logprobs.token_logprobs) == pytest.approx(beam.cumulative_logprob)
    assert answer.usage.prompt_tokens == 39
    assert answer.usage.completion_tokens == sum(len(beam.token_ids) for beam in want) == 48


def test_a_chat_is_searched_as_its_rendered_prompt(llm: LLM, client: openai.OpenAI) -> None:
    assert llm.tokenizer is not None
    answer = client.chat.completions.create(
        model="tiny",
        messages=QUESTION,  # type: ignore[arg-type]
        n=3,
        max_tokens=10,
        logprobs=True,
        top_logprobs=1,
        extra_body={"use_beam_search": True, "length_penalty": 0.5, "return_token_ids": True},
    )
    prompt = llm.tokenizer.encode_chat(QUESTION)
    want = beams(llm, prompt, beam_width=3, max_tokens=10, length_penalty=0.5)
    for choice, beam in zip(answer.choices, want, strict=True):
        assert choice.model_extra is not None
        assert choice.model_extra["token_ids"] == beam.token_ids
        assert choice.message.content == beam.text
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == len(beam.token_ids)
    plain = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=2)  # type: ignore[arg-type]
    assert "score" not in (plain.choices[0].model_extra or {})


@pytest.mark.report("vllm-project/vllm#31081")
def test_the_beams_are_the_same_in_a_crowd_that_asks_for_other_log_probabilities(client: openai.OpenAI) -> None:
    def ask(seed: int) -> list[Any]:
        return [choice.model_dump() for choice in search(client, ids(seed, 25), n=3, max_tokens=15).choices]

    alone = [ask(seed) for seed in range(20, 24)]
    crowd = [{"logprobs": 20}, {"n": 2, "temperature": 1.0}, {"logprobs": 1}, {}]
    with ThreadPoolExecutor(16) as pool:
        others = [pool.submit(complete, client, ids(40, 30), max_tokens=60, **fields) for fields in crowd * 2]
        together = list(pool.map(ask, range(20, 24)))
        for other in others:
            other.result()
    assert together == alone


def test_a_search_that_is_cancelled_or_left_ends_all_that_is_under_way(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    def steps() -> float:
        return server.metric("ropeway_engine_steps_total")

    def wait_until_it_runs() -> None:
        before, deadline = steps(), time.monotonic() + 10
        while steps() < before + 20:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def wait_until_nothing_runs() -> None:
        deadline = time.monotonic() + 5
        before = -1.0
        while (now := steps()) != before:
            assert time.monotonic() < deadline
            before = now
            time.sleep(0.2)
        for name in ("ropeway_num_requests_running", "ropeway_num_requests_waiting", LIVE):
            server.until(name, 0)

    body = {"model": "tiny", "prompt": ids(30, 20), "n": 8, "max_tokens": 1900, "use_beam_search": True}
    url = f"{server.url}/v1/completions"
    answers: list[httpx.Response] = []
    headers = {"x-request-id": "wide"}
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(url, json=body, headers=headers, timeout=60)), daemon=True
    )
    asking.start()
    wait_until_it_runs()
    ended = httpx.delete(f"{server.url}/v1/requests/wide")
    assert ended.json()["cancelled"] is True
    asking.join(10)
    assert answers[0].status_code == 499
    assert answers[0].json()["error"]["code"] == "cancelled"
    wait_until_nothing_runs()
    with httpx.Client(timeout=httpx.Timeout(60, read=0.5)) as http, pytest.raises(httpx.ReadTimeout):
        http.post(url, json=body)
    wait_until_nothing_runs()
    late = httpx.post(url, json={**body, "timeout": 0.3}, timeout=60)
    assert late.status_code == 504
    assert late.json()["error"]["code"] == "deadline_exceeded"
    wait_until_nothing_runs()
    assert len(search(client, PROMPT, n=2, max_tokens=3).choices) == 2


def test_where_a_search_s_time_went_is_told(server: ServerProcess) -> None:
    body = {"model": "tiny", "prompt": ids(31, 20), "n": 3, "max_tokens": 15, "use_beam_search": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert "prefill;dur=" in answer.headers["server-timing"]
    told = httpx.get(f"{server.url}/v1/requests/{answer.headers['x-request-id']}").json()
    assert (told["phase"], told["prompt_tokens"], len(told["choices"])) == ("finished", 20, 3)
    parts = told["parts"]
    assert sum(parts.values()) == pytest.approx(told["e2e_s"], abs=1e-3)
    assert parts["prefill_s"] > 0
    assert parts["delivery_s"] < told["e2e_s"]


def test_a_search_that_could_not_come_to_its_end_is_refused_before_it_begins(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=str(CONTEXT)) as refused:
        search(client, ids(32, 12), n=2, max_tokens=CONTEXT)
    assert refused.value.code == "context_length_exceeded"
    assert len(search(client, ids(32, CONTEXT - 2), n=2, max_tokens=2).choices) == 2
