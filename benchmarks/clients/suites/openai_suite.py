"""OpenAI's own client."""

from __future__ import annotations

import asyncio
import json

import openai
import pydantic
from checks import ASK, MODEL, POINT, URL, WEATHER, check, main

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


class Point(pydantic.BaseModel):
    x: int
    ok: bool


@check
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


@check
def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=20)
    assert answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@check
def chat_streamed() -> None:
    whole = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=20, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=20, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens


@check
def chat_with_logprobs_and_choices() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=5, n=3, logprobs=True, top_logprobs=4, seed=1, temperature=1.0
    )
    assert len(answer.choices) == 3
    assert all(len(choice.logprobs.content[0].top_logprobs) == 4 for choice in answer.choices)


@check
def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt=["One two", "Three"], max_tokens=5, echo=True)
    assert answer.choices[0].text.startswith("One two")
    assert len(answer.choices) == 2


@check
def tools_forced() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=100, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    assert answer.choices[0].finish_reason == "tool_calls"


@check
def tools_streamed() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, max_tokens=100, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    ) as events:
        for _ in events:
            pass
        (call,) = events.get_final_completion().choices[0].message.tool_calls
    assert "city" in json.loads(call.function.arguments)


@check
def tools_to_and_fro() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], max_tokens=20)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


@check
def structured_by_schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=60, response_format=form)
    assert json.loads(answer.choices[0].message.content).keys() == {"x", "ok"}


@check
def structured_parsed() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=ASK, max_tokens=60, response_format=Point)
    assert isinstance(answer.choices[0].message.parsed, Point)


@check
def responses() -> None:
    answer = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=20, instructions="Be brief.")
    assert answer.output_text
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


@check
def responses_streamed() -> None:
    with client.responses.stream(model=MODEL, input="Say hello.", max_output_tokens=20, temperature=0) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        final = events.get_final_response()
    assert final.output_text == text


@check
def responses_with_tools() -> None:
    tool = {"type": "function", **WEATHER["function"], "strict": True}
    answer = client.responses.create(
        model=MODEL, input="The weather in Bern?", max_output_tokens=100, tools=[tool], tool_choice="required",
        parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = [item for item in answer.output if item.type == "function_call"]
    conversation = [
        {"role": "user", "content": "The weather in Bern?"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    assert client.responses.create(model=MODEL, input=conversation, tools=[tool], max_output_tokens=20).id


@check
def responses_parsed() -> None:
    answer = client.responses.parse(model=MODEL, input="A point.", text_format=Point, max_output_tokens=60)
    assert isinstance(answer.output_parsed, Point)


@check
def errors_have_their_classes() -> None:
    for kind, call in (
        (openai.NotFoundError, lambda: client.chat.completions.create(model="nope", messages=ASK)),
        (openai.BadRequestError, lambda: client.chat.completions.create(model=MODEL, messages=[])),
        (
            openai.BadRequestError,
            lambda: client.chat.completions.create(model=MODEL, messages=ASK, extra_body={"guided_regex": "("}),
        ),
    ):
        try:
            call()
        except kind as error:
            assert error.body["message"]
        else:
            raise AssertionError(f"no {kind.__name__}")


@check
async def asynchronous() -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:

        async def one(number: int) -> str:
            stream = await client.chat.completions.create(
                model=MODEL, messages=ASK, max_tokens=10, seed=number, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert all(await asyncio.gather(*(one(number) for number in range(12))))


main()
