"""Request traces: when requests came and how long they were, in the formats of ``benchmarks/traces``.

A CSV file names its columns in its first line:

    arrival_s,input_tokens,output_tokens                  seconds; or timestamp_ms in place of arrival_s; or neither,
                                                          lengths only, which get their times by ``at_rate``
    ... ,hash_id_ranges                                   ids of 512-token blocks: "0 14-27" is 0, 14, 15, ... 27
    ... ,queued_s,scheduled_s,first_token_s,last_token_s  what was measured, on the clock of arrival_s
    ... ,tier,tenant                                      names

A JSONL file is one of Mooncake: an object per line with ``timestamp`` (milliseconds), ``input_length``,
``output_length``, ``hash_ids``; ``tier`` and ``tenant`` are read, too. Other columns and fields are refused, so that a
misspelt one is not silently left out. Blank lines are skipped.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ropeway.bench.workload import HASH_BLOCK, MAX_TOKENS, WorkloadRequest
from ropeway.errors import ConfigError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_LENGTHS = ("input_tokens", "output_tokens")
_MEASURED = ("queued_s", "scheduled_s", "first_token_s", "last_token_s")
_NAMES = ("tier", "tenant")
_CSV_COLUMNS = ("request_id", "arrival_s", "timestamp_ms", *_LENGTHS, "hash_id_ranges", *_MEASURED, *_NAMES)
_JSON_NEEDED = ("timestamp", "input_length", "output_length")
_JSON_FIELDS = (*_JSON_NEEDED, "hash_ids", *_NAMES)
_MAX_HASH_ID = 10**15 - 1
"""Far from the end of an int64, so that a repeated trace may count on."""
_MAX_TIME = 1e15
"""In seconds or milliseconds; more is a mistake, and too coarse as a float64."""
_RANGE = re.compile(r"(\d{1,15})(?:-(\d{1,15}))?", re.ASCII)


@dataclass(frozen=True, eq=False)
class Measured:
    """What a real engine did with the requests of a trace; float64 [n] each, seconds on the clock of the arrivals."""

    queued_s: Floats
    scheduled_s: Floats
    first_token_s: Floats
    last_token_s: Floats


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of their arrival, as columns of n entries. Operations give a new trace; those that change
    when requests come drop what was measured."""

    input_tokens: Ints
    output_tokens: Ints
    arrival_s: Floats | None = None
    """Never falling; None: lengths only."""
    hash_ids: list[tuple[int, ...]] | None = None
    """One per block of ``HASH_BLOCK`` input tokens, the last block maybe short."""
    tier: list[str] | None = None
    tenant: list[str] | None = None
    measured: Measured | None = None

    def __len__(self) -> int:
        return len(self.input_tokens)

    @property
    def times(self) -> Floats:
        """``arrival_s``. Raises ``ConfigError`` for a trace of lengths only."""
        if self.arrival_s is None:
            raise ConfigError(
                "the trace holds lengths only and no times; give a rate in requests per second, or a concurrency",
                param="rate",
            )
        return self.arrival_s

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return float(self.times[-1] - self.times[0])

    def from_zero(self) -> Trace:
        """The same with all times counted from the first arrival."""
        first = self.times[0]
        measured = self.measured
        if measured is not None:
            measured = Measured(*(getattr(measured, name) - first for name in _MEASURED))
        return dataclasses.replace(self, arrival_s=self.times - first, measured=measured)

    def take(self, n: int) -> Trace:
        """The first ``n`` requests. When there are fewer the trace is repeated: each lap begins a mean gap after the
        last arrival of the one before, with hash ids of its own, so that it shares no prefix with it."""
        if n < 1:
            raise ConfigError(f"{n} requests were asked of a trace; ask for at least 1", param="requests")
        if n <= len(self):
            return self._rows(np.arange(n), measured=self.measured)
        laps, rows = np.divmod(np.arange(n), len(self))
        taken = self._rows(rows, measured=None)
        arrival_s, hash_ids = taken.arrival_s, taken.hash_ids
        if arrival_s is not None:
            lap_s = self.duration_s * len(self) / max(len(self) - 1, 1)
            arrival_s = arrival_s + laps * lap_s
        if hash_ids is not None:
            ids_of_a_lap = 1 + max(max(ids) for ids in hash_ids)
            hash_ids = [
                tuple(i + int(lap) * ids_of_a_lap for i in ids) for lap, ids in zip(laps, hash_ids, strict=True)
            ]
        return dataclasses.replace(taken, arrival_s=arrival_s, hash_ids=hash_ids)

    def scaled(self, rate_scale: float) -> Trace:
        """The same requests ``rate_scale`` times as fast."""
        if not (rate_scale > 0 and math.isfinite(rate_scale)):
            raise ConfigError(
                f"the rate scale is {rate_scale}; it must be above 0 (1: as recorded)", param="rate_scale"
            )
        return dataclasses.replace(self, arrival_s=self.times / rate_scale, measured=None)

    def at_rate(self, rate: float, seed: int = 0, cv: float = 1.0) -> Trace:
        """The same requests, arriving at random from 0 on, ``rate`` per second on average. Gaps have a Gamma
        distribution with coefficient of variation ``cv``: 1 is a Poisson process, above 1 bursts, 0 a metronome."""
        if not (rate > 0 and math.isfinite(rate)):
            raise ConfigError(f"the rate is {rate}; it must be above 0 requests per second", param="rate")
        if not (cv >= 0 and math.isfinite(cv)):
            raise ConfigError(
                f"the coefficient of variation of the gaps is {cv}; it must be at least 0 (1: Poisson)", param="cv"
            )
        gaps = np.full(len(self), 1 / rate)
        if cv > 0:
            gaps = np.random.default_rng(seed).gamma(1 / cv**2, cv**2 / rate, size=len(self))
        return dataclasses.replace(self, arrival_s=np.cumsum(gaps) - gaps[0], measured=None)

    def spread(self, seed: int = 0, step_s: float | None = None) -> Trace:
        """Arrivals recorded on a grid (Mooncake's: 3 s), each moved to a random place within its step, order kept.
        ``step_s`` None: the smallest distance between two different times."""
        times = self.times
        if step_s is None:
            distances = np.diff(np.unique(times))
            if not len(distances):
                raise ConfigError(
                    "all requests of the trace arrive at once; say how far to spread them", param="step_s"
                )
            step_s = float(distances.min())
        moved = times + np.random.default_rng(seed).uniform(0.0, step_s, size=len(times))
        return dataclasses.replace(self, arrival_s=np.sort(moved), measured=None)

    def with_tier(self, name: str) -> Trace:
        """The same requests, all of one tier."""
        return dataclasses.replace(self, tier=[name] * len(self))

    def prompt_ids(self, i: int, vocab_size: int, seed: int = 0) -> NDArray[np.int32]:
        """int32 [input_tokens[i]]: made-up token ids in [0, vocab_size). Blocks of the same hash id hold the same
        tokens; nothing else is shared."""
        return self._request(i).prompt(i, vocab_size, seed)

    def workload(self) -> list[WorkloadRequest]:
        """The requests for a benchmark; without arrival times they all come at once."""
        return [self._request(i) for i in range(len(self))]

    def _request(self, i: int) -> WorkloadRequest:
        return WorkloadRequest(
            prompt_tokens=int(self.input_tokens[i]),
            output_tokens=int(self.output_tokens[i]),
            arrival_s=0.0 if self.arrival_s is None else float(self.arrival_s[i]),
            tier=None if self.tier is None else self.tier[i],
            tenant=None if self.tenant is None else self.tenant[i],
            hash_ids=None if self.hash_ids is None else self.hash_ids[i],
        )

    def _rows(self, rows: Ints, *, measured: Measured | None) -> Trace:
        def picked(column: list[Any] | None) -> list[Any] | None:
            return None if column is None else [column[row] for row in rows.tolist()]

        return Trace(
            input_tokens=self.input_tokens[rows],
            output_tokens=self.output_tokens[rows],
            arrival_s=None if self.arrival_s is None else self.arrival_s[rows],
            hash_ids=picked(self.hash_ids),
            tier=picked(self.tier),
            tenant=picked(self.tenant),
            measured=None if measured is None else Measured(*(getattr(measured, name)[rows] for name in _MEASURED)),
        )


