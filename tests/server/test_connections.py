"""HTTP below the API: what unusual clients and proxies do to a connection."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.asking import CHAT, COMPLETIONS, chat_body, check_error, check_serving, completion_body
from tests.support.served import Served


def answer_to(served: Served, request: bytes) -> tuple[int, bytes]:
    """(status, everything after the head) of a raw request on a connection of its own."""
    parts = urlsplit(served.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as connection:
        connection.sendall(request)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    head, _, rest = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), rest


def test_a_client_that_offers_http_2_is_answered_in_http_1(served: Served) -> None:
    """Java's client does so by default; the body comes with the offer."""
    body = json.dumps(completion_body()).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n"
    )
    status, rest = answer_to(served, head.encode() + body)
    assert status == 200, rest
    assert json.loads(rest)["choices"]


def test_headers_have_a_bound(served: Served, http: httpx.Client) -> None:
    head = f"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: {'y' * 1_000_000}\r\nConnection: close\r\n\r\n"
    try:
        status, _ = answer_to(served, head.encode())
        assert status in (400, 431)
    except (ConnectionResetError, BrokenPipeError):
        pass  # refused before all of it was sent
    check_serving(http)


def test_a_fault_of_ours_is_answered_in_shape_and_keeps_the_connection(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(served.engine, "submit", broken)
        for _ in range(3):
            response = http.post(CHAT, json=chat_body(), headers={"X-Request-Id": "mine"})
            error = check_error(response, 500)
            assert "a bug" not in error["message"]
            assert response.headers["x-request-id"] == "mine"
    check_serving(http)


@pytest.mark.parametrize("depth", [300, 700])
def test_deeply_nested_message_fields_are_refused_or_ignored(http: httpx.Client, depth: int) -> None:
    message = {"role": "user", "content": "hi"}
    nested = json.dumps({**chat_body(), "messages": [message]}).replace(
        '"content"', f'"x": {"[" * depth}{"]" * depth}, "content"'
    )
    response = http.post(CHAT, content=nested, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400), response.text
    check_serving(http)


def test_deeply_nested_tool_arguments_stay_text(http: httpx.Client) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    response = http.post(CHAT, json={**chat_body(), "messages": messages})
    assert response.status_code in (200, 400), response.text
    check_serving(http)


def test_long_stop_strings_are_refused_before_they_cost_anything(http: httpx.Client) -> None:
    response = http.post(COMPLETIONS, json=completion_body(n=32, stop="ab" * 100_000))
    check_error(response, 400, "200000", "1024", param="stop")


def test_more_prompts_than_ever_fit_are_refused_before_they_are_tokenized(http: httpx.Client) -> None:
    response = http.post(COMPLETIONS, json=completion_body(prompt=["a"] * 200_000))
    check_error(response, 400, "200000")


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics"])
def test_head_answers_as_get_without_a_body(http: httpx.Client, path: str) -> None:
    response = http.head(path)
    assert response.status_code == 200
    assert response.content == b""
