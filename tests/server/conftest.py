"""One server over a scripted engine for the whole run; every test finds it healthy, idle and with the usual script."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.support.scripted_engine import ScriptedEngine, scripted_tokenizer
from tests.support.served import Served, serving

MODEL = "scripted"


@pytest.fixture(scope="session")
def _served() -> Iterator[Served]:
    with serving(ScriptedEngine(tokenizer=scripted_tokenizer())) as served:
        yield served


@pytest.fixture
def served(_served: Served) -> Iterator[Served]:
    _served.engine.reset()
    yield _served
    _served.engine.reset()
    assert _served.idle(), "the test left a request running"


@pytest.fixture(scope="session")
def _http(_served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=_served.url, timeout=20) as client:
        yield client


@pytest.fixture
def http(served: Served, _http: httpx.Client) -> httpx.Client:
    return _http


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client
