"""API keys."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from ropeway.server.auth import OPEN_PATHS
from tests.server.asking import check_error, completion_body
from tests.support.scripted_engine import ScriptedEngine
from tests.support.served import Served, serving

KEY = "s3cret-ключ"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Served]:
    with serving(ScriptedEngine(), api_key=KEY) as served:
        yield served


def _header(key: str) -> dict[bytes, bytes]:
    return {b"Authorization": b"Bearer " + key.encode()}


@pytest.mark.report("vllm-project/vllm#18893")
@pytest.mark.report("vllm-project/vllm#58144")
@pytest.mark.report("vllm-project/vllm#42591")
def test_every_route_but_health_wants_the_key(guarded: Served) -> None:
    with httpx.Client(base_url=guarded.url) as http:
        paths = [*http.get("/openapi.json", headers=_header(KEY)).json()["paths"], "/docs", "/openapi.json", "/nowhere"]
        assert "/v1/chat/completions" in paths
        for path in paths:
            for spelled in (path, "/" + path, path.upper(), path + "/"):
                for method in ("GET", "POST", "OPTIONS", "HEAD"):
                    response = http.request(method, guarded.url + spelled)
                    if spelled in OPEN_PATHS:
                        assert response.status_code != 401
                        continue
                    assert response.status_code == 401, (method, spelled)
                    assert response.headers["www-authenticate"] == "Bearer"
                    if method != "HEAD" and not path.startswith("/v1/messages"):
                        assert check_error(response, 401, "API key")["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer \xff\xfe"],
)
def test_a_missing_or_wrong_key_is_401(guarded: Served, header: str | None) -> None:
    headers = {} if header is None else {b"Authorization": header.encode()}
    check_error(httpx.post(f"{guarded.url}/v1/completions", json=completion_body(), headers=headers), 401, "API key")


def test_the_right_key_opens(guarded: Served) -> None:
    for scheme in (b"Bearer", b"bearer"):
        response = httpx.post(
            f"{guarded.url}/v1/completions",
            json=completion_body(prompt=[5], model=None),
            headers={b"Authorization": scheme + b" " + KEY.encode()},
        )
        assert response.status_code == 200
    assert httpx.get(f"{guarded.url}/metrics", headers=_header(KEY)).status_code == 200
    assert httpx.get(f"{guarded.url}/health").json() == {"status": "ok"}


def test_health_tells_details_to_those_with_the_key_only() -> None:
    warning = "there is no disk_cache: /srv/kv cannot be written"
    with serving(ScriptedEngine(warnings=[warning]), api_key=KEY) as served:
        for headers in ({}, _header("wrong")):
            assert httpx.get(f"{served.url}/health", headers=headers).json() == {"status": "ok"}
        told = httpx.get(f"{served.url}/health", headers=_header(KEY)).json()
        assert abs(told.pop("since") - time.time()) < 300
        assert told == {"status": "ok", "warnings": [warning]}


def test_the_openai_client_raises_an_authentication_error(guarded: Served) -> None:
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError):
        client.models.list()


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
def test_what_a_browser_sends_for_other_pages_is_refused_where_no_key_is_needed(served: Served, origin: str) -> None:
    """A page may send a text/plain request anywhere; reading the answer is not what it needs."""
    body = json.dumps(completion_body()).encode()
    headers = {"origin": origin, "content-type": "text/plain"}
    answer = httpx.post(f"{served.url}/v1/completions", content=body, headers=headers)
    assert check_error(answer, 403, origin, "--cors-origins")["code"] == "origin_not_allowed"
    assert not served.engine.submitted
    own = {"origin": served.url, "content-type": "text/plain"}
    assert httpx.post(f"{served.url}/v1/completions", content=body, headers=own).status_code == 200
    assert httpx.get(f"{served.url}/v1/models", headers=headers).status_code == 200
