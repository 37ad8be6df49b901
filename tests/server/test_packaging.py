"""What lies in packaging/ names what exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx

from ropeway.settings import settings
from tests.server.asking import CHAT, chat_body

PACKAGING = Path(__file__).parents[2] / "packaging"


def test_every_metric_of_the_grafana_dashboard_exists(http: httpx.Client) -> None:
    http.post(CHAT, json=chat_body())
    text = http.get("/metrics").text
    known = set(re.findall(r"^(ropeway_\w+?)(?:\{| )", text, flags=re.MULTILINE))
    board = json.loads((PACKAGING / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) > 15
    asked = {name for query in queries for name in re.findall(r"ropeway_\w+", query)}
    assert asked <= known, asked - known
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_unit_drains_and_reloads(http: httpx.Client) -> None:
    unit = (PACKAGING / "ropeway.service").read_text()
    assert "ExecReload=/bin/kill -HUP $MAINPID" in unit
    (limit,) = re.findall(r"TimeoutStopSec=(\d+)", unit)
    assert float(limit) > settings()["drain_timeout_s"].default  # or systemd would cut requests off
