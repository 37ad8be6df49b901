"""Spans for a collector of OpenTelemetry: what they tell, what they never tell, and collectors that are not there."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ropeway.config import Config
from ropeway.errors import ConfigError, Draining
from ropeway.outcome import Refusal
from ropeway.server.run import serve
from ropeway.server.spans import Spans
from ropeway.settings import resolve
from tests.server.asking import CHAT, COMPLETIONS, HI, chat_body, completion_body
from tests.server.conftest import MODEL
from tests.support.otlp_collector import Collector, Told
from tests.support.scripted_engine import SCRIPT, ScriptedEngine, scripted_tokenizer
from tests.support.served import Served, serving

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": HI, "max_tokens": 9},
    COMPLETIONS: {"model": MODEL, "prompt": "Hi", "max_tokens": 9},
    "/v1/responses": {"model": MODEL, "input": "Hi", "max_output_tokens": 9},
    "/v1/messages": {"model": MODEL, "messages": HI, "max_tokens": 9},
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds between two exports


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture
def served(collector: Collector) -> Iterator[Served]:
    engine = ScriptedEngine(tokenizer=scripted_tokenizer())
    with serving(engine, otlp_endpoint=collector.url) as served:
        yield served


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=20) as client:
        yield client


def only(collector: Collector) -> Told:
    (told,) = collector.requests(1)
    return told


def check_failed(told: Told, code: str, status: int) -> None:
    assert told.span.error == code
    assert told.span.attributes["error.type"] == code
    assert told.span.attributes["http.response.status_code"] == status


# --------------------------------------------------------------------------- what they tell


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_request_is_a_span_with_its_phases_within(
    served: Served, http: httpx.Client, collector: Collector, path: str, streamed: bool
) -> None:
    served.engine.queue_s, served.engine.first_delay_s, served.engine.delay_s = 0.1, 0.1, 0.01
    served.engine.cached_tokens = 1
    begin_s = time.time()
    body = {**BODIES[path], "temperature": 0.5, "top_p": 0.9, "stream": streamed}
    answer = http.post(path, json=body, headers={"X-Request-Id": "mine-1"})
    end_s = time.time()
    assert answer.status_code == 200, answer.text
    timing = http.get("/v1/requests/mine-1").json()
    told = only(collector)
    span, attributes = told.span, told.span.attributes
    operation = "text_completion" if path == COMPLETIONS else "chat"
    assert (span.name, span.parent_id, span.error) == (f"{operation} {MODEL}", "", None)
    assert begin_s - 0.01 < span.begin_s < span.end_s < end_s + 1
    parts = timing["parts"]
    expected = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "ropeway",
        "gen_ai.request.id": "mine-1",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.stream": streamed,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.response.id": timing["id"],
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": timing["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.latency.e2e": timing["e2e_s"],
        "gen_ai.latency.time_in_queue": parts["queued_s"],
        "gen_ai.latency.time_in_model_prefill": parts["prefill_s"],
        "gen_ai.latency.time_in_model_decode": parts["decode_s"],
        "gen_ai.latency.time_in_model_inference": parts["prefill_s"] + parts["decode_s"],
        "ropeway.tier": "standard",
        "ropeway.waits.slots": timing["waits_s"]["slots"],
        "http.request.method": "POST",
        "http.route": path,
        "http.response.status_code": 200,
    }
    ttft_s = attributes.pop("gen_ai.latency.time_to_first_token")
    assert attributes == expected
    assert parts["queued_s"] + parts["prefill_s"] <= ttft_s < timing["e2e_s"]
    assert [child.name for child in told.children] == ["queued", "prefill", "decode"]
    assert span.begin_s <= told.children[0].begin_s
    for child, after in zip(told.children, [*told.children[1:], None], strict=True):
        assert child.trace_id == span.trace_id
        assert not child.attributes
        assert child.end_s - child.begin_s == pytest.approx(parts[f"{child.name}_s"], abs=1e-4)
        assert after is None or child.end_s == after.begin_s
    assert told.children[-1].end_s <= span.end_s
    assert span.resource["service.name"] == "ropeway"


def test_all_choices_of_all_prompts_are_one_span(http: httpx.Client, collector: Collector) -> None:
    usage = http.post(COMPLETIONS, json=completion_body(prompt=["a", "b c"], n=2, max_tokens=500)).json()["usage"]
    attributes = only(collector).span.attributes
    assert attributes["gen_ai.request.choice.count"] == 2
    assert attributes["gen_ai.response.finish_reasons"] == ["stop"] * 4
    assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]


def test_preemptions_are_counted(served: Served, http: httpx.Client, collector: Collector) -> None:
    served.engine.preempted = {"swap": 2, "recompute": 1}
    http.post(CHAT, json=chat_body())
    attributes = only(collector).span.attributes
    assert (attributes["ropeway.preemptions.swap"], attributes["ropeway.preemptions.recompute"]) == (2, 1)


def test_a_span_continues_the_trace_of_the_client(http: httpx.Client, collector: Collector) -> None:
    http.post(CHAT, json=chat_body(), headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"})
    told = only(collector)
    assert (told.span.trace_id, told.span.parent_id) == (TRACE, PARENT)
    assert {child.trace_id for child in told.children} == {TRACE}


def test_what_the_client_does_not_sample_is_not_exported(http: httpx.Client, collector: Collector) -> None:
    assert http.post(CHAT, json=chat_body(), headers={"traceparent": f"00-{TRACE}-{PARENT}-00"}).status_code == 200
    http.post(CHAT, json=chat_body(), headers={"traceparent": f"00-{TRACE[::-1]}-{PARENT}-01"})
    assert only(collector).span.trace_id == TRACE[::-1]
    assert all(span.trace_id == TRACE[::-1] for span in collector.spans())


@pytest.mark.parametrize(
    "header", ["", "00-1-2-01", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01", "x" * 5000, "grüße 🚡"]
)
def test_a_traceparent_that_is_none_begins_a_trace(http: httpx.Client, collector: Collector, header: str) -> None:
    headers = {b"traceparent": header.encode(), b"tracestate": b"====,,,"}
    assert http.post(CHAT, json=chat_body(), headers=headers).status_code == 200
    span = only(collector).span
    assert span.parent_id == ""
    assert span.trace_id != TRACE


def test_the_environment_names_the_service(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chats")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    with serving(ScriptedEngine(tokenizer=scripted_tokenizer()), otlp_endpoint=f"{collector.url}/v1/traces") as served:
        httpx.post(served.url + CHAT, json=chat_body())
        resource = only(collector).span.resource
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("chats", "test")


def test_only_what_generates_and_has_come_past_the_keys_is_a_span(collector: Collector) -> None:
    engine = ScriptedEngine(tokenizer=scripted_tokenizer())
    with serving(engine, otlp_endpoint=collector.url, api_key="k") as served:
        with httpx.Client(base_url=served.url) as http:
            assert http.post(CHAT, json=chat_body()).status_code == 401
            http.headers["authorization"] = "Bearer k"
            for path in ("/health", "/v1/models", CHAT):
                http.get(path)
            http.post("/tokenize", json={"prompt": "Hi"})
            http.post("/v1/messages/count_tokens", json={"messages": HI})
            assert http.post(COMPLETIONS, json=completion_body()).status_code == 200
        assert only(collector).span.name == f"text_completion {MODEL}"


# --------------------------------------------------------------------------- what ends badly


@pytest.mark.parametrize(
    ("path", "fields", "code", "status", "name"),
    [
        (CHAT, {"messages": 7}, "invalid_request_error", 400, "chat"),
        (CHAT, {"temperature": -1}, "invalid_request_error", 400, "chat"),
        (CHAT, {"model": "another"}, "model_not_found", 404, "chat"),
        (CHAT, {"max_tokens": 5000}, "context_length_exceeded", 400, f"chat {MODEL}"),
        (CHAT, {"n": 13}, "queue_full", 429, f"chat {MODEL}"),
        (COMPLETIONS, {"prompt": []}, "invalid_request_error", 400, "text_completion"),
        ("/v1/responses", {"background": True}, "invalid_request_error", 400, "chat"),
        ("/v1/messages", {"max_tokens": 5000}, "context_length_exceeded", 400, f"chat {MODEL}"),
    ],
)
def test_a_refused_request_is_a_span_with_the_code_of_its_refusal(
    http: httpx.Client, collector: Collector, path: str, fields: dict[str, Any], code: str, status: int, name: str
) -> None:
    answer = http.post(path, json=BODIES[path] | fields)
    assert answer.status_code == status, answer.text
    told = only(collector)
    check_failed(told, code, status)
    assert (told.span.name, told.children) == (name, [])


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_that_the_engine_refuses_is_told_with_its_wait(
    served: Served, http: httpx.Client, collector: Collector, streamed: bool
) -> None:
    served.engine.refusal, served.engine.answer_s = Refusal("Shed", "too late", retry_after_s=3.0), 0.05
    assert http.post(CHAT, json=chat_body(stream=streamed)).status_code == 429
    told = only(collector)
    check_failed(told, "shed", 429)
    assert told.span.attributes["gen_ai.usage.output_tokens"] == 0
    assert "gen_ai.latency.time_to_first_token" not in told.span.attributes
    assert [child.name for child in told.children] == ["queued"]


def test_a_request_that_comes_while_the_server_drains_is_told(
    served: Served, http: httpx.Client, collector: Collector
) -> None:
    served.app.state.ropeway.door.closed = True
    http.post(CHAT, json=chat_body())
    check_failed(only(collector), "draining", 503)


def test_a_fault_of_the_server_is_told(
    served: Served, http: httpx.Client, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("a detail of ours")

    monkeypatch.setattr(served.engine, "submit", broken)
    http.post(CHAT, json=chat_body())
    check_failed(only(collector), "internal_error", 500)


def test_a_client_that_leaves_a_stream_is_told(served: Served, collector: Collector) -> None:
    served.engine.delay_s = 0.05
    with httpx.stream("POST", served.url + CHAT, json=chat_body(stream=True, max_tokens=500)) as response:
        next(response.iter_lines())
    told = only(collector)
    check_failed(told, "client_closed_request", 200)
    assert 0 < told.span.attributes["gen_ai.usage.output_tokens"] < 500
    assert [child.name for child in told.children] == ["queued", "prefill", "decode"]
    assert max(child.end_s for child in told.children) <= told.span.end_s


def test_a_client_that_does_not_wait_for_a_whole_answer_is_told(served: Served, collector: Collector) -> None:
    served.engine.first_delay_s = 30.0
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(served.url + CHAT, json=chat_body(), timeout=0.5)
    told = only(collector)
    check_failed(told, "client_closed_request", 499)
    assert [child.name for child in told.children] == ["queued", "prefill"]


def test_a_cancelled_request_is_told(served: Served, http: httpx.Client, collector: Collector) -> None:
    served.engine.delay_s = 0.05
    body, name = chat_body(stream=True, max_tokens=500), {"X-Request-Id": "mine-2"}
    with httpx.stream("POST", served.url + CHAT, json=body, headers=name) as response:
        http.delete("/v1/requests/mine-2")
        response.read()
    check_failed(only(collector), "cancelled", 200)


def test_a_request_that_the_end_of_the_server_cuts_off_is_told(
    served: Served, http: httpx.Client, collector: Collector
) -> None:
    served.engine.delay_s = 0.05
    with http.stream("POST", CHAT, json=chat_body(stream=True, max_tokens=500)) as response:
        served.on_loop(lambda: served.app.state.ropeway.cancel_all(Draining("the server shuts down")))
        response.read()
    check_failed(only(collector), "draining", 200)


def test_the_death_of_the_engine_is_told(served: Served, http: httpx.Client, collector: Collector) -> None:
    served.engine.delay_s = 0.05
    with http.stream("POST", CHAT, json=chat_body(stream=True, max_tokens=500)) as response:
        served.on_loop(lambda: served.engine.die("the engine process ended with signal 9"))
        response.read()
    check_failed(only(collector), "engine_dead", 200)
    http.post(CHAT, json=chat_body())
    check_failed(collector.requests(2)[1], "engine_dead", 503)


def test_a_client_that_reads_nothing_is_an_error_without_a_name(collector: Collector) -> None:
    engine = ScriptedEngine(tokenizer=scripted_tokenizer(), max_model_len=2**20)
    with serving(engine, otlp_endpoint=collector.url, read_timeout_s=0.3) as served:
        body = chat_body(stream=True, max_tokens=10**6, ignore_eos=True, logprobs=True, top_logprobs=20)
        data = json.dumps(body).encode()
        host, port = served.url.removeprefix("http://").split(":")
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.connect((host, int(port)))
            lazy.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
            (told,) = collector.requests(1, within_s=20)
    check_failed(told, "_OTHER", 200)


def test_an_end_that_the_engine_hears_of_later_is_accounted_for(
    served: Served, http: httpx.Client, collector: Collector
) -> None:
    served.engine.delay_s, served.engine.told_s = 0.01, 0.3
    http.post(CHAT, json=chat_body(stop="hello", max_tokens=300))
    told = only(collector)
    assert told.span.error is None
    assert told.span.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert [child.name for child in told.children] == ["queued", "prefill", "decode"]
    assert told.children[-1].end_s <= told.span.end_s + 0.01


def test_an_engine_that_does_not_say_leaves_the_phases_out(
    served: Served, http: httpx.Client, collector: Collector
) -> None:
    served.engine.told_s = 30.0
    http.post(CHAT, json=chat_body(stop="hello", max_tokens=300))
    told = only(collector)
    assert told.span.error is None
    assert not told.children
    assert "gen_ai.latency.e2e" in told.span.attributes
    assert "gen_ai.latency.time_in_queue" not in told.span.attributes


# --------------------------------------------------------------------------- what they never tell


def test_no_text_is_ever_exported(served: Served, http: httpx.Client, collector: Collector) -> None:
    tool = {"type": "function", "function": {"name": "secret_tool", "parameters": {}}}
    messages = [{"role": "system", "content": "secret rules"}, {"role": "user", "content": "a secret of mine"}]
    asked: list[tuple[str, dict[str, Any]]] = [
        (CHAT, chat_body(messages=messages, max_tokens=300)),
        (CHAT, chat_body(messages=messages, max_tokens=300, stream=True, stop="secret", user="secret user")),
        (CHAT, chat_body(messages=messages, tools=[tool])),
        (CHAT, chat_body(messages=messages, model="secret model")),
        (CHAT, chat_body(messages=messages, temperature="secret heat")),
        (CHAT, chat_body(messages=messages, response_format={"type": "secret form"})),
        (CHAT, chat_body(messages=[{"role": "secret role", "content": "secret"}])),
        (COMPLETIONS, completion_body(prompt="secret prompt", echo=True, max_tokens=300)),
        (COMPLETIONS, completion_body(prompt="secret prompt", priority="secret tier")),
        ("/v1/responses", {"input": "secret input", "instructions": "secret instructions"}),
        ("/v1/messages", {"model": MODEL, "messages": messages[1:], "system": "secret system", "max_tokens": 300}),
    ]
    texts = [http.post(path, json=body).text for path, body in asked]
    assert all("keeps moving" in texts[place] for place in (0, 7, 9, 10))
    assert sum("secret" in text for text in texts) > 3
    told = collector.requests(len(asked))
    assert sum(each.span.error is not None for each in told) > 3
    sent = b"".join(collector.bodies).lower()
    assert b"secret" not in sent
    for word in SCRIPT.split():
        assert len(word) < 5 or word.strip(";,.").lower().encode() not in sent


# --------------------------------------------------------------------------- collectors that are not there


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("ropeway.")]


def test_a_collector_that_refuses_is_told_of(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(tokenizer=scripted_tokenizer())
    with serving(engine, otlp_endpoint=f"{collector.url}/elsewhere") as served:
        httpx.post(served.url + CHAT, json=chat_body())
        deadline = time.monotonic() + 5
        while not complaints(caplog) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "404" in complaints(caplog)[0]


def test_a_span_that_cannot_be_made_is_told_of_once(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("a detail of ours")

    monkeypatch.setattr(served.app.state.ropeway.spans._tracer, "start_span", broken)
    for _ in range(3):
        assert http.post(CHAT, json=chat_body()).status_code == 200
    assert served.on_loop(lambda: True)
    (line,) = complaints(caplog)
    assert line.endswith("one could not be made: ZeroDivisionError")


def test_what_the_sdk_refuses_of_the_environment_is_an_error_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")  # fewer than go together
    with pytest.raises(ConfigError, match=r"OTEL_\.\.\.\) say: max_export_batch_size"):
        Spans("http://127.0.0.1:1")


def test_without_its_packages_the_setting_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def start(config: Config) -> ScriptedEngine:
        raise AssertionError("the engine was started")

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    config = resolve({"model": "x", "port": 0, "management_port": 0, "otlp_endpoint": "http://127.0.0.1:1"}, environ={})
    with pytest.raises(ConfigError, match=r"otlp_endpoint .* pip install 'ropeway\[otel\]'") as refused:
        asyncio.run(serve(config.config, start))
    assert refused.value.param == "otlp_endpoint"
