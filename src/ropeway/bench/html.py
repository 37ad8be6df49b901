"""A report as one HTML file with its plots, readable without a network: plotly.js is inside."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ropeway.bench.latencies import PooledGaps, Recorder, Status
from ropeway.bench.report import check_writable, readable

_MOST_POINTS = 2000
"""Of a line. A longer one is drawn by the lowest and the highest point of each of its pieces."""
_PERCENTS = np.concatenate([np.linspace(0, 99, 199), np.linspace(99, 100, 41)[1:]])
_STATISTICS = ("mean", "p50", "p90", "p99", "max")


@dataclass(frozen=True)
class Lines:
    """Values over time, or any figure against another."""

    title: str
    x: str
    """What the horizontal axis shows, with its unit; ``y`` likewise."""
    y: str
    series: Mapping[str, tuple[ArrayLike, ArrayLike]]
    """Name -> (x, y), of equal length."""
    markers: bool = False
    """Show each point: for few measured ones, such as goodput at some rates."""
    log_y: bool = False


@dataclass(frozen=True)
class Distribution:
    """Cumulative distributions: which share of the values is at most x."""

    title: str
    x: str
    series: Mapping[str, ArrayLike | PooledGaps]
    """Name -> values; those that are NaN are left out."""
    log_x: bool = True


Chart = Lines | Distribution
Floats = NDArray[np.float64]


def latency_charts(recorder: Recorder) -> list[Chart]:
    """Requests under way over time, and how TTFT, ITL and E2E are distributed, by tier if there are any."""
    served = recorder.status == Status.OK
    named = {name or "all": code for code, name in enumerate(recorder.tiers)}
    by_tier = {name: served & (recorder.tier == code) for name, code in named.items()}
    return [
        Lines("Requests under way", "seconds", "requests", {n: _under_way(recorder, c) for n, c in named.items()}),
        Distribution("TTFT", "seconds", {name: recorder.ttft_s[mine] for name, mine in by_tier.items()}),
        Distribution("ITL", "seconds", {name: recorder.gaps[code] for name, code in named.items()}),
        Distribution("E2E", "seconds", {name: recorder.e2e_s[mine] for name, mine in by_tier.items()}),
    ]


def write_report(path: Path, title: str, figures: Mapping[str, Any], charts: Sequence[Chart]) -> None:
    """Write the figures as tables and the charts below them. Raises ``ConfigError`` if the file can't be written.

    ``figures``: as they are written as JSON; a mapping inside is a table of its own, except for a mapping of
    statistics (mean, p50, ...), which is a line of one. Without a value (None) a figure shows a dash."""
    from plotly.offline import get_plotlyjs

    heading = html.escape(title)
    check_writable(path, "html")
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{heading}</title><style>{_STYLE}</style>
<script>{get_plotlyjs()}</script></head>
<body><h1>{heading}</h1>
{_tables(figures)}
{"".join(map(_plot, charts))}
</body></html>
"""
    path.write_text(page, encoding="utf-8")


_STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 0.5em 0 1.5em }
td, th { padding: 0.2em 0.9em 0.2em 0; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
"""


def _tables(figures: Mapping[str, Any], heading: str = "", level: int = 2) -> str:
    plain = {name: value for name, value in figures.items() if not isinstance(value, Mapping)}
    nested = {name: value for name, value in figures.items() if isinstance(value, Mapping)}
    statistics = {name: value for name, value in nested.items() if value and value.keys() <= {*_STATISTICS}}
    parts = [f"<h{level}>{html.escape(heading)}</h{level}>"] if heading else []
    if plain:
        parts.append(_table([[name, _cell(name, value)] for name, value in plain.items()]))
    if statistics:
        columns = [each for each in _STATISTICS if any(each in values for values in statistics.values())]
        rows = [[name, *(_cell(name, values.get(c)) for c in columns)] for name, values in statistics.items()]
        parts.append(_table(rows, ["", *columns]))
    for name, value in nested.items():
        if name not in statistics and value:
            parts.append(_tables(value, f"{heading}: {name}" if heading else name, min(level + bool(heading), 6)))
    return "\n".join(parts)


def _table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    lines = [("th", header)] if header else []
    lines += [("td", row) for row in rows]
    body = "\n".join(
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>" for tag, cells in lines
    )
    return f"<table>{body}</table>"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return readable(name, value)


def _plot(chart: Chart) -> str:
    from plotly.io import to_html

    drawn = _lines(chart) if isinstance(chart, Lines) else _distribution(chart)
    layout = {
        "title": {"text": chart.title},
        "template": "plotly_white",
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": -0.2},
        **drawn["layout"],
    }
    # Plotly checks every attribute, and writes names so that they can't end the script.
    return str(
        to_html(
            {"data": drawn["data"], "layout": layout},
            config={"displaylogo": False, "responsive": True},
            include_plotlyjs=False,
            full_html=False,
            default_height="440px",
        )
    )


def _under_way(recorder: Recorder, tier: int) -> tuple[Floats, Floats]:
    ended = (recorder.tier == tier) & ~np.isnan(recorder.ended_s)
    starts, ends = np.sort(recorder.arrival_s[ended]), np.sort(recorder.ended_s[ended])
    moments = np.concatenate([starts, ends])
    moments.sort()
    under_way = np.searchsorted(starts, moments, side="right") - np.searchsorted(ends, moments, side="right")
    return moments, under_way.astype(np.float64)


def _lines(chart: Lines) -> dict[str, Any]:
    y_range = {"type": "log"} if chart.log_y else {"rangemode": "tozero"}
    return {
        "data": [_line(name, *values, markers=chart.markers) for name, values in chart.series.items()],
        "layout": {"xaxis": {"title": {"text": chart.x}}, "yaxis": {"title": {"text": chart.y}, **y_range}},
    }


def _distribution(chart: Distribution) -> dict[str, Any]:
    x_axis = {"title": {"text": chart.x}, "type": "log" if chart.log_x else "linear"}
    return {
        "data": [_line(name, _quantiles(values), _PERCENTS / 100) for name, values in chart.series.items()],
        "layout": {
            "xaxis": x_axis,
            "yaxis": {"title": {"text": "share of all"}, "range": [0, 1.02], "tickformat": ".0%"},
        },
    }


def _line(name: str, x: ArrayLike, y: ArrayLike, *, markers: bool = False) -> dict[str, Any]:
    across, up = _thinned(np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64))
    mode = "lines+markers" if markers else "lines"
    return {"type": "scatter", "name": name, "mode": mode, "x": across.tolist(), "y": up.tolist(), "showlegend": True}


def _quantiles(values: ArrayLike | PooledGaps) -> Floats:
    if isinstance(values, PooledGaps):
        return values.percentiles(_PERCENTS)
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[~np.isnan(numbers)]
    return np.percentile(numbers, _PERCENTS) if len(numbers) else np.full(len(_PERCENTS), np.nan)


def _thinned(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    if len(x) <= _MOST_POINTS:
        return x, y
    pieces = np.array_split(np.arange(len(x)), _MOST_POINTS // 2)
    kept = {int(piece[find(y[piece])]) for piece in pieces for find in (np.argmin, np.argmax)}
    kept |= {0, len(x) - 1}
    index = np.array(sorted(kept))
    return x[index], y[index]
