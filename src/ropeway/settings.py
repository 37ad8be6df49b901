"""Where settings come from: defaults < file < environment < flags (or keyword arguments).

``resolve`` merges the sources into a ``Config`` and remembers, field by field, who spoke last. Everything
it knows about the fields (type, default, docstring) it reads from the dataclasses of ``ropeway.config``, so
command-line flags, environment variables and files can't drift apart from them.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import math
import os
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import yaml

from ropeway.compatibility import CONFLICTS, NEEDS
from ropeway.config import Config
from ropeway.errors import ConfigError

ENVIRONMENT_PREFIX = "ROPEWAY_"
_OTHER_VARIABLES = frozenset({"ROPEWAY_CACHE", "ROPEWAY_PYPI_URL"})
"""Where ``ropeway.loading.sources`` looks for models; not settings of an engine."""
_POSITIONAL = frozenset({"model"})
"""Given without a flag on the command line."""
SECRETS = frozenset({"api_key", "cluster_secret"})
"""Fields whose values are never printed."""


@dataclass(frozen=True)
class Setting:
    """One field of one section, as ``ropeway.config`` declares it."""

    section: str
    name: str
    kind: type
    """``str``, ``int``, ``float`` or ``bool``."""
    choices: tuple[str, ...]
    """The allowed words of a ``Literal``; empty: any value of ``kind``."""
    optional: bool
    """Whether None is allowed; it means that Ropeway chooses."""
    default: Any
    doc: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def path(self) -> str:
        """The place in a file."""
        return f"{self.section}.{self.name}"

    @property
    def allowed(self) -> str:
        """What a value may be, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        return {
            bool: "true or false",
            int: "a whole number",
            float: "a number",
            str: "text",
        }[self.kind]


@dataclass(frozen=True)
class Origin:
    """Who gave a value. Sources with a higher ``rank`` win."""

    rank: int
    text: str

    def __str__(self) -> str:
        return self.text


DEFAULT = Origin(0, "default")


@dataclass(frozen=True)
class Resolved:
    """A configuration and how it came about."""

    config: Config
    origins: dict[str, Origin]
    """Field name -> who gave its value."""
    notes: list[str]
    """What was adjusted or passed over, in sentences for a log."""


@functools.cache
def settings() -> Mapping[str, Setting]:
    """Every field of every section by its name. Raises ``TypeError`` if a name occurs twice."""
    found: dict[str, Setting] = {}
    for section in dataclasses.fields(Config):
        owner = typing.get_type_hints(Config)[section.name]
        docs = field_docs(owner)
        hints = typing.get_type_hints(owner)
        for field in dataclasses.fields(owner):
            if field.name in found:
                raise TypeError(f"{field.name} is a field of both {found[field.name].section} and {section.name}")
            kind, choices, optional = _kind(hints[field.name])
            found[field.name] = Setting(
                section.name, field.name, kind, choices, optional, field.default, docs.get(field.name, "")
            )
    return types.MappingProxyType(found)


@functools.cache
def field_docs(owner: type) -> Mapping[str, str]:
    """The string below each annotated field of a class, by field name, on one line."""
    body = ast.parse(inspect.getsource(owner).lstrip()).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            docs[field.target.id] = " ".join(below.value.value.split())
    return docs


def resolve(
    given: Mapping[str, Any] | None = None,
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    given_as: Literal["flag", "argument"] = "flag",
) -> Resolved:
    """Merge all sources into a configuration.

    ``given`` holds flags or keyword arguments by field name; None means not given, as it does in a file.
    ``environ`` defaults to the process's. Raises ``ConfigError`` for an unknown name (with the nearest known
    one), a value of the wrong type or out of range (with where it came from), and for values that contradict
    each other. Where only one of two contradicting values was given on purpose, the other one gives way and
    ``notes`` says so.
    """
    values = {name: setting.default for name, setting in settings().items()}
    origins = dict.fromkeys(values, DEFAULT)
    notes: list[str] = []
    if file is not None:
        _merge(values, origins, _from_file(file))
    _merge(values, origins, _from_environment(os.environ if environ is None else environ, notes))
    _merge(values, origins, _from_given(given or {}, given_as))
    _check_ranges(values, origins)
    _reconcile(values, origins, notes)
    return Resolved(_build(values), origins, notes)


