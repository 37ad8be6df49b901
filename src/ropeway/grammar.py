"""What an answer must look like: a JSON schema, a regular expression, a choice, or a grammar.

A ``Grammar`` only says so; ``text/grammars.py`` compiles it, and the engine masks the tokens that would break it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from ropeway.errors import InvalidRequest

MAX_GRAMMAR = 128 * 1024
"""Most characters of a grammar's text."""
MAX_LITERAL = 4096
"""Most characters that it may prescribe at a stretch: what must come next is looked at in every step."""
MAX_DEPTH = 64
"""Deepest nesting of a JSON schema."""
MAX_BRACKETS = 200
"""Most brackets that are open at any place of an expression or of rules."""
MAX_CHOICES = 1024
"""Most options of a choice."""

_BLANKS = r"[ \n\r\t]{1,20}"
"""Between the parts of JSON, once at each place: a small model may like blanks so much that it never goes on."""
_ESCAPES = 'nrbtf\\"'
_LITERALS = re.compile(r'[^()\[\]{}|*+?.\\^$":\n]+')
_ANY_OBJECT = '{"type": "object"}'


class Grammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Made by one of its class methods. Raises ``InvalidRequest`` for a text beyond ``MAX_GRAMMAR``; what else is wrong
    with it shows when it is compiled."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    """The schema as JSON; the expression; the rules, of which ``start`` is the whole answer."""
    after: str = ""
    """The answer follows free text that ends with this (``</think>``)."""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_GRAMMAR:
            raise InvalidRequest(
                f"the {self.noun} has {len(self.text)} characters; the limit is {MAX_GRAMMAR}", param="grammar"
            )
        if not self.text.strip():
            raise InvalidRequest(f"the {self.noun} is empty", param="grammar")
        if self.kind != "json_schema" and _open_brackets(self.text) > MAX_BRACKETS:
            raise InvalidRequest(f"the {self.noun} has more than {MAX_BRACKETS} brackets in brackets", param="grammar")
        if self.kind != "json_schema" and _spells_out_too_much(self.text):
            raise InvalidRequest(
                f"the {self.noun} prescribes more than {MAX_LITERAL} characters at a stretch", param="grammar"
            )

    @property
    def noun(self) -> str:
        """What to call it in a message."""
        return {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}[self.kind]

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str, *, after: str = "") -> Grammar:
        """JSON that a schema (draft 2020-12) allows. The properties of an object come in the schema's order.

        Raises ``InvalidRequest`` for a text that is no JSON object."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(f"the JSON schema is no JSON: {error}", param="grammar") from error
        if not isinstance(schema, Mapping):
            raise InvalidRequest(
                f"the JSON schema must be an object, not of type {type(schema).__name__}", param="grammar"
            )
        if _deeper_than(schema, MAX_DEPTH):
            raise InvalidRequest(f"the JSON schema is nested more than {MAX_DEPTH} deep", param="grammar")
        if _longest_literal(schema) > MAX_LITERAL:
            raise InvalidRequest(
                f"the JSON schema prescribes more than {MAX_LITERAL} characters at a stretch", param="grammar"
            )
        return cls(kind="json_schema", text=json.dumps(schema), after=after)

    @classmethod
    def json_object(cls, *, after: str = "") -> Grammar:
        """Any JSON object."""
        return cls(kind="json_schema", text=_ANY_OBJECT, after=after)

    @classmethod
    def regex(cls, pattern: str, *, after: str = "") -> Grammar:
        """A text that ``pattern`` (in the syntax of Rust's regex crate) matches as a whole."""
        return cls(kind="regex", text=pattern, after=after)

    @classmethod
    def choice(cls, options: Sequence[str], *, after: str = "") -> Grammar:
        """One of some texts. Raises ``InvalidRequest`` for none of them, too many, and one that is empty."""
        if not 0 < len(options) <= MAX_CHOICES:
            raise InvalidRequest(
                f"a choice has {len(options)} options; from 1 to {MAX_CHOICES} can be", param="grammar"
            )
        if not all(isinstance(option, str) and option for option in options):
            raise InvalidRequest("every option of a choice must be text that is not empty", param="grammar")
        return cls(kind="lark", text=f"start: {' | '.join(map(json.dumps, options))}", after=after)

    @classmethod
    def lark(cls, rules: str, *, after: str = "") -> Grammar:
        """A text of a context-free grammar: in Lark's syntax, or in GBNF, which has ``::=`` where Lark has ``:``."""
        return cls(kind="lark", text=rules, after=after)


def told_plainly(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema for the compiler: with few blanks between the parts of its JSON, and with characters as they are, not as
    ``\\u4e2d``."""
    return {**schema, "x-guidance": {"whitespace_pattern": _BLANKS, "json_allowed_escapes": _ESCAPES}}


def _spells_out_too_much(text: str) -> bool:
    return any(match.end() - match.start() > MAX_LITERAL for match in _LITERALS.finditer(text))


def _open_brackets(text: str) -> int:
    """The most that are open at once, quoted ones too: what is to be kept out are thousands."""
    most = depth = 0
    for character in re.findall(r"[(\[{)\]}]", text):
        depth = depth + 1 if character in "([{" else max(depth - 1, 0)
        most = max(most, depth)
    return most


def _longest_literal(value: Any, key: str = "") -> int:
    """Of the texts that a schema prescribes: constants, names of properties, what patterns spell out."""
    if isinstance(value, str):
        return len(value) if key in ("const", "enum", "pattern") else 0
    if isinstance(value, list):
        return max((_longest_literal(each, key) for each in value), default=0)
    if not isinstance(value, Mapping):
        return 0
    inside = max((_longest_literal(each, name) for name, each in value.items()), default=0)
    return max(inside, max(map(len, value), default=0))


def _deeper_than(value: Any, most: int) -> bool:
    """Whether containers are nested more than ``most`` deep; without recursion, however deep they are."""
    level = [value]
    for _ in range(most + 1):
        level = [
            inner
            for each in level
            if isinstance(each, Mapping | list)
            for inner in (each.values() if isinstance(each, Mapping) else each)
        ]
        if not level:
            return False
    return any(isinstance(each, Mapping | list) for each in level)
