"""Where a request's time went: /v1/requests/{id} and Server-Timing."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from ropeway.outcome import Refusal
from ropeway.server.explaining import MOST_ENDED, Record, Records
from tests.server.asking import CHAT, COMPLETIONS, chat_body, check_error, completion_body, stream
from tests.support.scripted_engine import ScriptedEngine
from tests.support.served import Served, serving

PARTS = ("queued", "prefill", "decode", "preempted", "swapped", "delivery")


def explained(http: httpx.Client, name: str) -> dict[str, Any]:
    response = http.get(f"/v1/requests/{name}")
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    for each in (body, *body["choices"]):
        assert list(each["parts"]) == [f"{part}_s" for part in PARTS]
        assert all(seconds >= 0 for seconds in each["parts"].values())
        assert sum(each["parts"].values()) == pytest.approx(each["e2e_s"], rel=0.01, abs=1e-6)
    return body


def timing(response: httpx.Response) -> dict[str, float]:
    """Milliseconds by name, of a header in the standard's form."""
    header = response.headers["server-timing"]
    assert re.fullmatch(r"[a-z]+;dur=[0-9.]+(, [a-z]+;dur=[0-9.]+)*", header), header
    return {name: float(ms) for name, ms in re.findall(r"([a-z]+);dur=([0-9.]+)", header)}


def slow(served: Served) -> None:
    """0.5 s and more: 0.1 to be taken, 0.1 in the queue, 0.1 for the prompt, 0.05 a token."""
    served.engine.answer_s = served.engine.queue_s = served.engine.first_delay_s = 0.1
    served.engine.delay_s = 0.05


def agree(ask: Callable[[], tuple[float, float]]) -> None:
    """Whether the two times that ``ask`` gives, the server's and the client's, come within 1 % of each other. Client
    and server take turns in this process, and others on this machine, so it may take a few tries."""
    tries = []
    for _ in range(5):
        tries.append(ask())
        if tries[-1][0] == pytest.approx(tries[-1][1], rel=0.01):
            return
    raise AssertionError(tries)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("streamed", [False, True])
def test_the_parts_sum_to_the_end_to_end_time_of_the_client_within_one_percent(
    served: Served, http: httpx.Client, path: str, streamed: bool
) -> None:
    slow(served)
    body = chat_body(max_tokens=9) if path == CHAT else completion_body(max_tokens=9)

    def ask() -> tuple[float, float]:
        http.get("/health")  # the connection is there
        begin = time.monotonic()
        name = stream(http, path, body)[0]["id"] if streamed else http.post(path, json=body).json()["id"]
        wall_s = time.monotonic() - begin
        parts = explained(http, name)["parts"]
        assert parts["queued_s"] == pytest.approx(0.2, abs=0.08)
        assert parts["prefill_s"] == pytest.approx(0.1, abs=0.08)
        assert parts["decode_s"] == pytest.approx(0.4, abs=0.2)
        return sum(parts.values()), wall_s

    agree(ask)


def test_an_explanation_has_ids_tier_phase_waits_preemptions_and_tokens(served: Served, http: httpx.Client) -> None:
    served.engine.cached_tokens, served.engine.preempted = 16, {"swap": 2, "recompute": 1}
    served.engine.queue_s = 0.05
    response = http.post(CHAT, json=chat_body(priority="batch", max_tokens=7), headers={"X-Request-Id": "mine-1"})
    usage = response.json()["usage"]
    told = explained(http, response.json()["id"])
    assert told["object"] == "request"
    assert told["id"] == response.json()["id"]
    assert told["request_id"] == "mine-1"
    assert told["created"] == pytest.approx(response.json()["created"], abs=2)
    assert (told["tier"], told["phase"], told["error"]) == ("batch", "finished", None)
    assert (told["prompt_tokens"], told["output_tokens"], told["cached_tokens"]) == (usage["prompt_tokens"], 7, 16)
    assert told["preemptions"] == {"swap": 2, "recompute": 1}
    assert told["waits_s"]["slots"] == pytest.approx(told["parts"]["queued_s"])
    (choice,) = told["choices"]
    assert (choice["index"], choice["finish_reason"], choice["output_tokens"]) == (0, "length", 7)


