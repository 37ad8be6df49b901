"""Two hosts, that is network namespaces, whose cable is pulled: both go on, and hear nothing of each other."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from ropeway.bench.network import NoNetwork, TwoHosts
from tests.e2e.test_serving import ids
from tests.support.chat_model import tiny_chat_model
from tests.support.other_host import other_host
from tests.support.server_process import ServerProcess

FIELDS = {"nnodes": 2, "tensor_parallel_size": 2, "cluster_secret": "of both", "master_port": 29500}
"""In a network of their own, all ports are free."""
FLAGS = ("--nnodes", "2", "--tensor-parallel-size", "2", "--threads", "1", "--master-addr", TwoHosts.addresses[0])
LOST = "rank 1 has not been heard of"
# Some seconds of work.
LONG = {"model": "tiny", "prompt": ids(1, 10), "max_tokens": 1900, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoHosts]:
    """The test, and what it starts, is on the first."""
    monkeypatch.setenv("ROPEWAY_CLUSTER_SECRET", str(FIELDS["cluster_secret"]))
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(TwoHosts())
            stack.enter_context(hosts.first())
        except NoNetwork as error:
            pytest.skip(f"two networks cannot be made here: {error.message}")
        yield hosts


SLEEPER = """
import time

from ropeway.bench.network import TwoHosts

with TwoHosts() as hosts:
    print(*hosts.on_second([])[3:], flush=True)
    time.sleep(60)
"""


def test_two_hosts_are_taken_down_when_who_made_them_is_terminated(hosts: TwoHosts) -> None:
    """``hosts``: skips where there can be none."""
    sleeper = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True)
    assert sleeper.stdout is not None
    name = sleeper.stdout.readline().strip()
    assert (Path("/run/netns") / name).exists()
    sleeper.terminate()
    assert sleeper.wait(20) == 128 + signal.SIGTERM
    assert not (Path("/run/netns") / name).exists()


def set_link(hosts: TwoHosts, host: str, state: str) -> None:
    """``host``: first or second, whose end of the cable it is; ``state``: up or down."""
    command = ["ip", "link", "set", hosts.interfaces[host == "second"], state]
    subprocess.run(hosts.on_second(command) if host == "second" else command, check=True)


def started(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target)
    thread.start()
    return thread


def stream(server: ServerProcess, into: list[str], tokens: int = 1900) -> None:
    """The events of a long answer go into ``into``."""
    body = LONG | {"stream": True, "max_tokens": tokens}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        into.extend(line for line in response.iter_lines() if line)


def text_of(events: list[str]) -> str:
    """Raises ``KeyError`` for an error among them."""
    assert events[-1] == "data: [DONE]"
    return "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-1])


@pytest.mark.parametrize(("host", "collectives"), [("first", "tcp"), ("second", "gloo")])
def test_a_pulled_cable_is_an_error_for_clients_within_five_seconds_and_the_end_of_both_hosts(
    hosts: TwoHosts, host: str, collectives: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        other_host(FIELDS, hosts) as node,
        ServerProcess(tiny_chat_model(), *FLAGS, "--collectives", collectives) as server,
    ):
        events: list[list[str]] = [[], []]
        answers: list[httpx.Response] = []
        url = f"{server.url}/v1/completions"
        clients = [
            started(lambda: stream(server, events[0])),
            started(lambda: stream(server, events[1])),
            started(lambda: answers.append(httpx.post(url, json=LONG, timeout=60))),
        ]
        server.until("ropeway_num_requests_running", 3)
        engine, rank = *server.children(), *psutil.Process(node.pid).children()
        set_link(hosts, host, "down")
        cut_s = time.monotonic()
        for client in clients:
            client.join(max(cut_s + 5 - time.monotonic(), 0.0))
            assert not client.is_alive(), "a client hangs"
        assert all('"error"' in each[-1] and LOST in each[-1] for each in events)
        (answer,) = answers
        assert answer.status_code == 503
        assert LOST in answer.json()["error"]["message"]
        assert httpx.post(url, json=LONG).status_code == 503
        assert node.wait(5) == 1
        assert "rank 0 has not been heard of" in capfd.readouterr().err
        assert server.process.wait(8) == 1  # whoever started it may start it again
        assert not engine.is_running()
        assert not rank.is_running()


def test_a_cable_pulled_for_a_moment_costs_little_and_one_pulled_while_nothing_runs_is_the_end_of_both_hosts_too(
    hosts: TwoHosts,
) -> None:
    with other_host(FIELDS, hosts) as node, ServerProcess(tiny_chat_model(), *FLAGS) as server:
        undisturbed: list[str] = []
        stream(server, undisturbed, 900)
        events: list[str] = []
        client = started(lambda: stream(server, events, 900))
        server.until("ropeway_num_requests_running", 1)
        set_link(hosts, "second", "down")
        time.sleep(0.7)
        assert client.is_alive(), "the answer was complete before"
        set_link(hosts, "second", "up")
        client.join(30)
        assert not client.is_alive(), "the stream hangs"
        assert text_of(events) == text_of(undisturbed)

        set_link(hosts, "first", "down")
        assert node.wait(8) == 1
        assert server.process.wait(8) == 1
        assert LOST in server.log()
