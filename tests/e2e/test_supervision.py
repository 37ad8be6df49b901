"""A dead engine is started again; TLS, CORS, slow bodies and slow readers, on a real server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from cryptography import x509

from tests.support.certificates import make_certificate
from tests.support.chat_model import tiny_chat_model
from tests.support.server_process import ServerProcess

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": HI, "max_tokens": 5, "ignore_eos": True, **fields}


def engine_of(server: ServerProcess) -> psutil.Process:
    (engine,) = [child for child in server.children() if "ropeway.engine.child" in " ".join(child.cmdline())]
    return engine


def until_serving(server: ServerProcess, within_s: float = 60.0) -> float:
    """Seconds until a request is answered again."""
    began = time.monotonic()
    while time.monotonic() - began < within_s:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.post(server.url + CHAT, json=body(), timeout=10).status_code == 200:
                return time.monotonic() - began
        time.sleep(0.1)
    raise AssertionError(f"not serving after {within_s} s:\n{server.log()}")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    flags = ("--cors-origins", "https://a.example", "--body-timeout-s", "4", "--read-timeout-s", "1")
    with ServerProcess(tiny_chat_model(), *flags) as server:
        yield server


def test_a_killed_engine_is_started_again_and_its_requests_end_with_an_error(server: ServerProcess) -> None:
    before = server.metric("ropeway_engine_restarts_total")
    errors: list[dict[str, Any]] = []

    def stream() -> None:
        with httpx.stream("POST", server.url + CHAT, json=body(max_tokens=1900, stream=True), timeout=60) as response:
            lines = [line for line in response.iter_lines() if line]
        errors.append(json.loads(lines[-1].removeprefix("data: ")))

    threads = [threading.Thread(target=stream) for _ in range(3)]
    for thread in threads:
        thread.start()
    server.until("ropeway_num_requests_running", 3)
    os.kill(engine_of(server).pid, signal.SIGKILL)
    for thread in threads:
        thread.join(10)
    assert [error["error"]["code"] for error in errors] == ["engine_dead"] * 3
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 503
    assert "being started again" in health.text
    refused = httpx.post(server.url + CHAT, json=body())
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    until_serving(server)
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.metric("ropeway_engine_restarts_total") == before + 1
    assert server.metric('ropeway_kv_blocks{state="live"}') == 0


@pytest.mark.report("vllm-project/vllm#36451")
@pytest.mark.report("openvinotoolkit/model_server#4503")
def test_an_engine_that_hangs_is_no_healthy_one_and_is_started_again(server: ServerProcess) -> None:
    before = server.metric("ropeway_engine_restarts_total")
    hung = engine_of(server)
    hung.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while httpx.get(f"{server.url}/health").status_code == 200:
        assert time.monotonic() < deadline, "health says that all is well"
        time.sleep(0.1)
    until_serving(server)
    assert server.metric("ropeway_engine_restarts_total") == before + 1
    assert not hung.is_running()


@pytest.mark.report("sgl-project/sglang#22779")
def test_a_server_that_was_killed_can_be_started_again_on_its_port() -> None:
    with ServerProcess(tiny_chat_model()) as first:
        first.process.kill()
        first.process.wait()
        with ServerProcess(tiny_chat_model(), "--port", str(first.port)) as second:
            for _ in range(150):
                assert httpx.post(f"{first.url}{CHAT}", json=body(), timeout=10).status_code == 200
            assert second.process.poll() is None


@pytest.mark.report("vllm-project/vllm#10635")
@pytest.mark.report("vllm-project/vllm#24910")
def test_a_body_that_takes_long_to_tokenize_keeps_nobody_waiting(server: ServerProcess) -> None:
    text = "The line keeps moving; naïve café, 42 of 100. " * 60_000  # 2.8 MB
    answers: list[int] = []
    sending = [
        threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{server.url}/tokenize", json={"prompt": text}, timeout=120).status_code
            )
        )
        for _ in range(2)
    ]
    for thread in sending:
        thread.start()
    slowest = 0.0
    while any(thread.is_alive() for thread in sending):
        began = time.monotonic()
        assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
        slowest = max(slowest, time.monotonic() - began)
    assert answers == [200, 200]
    assert slowest < 1.0, f"health took {slowest:.2f} s"


@pytest.mark.report("mzau/mlx-knife#73")
def test_a_stream_takes_no_longer_than_the_whole_answer(server: ServerProcess) -> None:
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(5):
        for streamed in (True, False):
            began = time.monotonic()
            with httpx.stream(
                "POST", server.url + CHAT, json=body(max_tokens=300, stream=streamed), timeout=60
            ) as answer:
                answer.read()
            times[streamed].append(time.monotonic() - began)
    assert min(times[True]) < 2 * min(times[False])


def test_an_engine_with_ranks_is_started_again_with_them() -> None:
    with ServerProcess(tiny_chat_model(), "--tensor-parallel-size", "2", "--threads", "1") as server:
        (rank, *_) = [child for child in server.children() if "follower" in " ".join(child.cmdline())]
        rank.kill()
        until_serving(server)
        assert server.metric("ropeway_engine_restarts_total") == 1


def test_an_engine_that_dies_again_and_again_ends_the_server() -> None:
    with ServerProcess(tiny_chat_model(), "--engine-restarts", "1") as server:
        os.kill(engine_of(server).pid, signal.SIGKILL)
        until_serving(server)
        os.kill(engine_of(server).pid, signal.SIGKILL)
        assert server.process.wait(30) == 1
        assert "the engine is dead" in server.log()


def test_only_named_origins_may_ask_from_a_browser(server: ServerProcess) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allowed = httpx.options(server.url + CHAT, headers={"origin": "https://a.example", **asked})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    other = httpx.options(server.url + CHAT, headers={"origin": "https://b.example", **asked})
    assert "access-control-allow-origin" not in other.headers
    plain = httpx.post(server.url + CHAT, json=body(), headers={"origin": "https://a.example"})
    assert plain.headers["access-control-allow-origin"] == "https://a.example"


def test_a_body_that_does_not_come_is_given_up(server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        connection.settimeout(10)
        answer = b""
        while b"}}" not in answer and (more := connection.recv(65536)):
            answer += more
    assert b" 408 " in answer.split(b"\r\n")[0]
    assert b"body_timeout_s" in answer


def test_a_head_that_does_not_come_is_given_up(server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
        answer = b""
        while more := connection.recv(65536):
            answer += more
    assert b" 408 " in answer.split(b"\r\n")[0]
    assert b"body_timeout_s" in answer


def test_a_client_that_reads_nothing_is_given_up(server: ServerProcess) -> None:
    """Its connection stays open and full: the request is cancelled, and its blocks come back."""
    data = json.dumps(body(max_tokens=1900, n=4, stream=True, logprobs=True, top_logprobs=20)).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        server.until("ropeway_num_requests_running", 4)
        server.until("ropeway_num_requests_running", 0, within_s=30)
        deadline = time.monotonic() + 20
        while "a stream is given up" not in server.log():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    server.until('ropeway_kv_blocks{state="live"}', 0)


def name_of(port: int) -> str:
    """Of the certificate that a server shows."""
    shown = ssl.get_server_certificate(("127.0.0.1", port))
    return str(x509.load_pem_x509_certificate(shown.encode()).subject.rfc4514_string())


def test_https_with_a_certificate_that_changes(tmp_path: Path) -> None:
    chain, key = make_certificate(tmp_path, "first")
    with ServerProcess(tiny_chat_model(), "--tls-cert", str(chain), "--tls-key", str(key)) as server:
        url = f"https://127.0.0.1:{server.port}"
        answer = httpx.post(url + CHAT, json=body(), verify=False, timeout=30)
        assert answer.status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/health")
        assert name_of(server.port) == "CN=first"
        make_certificate(tmp_path, "second")
        deadline = time.monotonic() + 20
        while name_of(server.port) != "CN=second":
            assert time.monotonic() < deadline
            time.sleep(0.3)
        (tmp_path / "other").mkdir()
        other, other_key = make_certificate(tmp_path / "other", "third")
        chain.write_bytes(other.read_bytes())  # its key comes later
        time.sleep(3)
        assert name_of(server.port) == "CN=second"  # the last good pair stays
        key.write_bytes(other_key.read_bytes())
        deadline = time.monotonic() + 20
        while name_of(server.port) != "CN=third":
            assert time.monotonic() < deadline
            time.sleep(0.3)


def test_a_certificate_that_is_none_is_named_at_start(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("nonsense")
    server = ServerProcess(tiny_chat_model(), "--tls-cert", str(tmp_path / "cert.pem")).start()
    assert server.process.wait(60) != 0
    assert "cert.pem" in server.log()
    server.end()
