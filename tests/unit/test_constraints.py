"""Grammars, bad words and allowed tokens as masks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ropeway.engine.masking import Masking
from ropeway.errors import InvalidRequest
from ropeway.grammar import MAX_GRAMMAR, Grammar
from ropeway.request import Request, SamplingParams
from ropeway.text.answers.tools import Hermes, Tool
from ropeway.text.constraints import Constraint, ConstraintCompiler
from ropeway.text.tokenizer import Tokenizer
from tests.support.tokenizers import byte_level

EOS, ENDTEXT = 2, 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(400), eos_ids=[EOS])


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> ConstraintCompiler:
    return ConstraintCompiler(lambda: tokenizer, 400, [EOS, ENDTEXT])


def allowed(compiler: ConstraintCompiler, constraint: Constraint) -> set[int]:
    (bits,) = compiler.fill([constraint])
    flags = np.unpackbits(bits.view(np.uint8), bitorder="little")[:400]
    return set(np.flatnonzero(flags).tolist())


def takes(compiler: ConstraintCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether the grammar lets the text be said, and then end."""
    constraint = compiler.compile(SamplingParams(grammar=grammar)).fork()
    for token in tokenizer.encode(text, add_special_tokens=False):
        if token not in allowed(compiler, constraint):
            return False
        constraint.consume(token)
    return EOS in allowed(compiler, constraint)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 3}, "s": {"enum": ["a", "bé"]}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("several", [True, False])
def test_a_text_may_have_calls_and_those_of_strict_tools_keep_their_schema(
    compiler: ConstraintCompiler, tokenizer: Tokenizer, several: bool
) -> None:
    tools = [Tool(name="f", parameters=SCHEMA, strict=True), Tool(name="g", parameters=SCHEMA)]
    rules = Hermes().free_grammar(tools, several=several)
    assert rules is not None
    grammar = Grammar.lark(rules)
    good, bad = call("f", '{"n": 3}'), call("f", '{"n": 2}')
    for text in ("", "no call", "a < b, <tool_cal", f"Well.\n{good}", good, call("g", '{"x": [1]}'), f"{good}\n"):
        assert takes(compiler, tokenizer, grammar, text)
    for text in (bad, f"Well. {bad}", call("h", "{}"), good[:-1], "<tool_call>", call("g", "7")):
        assert not takes(compiler, tokenizer, grammar, text)
    assert takes(compiler, tokenizer, grammar, f"{good}\n{good} bye") == several


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (
            Grammar.json_schema(SCHEMA),
            ['{"n": 3}', '{"n":12,"s":"bé"}'],
            ['{"n": 2}', "{}", '{"s":"a"}', "7", '{"n":3'],
        ),
        (Grammar.json_object(), ["{}", '{"a": [1, null, "x"]}'], ["[]", '"a"', "{'a': 1}"]),
        (Grammar.regex(r"[0-9]{2,3}(px|em)"), ["12px", "999em"], ["1px", "12", "12 px"]),
        (Grammar.choice(["yes", "no", 'may"be\n']), ["yes", 'may"be\n'], ["y", "yesno", "maybe"]),
        (Grammar.lark('start: "a" b+\nb: "b" | "c"'), ["ab", "abcb"], ["a", "b"]),
        (Grammar.lark('root ::= "x" [0-9]+'), ["x1", "x42"], ["x", "1"]),
        (Grammar.lark('\nroot ::= first-one\nfirst-one  ::= "x:"'), ["x:"], ["y"]),
        (Grammar.lark('start: "a" "::=" "b"'), ["a::=b"], ["a"]),
        (Grammar.choice(["yes"], after="</think>"), ["hm\n</think>\n\nyes", "</think>yes"], ["yes", "</think>no"]),
        (Grammar.json_object(after="</think>"), ["a</think>{}"], ["{}", "</think>a"]),
        (Grammar.regex("[0-9]+", after="</think>"), ["a</think> 12"], ["12", "</think>x"]),
        (Grammar.lark('start: "a"', after="</think>"), ["x</think>a"], ["a"]),
    ],
)
def test_a_grammar_lets_through_what_it_should(
    compiler: ConstraintCompiler, tokenizer: Tokenizer, grammar: Grammar, good: list[str], bad: list[str]
) -> None:
    assert [takes(compiler, tokenizer, grammar, text) for text in good] == [True] * len(good)
    assert [takes(compiler, tokenizer, grammar, text) for text in bad] == [False] * len(bad)


