"""Requests and answers as tests spell them."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.server.conftest import MODEL
from tests.support.served import events

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HI, "max_tokens": 5, **fields}


def completion_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hi", "max_tokens": 5, **fields}


def stream(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All chunks of a streamed answer, which must end with ``[DONE]``."""
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        data = list(events(response))
    assert data.pop() == "[DONE]"
    return [json.loads(each) for each in data]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice over all chunks of either endpoint."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def check_error(response: httpx.Response, status: int, *words: str, param: str | None = None) -> dict[str, Any]:
    """Whether the response is an error in OpenAI's shape; gives its inside."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    for word in words:
        assert word in error["message"], error["message"]
    if param is not None:
        assert error["param"] == param
    return error  # type: ignore[no-any-return]


def check_serving(http: httpx.Client) -> None:
    """The server lives: healthy, and a plain request is answered."""
    assert http.get("/health").status_code == 200
    response = http.post(CHAT, json=chat_body())
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 5