def read_trace(paths: Sequence[Path]) -> Trace:
    """The requests of a trace, in one file or in parts that follow each other in time and have the same columns.

    Raises ``ConfigError`` naming file, line and what is wrong there."""
    if not paths:
        _refuse("no trace file was given; name at least one")
    rows: list[dict[str, Any]] = []
    before: tuple[float, str] | None = None
    for path in paths:
        read_before = len(rows)
        for row, where in _read_file(path):
            if rows and row.keys() != rows[0].keys():
                _refuse(
                    f"{where} gives {', '.join(row)}, but the first line of {paths[0]} gives {', '.join(rows[0])}; all "
                    "lines and parts of a trace must give the same"
                )
            before = _in_order(row, where, before)
            rows.append(row)
        if len(rows) == read_before:
            _refuse(f"trace {path} holds no request; it needs a line for each")
    columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in rows[0]}

    def floats(name: str) -> Floats:
        return np.array(columns[name], dtype=np.float64)

    return Trace(
        input_tokens=np.array(columns["input_tokens"], dtype=np.int64),
        output_tokens=np.array(columns["output_tokens"], dtype=np.int64),
        arrival_s=floats("arrival_s") if "arrival_s" in columns else None,
        hash_ids=columns.get("hash_ids"),
        tier=columns.get("tier"),
        tenant=columns.get("tenant"),
        measured=Measured(*map(floats, _MEASURED)) if _MEASURED[0] in columns else None,
    )


