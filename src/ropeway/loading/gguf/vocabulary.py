"""What the metadata says about single tokens: which kind each is, and which ones begin and end a text.

Nothing here needs torch or a tokenizer, so both the model's side (end tokens) and the text's side use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ropeway.errors import LoadError
from ropeway.loading.gguf.metadata import Metadata

UNSET_IDS = (-1, 0xFFFFFFFF)
"""What converters write for "there is none"."""

END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
)
"""Tokens that end a turn or a text in every vocabulary that has them. Many files name only one end token,
and often not the one their chat template writes; a model must stop at either."""


class TokenKind(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids with a role; None where the file names none."""

    bos: int | None
    eos: int | None
    unk: int | None
    pad: int | None
    ends: tuple[int, ...]
    """All ids that end generation, ``eos`` first: the file's eos, eot and eom, and its ``END_TOKENS``."""


def tokens(metadata: Metadata) -> list[str]:
    """The vocabulary in id order; empty when the file has none."""
    return metadata.texts("tokenizer.ggml.tokens") or []


def token_kinds(metadata: Metadata) -> NDArray[np.integer]:
    """``TokenKind`` of every token, int [vocabulary]. Raises ``LoadError`` when the lengths differ."""
    count = len(tokens(metadata))
    kinds = metadata.numbers("tokenizer.ggml.token_type")
    if kinds is None:
        return np.full(count, TokenKind.NORMAL)
    if len(kinds) != count:
        raise LoadError(f"{metadata.path}: {len(kinds)} values in 'tokenizer.ggml.token_type' for {count} tokens")
    return kinds


def special_ids(metadata: Metadata) -> SpecialIds:
    """Raises ``LoadError`` for an id that is not in the vocabulary."""
    vocabulary = tokens(metadata)
    # SentencePiece's own defaults, which files of that kind leave out.
    sentencepiece = metadata.scalar("tokenizer.ggml.model", str, "") == "llama"
    unk, bos, eos = (0, 1, 2) if sentencepiece and len(vocabulary) > 2 else (-1, -1, -1)

    def role(name: str, default: int = -1) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        number = metadata.scalar(key, int, default)
        if number in UNSET_IDS:
            return None
        if not 0 <= number < (len(vocabulary) or 1 << 31):
            raise LoadError(f"{metadata.path}: field '{key}' is {number}, the vocabulary has {len(vocabulary)} tokens")
        return number

    eos_id = role("eos", eos)
    named = [eos_id, role("eot"), role("eom")]
    known = [vocabulary.index(text) for text in set(END_TOKENS).intersection(vocabulary)]
    ends = dict.fromkeys([token for token in named if token is not None] + sorted(known))
    return SpecialIds(role("bos", bos), eos_id, role("unknown", unk), role("padding"), tuple(ends))
