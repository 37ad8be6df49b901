"""/v1/completions, /tokenize, /detokenize and /v1/models."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.server.asking import COMPLETIONS, check_error, completion_body, joined, stream
from tests.server.conftest import MODEL
from tests.support.scripted_engine import SCRIPT, ScriptedEngine
from tests.support.served import Served, serving


def test_the_openai_client_gets_a_whole_answer_and_a_stream(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Hi", max_tokens=500)
    assert whole.choices[0].text == SCRIPT
    assert whole.choices[0].finish_reason == "stop"
    assert whole.object == "text_completion"
    chunks = list(client.completions.create(model=MODEL, prompt="Hi", max_tokens=500, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == SCRIPT
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]


def test_without_max_tokens_sixteen_are_made(http: httpx.Client) -> None:
    usage = http.post(COMPLETIONS, json={"model": MODEL, "prompt": "Hi"}).json()["usage"]
    assert usage["completion_tokens"] == 16
    usage = http.post(COMPLETIONS, json={"model": MODEL, "prompt": "Hi", "min_tokens": 20}).json()["usage"]
    assert usage["completion_tokens"] == 20


@pytest.mark.report("vllm-project/vllm#9634")
@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("Hi", 1), ([72, 73], 1), (["a", "b", "c"], 3), ([[1, 2], [3]], 2), (["a"], 1)],
)
def test_a_prompt_is_text_or_ids_or_several_of_either(
    served: Served, http: httpx.Client, prompt: object, prompts: int
) -> None:
    body = completion_body(prompt=prompt, n=2, max_tokens=4)
    whole = http.post(COMPLETIONS, json=body).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(2 * prompts))
    assert whole["choices"][0]["text"] != whole["choices"][1]["text"]
    assert whole["usage"]["completion_tokens"] == 2 * prompts * 4
    assert whole["usage"]["prompt_tokens"] == sum(len(ids) for ids, _, _ in served.engine.submitted)
    chunks = stream(http, COMPLETIONS, body)
    for choice in whole["choices"]:
        assert joined(chunks, choice["index"]) == choice["text"]


def test_prompts_of_one_request_run_at_the_same_time(served: Served, http: httpx.Client) -> None:
    served.engine.delay_s = served.engine.first_delay_s = 0.02
    chunks = stream(http, COMPLETIONS, completion_body(prompt=["a", "b"], max_tokens=5))
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order)


def test_logprobs_have_the_completions_shape(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Hi", max_tokens=30, logprobs=2)
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs == [-0.25] * 30
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(logprobs.top_logprobs) == 30
    for token, offset, top in zip(logprobs.tokens, logprobs.text_offset, logprobs.top_logprobs, strict=True):
        assert top[token] == -0.25
        if "\N{REPLACEMENT CHARACTER}" not in token:
            assert choice.text[offset : offset + len(token)] == token


def test_streamed_logprobs_are_those_of_the_whole_answer(http: httpx.Client) -> None:
    body = completion_body(logprobs=1, max_tokens=40)
    whole = http.post(COMPLETIONS, json=body).json()["choices"][0]["logprobs"]
    chunks = stream(http, COMPLETIONS, body)
    for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for chunk in chunks for each in chunk["choices"][0]["logprobs"][column]] == whole[column]


def test_logprobs_zero_gives_the_chosen_tokens_only(http: httpx.Client) -> None:
    logprobs = http.post(COMPLETIONS, json=completion_body(logprobs=0)).json()["choices"][0]["logprobs"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [[token] for token in logprobs["tokens"]]


def test_special_tokens_spelled_in_a_prompt_are_special_tokens(served: Served, http: httpx.Client) -> None:
    http.post(COMPLETIONS, json=completion_body(prompt="<|im_start|>user"))
    assert served.engine.submitted[-1][0][0] == 1


def test_tokenize_and_detokenize_are_inverse(http: httpx.Client) -> None:
    body = http.post("/tokenize", json={"model": MODEL, "prompt": SCRIPT, "return_token_strs": True}).json()
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 1024
    assert http.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": SCRIPT}


def test_tokenize_counts_a_chat_as_the_chat_endpoint_does(http: httpx.Client) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße 🚀"}]
    count = http.post("/tokenize", json={"messages": messages}).json()["count"]
    usage = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()["usage"]
    assert count == usage["prompt_tokens"]


def test_tokenize_takes_a_text_longer_than_the_context(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": "one two " * 50_000}).json()["count"] > 1024


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}])
def test_tokenize_wants_either_a_prompt_or_messages(http: httpx.Client, body: dict[str, object]) -> None:
    check_error(http.post("/tokenize", json=body), 400, "either prompt or messages")


@pytest.mark.parametrize("tokens", [[-1], [400], [10**30], ["a"], [1.5], [True], "abc", None])
def test_detokenize_refuses_what_is_no_token_id(http: httpx.Client, tokens: object) -> None:
    check_error(http.post("/detokenize", json={"tokens": tokens}), 400, param="tokens")


@pytest.mark.report("sgl-project/sglang#7035")
@pytest.mark.report("sgl-project/sglang#9294")
@pytest.mark.report("vllm-project/vllm#15845")
def test_served_names_are_aliases_and_others_are_404() -> None:
    with serving(ScriptedEngine(), served_model_name="a, b/c") as served, httpx.Client(base_url=served.url) as http:
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["a", "b/c"]
        assert http.get("/v1/models/b/c").json()["id"] == "b/c"
        for asked, answered in (("a", "a"), ("b/c", "b/c"), (None, "a")):
            body = http.post(COMPLETIONS, json=completion_body(model=asked, prompt=[5])).json()
            assert body["model"] == answered
            for chunk in stream(http, COMPLETIONS, completion_body(model=asked, prompt=[5])):
                assert chunk["model"] == answered
        for wrong in ("zzz", "", "A"):
            response = http.post(COMPLETIONS, json=completion_body(model=wrong, prompt=[5]))
            assert check_error(response, 404, param="model")["code"] == "model_not_found"
        assert check_error(http.get("/v1/models/zzz"), 404, "zzz")["code"] == "model_not_found"


def test_a_model_without_a_tokenizer_works_by_token_ids() -> None:
    engine = ScriptedEngine(tokenizer=None)
    with serving(engine) as served, httpx.Client(base_url=served.url) as http:
        body = completion_body(prompt=[5, 6], logprobs=1)
        whole = http.post(COMPLETIONS, json=body).json()["choices"][0]
        assert whole["token_ids"] == engine.script[:5]
        assert whole["prompt_token_ids"] == [5, 6]
        assert whole["logprobs"]["tokens"] == [f"token_id:{token}" for token in engine.script[:5]]
        chunks = stream(http, COMPLETIONS, body)
        assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == whole["token_ids"]
        check_error(http.post(COMPLETIONS, json=completion_body()), 400, "no tokenizer", "token ids")
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        check_error(http.post("/v1/chat/completions", json=chat), 400, "no tokenizer")
        check_error(http.post("/tokenize", json={"prompt": "Hi"}), 400, "no tokenizer")


@pytest.mark.report("vllm-project/vllm#15281")
def test_the_models_defaults_fill_what_a_request_leaves_out() -> None:
    engine = ScriptedEngine()
    defaults = {"temperature": 0.3, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    with serving(engine, sampling_defaults=defaults) as served, httpx.Client(base_url=served.url) as http:
        http.post(COMPLETIONS, json=completion_body(prompt=[5], top_p=0.5, temperature=0))
        params = engine.submitted[-1][1]
        assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0, 0.5, 20, 1.05)
