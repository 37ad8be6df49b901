"""What a model's text means: reasoning, calls, content; the same however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropeway.errors import ConfigError
from ropeway.text.answers.families import Writing, writing_of
from ropeway.text.answers.parts import (
    Arguments,
    CallBegins,
    Content,
    Part,
    PartReader,
    PlainReader,
    Reasoning,
    split_at,
)
from ropeway.text.answers.reasoning import ReasoningReader
from ropeway.text.answers.tools import DeepSeek, Hermes, Llama3, Tool
from ropeway.text.tokenizer import Tokenizer
from tests.support.chat_templates import LLAMA3, QWEN, SMOLLM2
from tests.support.tokenizers import byte_level

NAMES = ["get_weather", "add"]
Said = tuple[str, str, list[tuple[str, str]]]
"""(content, reasoning, calls)"""


def put_together(parts: Sequence[Part]) -> Said:
    content, reasoning = "", ""
    calls: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallBegins(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case Arguments(index, text):
                assert index == len(calls) - 1, "arguments belong to the call that began last"
                calls[index] = (calls[index][0], calls[index][1] + text)
    return content, reasoning, calls


def read(reader: PartReader, pieces: Sequence[str]) -> Said:
    parts: list[Part] = []
    for piece in pieces:
        parts += reader.push(piece)
    return put_together([*parts, *reader.finish()])


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[begin:end] for begin, end in pairwise(ends)]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


HERMES_TEXTS: list[tuple[str, Said]] = [
    ("Hello.", ("Hello.", "", [])),
    (" a < b <tool", (" a < b <tool", "", [])),
    ("", ("", "", [])),
    (hermes("add", '{"a": 1, "b": [2, {"c": "}"}]}'), ("", "", [("add", '{"a": 1, "b": [2, {"c": "}"}]}')])),
    (f"Let me see.\n{hermes('add', '{}')}", ("Let me see.", "", [("add", "{}")])),
    (
        hermes("a", '{"x": "<tool_call>"}') + "\n" + hermes("b", "{}"),
        ("", "", [("a", '{"x": "<tool_call>"}'), ("b", "{}")]),
    ),
    (hermes("a", "{}") + hermes("b", "{}") + "\nDone.", ("\nDone.", "", [("a", "{}"), ("b", "{}")])),
    ('<tool_call>{"arguments": {"x": 1}, "name": "late"}</tool_call>', ("", "", [("late", '{"x": 1}')])),
    ('<tool_call>{"name": "none"}</tool_call>', ("", "", [("none", "{}")])),
    ('<tool_call>{"name": "text", "arguments": "{\\"x\\": 1}"}</tool_call>', ("", "", [("text", '{"x": 1}')])),
    (
        '<tool_call>{"name": "esc\\"aped", "arguments": {"q": "\\\\"}}</tool_call>',
        ("", "", [('esc"aped', '{"q": "\\\\"}')]),
    ),
    ('<tool_call>\n{"name": "cut", "arguments": {"x": ', ("", "", [("cut", '{"x": ')])),
    ('<tool_call>\n{"nam', ('<tool_call>\n{"nam', "", [])),
    ("<tool_call>not json</tool_call>", ("<tool_call>not json</tool_call>", "", [])),
    (hermes("extra", "{}").replace("}}", "}}}"), ("", "", [("extra", "{}")])),
    ('<tool_call>{"name": "open", "arguments": {}}', ("", "", [("open", "{}")])),
    (
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        ('<tool_call>{"name": 7, "arguments": {}}</tool_call>', "", []),
    ),
]
LLAMA_TEXTS: list[tuple[str, Said]] = [
    ("It is sunny.", ("It is sunny.", "", [])),
    ('{"name": "add", "parameters": {"a": 1}}', ("", "", [("add", '{"a": 1}')])),
    ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', ("", "", [("add", '{"a": 1}')])),
    (
        '\n{"name": "add", "parameters": {}}; {"name": "get_weather", "arguments": {"c": "x"}}',
        ("", "", [("add", "{}"), ("get_weather", '{"c": "x"}')]),
    ),
    ('{"city": "Paris", "name": "x"}', ('{"city": "Paris", "name": "x"}', "", [])),
    ('{"answer": 42}', ('{"answer": 42}', "", [])),
    ("{1, 2}", ("{1, 2}", "", [])),
    ('{"nam', ('{"nam', "", [])),
    ("<|python", ("<|python", "", [])),
]
V31 = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
CALL31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
CALL3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
DEEPSEEK_TEXTS: list[tuple[str, Said]] = [
    ("Plain < text.", ("Plain < text.", "", [])),
    (V31.format(CALL31.format("add", '{"a": 1}')), ("", "", [("add", '{"a": 1}')])),
    ("Wait. " + V31.format(CALL3.format("add", '{"a": "`"}')), ("Wait.", "", [("add", '{"a": "`"}')])),
    (
        V31.format(CALL3.format("a", "{}") + "\n" + CALL3.format("b", '{\n  "x": 1\n}')),
        ("", "", [("a", "{}"), ("b", '{\n  "x": 1\n}')]),
    ),
]


@pytest.mark.parametrize(("text", "said"), HERMES_TEXTS)
@given(places=st.lists(st.integers(0, 10**6), max_size=30))
def test_hermes_calls_are_read_however_the_text_is_cut(text: str, said: Said, places: list[int]) -> None:
    assert read(Hermes().reader(NAMES), cut(text, places)) == said
    assert read(Hermes().reader(NAMES), list(text)) == said


@pytest.mark.parametrize(("text", "said"), LLAMA_TEXTS)
@given(places=st.lists(st.integers(0, 10**6), max_size=30))
def test_llama_calls_are_read_however_the_text_is_cut(text: str, said: Said, places: list[int]) -> None:
    assert read(Llama3().reader(NAMES), cut(text, places)) == said
    assert read(Llama3().reader(NAMES), list(text)) == said


@pytest.mark.parametrize(("text", "said"), DEEPSEEK_TEXTS)
@given(places=st.lists(st.integers(0, 10**6), max_size=30))
def test_deepseek_calls_are_read_however_the_text_is_cut(text: str, said: Said, places: list[int]) -> None:
    assert read(DeepSeek().reader(NAMES), cut(text, places)) == said
    assert read(DeepSeek().reader(NAMES), list(text)) == said


@pytest.mark.parametrize("make", [Hermes().reader, Llama3().reader, DeepSeek().reader])
@given(
    text=st.text(alphabet='<>/tool_call{}":,name argumets\\ \n{}[]01x', max_size=120),
    places=st.lists(st.integers(0, 999)),
)
def test_no_text_breaks_a_reader_and_cuts_change_nothing(
    make: Callable[[Sequence[str]], PartReader], text: str, places: list[int]
) -> None:
    assert read(make(NAMES), cut(text, places)) == read(make(NAMES), [text])


@pytest.mark.parametrize(
    ("text", "inside", "said"),
    [
        ("<think>\nFirst.\n</think>\n\nThen.", False, ("Then.", "First.", [])),
        ("First.\n</think>\n\nThen.", True, ("Then.", "First.", [])),
        ("Only an answer.", False, ("Only an answer.", "", [])),
        ("<think>never ends", False, ("", "never ends", [])),
        ("", True, ("", "", [])),
        ("<think></think>x", False, ("x", "", [])),
        ("a <think>late</think>", False, ("a <think>late</think>", "", [])),
        ("<thin", False, ("<thin", "", [])),
        ("  <think>a  b</think>  c", False, ("c", "a  b", [])),
    ],
)
@given(places=st.lists(st.integers(0, 10**6), max_size=20))
def test_reasoning_is_told_apart(text: str, inside: bool, said: Said, places: list[int]) -> None:
    def reader() -> PartReader:
        return ReasoningReader("<think>", "</think>", PlainReader(), inside=inside)

    assert read(reader(), cut(text, places)) == said
    assert read(reader(), list(text)) == said


def test_calls_come_after_reasoning() -> None:
    reader = ReasoningReader("<think>", "</think>", Hermes().reader(NAMES), inside=False)
    text = f"<think>I must <tool_call> add.</think>\n\n{hermes('add', '{}')}"
    assert read(reader, list(text)) == ("", "I must <tool_call> add.", [("add", "{}")])


def test_names_are_told_before_arguments_are_complete() -> None:
    """A client shows a call as soon as it knows which."""
    reader = Hermes().reader(NAMES)
    assert reader.push('<tool_call>\n{"name": "add"') == [CallBegins(0, "add")]
    assert reader.push(', "arguments": {"a"') == [Arguments(0, '{"a"')]
    assert reader.push(": 1") == [Arguments(0, ": 1")]


def test_text_that_may_become_a_mark_is_held_back_and_no_more() -> None:
    assert split_at("abc<tool", ["<tool_call>"]) == ("abc", None, "<tool")
    assert split_at("abc<tool_call>d", ["<tool_call>"]) == ("abc", "<tool_call>", "d")
    assert split_at("abc<", []) == ("abc<", None, "")


def _tokenizer(template: str) -> Tokenizer:
    return Tokenizer(byte_level(400), eos_ids=[2], chat_templates={"default": template})


@pytest.mark.parametrize(
    ("template", "tools", "shows", "reasons"),
    [(QWEN, "hermes", True, True), (SMOLLM2, None, False, False), (LLAMA3, None, False, False)],
)
def test_a_family_is_known_by_its_template(template: str, tools: str | None, shows: bool, reasons: bool) -> None:
    writing = writing_of(_tokenizer(template))
    assert (writing.tools.name if writing.tools else None) == tools
    assert (writing.shows_tools, writing.reasons) == (shows, reasons)


def test_settings_go_before_the_template_and_must_be_known() -> None:
    forced = writing_of(_tokenizer(SMOLLM2), "llama3_json", "think")
    assert forced.tools is not None
    assert forced.tools.name == "llama3_json"
    assert forced.reasons
    assert writing_of(_tokenizer(QWEN), "none", "none") == Writing(shows_tools=True)
    with pytest.raises(ConfigError, match="tool_call_parser is 'xml'"):
        writing_of(None, "xml")


def test_a_grammar_of_calls_names_every_tool_and_its_schema() -> None:
    tools = [
        Tool(name="add", parameters={"type": "object", "properties": {"a": {"type": "integer"}}}),
        Tool(name="now"),
    ]
    rules = Hermes().grammar(tools, several=True)
    assert json.dumps('<tool_call>\n{"name": "add", "arguments": ') in rules
    assert "%json" in rules
    assert '"additionalProperties": false' in rules  # of the one without parameters
