"""Tool calls, in the ways that families of models write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from ropeway.grammar import told_plainly
from ropeway.text.answers.json_object import ObjectReader
from ropeway.text.answers.parts import Arguments, CallBegins, Content, Part, PartReader, split_at

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ARGUMENTS = ("arguments", "parameters")


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that a model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments; None: it takes none."""
    strict: bool = False
    """Whether the schema is kept even where the model may call or not."""

    @property
    def schema(self) -> Mapping[str, Any]:
        return self.parameters or _NO_PARAMETERS


class ToolFormat(Protocol):
    """A family's way."""

    name: str
    hidden: bool
    """Whether its marks are special tokens, which are left out of texts as a rule."""

    def reader(self, names: Sequence[str]) -> PartReader:
        """Reads answers of a model that may call ``names``."""
        ...

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:
        """Rules (see ``Grammar.lark``) of an answer that calls one of the tools, or ``several``."""
        ...

    def free_grammar(self, tools: Sequence[Tool], *, several: bool) -> str | None:
        """The same of any text with or without calls; those of ``strict`` tools have the arguments of their schemas.
        None: there is no telling where a call begins."""
        ...


class Hermes:
    """``<tool_call> {"name": ..., "arguments": {...}} </tool_call>``, one after the other (Hermes 2 Pro, Qwen 2.5 and
    3)."""

    name = "hermes"
    hidden = False

    def reader(self, names: Sequence[str]) -> PartReader:
        return _HermesReader()

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:
        return _grammar(
            tools,
            lambda name: ('<tool_call>\n{"name": ' + name + ', "arguments": ', "}\n</tool_call>"),
            between="\n" if several else None,
        )

    def free_grammar(self, tools: Sequence[Tool], *, several: bool) -> str | None:
        mark = "<tool_call>"
        calls = _grammar(
            [_as_called_freely(tool) for tool in tools],
            lambda name: ('\n{"name": ' + name + ', "arguments": ', "}\n</tool_call>"),
            between=None,
        )
        begin = f"start: (before called){'*' if several else '?'} TEXT?\nbefore[suffix={json.dumps(mark)}]: {_ANY}"
        return f"{begin}\nTEXT: /(.|\\n)+/ & ~/(.|\\n)*{mark}(.|\\n)*/\n{calls.replace('start:', 'called:', 1)}"


class Llama3:
    """The whole answer is ``{"name": ..., "parameters": {...}}``, several with semicolons between them; perhaps after
    ``<|python_tag|>`` (Llama 3.1 to 3.3)."""

    name = "llama3_json"
    hidden = True

    def reader(self, names: Sequence[str]) -> PartReader:
        return _Llama3Reader(names)

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:
        return _grammar(
            tools,
            lambda name: ('{"name": ' + name + ', "parameters": ', "}"),
            between="; " if several else None,
        )

    def free_grammar(self, tools: Sequence[Tool], *, several: bool) -> str | None:
        return None


class DeepSeek:
    """``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`` between marks for all of them (V3.1); V3 and
    R1 write ``function`` before the separator, and the name and a code block after it."""

    name = "deepseek"
    hidden = True

    def __init__(self, version: Literal["v3", "v3.1"] = "v3.1") -> None:
        self._version = version

    def reader(self, names: Sequence[str]) -> PartReader:
        return _DeepSeekReader()

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:
        return _grammar(tools, self._around, between="" if several else None, begin=_ALL_BEGIN, end=_ALL_END)

    def free_grammar(self, tools: Sequence[Tool], *, several: bool) -> str | None:
        called = self.grammar([_as_called_freely(tool) for tool in tools], several=several)
        return f"start: TEXT? called?\nTEXT: /(.|\\n)+/\n{called.replace('start:', 'called:', 1)}"

    def _around(self, name: str) -> tuple[str, str]:
        plain = json.loads(name)
        if self._version == "v3":
            return f"{_BEGIN}function{_SEPARATOR}{plain}\n```json\n", f"\n```{_END}"
        return f"{_BEGIN}{plain}{_SEPARATOR}", _END


_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_ANY = r"/(.|\n)*/"
_MARKS = (_ALL_BEGIN, _ALL_END, _BEGIN, _SEPARATOR, _END)


def _as_called_freely(tool: Tool) -> Tool:
    return tool if tool.strict else Tool(name=tool.name, parameters={"type": "object"})


