"""Service tiers from a file: ``[[tier]]`` tables in TOML, ``{"tier": [...]}`` in YAML and JSON, highest first.

What contradicts, and so is refused:

- a tier lighter than one below it: under policy ``priority`` the lower one would go first;
- ``ttft_s`` above ``queue_limit_s``: requests would be refused for waiting before their target could be missed.

``tpot_s`` above ``ttft_s`` is no contradiction: the first token may be wanted soon and the rest slowly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ropeway.config import SchedulerConfig
from ropeway.errors import ConfigError
from ropeway.settings import nearest, read_file
from ropeway.tiers import DEFAULT_TIERS, Tier

MAX_TIERS = 16
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""Names stand in headers and metrics, and must not be taken for an integer ``priority``."""


def tiers_of(config: SchedulerConfig) -> tuple[Tier, ...]:
    """The tiers that a configuration names, or the default ones. Raises as ``read_tiers`` does."""
    return DEFAULT_TIERS if config.tiers is None else read_tiers(Path(config.tiers))


def read_tiers(path: Path) -> tuple[Tier, ...]:
    """The tiers in a file ending in .toml, .yaml, .yml or .json.

    Raises ``ConfigError`` naming the file, the tier and the field: for a file that cannot be read, unknown fields,
    values of the wrong type or out of range, names that are missing, unfit or used twice, no tier or more than
    ``MAX_TIERS``, and targets that contradict each other."""

    def refuse(problem: str) -> ConfigError:
        return ConfigError(f"{path}: {problem}", param="tiers")

    content = read_file(path, "tiers")
    for name in content:
        if name != "tier":
            raise refuse(f"there is no field {name!r}; tiers are given as a list under 'tier'")
    tables = content.get("tier")
    if tables is None or tables == []:
        raise refuse("there is no tier in it; give at least one")
    if not isinstance(tables, list):
        raise refuse(f"'tier' must be a list of tables, not {type(tables).__name__}")
    if len(tables) > MAX_TIERS:
        raise refuse(f"it has {len(tables)} tiers; the limit is {MAX_TIERS}")
    tiers: list[Tier] = []
    for place, table in enumerate(tables, 1):
        if not isinstance(table, dict):
            raise refuse(f"tier {place} must be a table of fields, not {table!r:.100}")
        shown = f"tier {place} ({table['name']!r:.80})" if table.get("name") is not None else f"tier {place}"
        try:
            tiers.append(_read_tier(table))
        except ValueError as error:
            raise refuse(f"{shown}: {error}") from None
        _check_against(tiers, shown, refuse)
    return tuple(tiers)


def _check_against(tiers: Sequence[Tier], shown: str, refuse: Callable[[str], ConfigError]) -> None:
    *above, tier = tiers
    if tier.name in {other.name for other in above}:
        raise refuse(f"{shown}: the name is used twice; give each tier one of its own")
    if above and above[-1].weight < tier.weight:
        raise refuse(
            f"{shown}: weight {tier.weight:g} contradicts the order of the tiers: {above[-1].name!r} is higher and "
            f"weighs only {above[-1].weight:g}; no tier may be lighter than one below it"
        )


def _read_tier(table: Mapping[str, Any]) -> Tier:
    """Raises ``ValueError`` saying what is wrong with which field."""
    for name in table:
        if name not in _FIELDS:
            raise ValueError(f"there is no field {name!r}{nearest(str(name), _FIELDS)}")
    given = {name: _FIELDS[name](name, value) for name, value in table.items() if value is not None}
    if "name" not in given:
        raise ValueError("name is missing")
    tier = Tier(**given)
    if tier.ttft_s is not None and tier.queue_limit_s is not None and tier.ttft_s > tier.queue_limit_s:
        raise ValueError(
            f"ttft_s {tier.ttft_s:g} and queue_limit_s {tier.queue_limit_s:g} contradict: requests would be refused "
            "for waiting before their target could be missed; raise queue_limit_s or lower ttft_s"
        )
    return tier


def _name(field: str, value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(
            f"{field} is {value!r:.80}; it must begin with a letter and have letters, digits, '_', '.' or '-' only, "
            "at most 64"
        )
    return value


def _positive(field: str, value: object) -> float:
    number = _number(field, value)
    if number <= 0:
        raise ValueError(f"{field} is {value!r}; it must be above 0 (leave it out for no target)")
    return number


def _not_negative(field: str, value: object) -> float:
    number = _number(field, value)
    if number < 0:
        raise ValueError(f"{field} is {value!r}; it must be at least 0")
    return number


def _number(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{field} must be a number, not {value!r:.80}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{field} is {value!r:.80}; it must be a finite number")
    return number


def _count(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field} must be a whole number, not {value!r:.80}")
    if not 1 <= value < 2**63:
        raise ValueError(f"{field} is {value!r:.80}; it must be at least 1 (leave it out for no bound)")
    return value


def _truth(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{field} must be true or false, not {value!r:.80}")
    return value


_FIELDS: Mapping[str, Callable[[str, object], Any]] = {
    "name": _name,
    "weight": _not_negative,
    "ttft_s": _positive,
    "tpot_s": _positive,
    "max_queue": _count,
    "max_queue_tokens": _count,
    "queue_limit_s": _positive,
    "preemptible": _truth,
}
