"""An answer as blocks one after the other (reasoning, text, calls), which is how the responses and messages APIs tell
it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ropeway.server.chatting import Message
from ropeway.text.answers.parts import Arguments, CallBegins, Content, Part, Reasoning

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    kind: Kind
    index: int
    """Among the blocks of the answer."""
    name: str = ""
    """Of the tool that is called."""
    text: str = ""
    """So far: the reasoning, the text, the arguments."""


@dataclass(frozen=True, slots=True)
class BlockNews:
    what: Literal["begins", "goes_on", "ends"]
    block: Block
    text: str = ""
    """What it goes on with."""


class Blocks:
    """Takes parts as they come. At most one block is open at any time."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def take(self, parts: Iterable[Part]) -> Iterator[BlockNews]:
        for part in parts:
            match part:
                case Reasoning(text):
                    yield from self._go_on("reasoning", text)
                case Content(text):
                    yield from self._go_on("text", text)
                case CallBegins(_, name):
                    yield from self._begin("call", name)
                case Arguments(_, text):
                    yield from self._go_on("call", text)

    def end(self) -> Iterator[BlockNews]:
        """Nothing more comes."""
        if self._open is not None:
            block, self._open = self._open, None
            yield BlockNews("ends", block)

    @property
    def called(self) -> bool:
        return any(block.kind == "call" for block in self.all)

    def _go_on(self, kind: Kind, text: str) -> Iterator[BlockNews]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        assert self._open is not None
        self._open.text += text
        yield BlockNews("goes_on", self._open, text)

    def _begin(self, kind: Kind, name: str = "") -> Iterator[BlockNews]:
        yield from self.end()
        self._open = Block(kind, len(self.all), name)
        self.all.append(self._open)
        yield BlockNews("begins", self._open)


def blocks_of(message: Message) -> list[Block]:
    """A whole answer's."""
    found: list[tuple[Kind, str, str]] = []
    if message.reasoning:
        found.append(("reasoning", "", message.reasoning))
    if message.content or not message.calls:
        found.append(("text", "", message.content))
    found += [("call", call.name, call.arguments) for call in message.calls]
    return [Block(kind, index, name, text) for index, (kind, name, text) in enumerate(found)]
