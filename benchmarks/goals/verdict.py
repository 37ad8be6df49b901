"""What a goal's run has shown: figures beside their targets."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.table import Table


@dataclass(frozen=True)
class Check:
    """One figure and what it was to be."""

    name: str
    figure: float | None
    """None: not measured, and ``note`` says why."""
    target: float
    sense: Literal["at least", "at most"] = "at least"
    unit: Literal["", "x", "%", "us", "s", "min"] = ""
    note: str = ""

    @property
    def verdict(self) -> Literal["met", "missed", "skipped"]:
        if self.figure is None:
            return "skipped"
        good = self.figure >= self.target if self.sense == "at least" else self.figure <= self.target
        return "met" if good else "missed"

    def shown(self, value: float | None) -> str:
        """A figure or a target as people write it."""
        if value is None:
            return "-"
        match self.unit:
            case "%":
                return f"{value:.2%}"
            case "x" | "":
                return f"{value:.2f}{self.unit}"
            case _:
                return f"{value:,.4g} {self.unit}"


@dataclass
class Outcome:
    """What a goal's run brings back."""

    checks: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    """Everything measured, as plain data."""
    tables: list[Table] = field(default_factory=list)
    """For the terminal only."""

    @property
    def verdict(self) -> Literal["met", "missed", "skipped"]:
        verdicts = {check.verdict for check in self.checks}
        return "missed" if "missed" in verdicts else "met" if "met" in verdicts else "skipped"

    def report(self) -> dict[str, Any]:
        """The outcome as plain data."""
        checks = [asdict(check) | {"verdict": check.verdict} for check in self.checks]
        return {"verdict": self.verdict, "checks": checks, **self.figures}

    def table(self, title: str) -> Table:
        table = Table(title=title, title_justify="left")
        for heading in ("", "figure", "target", "verdict"):
            table.add_column(heading, justify="left" if heading in ("", "verdict") else "right")
        for check in self.checks:
            name = f"{check.name} ({check.note})" if check.note else check.name
            wanted = f"{check.sense} {check.shown(check.target)}"
            table.add_row(name, check.shown(check.figure), wanted, check.verdict)
        return table


def table_of(title: str, columns: list[str], rows: list[list[Any]]) -> Table:
    """A table of figures; the first column names the rows."""
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(columns):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*(f"{cell:,.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    return table
