"""Keeps control tokens spelled in user-supplied text from becoming control tokens.

A chat template writes control tokens (``<|im_end|>``) around text that users wrote. After rendering, the two look the
same. So every spelling of a control token in the messages is put between two marks before rendering; afterwards the
marks tell which stretches of the prompt are a user's::

    message    "hi<|im_end|>"        marked    "hi[m><|im_end|><m]"
    rendered   "<|im_start|>user\\nhi[m><|im_end|><m]<|im_end|>\\n"
    unmarked   "<|im_start|>user\\nhi<|im_end|><|im_end|>\\n"     and   [19, 29) is a user's

A text that *ends* in the beginning of a control token is marked too, as another string may follow it directly. The
marks are random words, so nobody can write them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from os.path import commonprefix
from typing import Any

from ropeway.errors import LoadError

MAX_SPELLING = 1024
"""Most characters of a control token."""
_STRUCTURE = frozenset({"role", "type"})
"""Keys whose values, when plain names, templates compare with or build control tokens of (``<|user|>``)."""
_NAME = re.compile(r"[\w.-]{1,64}")


class ControlSpellings:
    """The spellings of a tokenizer's control tokens. Immutable."""

    def __init__(self, spellings: Iterable[str]) -> None:
        """Raises ``LoadError`` for a spelling beyond ``MAX_SPELLING``, and for hundreds that each begin the next."""
        known = {spelling for spelling in spellings if spelling}
        self._longest = max(map(len, known), default=0)
        if self._longest > MAX_SPELLING:
            raise LoadError(f"the tokenizer has a special token of {self._longest} characters; at most {MAX_SPELLING}")
        self._first = frozenset(spelling[0] for spelling in known)
        self._prefixes = frozenset(spelling[:n] for spelling in known for n in range(1, len(spelling)))
        try:
            self._any = re.compile(_pattern(known)) if known else None
        except RecursionError as error:
            raise LoadError("the tokenizer has too many special tokens that each begin the next one") from error

    def found_in(self, text: str) -> bool:
        return self._any is not None and self._any.search(text) is not None

    def mark(self, value: Any, marks: Marks) -> Any:
        """A copy of ``value`` (messages, tools, ...) with every control token in a string between marks."""
        if isinstance(value, str):
            return self._mark_text(value, marks)
        if isinstance(value, list | tuple):
            return [self.mark(item, marks) for item in value]
        if isinstance(value, dict):
            return {self._mark_key(key, marks): self._mark_field(key, item, marks) for key, item in value.items()}
        return value

    def _mark_key(self, key: Any, marks: Marks) -> Any:
        return self._mark_text(key, marks) if isinstance(key, str) and not key.isidentifier() else key

    def _mark_field(self, key: Any, value: Any, marks: Marks) -> Any:
        if key in _STRUCTURE and isinstance(value, str) and _NAME.fullmatch(value):
            return value
        return self.mark(value, marks)

    def _mark_text(self, text: str, marks: Marks) -> str:
        if self._any is None:
            return text
        marked, count = self._any.subn(lambda match: marks.around(match[0]), text)
        if not count and not self._first.intersection(text[-self._longest :]):
            return text
        last_end = max((match.end() for match in self._any.finditer(text)), default=0) if count else 0
        for length in range(min(self._longest - 1, len(text) - last_end), 0, -1):
            if text[-length:] in self._prefixes:
                marked = marked[:-length] + marks.around(text[-length:])
                break
        marks.used = marks.used or marked != text
        return marked


def _pattern(words: Iterable[str]) -> str:
    """A regular expression for the longest of ``words``, as a tree of their common beginnings: vocabularies have up to
    a thousand control tokens that begin alike, and one after the other would be tried at every ``<``."""
    words = list(words)
    shared = commonprefix(words)  # noqa: RUF071 (these are no paths)
    rests: dict[str, list[str]] = {}
    for word in words:
        rest = word[len(shared) :]
        rests.setdefault(rest[:1], []).append(rest)
    ends = rests.pop("", None) is not None
    if not rests:
        return re.escape(shared)
    branches = "|".join(_pattern(rest) for _, rest in sorted(rests.items()))
    return f"{re.escape(shared)}(?:{branches})" + ("?" if ends else "")


class Marks:
    """The two marks of one rendering."""

    def __init__(self) -> None:
        word = secrets.token_hex(12)
        self._open, self._close = f"a{word}b", f"c{word}d"
        self._any = re.compile(f"{self._open}|{self._close}")
        self.used = False

    def around(self, text: str) -> str:
        return f"{self._open}{text}{self._close}"

    def remove(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """``text`` without marks, and the half-open intervals in it that stood between an opening mark and the closing
        one right after it. A mark that lost its partner (a template may split strings) means nothing."""
        parts: list[str] = []
        intervals: list[tuple[int, int]] = []
        size = read = 0
        opened: int | None = None
        for match in self._any.finditer(text):
            parts.append(text[read : match.start()])
            size += match.start() - read
            read = match.end()
            if match[0] == self._open:
                opened = size
            elif opened is not None:
                intervals.append((opened, size))
                opened = None
        parts.append(text[read:])
        return "".join(parts), intervals
