"""What comes of somebody else's configuration: settings of ours, and what could not be said with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ropeway.settings import resolve, settings


@dataclass
class Translation:
    """Filled field by field; every field given is in one of the three."""

    values: dict[str, Any] = field(default_factory=dict)
    """Our settings, by name."""
    kept: list[str] = field(default_factory=list)
    """Fields that need no setting here, and why."""
    lost: list[str] = field(default_factory=list)
    """Fields that cannot be translated, and what to do instead."""

    def set(self, name: str, value: Any) -> None:
        assert name in settings(), name
        self.values[name] = value

    def keep(self, field_name: str, why: str) -> None:
        self.kept.append(f"{field_name}: {why}")

    def lose(self, field_name: str, value: Any, why: str) -> None:
        self.lost.append(f"{field_name} = {_shown(value)}: {why}")

    def check(self) -> list[str]:
        """Notes on what gives way to what. Raises ``ConfigError`` where the values contradict each other."""
        return resolve(self.values, environ={}, given_as="argument").notes

    def toml(self, source: str) -> str:
        """A file for ``ropeway serve --config``."""
        lines = [f"# Translated from {source}."]
        sections: dict[str, dict[str, Any]] = {}
        for name, value in self.values.items():
            sections.setdefault(settings()[name].section, {})[name] = value
        for section, values in sections.items():
            lines += ["", f"[{section}]"]
            lines += [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
        return "\n".join(lines) + "\n"


class Fields:
    """One table of somebody else's file; what has not been asked for in the end is unknown."""

    def __init__(self, table: Any, place: str, translation: Translation) -> None:
        self._table: Mapping[str, Any] = table if isinstance(table, Mapping) else {}
        self._place = place
        self._translation = translation
        self._asked: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        self._asked.add(name)
        return self._table.get(name, default)

    def has(self, name: str) -> bool:
        """Whether the field is given; it counts as asked for then."""
        self._asked.add(name)
        return name in self._table

    def table(self, name: str) -> Fields:
        return Fields(self.take(name), f"{self._place}.{name}", self._translation)

    def set(self, name: str, setting: str) -> None:
        """A field that is one of our settings."""
        if self.has(name):
            self._translation.set(setting, self._table[name])

    def keep(self, names: tuple[str, ...], why: str) -> None:
        for name in names:
            if self.has(name):
                self._translation.keep(f"{self._place}.{name}", why)

    def lose(self, name: str, why: str, *, off: tuple[Any, ...] = ()) -> None:
        """A field with no counterpart, unless its value is one of ``off``."""
        if not self.has(name):
            return
        value = self._table[name]
        if any(value == word and type(value) is type(word) for word in off):
            self._translation.keep(f"{self._place}.{name}", "off, as it is here")
        else:
            self._translation.lose(f"{self._place}.{name}", value, why)

    def end(self) -> None:
        """Whatever is left."""
        for name in self._table:
            if name not in self._asked:
                self._translation.lose(f"{self._place}.{name}", self._table[name], "an unknown field")


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)[:100]
