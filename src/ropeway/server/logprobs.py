"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

from ropeway.request import TokenLogprob
from ropeway.server.protocol import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
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


class CompletionLogprobWriter:
    """Makes the columns of one choice, chunk by chunk; remembers how far its text has come."""

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if tokenizer is not None and skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def write(self, tokens: Sequence[TokenLogprob]) -> CompletionLogprobs:
        columns = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for each in tokens:
            columns.tokens.append(self._text(each.token_id))
            columns.token_logprobs.append(finite(each.logprob))
            columns.top_logprobs.append(self._alternatives(each))
            columns.text_offset.append(self._offset)
            if self._tokenizer is not None and each.token_id not in self._hidden:
                self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(each.token_id)))
        return columns

    def _alternatives(self, token: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the chosen one, by text; of tokens with the same text the likeliest counts."""
        best: dict[str, float] = {}
        for token_id, logprob in [*token.top, (token.token_id, token.logprob)]:
            best.setdefault(self._text(token_id), finite(logprob))
        return best

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.token_text(token_id)


def finite(logprob: float) -> float:
    return max(logprob, _LOWEST) if math.isfinite(logprob) else _LOWEST
