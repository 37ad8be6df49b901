"""A server process from start to end: ports, readiness, draining."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.asking import CHAT, chat_body, check_error, check_serving
from tests.support.otlp_collector import Collector
from tests.support.served import events

ROOT = Path(__file__).parents[2]


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    management: httpx.Client

    def wait(self, path: str, status: int, within_s: float = 15.0) -> httpx.Response:
        """The management listener's first answer with this status."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                response = self.management.get(path)
                if response.status_code == status:
                    return response
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)
        raise AssertionError(f"{path} did not become {status}")


def free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


@contextlib.contextmanager
def running(model: Path, attributes: dict[str, Any] | None = None, **flags: Any) -> Iterator[Server]:
    port, management = free_ports()
    flags = {"port": port, "management_port": management, "served_model_name": "scripted", **flags}
    arguments = [str(model), json.dumps(flags), json.dumps(attributes or {})]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.scripted_server", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{management}") as client:
            yield Server(process, f"http://127.0.0.1:{port}", client)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "top_p": 7}')
    return tmp_path


def _reader(server: Server, lines: list[str], **fields: Any) -> threading.Thread:
    """Reads a stream in a thread; returns once its first event has come."""
    begun = threading.Event()

    def read() -> None:
        with (
            httpx.Client(base_url=server.url, timeout=30) as http,
            http.stream("POST", CHAT, json=chat_body(stream=True, **fields)) as response,
        ):
            for each in events(response):
                lines.append(each)
                begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(10)
    return thread


def test_the_management_listener_is_healthy_and_not_ready_until_the_model_is_loaded(model: Path) -> None:
    with running(model, {"load_s": 2.0}) as server:
        check_error(server.wait("/ready", 503), 503, "being loaded")
        assert server.management.get("/health").json() == {"status": "loading"}
        check_error(server.management.get("/metrics"), 503)
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url + "/health")
        server.wait("/ready", 200)
        assert "ropeway_kv_blocks" in server.management.get("/metrics").text
        check_error(server.management.get("/v1/models"), 404)
        with httpx.Client(base_url=server.url) as http:
            check_serving(http)


@pytest.mark.report("vllm-project/vllm#15281")
def test_the_models_sampling_defaults_are_told_at_the_start(model: Path) -> None:
    with running(model) as server:
        server.wait("/ready", 200)
        server.process.send_signal(signal.SIGTERM)
        _, log = server.process.communicate(timeout=10)
    assert "temperature=0.6, top_k=20" in log
    assert "top_p is 7" in log
    assert server.url in log


@pytest.mark.report("vllm-project/vllm#34730")
@pytest.mark.report("vllm-project/vllm#36666")
@pytest.mark.report("sgl-project/sglang#1838")
def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(model: Path) -> None:
    with running(model, {"delay_s": 0.1}) as server:
        server.wait("/ready", 200)
        lines: list[str] = []
        thread = _reader(server, lines, max_tokens=20)
        with httpx.Client(base_url=server.url) as early:
            assert early.get("/health").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            check_error(server.wait("/ready", 503), 503, "shutting down")
            refused = early.post(CHAT, json=chat_body())
            assert check_error(refused, 503, "shutting down")["code"] == "draining"
            assert "retry-after" in refused.headers
            assert early.get("/health").status_code == 200
        thread.join(10)
        assert lines[-1] == "[DONE]"
        assert json.loads(lines[-2])["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(5) == 0
    with running(model, port=int(server.url.rsplit(":", 1)[1])) as again:
        again.wait("/ready", 200)


def test_what_does_not_finish_in_time_ends_with_an_error_event(model: Path) -> None:
    with running(model, {"delay_s": 0.2}, drain_timeout_s=0.5) as server:
        server.wait("/ready", 200)
        lines: list[str] = []
        thread = _reader(server, lines, max_tokens=900, ignore_eos=True)
        server.process.send_signal(signal.SIGTERM)
        thread.join(10)
        assert json.loads(lines[-1])["error"]["code"] == "draining"
        assert server.process.wait(5) == 0


def test_a_second_sigterm_ends_at_once(model: Path) -> None:
    with running(model, {"delay_s": 0.2}, drain_timeout_s=60) as server:
        server.wait("/ready", 200)
        lines: list[str] = []
        thread = _reader(server, lines, max_tokens=900, ignore_eos=True)
        server.process.send_signal(signal.SIGTERM)
        server.wait("/ready", 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(3) == 128 + signal.SIGTERM
        thread.join(10)
        assert "error" in json.loads(lines[-1])


def test_spans_that_wait_are_exported_at_the_end(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")  # milliseconds
    with Collector() as collector, running(model, otlp_endpoint=collector.url) as server:
        server.wait("/ready", 200)
        assert httpx.post(server.url + CHAT, json=chat_body()).status_code == 200
        assert not collector.bodies
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(8) == 0
        collector.requests(1)


def test_a_collector_that_never_answers_holds_up_neither_requests_nor_the_end(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        running(model, otlp_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}") as server,
        httpx.Client(base_url=server.url) as http,
    ):
        server.wait("/ready", 200)
        assert http.post(CHAT, json=chat_body()).status_code == 200
        silent.settimeout(5)
        exporting, _ = silent.accept()
        with exporting:
            begin_s = time.monotonic()
            for _ in range(50):
                assert http.post(CHAT, json=chat_body()).status_code == 200
            assert time.monotonic() - begin_s < 5
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(8) == 0  # an export may take ten seconds, and may be tried again


def test_a_collector_that_is_down_is_told_of_in_one_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with running(model, otlp_endpoint=f"http://me:mine@127.0.0.1:{port}") as server:
        server.wait("/ready", 200)
        with httpx.Client(base_url=server.url) as http:
            for _ in range(50):
                assert http.post(CHAT, json=chat_body()).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        _, log = server.process.communicate(timeout=8)
    assert server.process.returncode == 0
    told = [line for line in log.splitlines() if "span" in line or "opentelemetry" in line]
    assert len(told) == 1, log
    assert f"spans for 127.0.0.1:{port}: " in told[0]
    assert "mine" not in log
    assert "Traceback" not in log


def test_sigterm_while_the_model_is_loaded_ends_at_once(model: Path) -> None:
    with running(model, {"load_s": 60}) as server:
        server.wait("/ready", 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(3) == 0


@pytest.mark.report("NovaSky-AI/SkyRL#284")
@pytest.mark.parametrize("field", ["port", "management_port"])
def test_a_port_in_use_is_named_before_the_model_is_loaded(model: Path, field: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running(model, {"load_s": 60}, **{field: port}) as server:
            said, complaint = server.process.communicate(timeout=15)
    assert server.process.returncode == 1
    assert "loading" not in said
    last = complaint.strip().splitlines()[-1]
    assert str(port) in last
    assert f"--{field.replace('_', '-')}" in last


def test_a_host_that_is_not_of_this_machine_is_refused(model: Path) -> None:
    for host in ("no-such-host.invalid", "192.0.2.1"):
        with running(model, {"load_s": 60}, host=host) as server:
            said, complaint = server.process.communicate(timeout=15)
        assert server.process.returncode == 1
        assert "loading" not in said
        assert host in complaint.strip().splitlines()[-1]