def _grammar(tools: Sequence[Tool], around: Any, *, between: str | None, begin: str = "", end: str = "") -> str:
    """``around(name as JSON)`` -> what is written before and after the arguments. ``between`` calls; None: only one."""
    calls = " | ".join(f"call_{index}" for index in range(len(tools)))
    several = "" if between is None else f" ({_literal(between)} call)*"
    rules = [f"start: {_literal(begin)} call{several} {_literal(end)}", f"call: {calls}"]
    for index, tool in enumerate(tools):
        before, after = around(json.dumps(tool.name))
        rules.append(f"call_{index}: {_literal(before)} arguments_{index} {_literal(after)}")
        rules.append(f"arguments_{index}: %json {json.dumps(told_plainly(tool.schema))}")
    return "\n".join(rules)


def _literal(text: str) -> str:
    """A text in a rule; marks are tokens of their own."""
    parts: list[str] = []
    while text:
        before, mark, text = split_at(text, _MARKS) if any(mark in text for mark in _MARKS) else (text, None, "")
        if before:
            parts.append(json.dumps(before, ensure_ascii=False))
        if mark is not None:
            parts.append(mark)
    return " ".join(parts)


class _CallReader:
    """Reads the object that stands for one call."""

    def __init__(self, index: int) -> None:
        self.read = ""
        """Its text, as long as no name is known."""
        self.begun = False
        self._index = index
        self._object = ObjectReader()
        self._name = ""
        self._arguments: list[str] = []
        """What is not told yet: a name must come first, and arguments written as text are told whole."""
        self._written: Literal["not yet", "as object", "as text"] = "not yet"
        self._told = False

    @property
    def ended(self) -> bool:
        return self._object.ended

    @property
    def broken(self) -> bool:
        """It is no call."""
        return not self.begun and (self._object.broken or self._object.ended)

    @property
    def lost(self) -> bool:
        """It is a call whose arguments are no JSON."""
        return self.begun and self._object.broken

    def push(self, text: str) -> tuple[list[Part], str]:
        """(what is known of the call, what comes after it)"""
        pieces, rest = self._object.push(text)
        if not self.begun:
            self.read += text[: len(text) - len(rest)]
        parts: list[Part] = []
        for piece in pieces:
            if piece.key == "name" and not self.begun:
                self._name += piece.text
                if piece.last and (name := _text(self._name)):
                    self.begun = True
                    parts.append(CallBegins(self._index, name))
            elif piece.key in _ARGUMENTS:
                self._arguments.append(piece.text)
                if self._written == "not yet":
                    self._written = "as text" if piece.text.startswith('"') else "as object"
                if self._written == "as text" and piece.last:
                    self._arguments = [_text("".join(self._arguments)) or '""']
                    self._written = "as object"
        if self.begun:
            parts += self._tell(ended=self._object.ended)
        return parts, rest

    def _tell(self, *, ended: bool) -> list[Part]:
        if self._arguments and (self._written == "as object" or ended):
            text = "".join(self._arguments)
            self._arguments.clear()
            self._told = True
            return [Arguments(self._index, text)]
        if ended and not self._told:
            self._told = True
            return [Arguments(self._index, "{}")]
        return []


