"""Write the table of options that work together into docs/features.md.

python -m tools.features
"""

from __future__ import annotations

from pathlib import Path

from ropeway.compatibility import table

FILE = Path(__file__).parents[1] / "docs" / "features.md"
BEGIN, END = "<!-- options: python -m tools.features writes what follows -->\n", "<!-- options end -->\n"


def written(text: str) -> str:
    """The page with the table as it is now."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    FILE.write_text(written(FILE.read_text(encoding="utf-8")), encoding="utf-8")
