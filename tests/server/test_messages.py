"""/v1/messages, in Anthropic's format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import MODEL
from tests.support.chat_templates import QWEN
from tests.support.scripted_engine import ScriptedEngine, scripted_tokenizer
from tests.support.served import Served, serving

PATH = "/v1/messages"
HI = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = {
    "name": "add",
    "description": "Adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


@pytest.fixture(scope="module")
def qwen() -> Iterator[Served]:
    with serving(ScriptedEngine(tokenizer=scripted_tokenizer(QWEN))) as served:
        yield served


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 400, "messages": HI, **fields}


def ask(served: Served, script: str, **fields: Any) -> dict[str, Any]:
    served.engine.reset(script)
    response = httpx.post(served.url + PATH, json=body(**fields), timeout=20)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def check_message_error(response: httpx.Response, status: int, kind: str, words: str) -> None:
    assert response.status_code == status, response.text
    told = response.json()
    assert told["type"] == "error"
    assert told["error"].keys() == {"type", "message"}
    assert told["error"]["type"] == kind
    assert words in told["error"]["message"]


def test_a_text_is_a_block(qwen: Served) -> None:
    qwen.engine.cached_tokens = 0
    answer = ask(qwen, "Hello.", system="Be brief.")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", MODEL)
    assert answer["content"] == [{"type": "text", "text": "Hello."}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["usage"]["output_tokens"] > 0
    assert "system\nBe brief." in scripted_tokenizer().decode(qwen.engine.submitted[-1][0])


def test_why_it_stopped(qwen: Served) -> None:
    assert ask(qwen, "A long answer.", max_tokens=2)["stop_reason"] == "max_tokens"
    stopped = ask(qwen, "One. Two.", stop_sequences=["Two"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "Two")
    called = ask(qwen, f"<think>Hm.</think>{CALL}", tools=[ADD])
    assert called["stop_reason"] == "tool_use"
    thinking, call = called["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm.")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1})
    assert call["id"].startswith("toolu_")


def test_a_conversation_with_results_comes_back(qwen: Served) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Add.", "signature": ""},
                {"type": "text", "text": "Let me."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    ask(qwen, "It is 3.", messages=messages, tools=[ADD], system=[{"type": "text", "text": "Sys."}])
    text = scripted_tokenizer().decode(qwen.engine.submitted[-1][0])
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}' in text
    assert text.index("<tool_response>\n3") < text.index("user\nAnd?")
    assert "Sys." in text


@pytest.mark.parametrize(
    ("choice", "forced"),
    [({"type": "auto"}, False), ({"type": "any"}, True), ({"type": "tool", "name": "add"}, True)],
)
def test_tool_choice(qwen: Served, choice: dict[str, Any], forced: bool) -> None:
    ask(qwen, CALL, tools=[ADD], tool_choice=choice)
    assert (qwen.engine.submitted[-1][1].grammar is not None) == forced


def test_a_stream_is_blocks_that_begin_go_on_and_end(qwen: Served) -> None:
    script = f"<think>Hm.</think>Let me.\n{CALL}"
    whole = ask(qwen, script, tools=[ADD])
    qwen.engine.reset(script)
    with httpx.stream("POST", qwen.url + PATH, json=body(tools=[ADD], stream=True), timeout=20) as response:
        lines = [line for line in response.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    told = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [each["type"] for each in told]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    for each in told:
        if each["type"] == "content_block_start":
            assert each["index"] == len(blocks)
            blocks.append({**each["content_block"], "so_far": ""})
        elif each["type"] == "content_block_delta":
            assert each["index"] == len(blocks) - 1
            (text,) = [value for name, value in each["delta"].items() if name != "type"]
            blocks[-1]["so_far"] += text
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    assert blocks[0]["so_far"] == "Hm."
    assert blocks[1]["so_far"] == "Let me."
    assert json.loads(blocks[2]["so_far"]) == {"a": 1}
    assert told[-2]["delta"]["stop_reason"] == "tool_use"
    assert told[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_tokens_can_be_counted_before(qwen: Served) -> None:
    counted = httpx.post(f"{qwen.url}{PATH}/count_tokens", json={"model": MODEL, "messages": HI, "tools": [ADD]}).json()
    answer = ask(qwen, "Hello.", tools=[ADD])
    assert counted == {"input_tokens": answer["usage"]["input_tokens"]}


def test_errors_have_the_shape_of_this_api(qwen: Served) -> None:
    url = qwen.url + PATH
    post = httpx.post
    check_message_error(post(url, json=body(model="x")), 404, "not_found_error", "'x'")
    check_message_error(post(url, content=b"{"), 400, "invalid_request_error", "JSON")
    check_message_error(post(url, json={"model": MODEL, "messages": HI}), 400, "invalid_request_error", "max_tokens")
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    check_message_error(post(url, json=body(messages=image)), 400, "invalid_request_error", "image")
    check_message_error(
        post(url, json=body(tools=[{**ADD, "type": "bash_20250124"}])), 400, "invalid_request_error", "bash"
    )
    check_message_error(
        post(url, json=body(tool_choice={"type": "x"}, tools=[ADD])), 400, "invalid_request_error", "'x'"
    )
    check_message_error(httpx.get(url), 405, "invalid_request_error", "GET")
    qwen.engine.reset("Hello there, this goes on.")
    qwen.engine.fail_after = 2
    with httpx.stream("POST", url, json=body(stream=True), timeout=20) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-2] == "event: error"
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "api_error"
    qwen.engine.reset()


def test_the_key_may_come_in_anthropics_header() -> None:
    with serving(ScriptedEngine(tokenizer=scripted_tokenizer(QWEN)), api_key="k") as served:
        url = served.url + PATH
        check_message_error(httpx.post(url, json=body()), 401, "authentication_error", "API key")
        assert httpx.post(url, json=body(), headers={"x-api-key": "k"}, timeout=20).status_code == 200