def test_each_of_n_choices_and_of_several_prompts_is_explained(served: Served, http: httpx.Client) -> None:
    served.engine.delay_s, served.engine.preempted = 0.01, {"swap": 1}
    body = completion_body(prompt=["a", "b c"], n=2, max_tokens=500)
    answer = http.post(COMPLETIONS, json=body).json()
    told = explained(http, answer["id"])
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2, 3]
    assert sum(choice["output_tokens"] for choice in told["choices"]) == told["output_tokens"]
    assert told["output_tokens"] == answer["usage"]["completion_tokens"]
    assert told["preemptions"] == {"swap": 4}
    longest = max(told["choices"], key=lambda choice: choice["e2e_s"])
    assert told["parts"]["decode_s"] == longest["parts"]["decode_s"]
    assert len({choice["e2e_s"] for choice in told["choices"]}) > 1


@pytest.mark.parametrize(
    ("attributes", "phase", "part"),
    [({"queue_s": 30.0}, "queued", "queued_s"), ({"first_delay_s": 30.0}, "prefill", "prefill_s"),
     ({"delay_s": 30.0}, "decode", "decode_s")],
)  # fmt: skip
def test_a_request_under_way_is_explained_by_the_engine(
    served: Served, http: httpx.Client, attributes: dict[str, float], phase: str, part: str
) -> None:
    for name, value in attributes.items():
        setattr(served.engine, name, value)
    body = chat_body(stream=True, max_tokens=50)
    with httpx.Client(base_url=served.url) as other:  # noqa: SIM117
        with other.stream("POST", CHAT, json=body, headers={"X-Request-Id": "under-way"}):
            time.sleep(0.1)
            first = explained(http, "under-way")
            time.sleep(0.1)
            second = explained(http, "under-way")
    assert first["phase"] == second["phase"] == phase
    assert second["parts"][part] >= first["parts"][part] + 0.09
    assert (second["error"], second["choices"][0]["finish_reason"]) == (None, None)
    assert served.idle(1.0)
    after = explained(http, "under-way")
    assert (after["phase"], after["error"]) == ("finished", "client_closed_request")
    assert after["choices"][0]["finish_reason"] in (None, "abort")


def test_an_engine_that_does_not_say_leaves_the_phase_unknown(served: Served, http: httpx.Client) -> None:
    served.engine.explains, served.engine.queue_s = False, 30.0
    with httpx.Client(base_url=served.url) as other:  # noqa: SIM117
        with other.stream("POST", CHAT, json=chat_body(stream=True), headers={"X-Request-Id": "silent"}):
            told = explained(http, "silent")
    assert told["phase"] == "unknown"
    assert told["parts"]["delivery_s"] == told["e2e_s"]


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_that_a_stop_string_ended_is_explained_up_to_its_end(
    served: Served, http: httpx.Client, streamed: bool
) -> None:
    served.engine.delay_s, served.engine.told_s = 0.02, 0.03
    body = chat_body(stop="hello", max_tokens=300, stream=streamed)
    begin = time.monotonic()
    response = http.post(CHAT, json=body, headers={"X-Request-Id": "stopped"})
    wall_s = time.monotonic() - begin
    told = explained(http, "stopped")
    assert told["choices"][0]["finish_reason"] == "stop"
    assert told["phase"] == "finished"
    assert told["e2e_s"] == pytest.approx(wall_s, abs=0.05)
    assert told["parts"]["delivery_s"] < 0.02
    assert ("decode" in timing(response)) != streamed


def test_an_answer_does_not_wait_long_for_its_explanation(served: Served, http: httpx.Client) -> None:
    served.engine.told_s = 0.5
    begin = time.monotonic()
    response = http.post(CHAT, json=chat_body(stop="hello", max_tokens=300))
    assert time.monotonic() - begin < 0.3
    assert "server-timing" not in response.headers
    assert explained(http, response.json()["id"])["phase"] == "finished"


def test_a_whole_answer_has_all_parts_in_its_header(served: Served, http: httpx.Client) -> None:
    slow(served)
    for path, body in ((CHAT, chat_body(max_tokens=9)), (COMPLETIONS, completion_body(max_tokens=9, n=2))):

        def ask(path: str = path, body: dict[str, Any] = body) -> tuple[float, float]:
            begin = time.monotonic()
            response = http.post(path, json=body)
            wall_s = time.monotonic() - begin
            parts = timing(response)
            assert tuple(parts) == PARTS
            told = explained(http, response.json()["id"])
            assert parts["decode"] == pytest.approx(told["parts"]["decode_s"] * 1000, abs=0.01)
            return sum(parts.values()) / 1000, wall_s

        agree(ask)


