"""HTML reports: whole, readable without a network, and safe against what stands in a title."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ropeway.bench.html import Distribution, Lines, latency_charts, write_report
from ropeway.bench.latencies import PooledGaps, Recorder, Status, Targets, figures
from ropeway.bench.report import check_writable
from ropeway.errors import ConfigError

NAME = '</script><b>it\'s & "so"'


class Page(HTMLParser):
    """What a browser would find: elements, text outside of scripts, addresses to be fetched."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self.addresses: list[str] = []
        self._script = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._script = tag == "script"
        if self._script:
            self.scripts.append("")
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        self._script = False

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[-1] += data
        else:
            self.text += data

    def plots(self) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
        """(data, layout) of each plot."""
        found = []
        for script in self.scripts[1:]:
            arguments = script[script.index("Plotly.newPlot(") + len("Plotly.newPlot(") :]
            decoder, values = json.JSONDecoder(), []
            for _ in range(3):
                value, end = decoder.raw_decode(arguments.lstrip(" ,\n"))
                values.append(value)
                arguments = arguments.lstrip(" ,\n")[end:]
            found.append((values[1], values[2]))
        return found


@pytest.fixture
def report(tmp_path):
    def write(title: str, figures: dict[str, Any], charts: list[Any]) -> Page:
        write_report(tmp_path / "report.html", title, figures, charts)
        return Page(tmp_path / "report.html")

    return write


QUEUE = Lines("Queue", "seconds", "requests", {"waiting": ([0, 1, 2], [0, 5, 3])})


def test_a_report_fetches_nothing(report):
    page = report("Run", {"requests": 3}, [QUEUE])
    assert page.addresses == []
    assert not {"link", "img", "iframe"} & set(page.tags)
    assert len(page.scripts) == 2
    assert "plotly.js v" in page.scripts[0][:300]


def test_lines_hold_their_values_and_name_their_axes(report):
    ((data, layout),) = report("Run", {}, [QUEUE]).plots()
    assert (data[0]["x"], data[0]["y"], data[0]["mode"]) == ([0, 1, 2], [0, 5, 3], "lines")
    assert layout["xaxis"]["title"]["text"] == "seconds"
    assert layout["yaxis"]["title"]["text"] == "requests"
    assert layout["title"]["text"] == "Queue"


def test_a_few_measured_points_are_marked_and_an_axis_can_be_logarithmic(report):
    chart = Lines("Goodput", "offered", "good", {"static": ([1, 2], [1, 0.5])}, markers=True, log_y=True)
    ((data, layout),) = report("Run", {}, [chart]).plots()
    assert data[0]["mode"] == "lines+markers"
    assert layout["yaxis"]["type"] == "log"


def test_a_distribution_rises_from_the_least_to_the_largest_value(report):
    gaps = PooledGaps()
    gaps.add(np.linspace(0.01, 0.03, 1000))
    chart = Distribution("ITL", "seconds", {"pooled": gaps, "given": [3.0, float("nan"), 1.0], "none": []})
    ((data, layout),) = report("Run", {}, [chart]).plots()
    pooled, given, none = data
    assert pooled["x"] == sorted(pooled["x"])
    assert pooled["x"][len(pooled["x"]) // 2] == pytest.approx(
        np.interp(pooled["y"][119], [0, 1], [0.01, 0.03]), rel=0.01
    )
    assert (pooled["y"][0], pooled["y"][-1]) == (0, 1)
    assert (given["x"][0], given["x"][-1]) == (1.0, 3.0)
    assert set(none["x"]) == {None}
    assert layout["xaxis"]["type"] == "log"


def test_a_long_line_is_thinned_without_losing_its_extremes(report):
    values = np.sin(np.arange(100_000) / 1000)
    values[54_321], values[77_777] = 9.0, -9.0
    ((data, _),) = report("Run", {}, [Lines("Q", "x", "y", {"long": (np.arange(100_000), values)})]).plots()
    x, y = data[0]["x"], data[0]["y"]
    assert len(x) <= 2002
    assert (x[0], x[-1]) == (0, 99_999)
    assert x == sorted(x)
    assert (x[y.index(9.0)], x[y.index(-9.0)]) == (54_321, 77_777)


def test_figures_become_tables_with_readable_units(report):
    page = report(
        "Run",
        {
            "requests": 1234,
            "shed": None,
            "kept": True,
            "ttft_s": {"mean": 0.25, "p50": None, "p99": 2.0},
            "tiers": {"batch": {"requests": 7}},
            "files": ["a.csv", "b.csv"],
            "empty": {},
        },
        [],
    )
    assert page.tags.count("table") == 3
    for text in ("1,234", "250.0 ms", "2.00 s", "yes", "a.csv, b.csv", "tiers: batch"):
        assert text in page.text
    assert "empty" not in page.text
    assert page.tags.count("th") == 4


def test_names_cannot_break_out_of_the_page(report):
    page = report(NAME, {NAME: NAME}, [Lines(NAME, NAME, NAME, {NAME: ([1], [1])})])
    assert "b" not in page.tags
    assert page.text.count(NAME) == 4  # title, heading, both cells
    assert page.plots()[0][0][0]["name"] == NAME


def test_latency_charts_show_every_tier(report):
    recorder = Recorder(3, ["batch", "interactive", "batch"])
    recorder.arrived([0, 1, 2], [0.0, 1.0, 2.0])
    for request in range(2):
        recorder.stream(request, [2.0, 2.5 + request])
        recorder.ended(request, Status.OK, 3.0 + request)
    plots = report("Run", figures(recorder, Targets()), latency_charts(recorder)).plots()
    assert [layout["title"]["text"] for _, layout in plots] == ["Requests under way", "TTFT", "ITL", "E2E"]
    for data, _ in plots:
        assert [trace["name"] for trace in data] == ["batch", "interactive"]
    under_way = plots[0][0][0]
    assert list(zip(under_way["x"], under_way["y"], strict=True)) == [(0.0, 1.0), (3.0, 0.0)]


def test_a_file_that_cannot_be_written_is_refused_before_and_at_the_end(tmp_path):
    with pytest.raises(ConfigError, match="cannot write to"):
        check_writable(tmp_path / "no such folder" / "r.html", "html")
    with pytest.raises(ConfigError, match="cannot write to"):
        write_report(tmp_path, "Run", {}, [])


def test_plotly_is_loaded_only_for_a_report():
    code = "import sys, ropeway.bench.html; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
