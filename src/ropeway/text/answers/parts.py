"""The parts of an answer, as they come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for whoever asked."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that leads to the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The answer calls a tool."""

    index: int
    """Calls of one answer are numbered from 0."""
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, which are JSON in the end."""

    index: int
    text: str


Part = Content | Reasoning | CallBegins | Arguments


class PartReader(Protocol):
    """Reads the text of one completion. However it is cut, the parts put together are the same."""

    def push(self, text: str) -> list[Part]: ...
    def finish(self) -> list[Part]:
        """The rest, now that no text comes any more."""
        ...


class PlainReader:
    """All text is content."""

    def push(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []


class FirstCallReader:
    """As another reader, but for calls after the first."""

    def __init__(self, reader: PartReader) -> None:
        self._reader = reader

    def push(self, text: str) -> list[Part]:
        return self._first(self._reader.push(text))

    def finish(self) -> list[Part]:
        return self._first(self._reader.finish())

    @staticmethod
    def _first(parts: list[Part]) -> list[Part]:
        return [part for part in parts if not (isinstance(part, CallBegins | Arguments) and part.index > 0)]


def split_at(text: str, words: Iterable[str]) -> tuple[str, str | None, str]:
    """(what comes before the first of some words, that word, what comes after it). Where none is found: (what cannot be
    the beginning of one, None, the rest)."""
    places = [(place, -len(word), word) for word in words if (place := text.find(word)) >= 0]
    if places:
        place, _, word = min(places)
        return text[:place], word, text[place + len(word) :]
    held = max((_overlap(text, word) for word in words), default=0)
    return text[: len(text) - held], None, text[len(text) - held :]


def _overlap(text: str, word: str) -> int:
    """Characters at the end of ``text`` that a word begins with; not the whole word."""
    for length in range(min(len(word) - 1, len(text)), 0, -1):
        if word.startswith(text[-length:]):
            return length
    return 0
