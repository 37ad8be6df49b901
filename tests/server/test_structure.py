"""What an answer must look like, as clients say it."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from ropeway.grammar import Grammar
from tests.server.asking import CHAT, COMPLETIONS, chat_body, check_error, completion_body
from tests.support.served import Served

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            Grammar.json_schema(SCHEMA),
        ),
        ({"guided_json": SCHEMA}, Grammar.json_schema(SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, Grammar.json_schema(SCHEMA)),
        ({"guided_regex": "[0-9]+"}, Grammar.regex("[0-9]+")),
        ({"guided_choice": ["yes", "no"]}, Grammar.choice(["yes", "no"])),
        ({"guided_grammar": 'start: "x"'}, Grammar.lark('start: "x"')),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar.json_schema(SCHEMA)),
        ({"structured_outputs": {"regex": "a"}}, Grammar.regex("a")),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar.choice(["a"])),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, Grammar.lark('start: "x"')),
        ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({}, None),
    ],
)
def test_every_way_to_say_it_comes_to_a_grammar(
    served: Served, http: httpx.Client, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    for path, body in ((CHAT, chat_body(**fields)), (COMPLETIONS, completion_body(**fields))):
        assert http.post(path, json=body).status_code == 200
        assert served.engine.submitted[-1][1].grammar == grammar


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs the schema"),
        ({"response_format": "json"}, "response_format", "object"),
        ({"guided_json": "{"}, "guided_json", "no JSON"),
        ({"guided_json": 7}, "guided_json", ""),
        ({"guided_choice": []}, "guided_choice", "options"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "not empty"),
        ({"guided_regex": ""}, "guided_regex", "empty"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "leave one out"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, None, "leave one out"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "structured output"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        ({"n": 64, "allowed_token_ids": [5] * 5000}, "allowed_token_ids", "times n"),
        ({"bad_words": [""]}, "bad_words", "characters"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "from 1"),
        ({"allowed_token_ids": [400]}, "allowed_token_ids", "400"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "from 0"),
    ],
)
def test_what_contradicts_or_is_none_is_named(
    http: httpx.Client, fields: dict[str, Any], param: str | None, words: str
) -> None:
    check_error(http.post(CHAT, json=chat_body(**fields)), 400, words, param=param)


def test_words_and_tokens_reach_the_engine(served: Served, http: httpx.Client) -> None:
    http.post(CHAT, json=chat_body(bad_words=["x"], allowed_token_ids=[5, 6]))
    params = served.engine.submitted[-1][1]
    assert params.bad_words == ("x",)
    assert params.allowed_token_ids == (5, 6)


def test_a_hostile_grammar_is_looked_at_in_no_time(http: httpx.Client) -> None:
    """Its text is checked where requests come in, once per choice."""
    began = time.perf_counter()
    body = chat_body(n=4, guided_regex=("x" * 4096 + "\n") * 31)
    assert http.post(CHAT, json=body).status_code == 200
    assert time.perf_counter() - began < 0.5


def test_echo_begins_with_the_prompt(served: Served, http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json=completion_body(prompt=["Hi", "Ho"], n=2, echo=True)).json()
    plain = http.post(COMPLETIONS, json=completion_body(prompt=["Hi", "Ho"], n=2)).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [p + c["text"] for p, c in zip(["Hi", "Hi", "Ho", "Ho"], plain["choices"], strict=True)]


def test_best_of_answers_with_the_likeliest(served: Served, http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json=completion_body(best_of=4, n=2)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 20
    assert served.engine.submitted[-1][1].n == 4
    check_error(http.post(COMPLETIONS, json=completion_body(best_of=1, n=2)), 400, "at least n", param="best_of")
    body = completion_body(best_of=3, stream=True)
    check_error(http.post(COMPLETIONS, json=body), 400, "streamed", param="best_of")