def test_every_end_token_may_end_a_complete_text_and_none_an_incomplete_one(
    compiler: ConstraintCompiler, tokenizer: Tokenizer
) -> None:
    constraint = compiler.compile(SamplingParams(grammar=Grammar.choice(["ab"])))
    assert not {EOS, ENDTEXT} & allowed(compiler, constraint)
    for token in tokenizer.encode("ab", add_special_tokens=False):
        constraint.consume(token)
    assert allowed(compiler, constraint) == {EOS, ENDTEXT}
    constraint.consume(ENDTEXT)
    assert constraint.failure is None


def test_a_fork_goes_its_own_way(compiler: ConstraintCompiler, tokenizer: Tokenizer) -> None:
    first = compiler.compile(SamplingParams(grammar=Grammar.choice(["a", "b"])))
    (a,), (b,) = (tokenizer.encode(text, add_special_tokens=False) for text in "ab")
    second = first.fork()
    first.consume(a)
    assert EOS in allowed(compiler, first)
    assert {a, b} <= allowed(compiler, second)


def test_what_the_grammar_does_not_allow_is_a_failure(compiler: ConstraintCompiler, tokenizer: Tokenizer) -> None:
    constraint = compiler.compile(SamplingParams(grammar=Grammar.choice(["a"])))
    constraint.consume(tokenizer.encode("b", add_special_tokens=False)[0])
    assert constraint.failure


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        (Grammar.regex("(unclosed"), "regular expression"),
        (Grammar.regex("(?=lookahead)x"), "regular expression"),
        (Grammar.lark("nothing here"), "grammar"),
        (Grammar.lark("start: missing"), "grammar"),
        (Grammar.json_schema({"type": "nonsense"}), "JSON schema"),
        (Grammar.json_schema({"$ref": "http://elsewhere.example/x.json"}), "JSON schema"),
        (Grammar.json_schema({"type": "string", "pattern": "a(?!b)"}), "JSON schema"),
    ],
)
def test_what_cannot_be_compiled_says_why(compiler: ConstraintCompiler, grammar: Grammar, word: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{word}.* cannot be used: .+") as raised:
        compiler.compile(SamplingParams(grammar=grammar))
    assert len(raised.value.message) < 700


def test_a_schema_nested_too_deeply_is_refused_before_it_is_compiled() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    with pytest.raises(InvalidRequest, match="nested"):
        Grammar.json_schema(deep)


def test_grammars_have_a_size_limit_and_must_say_something() -> None:
    with pytest.raises(InvalidRequest, match=str(MAX_GRAMMAR)):
        Grammar.regex("a" * (MAX_GRAMMAR + 1))
    with pytest.raises(InvalidRequest, match="empty"):
        Grammar.lark("  \n")
    with pytest.raises(InvalidRequest, match="options"):
        Grammar.choice([])
    with pytest.raises(InvalidRequest, match="no JSON"):
        Grammar.json_schema("{")
    with pytest.raises(InvalidRequest, match="must be an object"):
        Grammar.json_schema("[1]")
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        SamplingParams(grammar=Grammar.regex("a"), ignore_eos=True)


def test_bad_words_are_never_completed(compiler: ConstraintCompiler, tokenizer: Tokenizer) -> None:
    constraint = compiler.compile(SamplingParams(bad_words=("hello", "x")))
    (x,) = tokenizer.encode("x", add_special_tokens=False)
    assert x not in allowed(compiler, constraint)
    *before, last = tokenizer.encode("hello", add_special_tokens=False)
    for token in before:
        assert token in allowed(compiler, constraint)
        constraint.consume(token)
    assert last not in allowed(compiler, constraint)
    constraint.consume(x)
    assert last in allowed(compiler, constraint)


def test_only_allowed_tokens_and_the_end(compiler: ConstraintCompiler) -> None:
    constraint = compiler.compile(SamplingParams(allowed_token_ids=(5, 31, 32, 399)))
    assert allowed(compiler, constraint) == {5, 31, 32, 399, EOS, ENDTEXT}


def test_constraints_narrow_each_other(compiler: ConstraintCompiler, tokenizer: Tokenizer) -> None:
    (a,), (b,) = (tokenizer.encode(text, add_special_tokens=False) for text in "ab")
    params = SamplingParams(grammar=Grammar.regex("[a-c]+"), allowed_token_ids=(a, b, 399), bad_words=("b",))
    assert allowed(compiler, compiler.compile(params)) == {a}


def test_reasoning_has_a_budget(compiler: ConstraintCompiler, tokenizer: Tokenizer) -> None:
    begin, end = (tokenizer.encode(mark, add_special_tokens=False) for mark in ("<think>", "</think>"))
    words = tokenizer.encode("one two three four five six", add_special_tokens=False)
    for inside in (True, False):
        constraint = compiler.compile(SamplingParams(thinking_budget=3, thinking=inside)).fork()
        for token in [*([] if inside else begin), *words[:3]]:
            assert len(allowed(compiler, constraint)) == 400
            constraint.consume(token)
        for token in end:
            assert allowed(compiler, constraint) == {token}
            constraint.consume(token)
        assert len(allowed(compiler, constraint)) == 400


def test_reasoning_that_ends_by_itself_or_never_begins_is_left_alone(
    compiler: ConstraintCompiler, tokenizer: Tokenizer
) -> None:
    text = tokenizer.encode("yes </think> one two three four", add_special_tokens=False)
    for inside in (True, False):
        constraint = compiler.compile(SamplingParams(thinking_budget=12, thinking=inside))
        for token in text:
            assert len(allowed(compiler, constraint)) == 400
            constraint.consume(token)


def test_a_model_without_tokenizer_or_end_token_says_so() -> None:
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        ConstraintCompiler(lambda: None, 400, [2]).compile(SamplingParams(grammar=Grammar.regex("a")))
    tokenizer = Tokenizer(byte_level(400))
    with pytest.raises(InvalidRequest, match="no end token"):
        ConstraintCompiler(lambda: tokenizer, 400, [777]).compile(SamplingParams(grammar=Grammar.regex("a")))


@pytest.mark.report("vllm-project/vllm#8805")
def test_json_has_characters_and_no_escapes_of_them(compiler: ConstraintCompiler, tokenizer: Tokenizer) -> None:
    grammar = Grammar.json_object()
    assert takes(compiler, tokenizer, grammar, '{"a": "理\\n\\"é"}')
    assert not takes(compiler, tokenizer, grammar, '{"a": "\\u7406"}')


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    grammar = Grammar.json_schema({"properties": {"b": {}, "a": {}}})
    assert list(json.loads(grammar.text)["properties"]) == ["b", "a"]


@pytest.mark.report("intel/llm-scaler#99")
def test_compiled_constraints_are_kept_for_a_while_only(compiler: ConstraintCompiler) -> None:
    masking = Masking(compiler)
    for number in range(300):
        request = Request(
            id=number,
            tokens=np.arange(2, dtype=np.int32),
            prompt_tokens=2,
            params=SamplingParams(grammar=Grammar.choice([f"tool {number}"])),
            limit=9,
        )
        masking.begin(request)
    while masking.compiling:
        masking.ready()
    assert masking.remembered <= 64
    masking.drop(range(300))
    assert masking.live == 0
    masking.close()
