"""What the engine refuses has a status of its own; what it gives up later ends an answer with an error."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx
import openai
import pytest

from ropeway.errors import Draining
from ropeway.outcome import Refusal
from tests.server.asking import CHAT, COMPLETIONS, HI, chat_body, check_error, check_serving, completion_body
from tests.server.conftest import MODEL
from tests.support.served import Served, events

SHED = Refusal("Shed", "the queue predicts 9 s; the target is 1 s", retry_after_s=7.2)
FULL = Refusal("QueueFull", "200 requests of tier batch wait; the limit is 200", retry_after_s=3.0)
TIMEOUT = Refusal("QueueTimeout", "no seat within 5 s", retry_after_s=5.0)
DEADLINE = Refusal("DeadlineExceeded", "not done 2 s after it came")
CONTEXT = Refusal("ContextLengthExceeded", "the prompt can never fit")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("refusal", "status", "code", "retry_after"),
    [
        (SHED, 429, "shed", "8"),
        (FULL, 429, "queue_full", "3"),
        (TIMEOUT, 503, "queue_timeout", "5"),
        (DEADLINE, 504, "deadline_exceeded", None),
        (CONTEXT, 400, "context_length_exceeded", None),
        (Refusal("NoSuchError", "of a newer engine"), 500, "request_failed", None),
    ],
    ids=lambda value: value.error if isinstance(value, Refusal) else "",
)
def test_a_refusal_has_its_own_status_before_a_response_begins(
    served: Served,
    http: httpx.Client,
    path: str,
    streamed: bool,
    refusal: Refusal,
    status: int,
    code: str,
    retry_after: str | None,
) -> None:
    served.engine.refusal, served.engine.answer_s = refusal, 0.05
    body = chat_body(stream=streamed) if path == CHAT else completion_body(stream=streamed)
    response = http.post(path, json=body)
    assert check_error(response, status, refusal.message)["code"] == code
    assert response.headers.get("retry-after") == retry_after
    assert response.headers["content-type"] == "application/json"
    served.engine.reset()
    check_serving(http)


def test_the_openai_client_raises_the_right_class(served: Served, client: openai.OpenAI) -> None:
    for refusal, kind in ((SHED, openai.RateLimitError), (TIMEOUT, openai.InternalServerError)):
        served.engine.refusal = refusal
        for streamed in (False, True):
            with pytest.raises(kind) as refused:
                client.chat.completions.create(model=MODEL, messages=HI, stream=streamed)  # type: ignore[call-overload]
            assert refusal.message in str(refused.value)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stream_begins_when_the_engine_has_taken_it_and_not_when_it_has_a_token(
    served: Served, http: httpx.Client, streamed: bool
) -> None:
    served.engine.answer_s, served.engine.first_delay_s = 0.1, 0.4
    begin = time.monotonic()
    with http.stream("POST", CHAT, json=chat_body(stream=streamed)) as response:
        assert response.status_code == 200
        begun = time.monotonic() - begin
        response.read()
    assert time.monotonic() - begin >= 0.5
    assert (0.1 <= begun < 0.4) == streamed


@pytest.mark.parametrize("streamed", [False, True])
def test_if_one_of_several_prompts_is_refused_all_are(served: Served, http: httpx.Client, streamed: bool) -> None:
    served.engine.refusal, served.engine.accepts, served.engine.delay_s = SHED, 2, 30.0
    body = completion_body(prompt=["a", "b", "c"], max_tokens=50, stream=streamed)
    check_error(http.post(COMPLETIONS, json=body), 429, SHED.message)
    assert served.idle(1.0)
    assert len(served.engine.submitted) == 3


def test_if_one_of_n_choices_is_refused_all_are(served: Served, http: httpx.Client) -> None:
    served.engine.refusal, served.engine.accepts, served.engine.delay_s = FULL, 1, 30.0
    check_error(http.post(CHAT, json=chat_body(n=3, max_tokens=50)), 429, FULL.message)
    assert served.idle(1.0)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [(TIMEOUT, 503, "queue_timeout"), (DEADLINE, 504, "deadline_exceeded")],
    ids=lambda value: value.error if isinstance(value, Refusal) else "",
)
@pytest.mark.parametrize("after", [0, 3])
def test_a_limit_that_strikes_later_ends_a_stream_with_an_event_and_a_whole_answer_with_its_status(
    served: Served, http: httpx.Client, path: str, refusal: Refusal, status: int, code: str, after: int
) -> None:
    served.engine.fail_after, served.engine.fail_with = after, refusal
    served.engine.first_delay_s = served.engine.queue_s = 0.02
    whole = chat_body(max_tokens=20) if path == CHAT else completion_body(max_tokens=20)
    assert check_error(http.post(path, json=whole), status, refusal.message)["code"] == code
    with http.stream("POST", path, json={**whole, "stream": True}) as response:
        assert response.status_code == 200
        *rest, last = events(response)
    assert json.loads(last)["error"]["code"] == code
    assert json.loads(last)["error"]["message"] == refusal.message
    assert "[DONE]" not in rest


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_before_the_engine_has_answered_aborts_its_request(
    served: Served, http: httpx.Client, streamed: bool
) -> None:
    served.engine.answer_s = 30.0
    data = json.dumps(chat_body(n=2, stream=streamed)).encode()
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        deadline = time.monotonic() + 5
        while not served.engine.live and time.monotonic() < deadline:
            time.sleep(0.005)
        assert served.engine.live
    assert served.idle(1.0)
    served.engine.reset()
    check_serving(http)


@pytest.mark.parametrize("streamed", [False, True])
def test_an_engine_that_dies_before_it_has_answered_is_a_503(served: Served, streamed: bool) -> None:
    served.engine.answer_s = 30.0
    answers: list[httpx.Response] = []
    reader = threading.Thread(
        target=lambda: answers.append(httpx.post(served.url + CHAT, json=chat_body(stream=streamed), timeout=20))
    )
    reader.start()
    while not served.engine.live:
        time.sleep(0.005)
    served.on_loop(lambda: served.engine.die("the engine process ended with signal 9"))
    reader.join(5)
    assert check_error(answers[0], 503, "signal 9")["code"] == "engine_dead"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_server_that_shuts_down_before_the_engine_has_answered_says_so(served: Served, streamed: bool) -> None:
    served.engine.answer_s = 30.0
    answers: list[httpx.Response] = []
    reader = threading.Thread(
        target=lambda: answers.append(httpx.post(served.url + CHAT, json=chat_body(stream=streamed), timeout=20))
    )
    reader.start()
    while not served.engine.live:
        time.sleep(0.005)
    served.on_loop(lambda: served.app.state.ropeway.cancel_all(Draining("the server shuts down")))
    reader.join(5)
    assert check_error(answers[0], 503, "shuts down")["code"] == "draining"
