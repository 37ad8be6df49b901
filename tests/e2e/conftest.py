"""One real server over a tiny model, shared by the tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.chat_model import tiny_chat_model
from tests.support.server_process import ServerProcess

LIVE = 'ropeway_kv_blocks{state="live"}'


@pytest.fixture(scope="session")
def _server() -> Iterator[ServerProcess]:
    with ServerProcess(tiny_chat_model(), "--max-num-seqs", "8", "--max-batched-tokens", "64") as server:
        yield server


@pytest.fixture
def server(_server: ServerProcess) -> Iterator[ServerProcess]:
    pids = [child.pid for child in _server.children()]
    yield _server
    _server.until(LIVE, 0)
    assert [child.pid for child in _server.children()] == pids, "the engine process was replaced"


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client
