"""The pictures of the dashboard and of ``ropeway top`` in docs/images, taken of a server with work to do.

python -m benchmarks.screens                       # the dashboard needs Chromium; without it only the terminal's
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import typer

from benchmarks.server import Server, running
from ropeway.cli.failures import told_plainly

IMAGES = Path(__file__).parents[1] / "docs" / "images"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_USERS = 14
_WARM_UP_S = 20.0
_TOPICS = ("cable cars", "mountains", "the sea", "old bridges", "bread", "trains", "the moon", "gardens")


@told_plainly
def _main() -> None:
    """Write docs/images/top.svg and docs/images/dashboard.png."""
    with running("smollm2-135m", "--max-num-seqs", "8", "--kv-memory", "0.05", "--max-model-len", "512") as server:
        stop = threading.Event()
        users = [threading.Thread(target=_user, args=(server, number, stop)) for number in range(_USERS)]
        for user in users:
            user.start()
        try:
            time.sleep(2.0)
            _terminal(server)
            _dashboard(server)
        finally:
            stop.set()
            for user in users:
                user.join()


def _user(server: Server, number: int, stop: threading.Event) -> None:
    """Asks, reads the answer, and asks again."""
    tier = ("interactive", "standard", "batch")[number % 3]
    turn = 0
    while not stop.is_set():
        turn += 1
        topic = _TOPICS[(number + turn) % len(_TOPICS)]
        body = {
            "messages": [{"role": "user", "content": f"Tell me about {topic}, in {40 + 10 * (number % 5)} words."}],
            "max_tokens": 60 + 15 * (number % 9),
            "priority": tier,
            "stream": True,
        }
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
            for _ in response.iter_lines():
                if stop.is_set():
                    return
            if response.status_code != 200:
                time.sleep(0.5)


def _terminal(server: Server) -> None:
    picture = IMAGES / "top.svg"
    command = [sys.executable, "-m", "ropeway", "top", server.url, "--every", "0.5", "--screenshot", str(picture)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    # It names fonts on other people's servers; the reader's own will do.
    drawn = re.sub(r"@font-face \{.*?\}|<!--.*?-->", "", picture.read_text(encoding="utf-8"), flags=re.DOTALL)
    picture.write_text(drawn, encoding="utf-8")
    typer.echo(f"wrote {picture}")


def _dashboard(server: Server) -> None:
    browser = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        typer.echo("the dashboard's picture is left as it is: no Chromium is installed")
        return
    from playwright.sync_api import sync_playwright

    picture = IMAGES / "dashboard.png"
    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = opened.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{server.url}/dashboard")
        time.sleep(_WARM_UP_S)
        page.locator("#requests tbody tr").nth(8).click()
        page.locator("#story dl").wait_for()
        page.locator("#record").click()
        page.locator("#timeline-note", has_text="forward").wait_for()
        page.screenshot(path=str(picture), full_page=True)
        opened.close()
    typer.echo(f"wrote {picture}")


if __name__ == "__main__":
    typer.run(_main)