def render(resolved: Resolved) -> str:
    """The configuration as a TOML file, each line with its origin as a comment; secrets are left out."""
    lines: list[str] = []
    for section in dataclasses.fields(Config):
        lines.append(f"[{section.name}]")
        values = getattr(resolved.config, section.name)
        for field in dataclasses.fields(values):
            value, origin = getattr(values, field.name), resolved.origins[field.name]
            if value is None:
                text = f"# {field.name} is unset"
            elif field.name in SECRETS:
                text = f"# {field.name} is set, not shown"
            else:
                # JSON's strings, numbers and booleans are TOML's.
                text = f"{field.name} = {json.dumps(value, ensure_ascii=False)}"
            lines.append(f"{text:<40}  # {origin}")
        lines.append("")
    return "\n".join(lines)


Given = Iterable[tuple[Setting, Any, Origin]]


def _merge(values: dict[str, Any], origins: dict[str, Origin], given: Given) -> None:
    for setting, value, origin in given:
        if value is not None:
            values[setting.name] = convert(setting, value, origin)
            origins[setting.name] = origin


def _from_file(file: Path) -> Given:
    content = read_file(file, "config")
    sections_by_name = {s.name for s in dataclasses.fields(Config)}
    for section, fields in content.items():
        if section not in sections_by_name:
            hint = nearest(str(section), sections_by_name)
            if str(section) in settings():
                hint = f"; it belongs into section {settings()[str(section)].section}"
            raise ConfigError(f"{file}: there is no section {section!r}{hint}", param=str(section))
        if fields is None:
            continue
        if not isinstance(fields, dict):
            raise ConfigError(f"{file}: section {section} must be a table of fields, not {fields!r}", param=section)
        known = {name: s for name, s in settings().items() if s.section == section}
        for name, value in fields.items():
            if name not in known:
                hint = nearest(str(name), known)
                if name in settings():
                    hint = f"; it belongs into section {settings()[name].section}"
                raise ConfigError(f"{file}: section {section} has no field {name!r}{hint}", param=str(name))
            yield known[name], value, Origin(1, f"{section}.{name} in {file}")


def read_file(file: Path, param: str) -> dict[str, Any]:
    """The table in a TOML, YAML or JSON file, by its ending; an empty file is an empty table. Raises ``ConfigError``
    about the setting ``param``."""
    readers: dict[str, Callable[[str], Any]] = {
        ".toml": tomllib.loads,
        ".yaml": yaml.safe_load,
        ".yml": yaml.safe_load,
        ".json": json.loads,
    }
    reader = readers.get(file.suffix.lower())
    if reader is None:
        raise ConfigError(f"{file}: the file for {param} must end in {', '.join(readers)}", param=param)
    try:
        content = reader(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", param=param) from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid {file.suffix[1:].upper()}: {error}", param=param) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a table of fields, not {type(content).__name__}", param=param)
    return content


def _from_environment(environ: Mapping[str, str], notes: list[str]) -> Given:
    by_variable = {s.variable: s for s in settings().values()}
    for variable, value in sorted(environ.items()):
        if variable in by_variable and value.startswith("tcp://"):
            # Kubernetes makes ROPEWAY_PORT for a service of that name.
            notes.append(f"environment variable {variable} is a service link ({value}), no setting; ignored")
        elif variable in by_variable:
            yield by_variable[variable], value, Origin(2, f"environment variable {variable}")
        elif variable.startswith(ENVIRONMENT_PREFIX) and variable not in _OTHER_VARIABLES:
            # Not an error: other programs (Kubernetes' service links, say) make such names, too.
            notes.append(f"environment variable {variable} names no setting{nearest(variable, by_variable)}; ignored")


def _from_given(given: Mapping[str, Any], given_as: Literal["flag", "argument"]) -> Given:
    for name, value in given.items():
        setting = settings().get(name)
        if setting is None:
            raise ConfigError(f"there is no setting {name!r}{nearest(name, settings())}", param=name)
        is_flag = given_as == "flag" and name not in _POSITIONAL
        yield setting, value, Origin(3, setting.flag if is_flag else f"argument {name}")


