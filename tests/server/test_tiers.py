"""Requests name their tier, their user and their deadline, by a field of the body or by a header."""

from __future__ import annotations

import time
from typing import Any

import httpx
import openai
import pytest

from ropeway.engine.client import RequestOptions
from tests.server.asking import CHAT, COMPLETIONS, HI, chat_body, check_error, check_serving, completion_body
from tests.server.conftest import MODEL
from tests.support.served import Served

NAMES = ("interactive", "standard", "batch")


def options(served: Served) -> RequestOptions:
    return served.engine.submitted[-1][2]


def ask(http: httpx.Client, path: str, *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = chat_body(**fields) if path == CHAT else completion_body(**fields)
    return http.post(path, json=body, headers=headers)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("priority", "rank"),
    [("interactive", 0), ("standard", 1), ("batch", 2), (None, 1), (0, 1), (-1, 0), (1, 2), (-99, 0), (10**30, 2)],
)
def test_a_request_names_its_tier_by_name_or_by_number(
    served: Served, http: httpx.Client, path: str, priority: object, rank: int
) -> None:
    assert ask(http, path, priority=priority).status_code == 200
    assert options(served).tier == rank


@pytest.mark.parametrize(
    ("header", "rank"), [("interactive", 0), ("batch", 2), ("0", 1), ("-1", 0), ("+1", 2), ("-" + "9" * 18, 0)]
)
def test_a_header_says_the_same(served: Served, http: httpx.Client, header: str, rank: int) -> None:
    for path in (CHAT, COMPLETIONS):
        assert ask(http, path, headers={"X-Ropeway-Tier": header}).status_code == 200
        assert options(served).tier == rank


def test_the_body_wins_over_the_header(served: Served, http: httpx.Client) -> None:
    headers = {"X-Ropeway-Tier": "batch", "X-Ropeway-Timeout": "3"}
    assert ask(http, CHAT, headers=headers, priority="interactive", timeout=30).status_code == 200
    given = options(served)
    assert given.tier == 0
    assert given.deadline_s is not None
    assert given.arrival_s is not None
    assert given.deadline_s - given.arrival_s == pytest.approx(30)
    assert ask(http, CHAT, headers={"X-Ropeway-Tier": "no such"}, priority=0).status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_unknown_tier_is_refused_naming_those_there_are(http: httpx.Client, path: str, streamed: bool) -> None:
    for unknown in ("urgent", "", "Batch"):
        check_error(ask(http, path, priority=unknown, stream=streamed), 400, repr(unknown), *NAMES, param="priority")
        response = ask(http, path, headers={"X-Ropeway-Tier": unknown}, stream=streamed)
        check_error(response, 400, "X-Ropeway-Tier", repr(unknown), *NAMES, param="X-Ropeway-Tier")
    check_serving(http)


@pytest.mark.parametrize("priority", [1.5, True, ["batch"], {"tier": 1}])
def test_a_priority_of_the_wrong_type_is_refused(http: httpx.Client, priority: object) -> None:
    for path in (CHAT, COMPLETIONS):
        check_error(ask(http, path, priority=priority), 400, param="priority")


def test_the_openai_client_names_a_tier_and_a_user(served: Served, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=HI,  # type: ignore[arg-type]
        user="anna",
        extra_body={"priority": "batch"},
    )
    assert (options(served).tier, options(served).tenant) == (2, "anna")
    with pytest.raises(openai.BadRequestError, match="interactive, standard, batch"):
        client.chat.completions.create(model=MODEL, messages=HI, extra_body={"priority": "no"})  # type: ignore[arg-type]


def test_a_user_is_a_tenant_and_has_a_longest_name(served: Served, http: httpx.Client) -> None:
    for path in (CHAT, COMPLETIONS):
        for user in ("", "anna", "grüße", "x" * 256):
            assert ask(http, path, user=user).status_code == 200
            assert options(served).tenant == user
        check_error(ask(http, path, user="x" * 257), 400, "257 characters", "256", param="user")
        for wrong in (5, True, ["anna"]):
            check_error(ask(http, path, user=wrong), 400, param="user")
        assert ask(http, path).status_code == 200
        assert options(served).tenant == ""


def test_a_timeout_is_a_deadline_counted_from_the_arrival(served: Served, http: httpx.Client) -> None:
    for headers, fields in (({}, {"timeout": 2.5}), ({"X-Ropeway-Timeout": "2.5"}, {}), ({}, {"timeout": 3})):
        before = time.monotonic()
        assert ask(http, CHAT, headers=headers, **fields).status_code == 200
        given = options(served)
        assert given.arrival_s is not None
        assert given.deadline_s is not None
        assert before < given.arrival_s < time.monotonic()
        assert given.deadline_s - given.arrival_s == pytest.approx(3 if fields.get("timeout") == 3 else 2.5)
    assert ask(http, CHAT, timeout=None).status_code == 200
    assert options(served).deadline_s is None


@pytest.mark.parametrize("timeout", [0, -1, 0.0, "5", True, [1]])
def test_a_timeout_that_is_no_positive_number_is_refused(http: httpx.Client, timeout: object) -> None:
    for path in (CHAT, COMPLETIONS):
        check_error(ask(http, path, timeout=timeout), 400, "timeout", param="timeout")


@pytest.mark.parametrize("header", ["0", "-1", "nan", "inf", "soon", "", "1e999", "1,5"])
def test_a_timeout_header_that_is_no_positive_number_is_refused(http: httpx.Client, header: str) -> None:
    response = ask(http, CHAT, headers={"X-Ropeway-Timeout": header})
    check_error(response, 400, "X-Ropeway-Timeout", param="X-Ropeway-Timeout")
    check_serving(http)
