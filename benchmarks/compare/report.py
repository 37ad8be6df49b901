"""What a race has shown: plain data, Markdown, a plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.compare.engines.base import SCENARIOS
from benchmarks.compare.race import Entry, Race
from benchmarks.compare.scenarios import median
from ropeway.bench.workload import totals

OURS = "ropeway"
_UNITS = {
    "prefill": "prompt tokens/s",
    "decode": "output tokens/s, one request",
    "batch": "output tokens/s, all requests at once",
}
_WEIGHTS = {
    "bf16": "bfloat16 weights",
    "int8": "8-bit weights",
    "int4": "4-bit weights",
    "shipped": "the GGUF file as shipped",
}

Row = dict[str, Any]
"""An entry of ``report_of``."""


def report_of(race: Race) -> dict[str, Any]:
    """Everything measured, and per entry the medians over all rounds."""
    prompt_tokens, output_tokens = totals(race.course.workload)
    return {
        "model": race.files.name,
        "course": {
            "requests": len(race.course.workload),
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "prefill_tokens": race.course.prefill_tokens,
            "decode_prompt_tokens": race.course.decode_prompt_tokens,
            "decode_tokens": race.course.decode_tokens,
        },
        "kv_bytes": race.place.kv_bytes,
        "entries": [_row(entry, race.entries) for entry in race.entries],
    }


def fastest(rows: Iterable[Row], engine: str, scenario: str, weights: str | None = None) -> Row | None:
    """The entry of an engine with the highest rate in a scenario, at one precision of the weights or at any; None if
    none has run."""
    ran = [
        row
        for row in rows
        if row["engine"] == engine and row["medians"] and (weights is None or row["weights"] == weights)
    ]
    return max(ran, key=lambda row: row["medians"][scenario], default=None)


def markdown(report: dict[str, Any]) -> str:
    """The table: engines at equal precision, then each at its fastest, then who did not take part and why."""
    course, rows = report["course"], report["entries"]
    lines = [
        f"# {report['model']}",
        "",
        f"prefill: a prompt of {course['prefill_tokens']:,} tokens; decode: one request, {course['decode_tokens']} "
        f"tokens after a prompt of {course['decode_prompt_tokens']}; batch: {course['requests']} requests at once, "
        f"{course['prompt_tokens']:,} prompt and {course['output_tokens']:,} output tokens. Tokens per second, "
        "medians; in brackets, Ropeway's rate with weights of that precision divided by it. Memory is the highest sum "
        "of proportional set sizes.",
        "",
    ]
    for weights, title in _WEIGHTS.items():
        ran = [row for row in rows if row["weights"] == weights and row["medians"]]
        if ran:
            head = ["", "KV", *SCENARIOS, "load", "memory", "same first tokens"]
            lines += [f"## {title}", "", *_table(head, [_cells(row, rows) for row in ran]), ""]
    lines += _fastest_lines(rows)
    if out := [row for row in rows if row["out"]]:
        lines += ["## Left out, or failed on the way", ""]
        lines += [f"- {row['engine']} {row['setting']}: {row['out'].splitlines()[0]}" for row in out]
        lines.append("")
    return "\n".join(lines)


def plot(report: dict[str, Any], file: Path) -> None:
    """Bars per scenario, one per entry, as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ran = [row for row in report["entries"] if row["medians"]][::-1]
    engines = sorted({row["engine"] for row in ran}, key=lambda engine: (engine != OURS, engine))
    colours = dict(zip(engines, plt.get_cmap("tab10").colors, strict=False))  # type: ignore[attr-defined]
    with plt.rc_context({"svg.hashsalt": report["model"], "font.size": 9}):
        figure, panels = plt.subplots(
            1, len(SCENARIOS), sharey=True, figsize=(11, 1 + 0.32 * len(ran)), layout="constrained"
        )
        for panel, scenario in zip(panels, SCENARIOS, strict=True):
            bars = panel.barh(
                [f"{row['engine']} {row['setting']}" for row in ran],
                [row["medians"][scenario] for row in ran],
                color=[colours[row["engine"]] for row in ran],
            )
            panel.bar_label(bars, fmt="%.3g", padding=2)
            panel.margins(x=0.15)
            panel.set_title(f"{scenario}: {_UNITS[scenario]}", fontsize=9)
            panel.spines[["top", "right"]].set_visible(False)
        figure.suptitle(report["model"])
        figure.savefig(file, format="svg", metadata={"Date": None})
        plt.close(figure)


def _row(entry: Entry, entries: list[Entry]) -> Row:
    rounds = entry.rounds
    medians = {name: median(each.scenarios[name] for each in rounds) for name in SCENARIOS} if rounds else {}
    return {
        "engine": entry.engine.name,
        "version": entry.version,
        "setting": entry.setting.name,
        "weights": entry.setting.weights,
        "kv": entry.setting.kv,
        "precise": entry.setting.precise,
        "options": dict(entry.setting.options),
        "note": entry.setting.note,
        "out": entry.out,
        "medians": medians,
        "load_s": statistics.median(each.load_s for each in rounds) if rounds else None,
        "peak_memory_bytes": max((each.peak_memory_bytes for each in rounds), default=None),
        "same_first_tokens": _agreement(entry, entries),
        "rounds": [asdict(each) for each in rounds],
    }


def _agreement(entry: Entry, entries: list[Entry]) -> float | None:
    """Share of the workload's requests whose first token is the one of the race's first bfloat16 entry. With rounding
    of its own an engine differs now and then; one that runs other weights agrees by chance alone."""
    reference = next((each for each in entries if each.setting.weights == "bf16" and each.rounds), None)
    if reference is None or reference is entry:
        return None
    pairs = [
        (ours, theirs)
        for a, b in zip(reference.rounds, entry.rounds, strict=False)
        for ours, theirs in zip(a.scenarios["batch"].first_tokens, b.scenarios["batch"].first_tokens, strict=True)
    ]
    return sum(ours == theirs for ours, theirs in pairs) / len(pairs) if pairs else None


def _cells(row: Row, rows: list[Row]) -> list[str]:
    name = f"{row['engine']} {row['version']}, {row['setting']}" + (f" ({row['note']})" if row["note"] else "")
    agreement = "" if row["same_first_tokens"] is None else f"{row['same_first_tokens']:.0%}"
    return [
        name,
        row["kv"],
        *(_rate(row, rows, scenario) for scenario in SCENARIOS),
        f"{row['load_s']:.1f} s",
        f"{row['peak_memory_bytes'] / 1e9:.2f} GB",
        agreement,
    ]


def _rate(row: Row, rows: list[Row], scenario: str) -> str:
    rate = row["medians"][scenario]
    ours = fastest(rows, OURS, scenario, row["weights"])
    if ours is None or row["engine"] == OURS:
        return f"{rate:,.1f}"
    return f"{rate:,.1f} ({ours['medians'][scenario] / rate:.2f}x)"


def _fastest_lines(rows: list[Row]) -> list[str]:
    engines = dict.fromkeys(row["engine"] for row in rows if row["medians"])
    cells = []
    for engine in engines:
        best = [fastest(rows, engine, scenario) for scenario in SCENARIOS]
        cells.append(
            [
                engine,
                *(
                    f"{row['medians'][name]:,.1f} ({row['setting']})"
                    for name, row in zip(SCENARIOS, best, strict=True)
                    if row
                ),
            ]
        )
    return ["## Each engine at its fastest setting", "", *_table(["", *SCENARIOS], cells), ""] if cells else []


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
