"""Anthropic's own client."""

from __future__ import annotations

import asyncio

import anthropic
from checks import MODEL, URL, WEATHER, check, main

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
ASK = [{"role": "user", "content": "Say hello in one word."}]
TOOL = {
    "name": WEATHER["function"]["name"],
    "description": WEATHER["function"]["description"],
    "input_schema": WEATHER["function"]["parameters"],
}


@check
def message() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=20, messages=ASK, system="Be brief.")
    assert answer.content[0].text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.output_tokens > 0


@check
def streamed() -> None:
    greedy = {"temperature": 0}
    with client.messages.stream(model=MODEL, max_tokens=20, messages=ASK, extra_body=greedy) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text
    whole = client.messages.create(model=MODEL, max_tokens=20, messages=ASK, extra_body=greedy)
    assert whole.content[0].text == text


@check
def tools() -> None:
    answer = client.messages.create(
        model=MODEL, max_tokens=100, messages=ASK, tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )  # fmt: skip
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert isinstance(call.input["city"], str)
    assert answer.stop_reason == "tool_use"
    messages = [
        *ASK,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
    ]
    assert client.messages.create(model=MODEL, max_tokens=20, messages=messages, tools=[TOOL]).content


@check
def tools_streamed() -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=100, messages=ASK, tools=[TOOL], tool_choice={"type": "tool", "name": TOOL["name"]}
    ) as stream:
        final = stream.get_final_message()
    assert isinstance(final.content[-1].input["city"], str)


@check
def tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASK)
    answer = client.messages.create(model=MODEL, max_tokens=1, messages=ASK)
    cached = answer.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == answer.usage.input_tokens + cached


@check
def stop_sequences() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=60, messages=ASK, stop_sequences=["e", "o", " "])
    assert answer.stop_reason in ("stop_sequence", "end_turn")


@check
def errors_have_their_classes() -> None:
    for kind, fields in (
        (anthropic.NotFoundError, {"model": "nope"}),
        (anthropic.BadRequestError, {"messages": []}),
    ):
        try:
            client.messages.create(**{"model": MODEL, "max_tokens": 5, "messages": ASK, **fields})
        except kind as error:
            assert error.body["error"]["message"]
        else:
            raise AssertionError(f"no {kind.__name__}")


@check
async def asynchronous() -> None:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0) as client:
        answers = await asyncio.gather(
            *(client.messages.create(model=MODEL, max_tokens=8, messages=ASK) for _ in range(8))
        )
        assert all(answer.content for answer in answers)


main()
