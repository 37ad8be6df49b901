"""Clients that leave, engines that fail, queues that are full, ids that repeat."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.server.asking import CHAT, COMPLETIONS, HI, chat_body, check_error, check_serving, completion_body, stream
from tests.server.conftest import MODEL
from tests.support.scripted_engine import ScriptedEngine, scripted_tokenizer
from tests.support.served import Served, events, serving


def _send_and_leave(served: Served, body: dict[str, Any], path: str = CHAT) -> None:
    """Send a request, wait until the engine has it, and close the connection."""
    data = json.dumps(body).encode()
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        deadline = time.monotonic() + 5
        while not served.engine.live and time.monotonic() < deadline:
            time.sleep(0.005)
        assert served.engine.live


@pytest.mark.report("ROCm/ATOM#1562")
@pytest.mark.report("openvinotoolkit/model_server#4428")
@pytest.mark.report("InternLM/lmdeploy#1619")
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("first_delay_s", [0.0, 30.0])
def test_a_client_that_leaves_aborts_its_request(
    served: Served, http: httpx.Client, streamed: bool, first_delay_s: float
) -> None:
    served.engine.first_delay_s, served.engine.delay_s = first_delay_s, 30.0
    _send_and_leave(served, chat_body(n=2, max_tokens=400, stream=streamed))
    assert served.idle(1.0)
    _send_and_leave(served, completion_body(prompt=["a", "b", "c"], stream=streamed), COMPLETIONS)
    assert served.idle(1.0)
    served.engine.reset()
    check_serving(http)


def test_a_client_that_stops_reading_in_the_middle_aborts_its_request(served: Served, client: openai.OpenAI) -> None:
    served.engine.delay_s = 0.05
    answer = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=500, stream=True)  # type: ignore[arg-type, call-overload]
    next(answer)
    answer.close()
    assert served.idle(1.0)


@pytest.mark.report("InternLM/lmdeploy#1619")
def test_after_many_clients_left_nothing_is_under_way(served: Served, http: httpx.Client) -> None:
    served.engine.delay_s = 0.2
    for _ in range(3):
        with ThreadPoolExecutor(8) as pool:
            for _ in range(8):
                pool.submit(_send_and_leave, served, chat_body(max_tokens=400, stream=True))
        assert served.idle(2.0)
    served.engine.reset()
    check_serving(http)


# --------------------------------------------------------------------------- failures


@pytest.mark.report("vllm-project/vllm#52852")
@pytest.mark.report("vllm-project/vllm#40978")
@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_error_inside_a_stream_is_an_event_and_never_a_silent_end(
    served: Served, http: httpx.Client, path: str, after: int
) -> None:
    served.engine.fail_after = after
    body = chat_body(max_tokens=20, stream=True) if path == CHAT else completion_body(max_tokens=20, stream=True)
    with http.stream("POST", path, json=body) as response:
        data = list(events(response))
    assert "[DONE]" not in data
    error = json.loads(data[-1])["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "scripted failure" in error["message"]
    assert all(choice["finish_reason"] is None for each in data[:-1] for choice in json.loads(each)["choices"])
    assert len(data) - 1 == (0 if after == 0 else after + (path == CHAT))


def test_the_openai_client_raises_on_an_error_inside_a_stream(served: Served, client: openai.OpenAI) -> None:
    served.engine.fail_after = 3
    with pytest.raises(openai.APIError, match="scripted failure"):
        list(client.chat.completions.create(model=MODEL, messages=HI, stream=True))  # type: ignore[arg-type, call-overload]


def test_an_error_in_a_whole_answer_is_a_500_with_the_reason(served: Served, http: httpx.Client) -> None:
    served.engine.fail_after = 3
    check_error(http.post(CHAT, json=chat_body(max_tokens=20, n=2)), 500, "scripted failure")
    check_error(http.post(COMPLETIONS, json=completion_body(max_tokens=20, prompt=["a", "b"])), 500, "scripted failure")


def test_a_dead_engine_ends_streams_and_health_says_why(served: Served, http: httpx.Client) -> None:
    served.engine.delay_s = 0.2
    result: list[list[str]] = []

    def read() -> None:
        body = chat_body(max_tokens=100, stream=True)
        with httpx.Client(base_url=served.url) as other, other.stream("POST", CHAT, json=body) as response:
            result.append(list(events(response)))

    thread = threading.Thread(target=read)
    thread.start()
    while not served.engine.live:
        time.sleep(0.005)
    served.on_loop(lambda: served.engine.die("the engine process ended with signal 9"))
    thread.join(5)
    assert not thread.is_alive()
    assert json.loads(result[0][-1])["error"]["code"] == "engine_dead"
    check_error(http.get("/health"), 503, "signal 9")
    check_error(http.post(CHAT, json=chat_body()), 503, "signal 9")
    served.engine.failure = None
    check_serving(http)


def test_a_fault_of_the_server_is_a_500_that_gives_nothing_away(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("a detail of ours")

    monkeypatch.setattr(served.engine, "submit", broken)
    error = check_error(http.post(CHAT, json=chat_body()), 500, "internal error")
    assert "detail" not in error["message"]
    assert error["code"] == "internal_error"


# --------------------------------------------------------------------------- load


def test_a_full_queue_is_429_with_retry_after_before_a_stream_begins(served: Served, http: httpx.Client) -> None:
    served.engine.delay_s = 30.0
    body = chat_body(n=12, max_tokens=50, stream=True)
    with httpx.Client(base_url=served.url) as other, other.stream("POST", CHAT, json=body):
        for streamed in (False, True):
            response = http.post(CHAT, json=chat_body(stream=streamed))
            assert check_error(response, 429, "12 requests")["code"] == "queue_full"
            assert response.headers["retry-after"] == "2"
            assert response.headers["content-type"] == "application/json"
        with pytest.raises(openai.RateLimitError):
            _ask_once(served)
    assert served.idle()
    served.engine.reset()
    check_serving(http)


def _ask_once(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        client.chat.completions.create(model=MODEL, messages=HI)  # type: ignore[arg-type]


def test_of_several_prompts_none_runs_if_one_finds_the_queue_full(served: Served, http: httpx.Client) -> None:
    served.engine.delay_s = 30.0
    check_error(http.post(COMPLETIONS, json=completion_body(prompt=["a"] * 7, n=2)), 429)
    assert served.idle(1.0)


@pytest.mark.report("huggingface/transformers#40479")
def test_parallel_streams_are_each_complete(served: Served, http: httpx.Client) -> None:
    served.engine.delay_s = 0.002
    expected = http.post(CHAT, json=chat_body(max_tokens=30)).json()["choices"][0]["message"]["content"]

    def read(_: int) -> str:
        with httpx.Client(base_url=served.url, timeout=20) as other:
            chunks = stream(other, CHAT, chat_body(max_tokens=30))
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(8))) == [expected] * 8


@pytest.mark.report("vllm-project/vllm#10583")
@pytest.mark.report("vllm-project/vllm#15041")
def test_two_requests_may_have_the_same_request_id(served: Served) -> None:
    served.engine.delay_s = 0.01

    def ask(limit: int) -> tuple[int, str]:
        response = httpx.post(
            served.url + CHAT, json=chat_body(max_tokens=limit, request_id="same"), headers={"X-Request-Id": "same"}
        )
        return response.json()["usage"]["completion_tokens"], response.headers["x-request-id"]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, [10, 20])) == [(10, "same"), (20, "same")]


def test_a_request_id_is_echoed_or_made(http: httpx.Client) -> None:
    assert http.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = {http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    for unfit in ("x" * 200, "a b", "é"):
        echoed = http.get("/health", headers={b"X-Request-Id": unfit.encode()}).headers["x-request-id"]
        assert echoed != unfit
    assert http.post(CHAT, content=b"{", headers={"X-Request-Id": "abc-2"}).headers["x-request-id"] == "abc-2"


def test_the_access_log_is_quiet_unless_asked_and_never_has_text(caplog: pytest.LogCaptureFixture) -> None:
    for access_log, lines in ((False, 0), (True, 1)):
        engine = ScriptedEngine(tokenizer=scripted_tokenizer())
        with caplog.at_level("DEBUG"), serving(engine, access_log=access_log) as served:
            caplog.clear()
            body = chat_body(messages=[{"role": "user", "content": "a secret of mine"}])
            httpx.post(served.url + CHAT, json=body)
            httpx.post(served.url + CHAT, json={**body, "temperature": -1})
        # A line is written after its response, so all are there when the server has ended.
        access = [r.getMessage() for r in caplog.records if r.name == "ropeway.access"]
        assert len(access) == 2 * lines
        assert all(CHAT in line for line in access)
        assert "secret" not in caplog.text
