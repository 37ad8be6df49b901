"""/v1/responses, raw and through OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.asking import check_error
from tests.server.conftest import MODEL
from tests.support.chat_templates import QWEN
from tests.support.scripted_engine import ScriptedEngine, scripted_tokenizer
from tests.support.served import Served, serving

PATH = "/v1/responses"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {}},
    "strict": True,
}


@pytest.fixture(scope="module")
def qwen() -> Iterator[Served]:
    with serving(ScriptedEngine(tokenizer=scripted_tokenizer(QWEN))) as served:
        yield served


@pytest.fixture
def sdk(qwen: Served) -> Iterator[openai.OpenAI]:
    qwen.engine.reset()
    with openai.OpenAI(base_url=f"{qwen.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def ask(served: Served, script: str, **fields: Any) -> dict[str, Any]:
    served.engine.reset(script)
    response = httpx.post(served.url + PATH, json={"model": MODEL, "input": "Hi", **fields}, timeout=20)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def test_a_text_is_a_message(qwen: Served) -> None:
    answer = ask(qwen, "Hello.", instructions="Be brief.", metadata={"a": "b"})
    assert answer["object"] == "response"
    assert answer["status"] == "completed"
    assert answer["metadata"] == {"a": "b"}
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}]
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    text = scripted_tokenizer().decode(qwen.engine.submitted[-1][0])
    assert "system\nBe brief." in text
    assert "user\nHi" in text


def test_an_answer_cut_off_is_incomplete(qwen: Served) -> None:
    answer = ask(qwen, "A long answer that goes on.", max_output_tokens=3)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["usage"]["output_tokens"] == 3


def test_reasoning_and_calls_are_items(qwen: Served) -> None:
    answer = ask(qwen, f"<think>Adding.</think>\n\nLet me.\n{CALL}", tools=[ADD])
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call"]
    reasoning, _, call = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Adding."}]
    assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 1, "b": 2})
    assert call["call_id"].startswith("call_")
    details = answer["usage"]["output_tokens_details"]
    whole = len(scripted_tokenizer().encode("<think>Adding.</think>", add_special_tokens=False))
    assert details["reasoning_tokens"] == whole


def test_a_conversation_with_calls_comes_back(qwen: Served) -> None:
    conversation = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1, "b": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "3."}]},
        {"role": "user", "content": "Sure?"},
    ]
    ask(qwen, "Yes.", input=conversation, tools=[ADD])
    text = scripted_tokenizer().decode(qwen.engine.submitted[-1][0])
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}' in text
    assert "<tool_response>\n3" in text
    assert text.index("3.") < text.index("Sure?")


@pytest.mark.parametrize("script", ["Hello there.", f"<think>Hm.</think>Let me.\n{CALL}", CALL])
def test_the_client_puts_a_stream_together_as_the_whole_answer(qwen: Served, sdk: openai.OpenAI, script: str) -> None:
    qwen.engine.reset(script)
    kinds: list[str] = []
    with sdk.responses.stream(model=MODEL, input="Hi", tools=[ADD]) as events:  # type: ignore[list-item]
        for event in events:
            assert event.sequence_number == len(kinds)
            kinds.append(event.type)
        final = events.get_final_response()
    whole = ask(qwen, script, tools=[ADD])
    assert [item.type for item in final.output] == [item["type"] for item in whole["output"]]
    assert final.output_text == "".join(
        part["text"] for item in whole["output"] if item["type"] == "message" for part in item["content"]
    )
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == len(final.output)
    assert final.usage is not None
    assert final.usage.output_tokens == whole["usage"]["output_tokens"]


def test_the_client_parses_an_answer_of_a_schema(qwen: Served, sdk: openai.OpenAI) -> None:
    import pydantic

    class Point(pydantic.BaseModel):
        x: int

    qwen.engine.reset('{"x": 4}')
    parsed = sdk.responses.parse(model=MODEL, input="Hi", text_format=Point, reasoning={"effort": "none"})
    assert parsed.output_parsed == Point(x=4)
    grammar = qwen.engine.submitted[-1][1].grammar
    assert grammar is not None
    assert '"x"' in grammar.text


def test_a_failure_on_the_way_is_an_event(qwen: Served) -> None:
    qwen.engine.reset("Hello there, this goes on for a while.")
    qwen.engine.fail_after = 3
    with httpx.stream("POST", qwen.url + PATH, json={"input": "Hi", "stream": True}, timeout=20) as response:
        lines = list(response.iter_lines())
    assert lines[-3] == "event: error"
    last = json.loads(lines[-2].removeprefix("data: "))
    assert last["type"] == "error"
    assert "scripted failure" in last["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
        ({"background": True}, "background", "not supported"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "stores no prompts"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"tools": [{"type": "function"}]}, "tools", "name is required"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "text only"),
        ({"input": [{"role": "user", "content": 7}]}, "input", "input[0].content"),
        ({"input": 7}, "input", ""),
        ({"input": [{"type": "reasoning", "content": 1}]}, "input", "input[0].content"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"top_logprobs": 3}, "top_logprobs", "not supported"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "grammar"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
    ],
)
def test_what_is_not_served_is_named(qwen: Served, fields: dict[str, Any], param: str, words: str) -> None:
    response = httpx.post(qwen.url + PATH, json={"input": "Hi", **fields}, timeout=20)
    check_error(response, 400, words, param=param)