def test_a_streams_header_has_what_is_known_when_it_begins(served: Served, http: httpx.Client) -> None:
    slow(served)
    with http.stream("POST", CHAT, json=chat_body(stream=True)) as response:
        parts = timing(response)
        response.read()
    assert list(parts) == ["queued"]
    assert 100 <= parts["queued"] < 200


def test_what_was_refused_or_failed_is_explained_with_its_error(served: Served, http: httpx.Client) -> None:
    served.engine.refusal = Refusal("Shed", "too late")
    http.post(CHAT, json=chat_body(), headers={"X-Request-Id": "shed-1"})
    told = explained(http, "shed-1")
    assert (told["phase"], told["error"], told["output_tokens"]) == ("finished", "shed", 0)
    assert told["choices"][0]["finish_reason"] in (None, "error")
    served.engine.refusal = None
    served.engine.fail_after, served.engine.fail_with = 3, Refusal("DeadlineExceeded", "too long")
    http.post(CHAT, json=chat_body(max_tokens=20), headers={"X-Request-Id": "late-1"})
    told = explained(http, "late-1")
    assert (told["error"], told["output_tokens"], told["choices"][0]["finish_reason"]) == (
        "deadline_exceeded",
        3,
        "error",
    )


def test_of_two_requests_with_one_request_id_the_latest_is_explained(served: Served, http: httpx.Client) -> None:
    for count in (3, 5):
        http.post(CHAT, json=chat_body(max_tokens=count), headers={"X-Request-Id": "again"})
    assert explained(http, "again")["output_tokens"] == 5


@pytest.mark.parametrize("name", ["nothing", "chatcmpl-0", "a%2Fb", "%20", "x" * 500])
def test_an_unknown_request_is_a_404(http: httpx.Client, name: str) -> None:
    error = check_error(http.get(f"/v1/requests/{name}"), 404, str(MOST_ENDED), param="request_id")
    assert error["code"] == "request_not_found"


def test_an_invalid_request_is_not_remembered(http: httpx.Client) -> None:
    http.post(CHAT, json=chat_body(temperature=-1), headers={"X-Request-Id": "bad-1"})
    check_error(http.get("/v1/requests/bad-1"), 404, "bad-1")


def test_explanations_want_the_key_like_every_other_route() -> None:
    with serving(ScriptedEngine(), api_key="k") as served, httpx.Client(base_url=served.url) as http:
        headers = {"Authorization": "Bearer k"}
        answer = http.post(COMPLETIONS, json=completion_body(prompt=[5], model=None), headers=headers).json()
        check_error(http.get(f"/v1/requests/{answer['id']}"), 401, "API key")
        check_error(http.get("/v1/requests/unknown"), 401, "API key")
        assert http.get(f"/v1/requests/{answer['id']}", headers=headers).json()["id"] == answer["id"]


def test_many_requests_are_each_explained(served: Served, http: httpx.Client) -> None:
    def ask(limit: int) -> str:
        with httpx.Client(base_url=served.url, timeout=20) as other:
            return str(other.post(CHAT, json=chat_body(max_tokens=limit)).json()["id"])

    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(ask, range(1, 33)))
    assert [explained(http, name)["output_tokens"] for name in names] == list(range(1, 33))


def test_the_ended_are_forgotten_in_their_order_and_those_under_way_are_not() -> None:
    records = Records(most_ended=3)
    made = [Record(f"id-{place}", f"request-{place % 2}", "batch", 0.0) for place in range(10)]
    for record in made:
        records.add(record)
    assert len(records) == 10
    for record in made[1:]:
        records.end(record)
        records.end(record)
    assert [record.id for record in made if records.find(record.id)] == ["id-0", "id-7", "id-8", "id-9"]
    assert records.find("request-1") is made[9]
    assert records.find("request-0") is made[8]
    records.end(made[0])
    assert records.find("id-7") is None
    assert len(records) == 3