class _HermesReader:
    """Implements ``PartReader``."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._calls = 0
        self._call: _CallReader | None = None
        self._closing = False
        self._held = ""

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        while True:
            if self._call is not None:
                rest = self._read_call(self._call, parts)
                if rest is None:
                    return parts
                self._held = rest
            words = (self._CLOSE, self._OPEN) if self._closing else (self._OPEN,)
            before, found, rest = split_at(self._held, words)
            if not self._closing:
                # Blanks before a call are not said, nor those between two.
                shown = before.rstrip()
                blanks = before[len(shown) :]
                if self._calls and not shown.strip():
                    shown = ""
                if shown:
                    parts.append(Content(shown))
                rest = rest if found else blanks + rest
            self._held = rest
            if found is None:
                return parts
            self._closing = False
            if found == self._OPEN:
                self._call = _CallReader(self._calls)

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._call is not None:
            call, self._call = self._call, None
            return [] if call.begun else [Content(self._OPEN + call.read)]
        return [Content(held)] if held.strip() and not self._closing else []

    def _read_call(self, call: _CallReader, parts: list[Part]) -> str | None:
        """The text after the call; None when there is none yet."""
        told, rest = call.push(self._held)
        parts += told
        self._held = ""
        if call.broken:
            parts.append(Content(self._OPEN + call.read))
            self._call = None
            return rest
        if not call.ended and not call.lost:
            return None
        self._calls += 1
        self._call, self._closing = None, True
        return rest


class _Llama3Reader:
    """Implements ``PartReader``."""

    _TAG = "<|python_tag|>"

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._state: Literal["begin", "call", "between", "text"] = "begin"
        self._call = _CallReader(0)
        self._calls = 0
        self._held = ""

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        while self._held:
            if self._state == "text":
                parts.append(Content(self._held))
                self._held = ""
            elif self._state == "call":
                self._read_call(parts)
            elif not self._find_call():
                break
        return parts

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._state == "call":
            return [] if self._call.begun else [Content(self._call.read)]
        return [Content(held)] if held.strip() else []

    def _find_call(self) -> bool:
        """Whether it is known what comes next."""
        stripped = self._held.lstrip() if self._state == "begin" else self._held.lstrip(" \t\r\n;,")
        if not stripped or (self._TAG.startswith(stripped) and stripped != self._TAG):
            return False
        if stripped.startswith(self._TAG):
            self._held = stripped[len(self._TAG) :]
            return True
        if stripped.startswith("{"):
            self._held, self._state, self._call = stripped, "call", _CallReader(self._calls)
        else:
            self._state = "text"
        return True

    def _read_call(self, parts: list[Part]) -> None:
        told, rest = self._call.push(self._held)
        self._held = rest
        known = not (told and isinstance(told[0], CallBegins)) or told[0].name in self._names
        if self._call.broken or not known:
            parts.append(Content(self._call.read))
            self._state = "text"
            return
        parts += told
        if self._call.ended or self._call.lost:
            self._calls += 1
            self._state = "between"


class _DeepSeekReader:
    """Implements ``PartReader``."""

    def __init__(self) -> None:
        self._calls = 0
        self._state: Literal["text", "head", "name", "code", "arguments", "between"] = "text"
        self._held = ""

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        while self._read(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._state == "text":
            return [Content(held)] if held.strip() else []
        if self._state == "arguments" and held.strip():
            return [Arguments(self._calls, held.rstrip().removesuffix("```").rstrip())]
        return []

    def _read(self, parts: list[Part]) -> bool:
        """Whether there is more to read."""
        if self._state == "name":
            return self._read_name(parts)
        words = {"text": (_ALL_BEGIN, _BEGIN), "between": (_BEGIN, _ALL_END), "head": (_SEPARATOR,)}
        before, found, rest = split_at(self._held, words.get(self._state, (_END,)))
        if self._state == "text":
            shown = before.rstrip()
            if shown:
                parts.append(Content(shown))
            self._held = rest if found else before[len(shown) :] + rest
            self._state = "text" if found is None else "between" if found == _ALL_BEGIN else "head"
            return found is not None
        if self._state == "between":
            self._held = rest
            self._state = "between" if found is None else "head" if found == _BEGIN else "text"
            return found is not None
        if self._state == "head":
            if found is None:
                return False
            self._held = rest
            if before.strip() == "function":
                self._state = "name"
            else:
                parts.append(CallBegins(self._calls, before.strip()))
                self._state = "arguments"
            return True
        return self._read_arguments(before, found, rest, parts)

    def _read_name(self, parts: list[Part]) -> bool:
        """The line that has it, and the one that begins a code block."""
        lines = self._held.split("\n", 2)
        if len(lines) < 3:
            return False
        parts.append(CallBegins(self._calls, lines[0].strip()))
        self._held = lines[2]
        self._state = "arguments"
        return True

    def _read_arguments(self, before: str, found: str | None, rest: str, parts: list[Part]) -> bool:
        text = before.rstrip().removesuffix("```").rstrip() if found else before.rstrip().rstrip("`").rstrip()
        if text:
            parts.append(Arguments(self._calls, text))
        if found is None:
            self._held = before[len(text) :] + rest
            return False
        self._held, self._state = rest, "between"
        self._calls += 1
        return True


def _text(written: str) -> str:
    """The text that a JSON string holds; empty for anything else."""
    try:
        text = json.loads(written, strict=False)
    except ValueError:
        return ""
    return text if isinstance(text, str) else ""