def _read_file(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Every request by the names of ``Trace``, and where it stands."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        _refuse(f"trace {path} cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        _refuse(f"trace {path} is not UTF-8 text: {error.reason}")
    read = _read_jsonl if text.lstrip().startswith(("{", "[")) else _read_csv
    for line, where in read(text, path):
        yield _request(line, where), where


def _read_csv(text: str, path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: list[str] = []
    try:
        for values in lines:
            where = f"{path} line {lines.line_num}"
            if not any(value.strip() for value in values):
                continue
            if not columns:
                columns = _checked_header([value.strip() for value in values], where)
            elif len(values) != len(columns):
                _refuse(f"{where} has {len(values)} values; the first line names {len(columns)} columns")
            else:
                yield dict(zip(columns, map(str.strip, values), strict=True)), where
    except csv.Error as error:
        _refuse(f"{path} line {lines.line_num} is not valid CSV: {error}")


def _checked_header(columns: list[str], where: str) -> list[str]:
    given = set(columns)
    needed = {*_LENGTHS}
    if given & {*_MEASURED}:
        needed |= {"arrival_s", *_MEASURED}
    if missing := [name for name in _CSV_COLUMNS if name in needed - given]:
        _refuse(
            f"{where} names the columns of the trace, and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            f"missing; it names {', '.join(columns):.200}"
        )
    if strangers := [name for name in columns if name not in _CSV_COLUMNS]:
        _refuse(f"{where}: unknown column {strangers[0]!r:.60}; rename or remove it; known: {', '.join(_CSV_COLUMNS)}")
    if len(given) < len(columns):
        _refuse(f"{where} names a column twice: {', '.join(columns)}; keep one of them")
    if {"arrival_s", "timestamp_ms"} <= given:
        _refuse(f"{where} names both arrival_s and timestamp_ms; keep one of them")
    return columns


def _read_jsonl(text: str, path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{path} line {number}"
        if not line.strip():
            continue
        try:
            body = json.loads(line)
        except (ValueError, RecursionError) as error:
            _refuse(f"{where} is not valid JSON: {error}")
        if not isinstance(body, dict):
            _refuse(f"{where} must be a JSON object, not {line.strip():.60}")
        if missing := [name for name in _JSON_NEEDED if name not in body]:
            _refuse(f"{where}: {', '.join(missing)} missing; a JSONL trace is one of Mooncake's (or is it a workload?)")
        if strangers := [name for name in body if name not in _JSON_FIELDS]:
            _refuse(f"{where}: unknown field {strangers[0]!r:.60}; remove it; known: {', '.join(_JSON_FIELDS)}")
        yield body, where


def _request(line: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A line of either format by the names of ``Trace``, checked."""
    row: dict[str, Any] = {}
    for name, value in line.items():
        match name:
            case "arrival_s" | "queued_s" | "scheduled_s" | "first_token_s" | "last_token_s":
                row[name] = _time(name, value, where)
            case "timestamp_ms" | "timestamp":
                row["arrival_s"] = _time(name, value, where) / 1000
            case "input_tokens" | "input_length":
                row["input_tokens"] = _length(name, value, where)
            case "output_tokens" | "output_length":
                row["output_tokens"] = _length(name, value, where)
            case "tier" | "tenant":
                if not isinstance(value, str) or not value:
                    _refuse(f"{where}: {name} is {value!r:.60}; it must be a name, or leave {name} out of all lines")
                row[name] = value
    blocks = -(-row["input_tokens"] // HASH_BLOCK)
    if "hash_ids" in line:
        row["hash_ids"] = _listed_ids(line["hash_ids"], blocks, where)
    elif "hash_id_ranges" in line:
        row["hash_ids"] = _ranged_ids(line["hash_id_ranges"], blocks, where)
    if _MEASURED[0] in row:
        _check_measured(row, where)
    return row


def _time(name: str, value: Any, where: str) -> float:
    number = _number(value)
    if number is None or not abs(number) <= _MAX_TIME:
        _refuse(f"{where}: {name} is {value!r:.60}, which is no time; give a number from 0 to {_MAX_TIME:.0e}")
    if number < 0:
        _refuse(f"{where}: {name} is {value}, before the start; times are at least 0")
    return float(number)


def _length(name: str, value: Any, where: str) -> int:
    number = _number(value)
    if not isinstance(number, int):
        _refuse(f"{where}: {name} is {value!r:.60}; give a whole number of tokens")
    if not 1 <= number <= MAX_TOKENS:
        _refuse(
            f"{where}: {name} is {value!s:.60}; it must be from 1 to {MAX_TOKENS}; leave requests without tokens out"
        )
    return number


def _number(value: Any) -> int | float | None:
    """A number of JSON, or one written in a CSV file; None: it is none."""
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _listed_ids(value: Any, blocks: int, where: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        _refuse(f"{where}: hash_ids is {value!r:.60}; it must be a list of ids")
    for each in value:
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each <= _MAX_HASH_ID:
            _refuse(f"{where}: hash_ids holds {each!r:.60}; ids are whole numbers from 0 to {_MAX_HASH_ID}")
    _check_blocks(len(value), blocks, where)
    return tuple(value)


def _ranged_ids(value: str, blocks: int, where: str) -> tuple[int, ...]:
    ranges: list[range] = []
    for part in value.split():
        found = _RANGE.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        if last < first:
            _refuse(f"{where}: hash_id_ranges holds {part!r:.60}; it lists ids and ranges of ids, as in 0 14-27")
        ranges.append(range(first, last + 1))
    _check_blocks(sum(map(len, ranges)), blocks, where)
    return tuple(each for ids in ranges for each in ids)


def _check_blocks(given: int, blocks: int, where: str) -> None:
    if given != blocks:
        _refuse(
            f"{where} has {given} hash ids, but its input has {blocks} blocks of {HASH_BLOCK} tokens; give one id for "
            "each block, or no ids at all"
        )


def _check_measured(row: Mapping[str, Any], where: str) -> None:
    # The arrival is read off another clock than what follows, so it may be a little after queued_s.
    for earlier, later in [*itertools.pairwise(_MEASURED), ("arrival_s", "first_token_s")]:
        if row[later] < row[earlier]:
            _refuse(
                f"{where}: {later} is {row[later]}, before {earlier}, which is {row[earlier]}; all times of a trace "
                "count from the same moment"
            )


def _in_order(row: Mapping[str, Any], where: str, before: tuple[float, str] | None) -> tuple[float, str] | None:
    """What the next row must not come before. Raises ``ConfigError`` if this one comes before its predecessor."""
    if "arrival_s" not in row:
        return None
    now: float = row["arrival_s"]
    if before is not None and now < before[0]:
        _refuse(
            f"{where} arrives at {now} s, earlier than {before[1]}, which arrives at {before[0]} s; sort the trace by "
            "time, and give its parts in order"
        )
    return now, where


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message, param="trace")
