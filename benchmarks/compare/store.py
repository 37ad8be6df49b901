"""Rounds on disk: one file per engine, setting and round, so that a race which was interrupted can go on."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.compare.scenarios import Measured


@dataclass(frozen=True)
class Round:
    """What one engine did in one round with one setting."""

    scenarios: dict[str, Measured]
    load_s: float
    """The longest of its starts."""
    peak_memory_bytes: int
    """Highest sum of proportional set sizes of its processes."""
    stolen_time_fraction: float
    """Share of the machine's CPU time that its host gave to others meanwhile."""
    at: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    """When it was done."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Round:
        scenarios = {name: Measured(**measured) for name, measured in data["scenarios"].items()}
        return cls(**{**data, "scenarios": scenarios})


class Store:
    """The rounds of one race: one folder per model, course and version of Ropeway."""

    def __init__(self, root: Path, name: str, *identity: str) -> None:
        self.folder = root / f"{name}-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]}"

    def get(self, engine: str, setting: str, fingerprint: str, number: int) -> Round | None:
        """None: not run yet, or run with another version or options."""
        try:
            data = json.loads(self._file(engine, setting, number).read_text())
            return Round.from_json(data["round"]) if data["fingerprint"] == fingerprint else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, engine: str, setting: str, fingerprint: str, number: int, result: Round) -> None:
        """Written whole or not at all."""
        file = self._file(engine, setting, number)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"fingerprint": fingerprint, "round": asdict(result)}, indent=1) + "\n")
        part.rename(file)

    def forget(self, engine: str) -> None:
        """Drop an engine's rounds."""
        for file in self.folder.glob(f"{_word(engine)}--*.json"):
            file.unlink()

    def _file(self, engine: str, setting: str, number: int) -> Path:
        return self.folder / f"{_word(engine)}--{_word(setting)}--{number}.json"


def _word(name: str) -> str:
    return re.sub(r"[^\w.]+", "_", name)
