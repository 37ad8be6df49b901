"""The dashboard's page and figures, and who may see them; in a real browser where one is installed."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from ropeway.cli.top_view import quantile
from tests.server.asking import CHAT, chat_body, check_error, stream
from tests.server.test_api_keys import header, write
from tests.support.scripted_engine import ScriptedEngine, scripted_tokenizer
from tests.support.served import Served, serving

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


def test_the_page_asks_for_nothing_from_elsewhere(http: httpx.Client) -> None:
    page = http.get("/dashboard")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    parts = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert "/dashboard/app.js" in parts
    for part in parts:
        if part.startswith("data:"):
            continue
        assert part.startswith("/dashboard/")
        assert http.get(part).status_code == 200
    text = page.text + http.get("/dashboard/app.js").text + http.get("/dashboard/style.css").text
    assert not re.search(r"https?://", text)
    check_error(http.get("/dashboard/routes.py"), 404, "there is no")
    check_error(http.get("/dashboard/..%2fapp.py"), 404, "there is no")


def test_figures_are_those_of_the_engine(served: Served, http: httpx.Client) -> None:
    before = http.get("/dashboard/now").json()
    stream(http, CHAT, chat_body())
    now = http.get("/dashboard/now").json()
    assert now["tokens"]["generation"] == before["tokens"]["generation"] + 5
    assert now["latencies"]["ttft"][-1][1] == before["latencies"]["ttft"][-1][1] + 1
    assert now["blocks"].startswith("231000")
    assert now["queue"][0]["waits_s"] == 1.5
    assert now["tiers"] == ["interactive", "standard", "batch"]
    assert now["requests"][0]["ended"]
    assert now["failure"] is None
    assert "Hi" not in str(now["requests"])


def test_how_long_it_is_up_does_not_jump_with_the_walls_clock(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = http.get("/dashboard/now").json()
    wall = time.time
    for jump_s in (-3600.0, 86400.0):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: wall() + jump_s)
        now = http.get("/dashboard/now").json()
        assert abs(now["now_s"] - before["now_s"] - jump_s) < 60
        assert 0 < now["up_s"] - before["up_s"] < 60


def test_a_dead_engine_is_shown_as_one(http: httpx.Client, served: Served) -> None:
    served.engine.failure = "it broke"
    now = http.get("/dashboard/now").json()
    assert now["failure"] == "it broke"
    assert now["seats"] == []


def test_a_timeline_is_recorded_for_a_while(http: httpx.Client) -> None:
    assert http.get("/dashboard/timeline", params={"seconds": 0.1}).json() == {}
    for wrong in ("0", "-1", "99", "nan", "x"):
        check_error(http.get("/dashboard/timeline", params={"seconds": wrong}), 400, "seconds", param="seconds")


def test_one_trace_is_recorded_at_a_time(http: httpx.Client) -> None:
    with ThreadPoolExecutor(2) as pool:
        codes = list(pool.map(lambda _: http.get("/dashboard/timeline", params={"seconds": 0.5}).status_code, range(2)))
    assert sorted(codes) == [200, 409]


def test_only_admins_see_everybodys_requests(tmp_path: Path) -> None:
    file = write(tmp_path / "keys.toml")
    with serving(ScriptedEngine(tokenizer=scripted_tokenizer()), api_keys=str(file)) as served:
        assert httpx.get(f"{served.url}/dashboard").status_code == 200
        check_error(httpx.get(f"{served.url}/dashboard/now"), 401, "API key")
        check_error(httpx.get(f"{served.url}/dashboard/now", headers=header("alice")), 403, "admin")
        check_error(httpx.get(f"{served.url}/dashboard/timeline", headers=header("alice")), 403, "admin")
        assert httpx.get(f"{served.url}/dashboard/now", headers=header("root")).status_code == 200
        answer = httpx.post(served.url + CHAT, json=chat_body(), headers=header("alice"), timeout=20).json()
        story = f"{served.url}/dashboard/requests/{answer['id']}"
        assert httpx.get(story, headers=header("root")).json()["id"] == answer["id"]
        check_error(httpx.get(story, headers=header("alice")), 403, "admin")


def test_quantiles_between_two_looks() -> None:
    before: list[tuple[float | None, float]] = [(1.0, 5), (2.0, 5), (None, 5)]
    now: list[tuple[float | None, float]] = [(1.0, 5), (2.0, 15), (None, 15)]
    assert quantile(now, before, 0.5) == pytest.approx(1.5)
    assert quantile(before, before, 0.5) is None
    assert quantile([(1.0, 0), (None, 4)], [(1.0, 0), (None, 0)], 0.5) == 1.0


@pytest.fixture(scope="module")
def page_url() -> Iterator[str]:
    with serving(ScriptedEngine(tokenizer=scripted_tokenizer())) as served:
        served.engine.delay_s = 0.02
        yield served.url


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_the_page_works_in_a_browser(page_url: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    problems: list[str] = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1600})
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
        page.on("request", lambda asked: None if asked.url.startswith(page_url) else problems.append(asked.url))
        page.goto(f"{page_url}/dashboard")
        page.locator("#status", has_text="serving").wait_for()
        page.fill("#say", "Hello")
        page.press("#say", "Enter")
        page.locator("#talk p.assistant", has_text="two three").wait_for()
        page.wait_for_selector("#requests tbody tr")
        page.click("#requests tbody tr")
        page.wait_for_selector("#story dl")
        assert "decode" in page.inner_text("#story")
        page.click("#record")
        page.locator("#timeline-note", has_text="nothing ran").wait_for()
        assert not page.locator("#key-form").is_visible()
        points = "document.getElementById('c-load').calcdata[0].length"
        drawn = page.evaluate(points)
        page.wait_for_timeout(2500)
        assert page.evaluate(points) > drawn, "the charts stand still"
        assert page.locator("#queue tbody tr").count() == 1
        browser.close()
    assert not [problem for problem in problems if "favicon" not in problem]
