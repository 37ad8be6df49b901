from collections.abc import Mapping
from datetime import datetime
from typing import Any

import pytest

from ropeway.errors import InvalidRequest, LoadError
from ropeway.text import chat_template
from ropeway.text.chat_template import ChatTemplate
from ropeway.text.tokenizer import Tokenizer
from tests.support.chat_templates import LLAMA3, MISTRAL, QWEN, SMOLLM2
from tests.support.tokenizers import byte_level

NAMED = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
USER = {"role": "user", "content": 'What\'s <b>5 > 3</b> & "why"?  \n'}
SYSTEM = {"role": "system", "content": "  Be terse. ünïcödé 你好"}
ANSWER = {"role": "assistant", "content": "<think>hm</think>\n\nBecause 5 > 3. "}
PLAIN = {"role": "assistant", "content": "Because 5 > 3. "}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": "<5>", "b": [1, None]}}}],
}
RESULT = {"role": "tool", "content": "8"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "description": "größe <n>"}}}


def tokenizer_with(template: str | None, **named: str) -> Tokenizer:
    templates = {} if template is None else {"default": template}
    return Tokenizer(byte_level(), named_tokens={**NAMED, **named}, chat_templates=templates)


@pytest.fixture(scope="module")
def hugging_face() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), **NAMED)


@pytest.mark.parametrize("template", [SMOLLM2, QWEN, LLAMA3, MISTRAL], ids=["smollm2", "qwen", "llama3", "mistral"])
@pytest.mark.parametrize(
    "messages",
    [[USER], [USER, PLAIN], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER, USER]],
    ids=["user", "answered", "turns", "system"],
)
@pytest.mark.parametrize("mode", ["prompt", "none", "continue"])
def test_renders_and_encodes_as_transformers_does(
    hugging_face: Any, template: str, messages: list[dict[str, Any]], mode: str
) -> None:
    options = {"add_generation_prompt": mode == "prompt", "continue_final_message": mode == "continue"}
    tokenizer = tokenizer_with(template)
    if template == MISTRAL and messages[0] is SYSTEM:
        with pytest.raises(InvalidRequest, match="roles must alternate"):
            tokenizer.apply_chat_template(messages, **options)
        return
    expected = hugging_face.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    assert tokenizer.apply_chat_template(messages, **options) == expected
    assert tokenizer.encode_chat(messages, **options) == hugging_face.encode(expected, add_special_tokens=False)


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_tools_and_template_variables_render_as_transformers_does(hugging_face: Any, kwargs: Mapping[str, Any]) -> None:
    messages = [SYSTEM, USER, CALL, RESULT]
    expected = hugging_face.apply_chat_template(
        messages, tools=[TOOL], chat_template=QWEN, tokenize=False, add_generation_prompt=True, **kwargs
    )
    assert tokenizer_with(QWEN).apply_chat_template(messages, tools=[TOOL], **kwargs) == expected


def test_arguments_of_tool_calls_may_be_json_text() -> None:
    function = CALL["tool_calls"][0]["function"]
    as_text = {**CALL, "tool_calls": [{"function": {**function, "arguments": '{"a": "<5>", "b": [1, null]}'}}]}
    tokenizer = tokenizer_with(QWEN)
    assert tokenizer.apply_chat_template([USER, as_text]) == tokenizer.apply_chat_template([USER, CALL])


def test_a_list_of_text_parts_is_one_text_and_other_parts_are_refused() -> None:
    tokenizer = tokenizer_with(SMOLLM2)
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert "<|im_start|>user\na\nb<|im_end|>" in tokenizer.apply_chat_template([parts])
    with pytest.raises(InvalidRequest, match="'image_url'"):
        tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


@pytest.mark.report("janhq/jan#6254")
@pytest.mark.report("EricLBuehler/mistral.rs#506")
def test_a_template_that_raises_is_an_invalid_request_with_its_text() -> None:
    for messages in ([USER, USER], [SYSTEM]):
        with pytest.raises(InvalidRequest, match="Conversation roles must alternate") as caught:
            tokenizer_with(MISTRAL).encode_chat(messages)
        assert caught.value.status == 400


def test_a_model_without_template_points_to_completions() -> None:
    with pytest.raises(InvalidRequest, match=r"no chat template.*/v1/completions"):
        tokenizer_with(None).apply_chat_template([USER])


def test_a_template_for_tools_is_taken_when_there_are_tools() -> None:
    tokenizer = Tokenizer(byte_level(), chat_templates={"default": "plain", "tool_use": "{{ tools|length }} tools"})
    assert tokenizer.apply_chat_template([USER]) == "plain"
    assert tokenizer.apply_chat_template([USER], tools=[TOOL]) == "1 tools"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 5 }}",
        "{{ messages[7].content.strip() }}",
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
    ids=["type", "index", "sandbox", "zero", "range", "recursion"],
)
def test_a_template_that_fails_on_the_messages_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        tokenizer_with(source).apply_chat_template([USER])


def test_a_runaway_template_is_stopped_by_size_and_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    runaway = ChatTemplate("{% for i in range(100000) %}{% for j in range(100000) %}{{ i }} {% endfor %}{% endfor %}")
    monkeypatch.setattr(chat_template, "MAX_OUTPUT", 10_000)
    with pytest.raises(InvalidRequest, match="more than 10000 characters"):
        runaway.render({})
    monkeypatch.setattr(chat_template, "MAX_OUTPUT", 10**12)
    monkeypatch.setattr(chat_template, "MAX_TIME_S", 0.02)
    with pytest.raises(InvalidRequest, match=r"more than 0\.02 s"):
        runaway.render({})


def test_an_invalid_template_is_a_load_error_naming_the_line() -> None:
    with pytest.raises(LoadError, match="line 2"):
        ChatTemplate("fine\n{% if %}")


def test_variables_the_server_sets_cannot_be_overridden() -> None:
    with pytest.raises(InvalidRequest, match="raise_exception"):
        tokenizer_with(SMOLLM2).apply_chat_template([USER], raise_exception="x")


def test_the_date_is_todays_and_blocks_are_trimmed() -> None:
    rendered = ChatTemplate("  {% if true %}\n{{ strftime_now('%Y') }}\n  {% endif %}\n").render({})
    assert rendered == f"{datetime.now():%Y}\n"


def test_continuing_a_message_the_template_hides_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        tokenizer_with("nothing").apply_chat_template([USER, ANSWER], continue_final_message=True)
    with pytest.raises(InvalidRequest, match="no text to continue"):
        tokenizer_with(QWEN).apply_chat_template([{"role": "user", "content": None}], continue_final_message=True)
    with pytest.raises(InvalidRequest, match="messages is empty"):
        tokenizer_with(QWEN).apply_chat_template([])
