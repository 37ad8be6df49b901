"""One JSON object that arrives in pieces: its members' values are shown while they come."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of a member's value, as it is written."""

    key: str
    text: str
    last: bool
    """Whether the value is complete."""


class ObjectReader:
    """Reads up to the end of one object, and no further. It is lenient: what it shows is checked by nobody, but where
    it cannot tell keys from values it gives up."""

    def __init__(self) -> None:
        self.ended = False
        self.broken = False
        """Whether this is no object; nothing more is read then."""
        self._depth = 0
        self._quoted = self._escaped = False
        self._key = ""
        self._place = "object"
        """What comes next at the outermost level: ``object``, ``key``, ``colon``, ``value`` (not begun), ``inside`` (a
        value), ``next`` (a comma or the end)."""
        self._value: list[str] = []

    def push(self, text: str) -> tuple[list[Piece], str]:
        """(values, or more of them; what comes after the object)"""
        pieces: list[Piece] = []
        for place, character in enumerate(text):
            if self.ended or self.broken:
                return [*pieces, *self._more()], text[place:]
            self._take(character, pieces)
        return [*pieces, *self._more()], ""

    def _more(self) -> list[Piece]:
        if self._place != "inside" or not self._value:
            return []
        text = "".join(self._value)
        self._value.clear()
        return [Piece(self._key, text, last=False)]

    def _take(self, character: str, pieces: list[Piece]) -> None:
        if self._place == "inside":
            self._take_value(character, pieces)
        elif character.isspace() and not self._quoted:
            pass
        elif self._place == "object":
            self.broken = character != "{"
            self._place = "key"
        elif self._place == "key":
            self._take_key(character)
        elif self._place == "colon":
            self.broken = character != ":"
            self._place = "value"
        elif self._place == "value":
            self._place = "inside"
            self._depth = 0
            self._take_value(character, pieces)
        else:
            self.ended = character == "}"
            self.broken = character not in "},"
            self._place = "key"

    def _take_key(self, character: str) -> None:
        if not self._quoted:
            if character == "}" and not self._key:
                self.ended = True
            elif character == '"':
                self._quoted = True
                self._value.clear()
            else:
                self.broken = True
            return
        if character == '"' and not self._escaped:
            self._quoted = False
            self._key = _text_of('"' + "".join(self._value) + '"')
            self._value.clear()
            self._place = "colon"
            return
        self._value.append(character)
        self._escaped = character == "\\" and not self._escaped

    def _take_value(self, character: str, pieces: list[Piece]) -> None:
        if self._quoted:
            self._value.append(character)
            if character == '"' and not self._escaped:
                self._quoted = False
                if self._depth == 0:
                    self._end_value(pieces)
            self._escaped = character == "\\" and not self._escaped
            return
        if self._depth == 0 and character in ",}":
            self._end_value(pieces)  # of a number, or of a word
            self.ended = character == "}"
            self._place = "key"
            return
        self._value.append(character)
        if character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth <= 0:
                self._end_value(pieces)

    def _end_value(self, pieces: list[Piece]) -> None:
        pieces.append(Piece(self._key, "".join(self._value), last=True))
        self._value.clear()
        self._place = "next"


def _text_of(written: str) -> str:
    try:
        text = json.loads(written, strict=False)
    except ValueError:
        return written.strip('"')
    return text if isinstance(text, str) else written
