"""Token ids to text as they arrive: whole characters only, at a constant cost per token."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol

from ropeway.text.pieces import PieceDecoder
from ropeway.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """Decodes one completion. What ``push`` and ``finish`` return, put together, is ``tokenizer.decode`` of all ids,
    less an incomplete character at the very end, which is never shown (streaming or not).

    One known difference: with byte fallback, ``decode`` shows every byte of a run as U+FFFD when the run is invalid
    anywhere; here the characters complete by then have been emitted.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        pieces = tokenizer.piece_decoder
        self._decoder: _Decoder = _Windowed(tokenizer) if pieces is None else _Bytewise(tokenizer, pieces)

    def fork(self) -> IncrementalDetokenizer:
        """Another one that has come as far, to go on by itself."""
        other = copy.copy(self)
        other._decoder = copy.copy(self._decoder)
        return other

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; may be empty."""
        return self._decoder.push([id_ for id_ in ids if id_ not in self._skipped])

    def finish(self) -> str:
        """What was held back and can be shown."""
        return self._decoder.finish()


class _Decoder(Protocol):
    """A shallow copy goes on by itself."""

    def push(self, ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class _Bytewise:
    """For vocabularies whose tokens are byte strings: joins them and decodes UTF-8, holding an incomplete character."""

    def __init__(self, tokenizer: Tokenizer, pieces: PieceDecoder) -> None:
        self._tokenizer = tokenizer
        self._pieces = pieces
        self._first = True
        self._strip = pieces.strip
        self._held = b""

    def push(self, ids: Sequence[int]) -> str:
        token_bytes = self._tokenizer.token_bytes
        pieces = [token_bytes(id_) for id_ in ids]
        if self._first:
            for n, id_ in enumerate(ids):
                spelling = self._tokenizer.spelling(id_)
                if spelling is not None:
                    pieces[n] = self._pieces.piece(spelling, first=True)
                    self._first = False
                    break
        data = b"".join(pieces)
        if self._strip:
            data, self._strip = self._pieces.strip_start(data, self._strip)
        return self._characters(self._held + data)

    def finish(self) -> str:
        self._held = b""
        return ""

    def _characters(self, data: bytes) -> str:
        """Text of ``data`` but for an incomplete character at its end, which is held."""
        parts: list[str] = []
        start = 0
        while True:
            try:
                parts.append(data[start:].decode())
                self._held = b""
                return "".join(parts)
            except UnicodeDecodeError as error:
                bad, end = start + error.start, start + error.end
                parts.append(data[start:bad].decode())
                if end == len(data) and error.reason == "unexpected end of data":
                    self._held = data[bad:]
                    return "".join(parts)
                parts.append(_REPLACEMENT * (end - bad if self._pieces.byte_fallback else 1))
                start = end


class _Windowed:
    """For any other vocabulary: decodes the last few tokens with and without the new one, and emits the difference."""

    HOLD = 8
    """Tokens a text ending in U+FFFD is held for; no character takes more."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._read = 0
        """``_ids[:_read]`` has been emitted and serves as context."""

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push_one(id_) for id_ in ids if self._tokenizer.spelling(id_) is not None])

    def _push_one(self, id_: int) -> str:
        self._ids = [*self._ids, id_]
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._read < self.HOLD:
            return ""
        return self._advance(text)

    def _advance(self, text: str) -> str:
        shown = len(self._decode(self._ids[: self._read]))
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return text[shown:]

    def finish(self) -> str:
        return self._advance(self._decode(self._ids).rstrip(_REPLACEMENT))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
