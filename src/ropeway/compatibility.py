"""Which options work together: the one table that settings are checked by, and that docs/features.md shows.

An option is a setting put to use. It may need another one, or exclude another one; all other pairs work together, and
``tests/e2e/test_combinations.py`` runs each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]
"""Settings by name."""


@dataclass(frozen=True, eq=False)
class Option:
    label: str
    setting: str
    used: Callable[[Any], bool]
    """By the setting's value."""
    off: Any
    """Its value when it is not used."""
    example: Values
    """Settings that put it to use, with what it needs."""

    def is_used(self, values: Values) -> bool:
        return self.used(values[self.setting])


@dataclass(frozen=True)
class Need:
    option: Option
    needed: Option
    why: str


@dataclass(frozen=True)
class Conflict:
    """Of two options. Where the other was said with more authority, ``option`` is given up."""

    option: Option
    other: Option
    why: str


def _is(value: Any) -> Callable[[Any], bool]:
    return lambda given: bool(given == value)


def _is_not(value: Any) -> Callable[[Any], bool]:
    return lambda given: bool(given != value)


_RANKS = {"tensor_parallel_size": 2}
_ROOM = {"swap_space": 0.01}

PREFIX_CACHE = Option("prefix cache", "prefix_cache", _is(True), False, {"prefix_cache": True})
HOST_MEMORY = Option("host memory", "swap_space", _is_not(0), 0.0, _ROOM)
SWAP = Option("preemption by swap", "preemption", _is("swap"), "recompute", {"preemption": "swap", **_ROOM})
DISK_CACHE = Option(
    "disk cache", "disk_cache", _is_not(None), None, {"disk_cache": "FOLDER", "prefix_cache": True, **_ROOM}
)
KV_INT8 = Option("8-bit KV", "kv_dtype", _is("int8"), "auto", {"kv_dtype": "int8"})
KV_INT4 = Option("4-bit values", "kv_dtype", _is("int4"), "auto", {"kv_dtype": "int4"})
KV_INT4_FULL = Option("4-bit KV", "kv_dtype", _is("int4-full"), "auto", {"kv_dtype": "int4-full", "block_size": 32})
WEIGHTS_INT8 = Option("8-bit weights", "weights", _is("int8"), "auto", {"weights": "int8"})
WEIGHTS_INT4 = Option("4-bit weights", "weights", _is("int4"), "auto", {"weights": "int4"})
WHOLE_PROMPTS = Option("whole prompts", "chunked_prefill", _is(False), True, {"chunked_prefill": False})
TPOT_BUDGET = Option("TPOT budget", "step_budget", _is("tpot"), "constant", {"step_budget": "tpot"})
SYNCHRONOUS = Option("synchronous", "async_scheduling", _is(False), True, {"async_scheduling": False})
BATCHES = Option("static batching", "batching", _is_not("continuous"), "continuous", {"batching": "static"})
PADDED_ROWS = Option("padded rows", "padded_rows", _is(True), False, {"padded_rows": True, "batching": "static"})
RANKS = Option("tensor parallel", "tensor_parallel_size", _is_not(1), 1, _RANKS)
HOSTS = Option(
    "several hosts", "nnodes", _is_not(1), 1, {"nnodes": 2, "cluster_secret": "between these hosts", **_RANKS}
)
SHARED_MEMORY = Option("collectives shared", "collectives", _is("shared"), "auto", {"collectives": "shared", **_RANKS})
MICRO_BATCHES = Option("micro-batches", "micro_batch", _is_not("off"), "off", {"micro_batch": "on", **_RANKS})
FUSED_COLLECTIVES = Option(
    "fused collectives", "fused_collectives", _is(True), False, {"fused_collectives": True, **_RANKS}
)

OPTIONS = (
    *(PREFIX_CACHE, HOST_MEMORY, SWAP, DISK_CACHE, KV_INT8, KV_INT4, KV_INT4_FULL, WEIGHTS_INT8, WEIGHTS_INT4),
    *(WHOLE_PROMPTS, TPOT_BUDGET, SYNCHRONOUS, BATCHES, PADDED_ROWS),
    *(RANKS, HOSTS, SHARED_MEMORY, MICRO_BATCHES, FUSED_COLLECTIVES),
)
NEEDS = (
    Need(SWAP, HOST_MEMORY, "swapped requests need room; give swap_space"),
    Need(DISK_CACHE, HOST_MEMORY, "blocks go to disk through host memory; give swap_space"),
    Need(DISK_CACHE, PREFIX_CACHE, "what is kept on disk are cached prefixes"),
    Need(PADDED_ROWS, BATCHES, "only static and dynamic batches have rows to pad"),
    Need(MICRO_BATCHES, RANKS, "one rank has nobody to communicate with"),
    Need(FUSED_COLLECTIVES, RANKS, "one rank has nobody to communicate with"),
    Need(SHARED_MEMORY, RANKS, "one rank has nobody to communicate with"),
    Need(HOSTS, RANKS, "hosts share out ranks; give tensor_parallel_size"),
)
CONFLICTS = (
    Conflict(DISK_CACHE, RANKS, "blocks on disk are those of one rank"),
    Conflict(MICRO_BATCHES, FUSED_COLLECTIVES, "both overlap the same communication; give one of them"),
    Conflict(SHARED_MEMORY, HOSTS, "hosts share no memory"),
)


def conflict_of(one: Option, other: Option) -> str | None:
    """Why two options, and what they need, do not work together; None: they do."""
    if one.setting == other.setting:
        return "one setting has one value"
    for conflict in CONFLICTS:
        if {conflict.option, conflict.other} <= {one, other} | _needed(one) | _needed(other):
            return conflict.why
    return None


def _needed(option: Option) -> set[Option]:
    return {need.needed for need in NEEDS if need.option is option}


def table() -> str:
    """In Markdown: whom each option needs and excludes. What is not named works together."""
    lines = ["| option | setting | needs | not together with |", "|---|---|---|---|"]
    for option in OPTIONS:
        needs = ", ".join(need.needed.label for need in NEEDS if need.option is option)
        excluded = [
            f"{other.label} ({why})"
            for other in OPTIONS
            if other is not option and other.setting != option.setting and (why := conflict_of(option, other))
        ]
        lines.append(f"| {option.label} | `{option.setting}` | {needs} | {'; '.join(excluded)} |")
    return "\n".join(lines)
