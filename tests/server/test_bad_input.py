"""Whatever a client sends: a clear message, the right status, and the server goes on serving."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from ropeway.server.limits import MAX_MESSAGES
from tests.server.asking import (
    CHAT,
    COMPLETIONS,
    HI,
    chat_body,
    check_error,
    check_serving,
    completion_body,
    stream,
)
from tests.server.conftest import MODEL
from tests.support.scripted_engine import ScriptedEngine, scripted_tokenizer
from tests.support.served import Served, serving


@pytest.fixture(autouse=True)
def _goes_on_serving(http: httpx.Client) -> Iterator[None]:
    yield
    check_serving(http)


# --------------------------------------------------------------------------- lengths


@pytest.mark.report("vllm-project/vllm#33418")
@pytest.mark.report("huggingface/text-generation-inference#1108")
@pytest.mark.parametrize("streamed", [False, True])
def test_a_prompt_and_max_tokens_longer_than_the_context_name_all_numbers(http: httpx.Client, streamed: bool) -> None:
    body = {"model": MODEL, "prompt": [5] * 12, "max_tokens": 1020, "stream": streamed}
    error = check_error(http.post(COMPLETIONS, json=body), 400, "1024", "12", "1020")
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "max_tokens"


@pytest.mark.report("ggml-org/llama.cpp#14566")
@pytest.mark.report("vllm-project/vllm#16445")
@pytest.mark.parametrize("streamed", [False, True])
def test_a_prompt_longer_than_the_context_is_refused_before_a_stream_begins(http: httpx.Client, streamed: bool) -> None:
    for length, status in ((1025, 400), (1024, 400), (1023, 200)):
        response = http.post(COMPLETIONS, json=completion_body(prompt=[5] * length, max_tokens=1, stream=streamed))
        assert response.status_code == status
        if status == 400:
            check_error(response, 400, "1024", str(length), param="prompt")
            assert response.headers["content-type"] == "application/json"


@pytest.mark.report("ollama/ollama#299")
@pytest.mark.report("ollama/ollama#17889")
def test_a_prompt_is_never_cut_to_the_context(served: Served, http: httpx.Client) -> None:
    text = "needle " + "hello " * 2000
    error = check_error(http.post(CHAT, json=chat_body(messages=[{"role": "user", "content": text}])), 400, "1024")
    assert error["code"] == "context_length_exceeded"
    count = http.post("/tokenize", json={"prompt": "hello " * 300}).json()["count"]
    usage = http.post(COMPLETIONS, json=completion_body(prompt="hello " * 300)).json()["usage"]
    assert usage["prompt_tokens"] == count == len(served.engine.submitted[-1][0])


def test_a_text_no_context_can_hold_is_refused_without_tokenizing_it(http: httpx.Client) -> None:
    begin = time.monotonic()
    body = completion_body(prompt="hello " * 1_000_000)
    error = check_error(http.post(COMPLETIONS, json=body), 400, "6000000 characters", "1024", param="prompt")
    assert error["code"] == "context_length_exceeded"
    body = chat_body(messages=[{"role": "user", "content": [{"type": "text", "text": "hello " * 1_000_000}]}])
    check_error(http.post(CHAT, json=body), 400, "6000000 characters", param="messages")
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize("value", [0, -1, -(10**20)])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_max_tokens_zero_or_negative_is_refused(http: httpx.Client, path: str, value: int) -> None:
    body = chat_body(max_tokens=value) if path == CHAT else completion_body(max_tokens=value)
    check_error(http.post(path, json=body), 400, "max_tokens", str(value), param="max_tokens")


@pytest.mark.report("vllm-project/vllm#7283")
@pytest.mark.parametrize("prompt", ["", [""], [], [[]], [[], [1]], ["a", ""]])
def test_an_empty_prompt_is_refused(http: httpx.Client, prompt: object) -> None:
    check_error(http.post(COMPLETIONS, json=completion_body(prompt=prompt)), 400, "empty", param="prompt")


def test_no_messages_are_refused(http: httpx.Client) -> None:
    check_error(http.post(CHAT, json=chat_body(messages=[])), 400, "empty", param="messages")
    check_error(http.post(CHAT, json={"model": MODEL}), 400, "messages is required", param="messages")
    check_error(http.post(COMPLETIONS, json={"model": MODEL}), 400, "prompt is required", param="prompt")


# --------------------------------------------------------------------------- types and ranges


@pytest.mark.report("vllm-project/vllm#9634")
@pytest.mark.report("sgl-project/sglang#36856")
@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2, 99_999_999],
        [-1],
        [10**30],
        [1.5],
        [True],
        [1, "a"],
        ["a", 1],
        [[1], "a"],
        [[1], 2],
        [[[1]]],
        [None],
        {},
        7,
        None,
    ],
)
def test_a_prompt_of_the_wrong_type_or_beyond_the_vocabulary_is_refused(http: httpx.Client, prompt: object) -> None:
    check_error(http.post(COMPLETIONS, json=completion_body(prompt=prompt)), 400, param="prompt")


@pytest.mark.report("ggml-org/llama.cpp#19367")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 500_000), ("temperature", -0.1), ("temperature", "0.7"), ("temperature", True),
        ("temperature", [1]), ("top_p", -0.5), ("top_p", 0), ("top_p", 1.01), ("top_p", "1"), ("top_k", -5),
        ("top_k", 1.5), ("top_k", "5"), ("top_k", 2**40), ("min_p", 2), ("min_p", -1), ("repetition_penalty", 0),
        ("repetition_penalty", -1), ("repetition_penalty", 1e9), ("presence_penalty", 3), ("presence_penalty", "a"),
        ("frequency_penalty", -3), ("n", 0), ("n", -1), ("n", 1.5), ("n", "2"), ("n", True), ("seed", "a"),
        ("seed", 1.5), ("seed", 2**70), ("min_tokens", -1), ("min_tokens", 6), ("max_tokens", "5"),
        ("max_tokens", 2.5), ("max_tokens", 2**40), ("stop", [""]), ("stop", ""), ("stop", 5), ("stop", [5]),
        ("stop", ["x"] * 17), ("stop_token_ids", [400]), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]),
        ("stop_token_ids", 3), ("ignore_eos", "yes"), ("ignore_eos", 1), ("stream", "true"), ("stream", 1),
        ("cache_salt", ""), ("cache_salt", 5), ("skip_special_tokens", 0), ("stream_options", {"include_usage": 1}),
        ("stream_options", True), ("model", 5), ("model", ["scripted"]), ("logit_bias", {"999999999": -100}),
        ("logit_bias", {"-1": 1}), ("logit_bias", {"abc": 1}), ("logit_bias", {"5": 1e9}), ("logit_bias", {"5": "1"}),
        ("logit_bias", [1]), ("logit_bias", {str(i): 1 for i in range(1025)}), ("logprobs", "yes"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_bad_types_and_values_out_of_range_are_refused_naming_the_field(
    http: httpx.Client, path: str, name: str, value: object
) -> None:
    body = chat_body(**{name: value}) if path == CHAT else completion_body(**{name: value})
    check_error(http.post(path, json=body), 400, name, param=name)


@pytest.mark.report("vllm-project/vllm#16529")
@pytest.mark.report("sgl-project/sglang#7670")
def test_a_logit_bias_beyond_the_vocabulary_names_the_id(http: httpx.Client) -> None:
    body = chat_body(logit_bias={"999999999": -100, "5": 3})
    check_error(http.post(CHAT, json=body), 400, "999999999", param="logit_bias")
    assert http.post(CHAT, json=chat_body(logit_bias={})).status_code == 200


@pytest.mark.report("vllm-project/vllm#54195")
def test_a_stop_token_id_beyond_the_vocabulary_names_the_id(http: httpx.Client) -> None:
    body = chat_body(stop_token_ids=[200_000], min_tokens=3)
    check_error(http.post(CHAT, json=body), 400, "200000", param="stop_token_ids")


@pytest.mark.report("ggml-org/llama.cpp#19367")
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "seed"])
@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
def test_nan_and_infinite_parameters_are_refused(http: httpx.Client, name: str, literal: str) -> None:
    raw = json.dumps(chat_body()).removesuffix("}") + f', "{name}": {literal}}}'
    check_error(http.post(CHAT, content=raw), 400)


@pytest.mark.report("sgl-project/sglang#36856")
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"n": 100_000}),
        (CHAT, {"logprobs": True, "top_logprobs": 10**8}),
        (CHAT, {"messages": HI * 100_000}),
        (COMPLETIONS, {"best_of": 10**5}),
        (COMPLETIONS, {"logprobs": 10**9}),
        (COMPLETIONS, {"prompt": ["a"] * 1000}),
    ],
)
def test_huge_counts_are_refused_quickly(http: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    body = chat_body(**fields) if path == CHAT else completion_body(**fields)
    begin = time.monotonic()
    check_error(http.post(path, json=body), 400)
    assert time.monotonic() - begin < 2


def test_more_choices_than_the_server_ever_holds_are_refused() -> None:
    with serving(ScriptedEngine(), max_queue=8) as served, httpx.Client(base_url=served.url) as other:
        check_error(other.post(COMPLETIONS, json=completion_body(prompt=[5], n=13)), 400, "13", "12", param="n")
        body = completion_body(prompt=[[5]] * 7, n=2)
        check_error(other.post(COMPLETIONS, json=body), 400, "14", "12", param="prompt")
        assert other.post(COMPLETIONS, json=completion_body(prompt=[5], n=12)).status_code == 200


def test_the_limit_of_messages_is_named(http: httpx.Client) -> None:
    response = http.post(CHAT, json=chat_body(messages=HI * (MAX_MESSAGES + 1)))
    check_error(response, 400, str(MAX_MESSAGES), param="messages")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "Hi"}, ["messages[1].role is missing"]),
        ({"role": "wizard", "content": "Hi"}, ["messages[1].role", "wizard", "assistant"]),
        ({"role": ["user"], "content": "Hi"}, ["messages[1].role"]),
        ({"role": "user"}, ["messages[1].content is missing"]),
        ({"role": "user", "content": None}, ["messages[1].content is missing"]),
        ({"role": "user", "content": 5}, ["messages[1].content", "int"]),
        ({"role": "user", "content": []}, ["messages[1].content is empty"]),
        ({"role": "user", "content": ["Hi"]}, ["messages[1].content[0]"]),
        ({"role": "user", "content": [{"type": "text"}]}, ["messages[1].content[0].text"]),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, ["messages[1].content[0].text"]),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}],
            },
            ["messages[1].content[1].type", "image_url", "text only"],
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, ["input_audio"]),
    ],
)
def test_a_wrong_message_is_refused_naming_its_place(http: httpx.Client, message: object, words: list[str]) -> None:
    check_error(http.post(CHAT, json=chat_body(messages=[*HI, message])), 400, *words, param="messages")


@pytest.mark.parametrize("messages", ["Hi", {"role": "user"}, ["Hi"], [5], [None], 5, None])
def test_messages_of_the_wrong_type_are_refused(http: httpx.Client, messages: object) -> None:
    check_error(http.post(CHAT, json=chat_body(messages=messages)), 400, "messages", param="messages")


@pytest.mark.report("janhq/jan#6254")
@pytest.mark.report("EricLBuehler/mistral.rs#506")
def test_a_template_that_refuses_the_messages_is_quoted() -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}x"
    engine = ScriptedEngine(tokenizer=scripted_tokenizer(template))
    with serving(engine) as served, httpx.Client(base_url=served.url) as other:
        body = chat_body(messages=[{"role": "system", "content": "Hi"}])
        check_error(other.post(CHAT, json=body), 400, "no system role here", param="messages")
        check_serving(other)


# --------------------------------------------------------------------------- fields


@pytest.mark.report("vllm-project/vllm#10463")
@pytest.mark.report("vllm-project/vllm#13881")
def test_unknown_fields_are_ignored_and_logged_once(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    body = chat_body(foo=1, bar={"deep": [1]}, user="u", metadata={}, store=False)
    body["messages"] = [{"role": "user", "content": "Hi", "id": 7, "opts": {"v": 1}}]
    with caplog.at_level(logging.INFO, logger="ropeway.server"):
        for _ in range(5):
            assert http.post(CHAT, json=body).status_code == 200
    notes = [record.getMessage() for record in caplog.records if "unknown field" in record.getMessage()]
    assert len(notes) == 2
    assert any("'foo'" in note for note in notes)
    assert any("'bar'" in note for note in notes)


@pytest.mark.report("ggml-org/llama.cpp#23463")
@pytest.mark.parametrize(
    ("name", "on", "off"),
    [
        ("functions", [{"name": "f"}], []),
        ("modalities", ["text", "audio"], ["text"]),
        ("audio", {"voice": "x"}, None),
        ("suffix", "x", ""),
        ("truncate_prompt_tokens", 5, None),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_field_not_served_is_refused_by_name_unless_it_is_off(
    http: httpx.Client, path: str, name: str, on: object, off: object
) -> None:
    make = chat_body if path == CHAT else completion_body
    check_error(http.post(path, json=make(**{name: on})), 400, name, param=name)
    assert http.post(path, json=make(**{name: off})).status_code == 200


@pytest.mark.parametrize(
    ("path", "name", "on", "off"),
    [
        (CHAT, "echo", True, False),
        (CHAT, "best_of", 2, 1),
        (COMPLETIONS, "tools", [{"type": "function", "function": {"name": "f"}}], []),
        (COMPLETIONS, "tool_choice", "required", "auto"),
        ("/v1/responses", "prompt_logprobs", 0, None),
        ("/v1/responses", "use_beam_search", True, False),
        ("/v1/responses", "length_penalty", 2.0, 1.0),
        ("/v1/responses", "response_format", {"type": "json_object"}, {"type": "text"}),
    ],
)
def test_a_field_of_another_route_is_refused_by_name(
    http: httpx.Client, path: str, name: str, on: object, off: object
) -> None:
    asked = {CHAT: {"messages": HI}, COMPLETIONS: {"prompt": "Hi"}}.get(path, {"input": "Hi"})
    body = {"model": MODEL, **asked}
    check_error(http.post(path, json={**body, name: on}), 400, name, param=name)
    assert http.post(path, json={**body, name: off}).status_code == 200


def test_stream_options_without_stream_are_refused(http: httpx.Client) -> None:
    response = http.post(CHAT, json=chat_body(stream_options={"include_usage": True}))
    check_error(response, 400, param="stream_options")


# --------------------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[", b"nonsense", b"null", b"5", b'"text"', b"[1]", b"true", b"{'a': 1}", b'{"a": 1,}',
        b'{"messages": [}', b"\xff\xfe{}", b'{"a": "\xff"}', b"\x00" * 100, b'{"a": 1} {"b": 2}',
        b'{"n": ' + b"9" * 10_000 + b"}", b"\xef\xbb\xbf{}",
    ],
)  # fmt: skip
def test_invalid_json_is_refused(http: httpx.Client, raw: bytes) -> None:
    for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
        assert check_error(http.post(path, content=raw), 400)["code"] == "invalid_json"


@pytest.mark.report("sgl-project/sglang#36856")
@pytest.mark.parametrize("pair", [b"[]", b'{"a":}'])
@pytest.mark.parametrize("depth", [1_100, 10_000, 100_000])
def test_deeply_nested_json_is_refused(http: httpx.Client, pair: bytes, depth: int) -> None:
    begin, end = pair[:-1], pair[-1:]
    raw = b'{"messages": ' + begin * depth + b"1" + end * depth + b"}"
    check_error(http.post(CHAT, content=raw), 400, "nested too deeply")


@pytest.mark.report("Firefox-AI/MLPA#174")
@pytest.mark.report("volcengine/OpenViking#4238")
@pytest.mark.parametrize(
    "raw",
    [
        r'{"model": "scripted", "messages": [{"role": "user", "content": "hi \ud83e"}]}',
        r'{"model": "scripted", "messages": [{"role": "user", "content": "\udd16 hi"}]}',
        r'{"model": "scripted", "messages": [{"role": "user", "content": "Hi"}], "stop": "\ud83e"}',
        r'{"model": "scripted", "messages": [{"role": "user", "content": "Hi"}], "user": "\ud83e\ud83e"}',
        r'{"model": "\ud83e", "messages": [{"role": "user", "content": "Hi"}]}',
        r'{"\ud83e": 1, "messages": [{"role": "user", "content": "Hi"}]}',
    ],
)
def test_lone_surrogates_are_refused(http: httpx.Client, raw: str) -> None:
    check_error(http.post(CHAT, content=raw), 400, "surrogate")


def test_a_whole_surrogate_pair_and_a_nul_character_are_fine(http: httpx.Client) -> None:
    raw = r'{"messages": [{"role": "user", "content": "hi \ud83e\udd16 \u0000"}], "max_tokens": 1}'
    assert http.post(CHAT, content=raw).status_code == 200


def test_of_a_repeated_key_the_last_value_counts(http: httpx.Client) -> None:
    raw = json.dumps(completion_body()).removesuffix("}") + ', "max_tokens": 2}'
    assert http.post(COMPLETIONS, content=raw).json()["usage"]["completion_tokens"] == 2


def test_a_50_mb_body_is_refused_with_413(http: httpx.Client) -> None:
    error = check_error(http.post(CHAT, content=b" " * 50_000_000), 413, "max_body_mb", str(8 * 2**20))
    assert error["code"] == "payload_too_large"


def test_a_50_mb_body_without_a_length_is_refused_with_413(http: httpx.Client) -> None:
    check_error(http.post(CHAT, content=(b" " * 1_000_000 for _ in range(50))), 413, "max_body_mb")


def test_the_loop_answers_others_while_a_large_body_is_read(http: httpx.Client, served: Served) -> None:
    slowest = 0.0
    body = json.dumps(chat_body(messages=[{"role": "user", "content": "x" * 7_000_000}])).encode()
    with httpx.Client(base_url=served.url) as probe:

        def pieces() -> Iterator[bytes]:
            nonlocal slowest
            for at in range(0, len(body), 500_000):
                begin = time.monotonic()
                assert probe.get("/health").status_code == 200
                slowest = max(slowest, time.monotonic() - begin)
                yield body[at : at + 500_000]

        check_error(http.post(CHAT, content=pieces()), 400, "7000000 characters")
    assert slowest < 0.2


# --------------------------------------------------------------------------- shapes and classes of errors


@pytest.mark.report("vllm-project/vllm#12886")
def test_every_error_has_the_shape_of_the_openai_api(http: httpx.Client) -> None:
    check_error(http.get("/nowhere"), 404, "/nowhere")
    check_error(http.get("/v1/models/"), 404)
    check_error(http.get(CHAT), 405, "GET")
    check_error(http.delete("/health"), 405, "DELETE")
    check_error(http.post(CHAT, content=b"{"), 400)
    check_error(http.post(CHAT, json=chat_body(model="zzz")), 404, "zzz", MODEL, param="model")
    check_error(http.post(CHAT, json=chat_body(temperature="hot")), 400, param="temperature")


@pytest.mark.report("vllm-project/vllm#12886")
def test_the_openai_client_raises_the_right_class(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=99999)  # type: ignore[arg-type]
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="zzz", messages=HI)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"
    served.engine.failure = "scripted death"
    with pytest.raises(openai.InternalServerError, match="scripted death"):
        client.chat.completions.create(model=MODEL, messages=HI)  # type: ignore[arg-type]
    served.engine.failure = None


def test_one_bad_request_does_not_disturb_a_stream_beside_it(http: httpx.Client, served: Served) -> None:
    served.engine.delay_s = 0.01
    whole = http.post(CHAT, json=chat_body(max_tokens=30)).json()["choices"][0]["message"]["content"]
    with (
        httpx.Client(base_url=served.url) as other,
        other.stream("POST", CHAT, json=chat_body(max_tokens=30, stream=True)) as live,
    ):
        for bad in (b"{", json.dumps(chat_body(n=0)).encode(), json.dumps(chat_body(logit_bias={"999": 1})).encode()):
            check_error(http.post(CHAT, content=bad), 400)
        lines = [line.removeprefix("data: ") for line in live.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines) == whole
    assert stream(http, CHAT, chat_body())
