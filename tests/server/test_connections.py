"""HTTP below the API: what unusual clients and proxies do to a connection."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from ropeway.server import connections
from ropeway.server.listening import Certificate
from tests.server.asking import CHAT, COMPLETIONS, chat_body, check_error, check_serving, completion_body
from tests.support.certificates import make_certificate
from tests.support.scripted_engine import ScriptedEngine, scripted_tokenizer
from tests.support.served import Served, serving

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LIMIT_S = 0.5
"""What clients of a hasty server have."""


def connected(served: Served) -> socket.socket:
    parts = urlsplit(served.url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10)


def answer_to(served: Served, request: bytes) -> tuple[int, bytes]:
    """(status, everything after the head) of a raw request on a connection of its own."""
    with connected(served) as connection:
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


@pytest.fixture(scope="module")
def hasty() -> Iterator[Served]:
    with serving(ScriptedEngine(tokenizer=scripted_tokenizer()), body_timeout_s=LIMIT_S) as served:
        yield served


def open_still(connection: socket.socket, within_s: float = 0.0) -> bool:
    """Whether the server has neither sent anything nor closed it."""
    return not select.select([connection], [], [], within_s)[0]


def until_closed(connection: socket.socket, dripping: bytes = b"") -> tuple[float, bytes]:
    """(seconds, what came) until the server closes a connection on which a byte is sent now and then."""
    began = time.monotonic()
    for byte in dripping:
        if not open_still(connection, 0.05):
            break
        connection.sendall(bytes([byte]))
    received = b""
    try:
        while chunk := connection.recv(65536):
            received += chunk
    except ConnectionResetError:
        pass  # what was sent last came too late
    return time.monotonic() - began, received


def one_answer(connection: socket.socket) -> int:
    """The status of an answer that is read to its end, on a connection that stays open."""
    with connection.makefile("rb") as stream:
        status = int(stream.readline().split()[1])
        length = 0
        while (line := stream.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        assert len(stream.read(length)) == length
    return status


def check_health(connection: socket.socket) -> None:
    connection.sendall(HEALTH)
    assert one_answer(connection) == 200


def check_head_timeout(answer: bytes) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert error["code"] == "request_timeout"
    assert "0.5 s (body_timeout_s)" in error["message"]


def test_a_head_that_comes_byte_by_byte_is_given_up(hasty: Served) -> None:
    with connected(hasty) as connection:
        took_s, answer = until_closed(connection, dripping=HEALTH[:-2] + b"X-Long: " + b"y" * 1000)
    assert LIMIT_S * 0.9 < took_s < LIMIT_S + 1
    check_head_timeout(answer)


def test_a_connection_on_which_nothing_comes_is_closed(hasty: Served) -> None:
    with connected(hasty) as connection:
        took_s, answer = until_closed(connection)
    assert LIMIT_S * 0.9 < took_s < LIMIT_S + 1
    assert answer == b""


def test_a_connection_may_idle_between_requests_but_not_in_a_head(hasty: Served) -> None:
    with connected(hasty) as connection:
        for _ in range(3):
            check_health(connection)
            assert open_still(connection, LIMIT_S * 1.5)
        took_s, answer = until_closed(connection, dripping=HEALTH[:-2] + b"X-Long: " + b"y" * 1000)
    assert LIMIT_S * 0.9 < took_s < LIMIT_S + 1
    check_head_timeout(answer)


def test_the_rest_of_a_body_that_nobody_wants_is_bounded_too(hasty: Served) -> None:
    with connected(hasty) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert one_answer(connection) == 404
        took_s, answer = until_closed(connection, dripping=b" " * 999)
    assert took_s < LIMIT_S + 1
    assert answer == b""


def test_an_answer_may_take_longer_than_its_request(hasty: Served) -> None:
    hasty.engine.first_delay_s = LIMIT_S * 1.5
    try:
        response = httpx.post(hasty.url + CHAT, json=chat_body())
    finally:
        hasty.engine.reset()
    assert response.status_code == 200
    assert response.elapsed.total_seconds() > LIMIT_S


def test_of_many_silent_connections_the_oldest_are_closed(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and not when their time is over."""
    monkeypatch.setattr(connections, "MOST_WAITING", 3)
    silent = [connected(served) for _ in range(3)]
    assert open_still(silent[0], 1.2)
    silent.append(connected(served))
    began = time.monotonic()
    assert until_closed(silent[0])[1] == b""
    assert time.monotonic() - began < 1
    assert all(open_still(each) for each in silent[1:])
    check_health(silent[1])  # it sends at last, and owes nothing any more
    check_serving(http)
    assert open_still(silent[2])
    for each in silent:
        each.close()


def test_clients_that_come_together_are_all_served(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_WAITING", 3)
    together = [connected(served) for _ in range(20)]
    for each in together:
        check_health(each)
        each.close()


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"], ids=["nothing", "a part of it"])
def test_a_tls_handshake_that_is_not_finished_is_given_up(tmp_path: Path, sent: bytes) -> None:
    certificate = Certificate(*make_certificate(tmp_path, "one"))
    with serving(ScriptedEngine(), certificate=certificate, body_timeout_s=LIMIT_S) as served:
        with connected(served) as connection:
            connection.sendall(sent)
            took_s, _ = until_closed(connection)
        assert LIMIT_S * 0.9 < took_s < LIMIT_S + 1
        assert httpx.get(f"{served.url}/health", verify=False).status_code == 200
