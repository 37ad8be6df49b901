"""Start, death and the end of a server's processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import openai
import psutil
import pytest

from tests.e2e.test_serving import complete, ids
from tests.support.chat_model import tiny_chat_model
from tests.support.server_process import ServerProcess


def stream(server: ServerProcess, max_tokens: int, into: list[str]) -> None:
    """Read a stream to its end; the events go into ``into``."""
    body = {"model": "tiny", "prompt": ids(1, 10), "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        into.extend(line for line in response.iter_lines() if line)


@pytest.mark.report("vllm-project/vllm#34730")
@pytest.mark.report("vllm-project/vllm#24885")
def test_sigterm_lets_running_requests_finish_and_refuses_new_ones() -> None:
    with ServerProcess(tiny_chat_model()) as server:
        events: list[str] = []
        reader = threading.Thread(target=stream, args=(server, 1500, events))
        reader.start()
        server.until("ropeway_num_requests_running", 1)
        server.terminate()
        time.sleep(0.1)
        refused = httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": [5]})
        assert refused.status_code == 503
        assert not server.ready()
        reader.join()
        assert events[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in events[-2]
        assert server.process.wait(20) == 0
        with socket.create_server(("127.0.0.1", server.port)):
            pass


@pytest.mark.report("vllm-project/vllm#39863")
@pytest.mark.report("vllm-project/vllm#7633")
@pytest.mark.report("vllm-project/vllm#52852")
def test_a_killed_engine_process_is_told_to_every_reader_and_by_health() -> None:
    with ServerProcess(tiny_chat_model(), "--engine-restarts", "0") as server:
        events: list[list[str]] = [[], [], []]
        readers = [threading.Thread(target=stream, args=(server, 1900, each)) for each in events]
        for reader in readers:
            reader.start()
        server.until("ropeway_num_requests_running", 3)
        (engine,) = server.children()
        engine.kill()
        for reader in readers:
            reader.join(5)
            assert not reader.is_alive(), "a stream hangs"
        assert all(any('"error"' in line for line in each) for each in events)
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503
        with server.client() as client, pytest.raises(openai.InternalServerError) as refused:
            complete(client, [5], max_tokens=1)
        assert refused.value.status_code == 503
        assert server.process.wait(5) == 1  # whoever started it may start it again


@pytest.mark.report("vllm-project/vllm#55510")
@pytest.mark.report("vllm-project/vllm#43060")
def test_the_engine_process_ends_with_its_parent() -> None:
    with ServerProcess(tiny_chat_model()) as server:
        (engine,) = server.children()
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        assert psutil.wait_procs([engine], timeout=8)[1] == []


def refusal(*arguments: str) -> tuple[int, str, float]:
    """(exit code, last line of standard error, seconds) of a ``ropeway`` command."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "ropeway", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    lines = done.stderr.strip().splitlines()
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, lines[-1] if lines else "", time.monotonic() - began


@pytest.mark.report("NovaSky-AI/SkyRL#284")
def test_port_in_use_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, line, seconds = refusal("serve", str(tiny_chat_model()), "--port", port)
    assert code == 1
    assert port in line
    assert seconds < 5


@pytest.mark.report("vllm-project/vllm#17618")
def test_unknown_model_is_told_in_the_last_line() -> None:
    code, line, _ = refusal("serve", "/no/such/model", "--port", "0")
    assert code == 1
    assert "/no/such/model" in line


def test_no_memory_for_the_pool_is_told_with_what_would_fit() -> None:
    code, line, _ = refusal("serve", str(tiny_chat_model()), "--port", "0", "--kv-blocks", "2000000000")
    assert code == 1
    assert "2000000000" in line
    assert "--kv-blocks" in line
