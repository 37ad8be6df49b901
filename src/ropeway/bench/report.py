"""Results on the terminal and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropeway.bench.machine import StolenTime, machine_facts
from ropeway.config import Config
from ropeway.errors import ConfigError
from ropeway.settings import SECRETS

if TYPE_CHECKING:
    from rich.table import Table

_ENGINE_SECTIONS = ("model", "cache", "scheduler", "engine", "parallel")


def settings_of(config: Config) -> dict[str, Any]:
    """The settings that shape a run, flat, by field name; no secrets."""
    parts = [dataclasses.asdict(getattr(config, section)) for section in _ENGINE_SECTIONS]
    return {name: value for part in parts for name, value in part.items() if name not in SECRETS}


def check_writable(file: Path, param: str) -> None:
    """Before a long run: raises ``ConfigError``, naming the setting, if nothing can be written to this file."""
    try:
        file.open("a").close()  # a folder can be touched
    except OSError as error:
        raise ConfigError(f"cannot write to {file}: {error.strerror}", param=param) from error


@contextmanager
def reported_to(file: Path | None) -> Iterator[dict[str, Any]]:
    """A dictionary to fill with a report; machine facts and the time stolen during the block are added and, if there
    is a ``file``, it is written there. Raises ``ConfigError`` at once when it cannot be."""
    if file is not None:
        check_writable(file, "json")
    stolen = StolenTime()
    report: dict[str, Any] = {}
    yield report
    report["machine"] = machine_facts() | {"stolen_time_fraction": stolen.fraction}
    if file is not None:
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def figures_table(title: str, figures: dict[str, Any]) -> Table:
    """One line per figure, with its unit as its name tells it."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in figures.items():
        table.add_row(name, readable(name, value))
    return table


def readable(name: str, value: Any) -> str:
    """A figure as people write it: ``readable("peak_rss_bytes", 2**30)`` is ``1.07 GB``."""
    if not isinstance(value, int | float):
        return str(value)
    if name.endswith("_fraction") or name == "kv_waste":
        return f"{value:.1%}"
    if "_bytes" in name:
        return _scaled(value, "B") + ("/s" if name.endswith("_per_s") else "")
    if "_flops" in name:
        return _scaled(value, "FLOP") + ("/s" if name.endswith("_per_s") else "")
    if name.endswith("_per_s"):
        return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"
    if name.endswith("_s") or "_s_" in name:
        return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _scaled(value: float, unit: str) -> str:
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.2f} {prefix}{unit}"
    return f"{value:.0f} {unit}"
