"""Tools and reasoning in chat completions, over a scripted model that writes as Qwen does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.asking import CHAT, chat_body, check_error, joined, stream
from tests.server.conftest import MODEL
from tests.support.chat_templates import QWEN
from tests.support.scripted_engine import ScriptedEngine, scripted_tokenizer
from tests.support.served import Served, serving

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD = {"type": "function", "function": {"name": "add"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture(scope="module")
def qwen() -> Iterator[Served]:
    with serving(ScriptedEngine(tokenizer=scripted_tokenizer(QWEN))) as served:
        yield served


def ask(served: Served, script: str, **fields: Any) -> dict[str, Any]:
    served.engine.reset(script)
    response = httpx.post(served.url + CHAT, json=chat_body(max_tokens=400, **fields), timeout=20)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]  # type: ignore[no-any-return]


def test_a_call_is_told_as_one(qwen: Served) -> None:
    choice = ask(qwen, CALL, tools=[WEATHER, ADD])
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}


def test_several_calls_have_ids_of_their_own(qwen: Served) -> None:
    calls = ask(qwen, f"Let me see.\n{CALL}\n{CALL}", tools=[WEATHER])["message"]["tool_calls"]
    assert len({call["id"] for call in calls}) == 2


def test_text_before_a_call_is_content(qwen: Served) -> None:
    assert ask(qwen, f"Let me see.\n{CALL}", tools=[WEATHER])["message"]["content"] == "Let me see."


def test_without_tools_marks_are_text(qwen: Served) -> None:
    choice = ask(qwen, CALL)
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == CALL


@pytest.mark.parametrize("choice", ["none"])
def test_tool_choice_none_shows_no_tools_and_reads_no_calls(qwen: Served, choice: str) -> None:
    answer = ask(qwen, CALL, tools=[WEATHER], tool_choice=choice)
    assert answer["message"]["content"] == CALL
    prompt, _, _ = qwen.engine.submitted[-1]
    assert "get_weather" not in scripted_tokenizer().decode(prompt)


def test_the_model_is_told_of_the_tools(qwen: Served) -> None:
    ask(qwen, "Hi", tools=[WEATHER])
    prompt, params, _ = qwen.engine.submitted[-1]
    text = scripted_tokenizer().decode(prompt)
    assert '"name": "get_weather"' in text
    assert "The weather of a city" in text
    assert params.grammar is None  # it may call, and need not


def test_a_strict_tool_that_need_not_be_called_is_called_by_its_schema(qwen: Served) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    ask(qwen, "Hi", tools=[ADD, strict])
    grammar = qwen.engine.submitted[-1][1].grammar
    assert grammar is not None
    assert grammar.after == "</think>"
    assert grammar.text.startswith("start: (before called)* TEXT?")
    ask(qwen, "Hi", tools=[ADD, strict], parallel_tool_calls=False)
    grammar = qwen.engine.submitted[-1][1].grammar
    assert grammar is not None
    assert grammar.text.startswith("start: (before called)? TEXT?")


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", ["get_weather", "add"]), ({"type": "function", "function": {"name": "add"}}, ["add"])],
)
def test_a_call_that_must_be_made_is_forced_by_a_grammar(qwen: Served, choice: Any, names: list[str]) -> None:
    ask(qwen, CALL, tools=[WEATHER, ADD], tool_choice=choice)
    grammar = qwen.engine.submitted[-1][1].grammar
    assert grammar is not None
    assert grammar.after == "</think>"  # this model reasons first
    for name in ("get_weather", "add"):
        assert (f'\\"name\\": \\"{name}\\"' in grammar.text) == (name in names)


def test_parallel_calls_can_be_ruled_out(qwen: Served) -> None:
    ask(qwen, CALL, tools=[ADD], tool_choice="required")
    several = qwen.engine.submitted[-1][1].grammar
    ask(qwen, CALL, tools=[ADD], tool_choice="required", parallel_tool_calls=False)
    one = qwen.engine.submitted[-1][1].grammar
    assert several is not None
    assert one is not None
    assert "call)*" in several.text
    assert "call)*" not in one.text


@pytest.mark.report("vllm-project/vllm#9693")
@pytest.mark.report("vllm-project/vllm#18108")
@pytest.mark.parametrize(
    "arguments",
    [
        '{"start": "2024-01-01", "count": 3}',
        "{}",
        '{"a": {"b": [1, {"c": null}]}}',
        '{"text": "} \\" {"}',
        '{"x": 1.5e3}',
    ],
)
def test_streamed_arguments_are_those_of_the_whole_answer(qwen: Served, arguments: str) -> None:
    script = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    (call,) = ask(qwen, script, tools=[ADD])["message"]["tool_calls"]
    qwen.engine.reset(script)
    with httpx.Client(base_url=qwen.url, timeout=20) as http:
        chunks = stream(http, CHAT, chat_body(max_tokens=400, tools=[ADD]))
    deltas = [each for chunk in chunks for choice in chunk["choices"] for each in choice["delta"].get("tool_calls", [])]
    assert "".join(each["function"]["arguments"] for each in deltas) == call["function"]["arguments"] == arguments


@pytest.mark.report("vllm-project/vllm-ascend#8327")
def test_the_chunk_that_ends_an_answer_with_calls_has_nothing_else(qwen: Served) -> None:
    qwen.engine.reset(CALL)
    with httpx.Client(base_url=qwen.url, timeout=20) as http:
        chunks = stream(http, CHAT, chat_body(max_tokens=400, tools=[WEATHER]))
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["choices"][0]["delta"] == {}


@pytest.mark.report("vllm-project/vllm#25054")
@pytest.mark.report("vllm-project/vllm#9209")
@pytest.mark.parametrize(
    ("choice", "reason"),
    [("auto", "tool_calls"), ("required", "tool_calls"), ({"type": "function", "function": {"name": "add"}}, "stop")],
)
def test_an_answer_ends_for_the_same_reason_streamed_or_not(qwen: Served, choice: Any, reason: str) -> None:
    fields = {"tools": [ADD, WEATHER], "tool_choice": choice}
    assert ask(qwen, CALL, **fields)["finish_reason"] == reason
    qwen.engine.reset(CALL)
    with httpx.Client(base_url=qwen.url, timeout=20) as http:
        chunks = stream(http, CHAT, chat_body(max_tokens=400, **fields))
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]] == [reason]


@pytest.mark.report("vllm-project/vllm#9451")
@pytest.mark.report("vllm-project/vllm#26233")
def test_calls_after_the_first_are_left_out_where_one_is_wanted(qwen: Served) -> None:
    fields = {"tools": [WEATHER], "parallel_tool_calls": False}
    assert len(ask(qwen, f"{CALL}\n{CALL}", **fields)["message"]["tool_calls"]) == 1
    qwen.engine.reset(f"{CALL}\n{CALL}")
    with httpx.Client(base_url=qwen.url, timeout=20) as http:
        chunks = stream(http, CHAT, chat_body(max_tokens=400, **fields))
    deltas = [each for chunk in chunks for choice in chunk["choices"] for each in choice["delta"].get("tool_calls", [])]
    assert {each["index"] for each in deltas} == {0}
    assert json.loads("".join(each["function"]["arguments"] for each in deltas)) == {"city": "Köln"}


def test_a_stream_tells_names_first_and_arguments_as_they_come(qwen: Served) -> None:
    qwen.engine.reset(f"Let me see.\n{CALL}\n{CALL}")
    with httpx.Client(base_url=qwen.url, timeout=20) as http:
        chunks = stream(http, CHAT, chat_body(max_tokens=400, tools=[WEATHER]))
    assert joined(chunks) == "Let me see."
    deltas = [call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", [])]
    for index in (0, 1):
        first, *rest = [delta for delta in deltas if delta["index"] == index]
        assert first["id"].startswith("call_")
        assert first["function"] == {"name": "get_weather", "arguments": ""}
        assert len(rest) > 1
        assert all("id" not in delta and "name" not in delta["function"] for delta in rest)
        assert json.loads("".join(delta["function"]["arguments"] for delta in rest)) == {"city": "Köln"}
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]] == ["tool_calls"]


def test_the_openai_client_reads_streamed_calls(qwen: Served) -> None:
    qwen.engine.reset(CALL)
    with (
        openai.OpenAI(base_url=f"{qwen.url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            tools=[WEATHER],  # type: ignore[list-item]
        ) as events,
    ):
        completion = events.get_final_completion()
    (call,) = completion.choices[0].message.tool_calls or []
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Köln"}


def test_a_conversation_goes_on_after_a_call(qwen: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    ask(qwen, "It rains.", tools=[WEATHER], messages=messages)
    text = scripted_tokenizer().decode(qwen.engine.submitted[-1][0])
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}' in text
    assert "<tool_response>\nrain" in text


def test_reasoning_is_told_apart(qwen: Served) -> None:
    choice = ask(qwen, "<think>\nHm.\n</think>\n\nYes.")
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["content"] == "Yes."
    assert "reasoning_content" not in ask(qwen, "<think>Hm.</think>Yes.", include_reasoning=False)["message"]


@pytest.mark.report("vllm-project/vllm-ascend#10777")
def test_reasoning_has_its_share_of_the_usage(qwen: Served) -> None:
    script = "<think>\nHm.\n</think>\n\nYes."
    wanted = len(scripted_tokenizer().encode("<think>\nHm.\n</think>", add_special_tokens=False))
    qwen.engine.reset(script)
    usage = httpx.post(qwen.url + CHAT, json=chat_body(max_tokens=400), timeout=20).json()["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] == wanted < usage["completion_tokens"]
    qwen.engine.reset(script)
    with httpx.Client(base_url=qwen.url, timeout=20) as http:
        chunks = stream(http, CHAT, chat_body(max_tokens=400, stream_options={"include_usage": True}))
    assert chunks[-1]["usage"] == usage
    qwen.engine.reset("Yes.")
    usage = httpx.post(qwen.url + CHAT, json=chat_body(), timeout=20).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


def test_reasoning_is_streamed_apart(qwen: Served) -> None:
    qwen.engine.reset("<think>\nHm, let me think.\n</think>\n\nYes.")
    with httpx.Client(base_url=qwen.url, timeout=20) as http:
        chunks = stream(http, CHAT, chat_body(max_tokens=400))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, let me think."
    assert joined(chunks) == "Yes."
    assert sum("reasoning_content" in delta for delta in deltas) > 3


@pytest.mark.parametrize("fields", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}])
def test_reasoning_can_be_left_out(qwen: Served, fields: dict[str, Any]) -> None:
    ask(qwen, "Yes.", response_format={"type": "json_object"}, **fields)
    prompt, params, _ = qwen.engine.submitted[-1]
    assert scripted_tokenizer().decode(prompt, skip_special_tokens=False).endswith("</think>\n\n")
    assert params.grammar is not None
    assert params.grammar.after == ""


def test_an_answer_of_a_schema_may_be_a_call_instead(qwen: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "title": "answer"}}}
    ask(qwen, CALL, tools=[ADD], response_format=form)
    grammar = qwen.engine.submitted[-1][1].grammar
    assert grammar is not None
    assert "start: calls | json" in grammar.text
    assert '"title": "answer"' in grammar.text


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [ADD], "tool_choice": "any"}, "tool_choice", "'any'"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice",
            "none of the",
        ),
        ({"tools": [ADD, ADD]}, "tools", "two tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "letters"),
        ({"tools": [{"type": "retrieval", "function": {"name": "a"}}]}, "tools", "function"),
        ({"tools": [{"function": {}}]}, "tools", "name"),
        ({"tools": "add"}, "tools", "array"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools", "128"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages", "tool_calls[0].function"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages", "tool_calls"),
    ],
)
def test_bad_tools_are_named(qwen: Served, fields: dict[str, Any], param: str, words: str) -> None:
    response = httpx.post(qwen.url + CHAT, json=chat_body(**fields), timeout=20)
    check_error(response, 400, words, param=param)


def test_a_model_that_knows_no_tools_says_so(http: httpx.Client) -> None:
    check_error(http.post(CHAT, json=chat_body(tools=[ADD])), 400, "knows no tools", param="tools")


def test_a_model_can_be_told_of_tools_all_the_same() -> None:
    with serving(ScriptedEngine(tokenizer=scripted_tokenizer()), tool_call_parser="hermes") as served:
        choice = ask(served, CALL, tools=[WEATHER], messages=[{"role": "system", "content": "Be kind."}, *_HI])
        assert choice["finish_reason"] == "tool_calls"
        text = scripted_tokenizer().decode(served.engine.submitted[-1][0])
        assert text.startswith("system\nBe kind.\n\nYou may call functions")
        assert "get_weather" in text


_HI = [{"role": "user", "content": "Hi"}]


def test_other_ways_need_a_template_that_tells_of_tools() -> None:
    with serving(ScriptedEngine(tokenizer=scripted_tokenizer()), tool_call_parser="llama3_json") as served:
        response = httpx.post(served.url + CHAT, json=chat_body(tools=[ADD]), timeout=20)
        check_error(response, 400, "knows no tools", param="tools")


def test_tokenize_counts_tools(qwen: Served) -> None:
    plain = httpx.post(f"{qwen.url}/tokenize", json={"messages": _HI}).json()["count"]
    assert httpx.post(f"{qwen.url}/tokenize", json={"messages": _HI, "tools": [WEATHER]}).json()["count"] > plain