def nearest(name: str, known: Iterable[str]) -> str:
    """A question to end a complaint about an unknown name with; empty when no known one is like it."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _kind(hint: Any) -> tuple[type, tuple[str, ...], bool]:
    optional = False
    if isinstance(hint, types.UnionType):
        (hint,) = (arm for arm in typing.get_args(hint) if arm is not type(None))
        optional = True
    if typing.get_origin(hint) is Literal:
        return str, typing.get_args(hint), optional
    assert hint in (str, int, float, bool), hint
    return hint, (), optional


# --------------------------------------------------------------------------- values

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def convert(setting: Setting, value: Any, origin: Origin) -> Any:
    """``value`` as the setting's type. Text is read as a number or a truth value where one is due, because
    the environment has nothing else. Raises ``ConfigError``."""
    converted: Any = None
    if isinstance(value, Path):
        value = str(value)
    if setting.kind is str:
        converted = value if isinstance(value, str) and (not setting.choices or value in setting.choices) else None
    elif setting.kind is bool:
        converted = _to_bool(value)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        converted = _to_number(setting.kind, value)
    if converted is None:
        shown = "a value of the wrong form" if setting.name in SECRETS else repr(value)
        raise ConfigError(f"{setting.name} must be {setting.allowed}, not {shown} (from {origin})", param=setting.name)
    return converted


def _to_bool(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    return True if word in _TRUE else False if word in _FALSE else None


def _to_number(kind: type, value: str | int | float) -> int | float | None:
    try:
        number: int | float = kind(value)
        exact = math.isfinite(number) and (isinstance(value, str) or number == value)
    except (ValueError, OverflowError):
        return None
    return number if exact else None


_AT_LEAST: Mapping[str, float] = {
    "max_model_len": 1,
    "block_size": 1,
    "kv_blocks": 1,
    "max_num_seqs": 1,
    "max_batched_tokens": 1,
    "threads": 1,
    "tensor_parallel_size": 1,
    "nnodes": 1,
    "node_rank": 0,
    "master_port": 1,
    "port": 0,
    "management_port": 0,
    "max_queue": 0,
    "drain_timeout_s": 0,
    "swap_space": 0,
    "watermark": 0,
    "batch_window_s": 0,
}
_ABOVE: Mapping[str, float] = {
    "kv_memory": 0,
    "max_body_mb": 0,
    "body_timeout_s": 0,
    "read_timeout_s": 0,
    "disk_space": 0,
    "admission_quantile": 0,
    "aging_s": 0,
    "join_timeout_s": 0,
}
_AT_MOST: Mapping[str, float] = {
    "port": 65535,
    "management_port": 65535,
    "threads": 1024,
    "tensor_parallel_size": 64,
    "master_port": 65533,
    "max_body_mb": 65536,
    "watermark": 0.9,
    "admission_quantile": 1,
}
_KEY_GROUP = 32
"""Tokens over which kv_dtype int4-full quantises keys."""
_NOT_EMPTY = (
    *("model", "host", "api_key", "served_model_name", "disk_cache", "length_profile", "tiers", "trace"),
    *("master_addr", "network_interface", "cluster_secret"),
)


def _check_ranges(values: Mapping[str, Any], origins: Mapping[str, Origin]) -> None:
    def refuse(name: str, rule: str) -> typing.NoReturn:
        shown = "" if name in SECRETS else f" {values[name]!r}"
        raise ConfigError(f"{name}{shown} (from {origins[name]}) {rule}", param=name)

    for name, value in values.items():
        if value is None:
            continue
        if name in _AT_LEAST and value < _AT_LEAST[name]:
            refuse(name, f"must be at least {_AT_LEAST[name]}")
        if name in _ABOVE and value <= _ABOVE[name]:
            refuse(name, f"must be above {_ABOVE[name]}")
        if name in _AT_MOST and value > _AT_MOST[name]:
            refuse(name, f"must be at most {_AT_MOST[name]}")
        if name in _NOT_EMPTY and not value.strip():
            refuse(name, "must not be empty")
    if values["served_model_name"] and not all(part.strip() for part in values["served_model_name"].split(",")):
        refuse("served_model_name", "has an empty name between commas")
    if values["otlp_endpoint"] is not None and not _is_http(values["otlp_endpoint"]):
        refuse("otlp_endpoint", "must be the URL of a collector for OTLP over HTTP, like http://127.0.0.1:4318")
    if values["block_size"].bit_count() != 1:
        refuse("block_size", "must be a power of two")


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or brackets that cannot be
        return False


def _reconcile(values: dict[str, Any], origins: dict[str, Origin], notes: list[str]) -> None:
    """Settle what contradicts: two values given with the same authority are an error, else the weaker gives way."""

    def clash(one: str, other: str, why: str) -> typing.NoReturn:
        raise ConfigError(
            f"{one} {values[one]} (from {origins[one]}) and {other} {values[other]} (from {origins[other]}) "
            f"contradict: {why}",
            param=one,
        )

    seqs, tokens = "max_num_seqs", "max_batched_tokens"
    if values[seqs] > values[tokens]:
        weaker, stronger = (seqs, tokens) if origins[seqs] is DEFAULT else (tokens, seqs)
        if origins[weaker] is not DEFAULT:
            clash(seqs, tokens, "a step must have room for one token of every running sequence")
        notes.append(f"{weaker} changed from {values[weaker]} to {values[stronger]} to go with {stronger}")
        values[weaker] = values[stronger]
        origins[weaker] = Origin(0, f"default, adjusted to {stronger}")

    def choose(one: str, other: str, off: Any, why: str) -> None:
        """Of two settings that say the same thing differently, the one given with more authority counts."""
        if origins[one].rank == origins[other].rank:
            clash(one, other, why)
        weaker, stronger = sorted((one, other), key=lambda name: origins[name].rank)
        notes.append(f"{weaker} (from {origins[weaker]}) is overridden by {stronger} (from {origins[stronger]})")
        values[weaker], origins[weaker] = off, Origin(0, f"overridden by {stronger}")

    if values["kv_blocks"] is not None and values["kv_memory"] is not None:
        choose("kv_blocks", "kv_memory", None, "both set the size of the same pool; give one of them")
    if "auto" not in (values["dtype"], values["weights"]) and values["dtype"] != values["weights"]:
        choose("dtype", "weights", "auto", "both say what the weights are held in; give one of them")

    def needs(name: str, off: Any, other: str, why: str) -> None:
        """``name`` cannot be had as long as ``other`` is what it is. It gives way if that was said with more
        authority."""
        if origins[other].rank <= origins[name].rank:
            clash(name, other, why)
        shown = "unset" if off is None else off
        notes.append(
            f"{name} changed from {values[name]} (from {origins[name]}) to {shown} to go with {other} {values[other]} "
            f"(from {origins[other]})"
        )
        values[name], origins[name] = off, Origin(0, f"adjusted to {other}")

    for need in NEEDS:
        if need.option.is_used(values) and not need.needed.is_used(values):
            needs(need.option.setting, need.option.off, need.needed.setting, need.why)
    for conflict in CONFLICTS:
        if conflict.option.is_used(values) and conflict.other.is_used(values):
            needs(conflict.option.setting, conflict.option.off, conflict.other.setting, conflict.why)

    if values["tensor_parallel_size"] % values["nnodes"]:
        clash("tensor_parallel_size", "nnodes", "every host must have the same number of ranks")
    if values["node_rank"] >= values["nnodes"]:
        clash("node_rank", "nnodes", "hosts are numbered from 0")
    if values["nnodes"] > 1 and values["cluster_secret"] is None:
        raise ConfigError(
            f"nnodes {values['nnodes']} (from {origins['nnodes']}) needs cluster_secret: what all hosts know, and "
            "others don't",
            param="cluster_secret",
        )

    dtype, size = "kv_dtype", "block_size"
    if values[dtype] == "int4-full" and values[size] < _KEY_GROUP:
        if origins[dtype].rank > origins[size].rank:
            notes.append(f"{size} changed from {values[size]} to {_KEY_GROUP} to go with {dtype} {values[dtype]}")
            values[size], origins[size] = _KEY_GROUP, Origin(0, f"adjusted to {dtype}")
        else:
            needs(dtype, "auto", size, f"it keeps keys in groups of {_KEY_GROUP} tokens; give block_size {_KEY_GROUP}")

    port, management = "port", "management_port"
    if values[management] is None and values[port] == 65535:
        raise ConfigError(
            "port 65535 leaves no port after it for the management listener; give management_port", param=management
        )
    if values[management] is not None and values[management] == values[port] != 0:
        clash(management, port, "the two listeners need ports of their own")


def _build(values: Mapping[str, Any]) -> Config:
    parts = {}
    for section in dataclasses.fields(Config):
        owner = typing.get_type_hints(Config)[section.name]
        parts[section.name] = owner(**{field.name: values[field.name] for field in dataclasses.fields(owner)})
    return Config(**parts)
