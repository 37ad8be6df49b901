"""LiteLLM, as a client of an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json

import litellm
from checks import ASK, MODEL, POINT, URL, WEATHER, check, main

COMMON = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}


@check
def chat() -> None:
    answer = litellm.completion(messages=ASK, max_tokens=20, **COMMON)
    assert answer.choices[0].message.content
    assert answer.usage.total_tokens > 0


@check
def streamed() -> None:
    chunks = list(litellm.completion(messages=ASK, max_tokens=20, stream=True, **COMMON))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@check
def tools() -> None:
    answer = litellm.completion(messages=ASK, max_tokens=100, tools=[WEATHER], tool_choice="required", **COMMON)
    call = answer.choices[0].message.tool_calls[0]
    assert "city" in json.loads(call.function.arguments)


@check
def structured() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
    answer = litellm.completion(messages=ASK, max_tokens=60, response_format=form, **COMMON)
    assert json.loads(answer.choices[0].message.content).keys() == {"x", "ok"}


@check
def text_completion() -> None:
    common = {**COMMON, "model": f"text-completion-openai/{MODEL}"}
    assert litellm.text_completion(prompt="One two", max_tokens=5, **common).choices[0].text


@check
async def asynchronous() -> None:
    answers = await asyncio.gather(*(litellm.acompletion(messages=ASK, max_tokens=8, **COMMON) for _ in range(6)))
    assert all(answer.choices[0].message.content for answer in answers)


@check
def errors() -> None:
    try:
        litellm.completion(messages=[], **COMMON)
    except litellm.BadRequestError:
        return
    raise AssertionError("no BadRequestError")


main()
