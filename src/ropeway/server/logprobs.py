"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence

from msgspec import UNSET, UnsetType

from ropeway.request import TokenLogprob
from ropeway.server.protocol import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    TopLogprob,
)
from ropeway.text.tokenizer import Tokenizer

_LOWEST = -9999.0
"""Stands for minus infinity (a banned token), which JSON cannot say; OpenAI's value."""


def chat_logprobs(tokens: Sequence[TokenLogprob], tokenizer: Tokenizer) -> ChatLogprobs:
    def entry(token_id: int, logprob: float) -> TopLogprob:
        piece = tokenizer.token_bytes(token_id)
        return TopLogprob(token=piece.decode(errors="replace"), logprob=finite(logprob), bytes=list(piece))

    content = []
    for each in tokens:
        chosen = entry(each.token_id, each.logprob)
        content.append(
            ChatTokenLogprob(
                token=chosen.token,
                logprob=chosen.logprob,
                bytes=chosen.bytes,
                top_logprobs=[entry(*alternative) for alternative in each.top],
            )
        )
    return ChatLogprobs(content=content)


def prompt_logprobs(
    tokens: Iterable[TokenLogprob | None], tokenizer: Tokenizer | None
) -> list[dict[int, PromptLogprob] | None]:
    """Of every token of a prompt: itself and the likeliest at its place, by token id."""

    def entry(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=_text(token_id, tokenizer))

    told: list[dict[int, PromptLogprob] | None] = []
    for each in tokens:
        if each is None or each.rank is None:
            told.append(None)
            continue
        entries = {each.token_id: entry(each.token_id, each.logprob, each.rank)}
        for rank, (token_id, logprob) in enumerate(each.top, 1):
            entries.setdefault(token_id, entry(token_id, logprob, rank))
        told.append(entries)
    return told


class CompletionLogprobWriter:
    """Makes the columns of one choice, chunk by chunk; remembers how far its text has come."""

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if tokenizer is not None and skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def write_prompt(
        self, columns: CompletionLogprobs, token_ids: Iterable[int], logprobs: Iterable[TokenLogprob | None], text: str
    ) -> None:
        """The prompt that the choice begins with. ``text`` need not have the tokens that the tokenizer added."""
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            self._write(columns, token_id, logprob)
            piece = self._decoded(token_id)
            if text.startswith(piece, self._offset):
                self._offset += len(piece)
        self._decoder.reset()
        self._offset = len(text)

    def write(self, columns: CompletionLogprobs, tokens: Iterable[TokenLogprob]) -> None:
        for each in tokens:
            self._write(columns, each.token_id, each)
            if each.token_id not in self._hidden:
                self._offset += len(self._decoded(each.token_id))

    def _write(self, columns: CompletionLogprobs, token_id: int, logprob: TokenLogprob | None) -> None:
        columns.tokens.append(_text(token_id, self._tokenizer))
        columns.token_logprobs.append(None if logprob is None else finite(logprob.logprob))
        columns.top_logprobs.append(None if logprob is None else self._alternatives(logprob))
        columns.text_offset.append(self._offset)

    def _decoded(self, token_id: int) -> str:
        """What the token completes; of a character in several tokens, nothing but the last one does."""
        return "" if self._tokenizer is None else self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def _alternatives(self, token: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the chosen one, by text; of tokens with the same text the likeliest counts."""
        best: dict[str, float] = {}
        for token_id, logprob in [*token.top, (token.token_id, token.logprob)]:
            best.setdefault(_text(token_id, self._tokenizer), finite(logprob))
        return best


def _text(token_id: int, tokenizer: Tokenizer | None) -> str:
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)


def score_of(value: float | None) -> float | UnsetType:
    """As a choice tells it, which is nothing where it is no beam."""
    return UNSET if value is None else finite(value)


def finite(logprob: float) -> float:
    return max(logprob, _LOWEST) if math.isfinite(logprob) else _LOWEST
