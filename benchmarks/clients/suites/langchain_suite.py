"""LangChain's ChatOpenAI."""

from __future__ import annotations

import asyncio

import pydantic
from checks import MODEL, URL, check, main
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_retries=0, max_completion_tokens=100)


class Point(pydantic.BaseModel):
    """A point of the plane."""

    x: int
    ok: bool


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return "sunny"


@check
def chat() -> None:
    answer = model.invoke([SystemMessage("Be brief."), HumanMessage("Say hello.")])
    assert answer.content
    assert answer.usage_metadata["total_tokens"] > 0


@check
def streamed() -> None:
    assert "".join(chunk.content for chunk in model.stream("Say hello."))


@check
def tools() -> None:
    bound = model.bind_tools([get_weather], tool_choice="get_weather")
    answer = bound.invoke("The weather in Bern?")
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather"
    assert isinstance(call["args"]["city"], str)
    messages = [HumanMessage("The weather in Bern?"), answer, ToolMessage("sunny", tool_call_id=call["id"])]
    assert model.bind_tools([get_weather]).invoke(messages) is not None


@check
def structured() -> None:
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Point, method=method).invoke("A point."), Point)


@check
def batches() -> None:
    assert all(answer.content for answer in model.batch(["One.", "Two.", "Three."]))


@check
async def asynchronous() -> None:
    answers = await asyncio.gather(*(model.ainvoke("Say hello.") for _ in range(6)))
    assert all(answer.content for answer in answers)


@check
def responses_api() -> None:
    answer = ChatOpenAI(
        model=MODEL, base_url=f"{URL}/v1", api_key="none", use_responses_api=True, max_completion_tokens=30
    ).invoke("Say hello.")
    assert answer.text


main()
