"""Tokens as bytes: which bytes one token contributes to a text, whatever stands around it.

A decoder of the ``tokenizers`` library turns a whole list of tokens into text. For the decoders language models use
(byte-level BPE; SentencePiece with or without byte fallback; Metaspace) the text is the concatenation of one byte
string per token, decoded as UTF-8, but for blanks at its very beginning. That is what makes decoding incremental.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import Decoder


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2): printable Latin-1 characters stand for themselves, the other bytes
    for the characters from U+0100 on, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()


@dataclass(frozen=True)
class PieceDecoder:
    """A decoder taken apart, so that it can be applied to one token at a time."""

    byte_level: bool = False
    """Characters of a token stand for bytes."""
    byte_fallback: bool = False
    """Tokens spelled ``<0x00>`` to ``<0xFF>`` are bytes. Then a byte that is no UTF-8 is shown as one U+FFFD each,
    else an invalid sequence is (the two conventions of the library)."""
    replaced: tuple[tuple[str, str], ...] = ()
    """Spellings replaced in every token, in order; ``("▁", " ")`` as a rule."""
    first_drops: str = ""
    """A character dropped, not replaced, in the first token of a text."""
    strip: int = 0
    """Blanks dropped at the beginning of a text, at most."""

    def piece(self, token: str, *, first: bool = False) -> bytes:
        """The bytes of a token spelled ``token`` in the vocabulary; ``first``: no token comes before it."""
        if self.byte_level:
            try:
                return bytes([_BYTES[character] for character in token])
            except KeyError:  # an added token, spelled as it reads
                return token.encode()
        if first and self.first_drops:
            token = token.replace(self.first_drops, "")
        for old, new in self.replaced:
            token = token.replace(old, new)
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.encode()

    def strip_start(self, data: bytes, left: int) -> tuple[bytes, int]:
        """Drop up to ``left`` blanks from the beginning of a text's next bytes. Returns the rest, and how many more
        blanks may go: 0 once another character has been seen."""
        rest = data.lstrip(b" ")
        blanks = len(data) - len(rest)
        return data[min(blanks, left) :], 0 if rest else max(left - blanks, 0)


def take_apart(decoder: Decoder | None) -> PieceDecoder | None:
    """``decoder`` as a ``PieceDecoder``, or None if its tokens cannot be decoded one by one (WordPiece, CTC, ...)."""
    if decoder is None:
        return None
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return PieceDecoder(byte_level=True)

    replaced: list[tuple[str, str]] = []
    first_drops, strip = "", 0
    order = {"Replace": 0, "Metaspace": 0, "ByteFallback": 1, "Fuse": 2, "Strip": 3}
    places = [order.get(kind, -1) for kind in kinds]
    if -1 in places or places != sorted(places) or kinds.count("Strip") > 1:
        return None
    for step in steps:
        if step["type"] == "Replace":
            if "String" not in step["pattern"]:
                return None
            replaced.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Metaspace":
            replaced.append((step["replacement"], " "))
            if step.get("prepend_scheme", "always") != "never":
                first_drops = step["replacement"]
        elif step["type"] == "Strip":
            if "Fuse" not in kinds or step["content"] != " " or step["stop"] != 0:
                return None
            strip = step["start"]
    if first_drops and kinds[0] != "Metaspace":
        return None
    return PieceDecoder(
        byte_fallback="ByteFallback" in kinds, replaced=tuple(replaced), first_drops=first_drops, strip=strip
    )
