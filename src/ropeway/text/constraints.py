"""What limits the tokens of a completion: a grammar, words it must not hold, and the only tokens it may have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ropeway.errors import InvalidRequest
from ropeway.request import SamplingParams
from ropeway.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ropeway.text.grammars import GrammarCompiler, GrammarMatcher

Words = NDArray[np.int32]
"""int32 [words]: a bit per token, as in ``plan.Masks``."""


@dataclass
class Thinking:
    """Reasoning with a budget: when it is used up, the mark at its end is all that may come."""

    budget: int
    """Tokens that are left."""
    begin: tuple[int, ...]
    """The mark at its beginning; the first tokens of a text, or they begin no reasoning."""
    end: tuple[int, ...]
    said: tuple[int, ...] = ()
    """The text so far, while it may be such a mark; within the reasoning, as much as the mark at its end has."""
    inside: bool = False
    over: bool = False

    def consume(self, token: int) -> None:
        if self.over:
            return
        self.said = (*self.said, token)
        if not self.inside:
            self.inside = self.said == self.begin
            self.over = not self.inside and self.said != self.begin[: len(self.said)]
            self.said = () if self.inside else self.said
            return
        self.budget -= 1
        self.said = self.said[-len(self.end) :]
        self.over = self.said == self.end

    @property
    def must_say(self) -> int | None:
        """The only token that may come."""
        if self.over or not self.inside or self.budget > 0:
            return None
        begun = next(n for n in range(len(self.end), -1, -1) if n == 0 or self.said[-n:] == self.end[:n])
        return self.end[begun]


class Constraint:
    """One completion's. It knows the tokens that have been told to it, and no others."""

    def __init__(
        self,
        *,
        allowed: Words | None,
        bad: Sequence[tuple[int, ...]],
        matcher: GrammarMatcher | None,
        thinking: Thinking | None = None,
    ) -> None:
        """``allowed``: what may be said at all; ``bad``: tokens that must not come in a row."""
        self.matcher = matcher
        self._thinking = thinking
        self._allowed = allowed
        self._bad = bad
        self._longest = max(map(len, bad), default=0)
        self._last: tuple[int, ...] = ()

    def fork(self) -> Constraint:
        """The same for another completion; to be called before any token is told."""
        matcher = None if self.matcher is None else self.matcher.fork()
        thinking = None if self._thinking is None else replace(self._thinking)
        return Constraint(allowed=self._allowed, bad=self._bad, matcher=matcher, thinking=thinking)

    def consume(self, token: int) -> None:
        """The completion goes on with ``token``."""
        if self.matcher is not None:
            self.matcher.consume(token)
        if self._thinking is not None:
            self._thinking.consume(token)
        if self._longest > 1:
            self._last = (*self._last, token)[1 - self._longest :]

    def narrow(self, bits: Words) -> None:
        """Take out of ``bits`` (in place) what may not come next, but for the grammar's part."""
        must_say = None if self._thinking is None else self._thinking.must_say
        if must_say is not None:
            bits[:] = 0
            bits[must_say >> 5] = _bit(must_say)
            return
        if self._allowed is not None:
            np.bitwise_and(bits, self._allowed, out=bits)
        for *before, token in self._bad:
            if not before or self._last[-len(before) :] == tuple(before):
                bits[token >> 5] &= ~_bit(token)

    @property
    def failure(self) -> str | None:
        """Why the completion cannot go on."""
        return None if self.matcher is None else self.matcher.failure


class ConstraintCompiler:
    """Makes constraints for one model. ``compile`` may be called from several threads at once."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer | None], vocab_size: int, end_ids: Sequence[int]) -> None:
        """``load_tokenizer`` is called when the first constraint needs it. ``vocab_size``: token ids below it may be
        sampled."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._end_ids = [token for token in end_ids if token < vocab_size]
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self._grammars: GrammarCompiler | None = None
        self.words = -(-vocab_size // 32)
        """32-bit words of a mask."""

    def compile(self, params: SamplingParams) -> Constraint:
        """Raises ``InvalidRequest`` where the grammar cannot be used, or the model has no tokenizer."""
        allowed = None
        if params.allowed_token_ids is not None:
            allowed = np.zeros(self.words, dtype=np.int32)
            for token in (*params.allowed_token_ids, *self._end_ids):
                allowed[token >> 5] |= _bit(token)
        bad = self._bad_words(params.bad_words)
        matcher = None if params.grammar is None else self._compiler().compile(params.grammar)
        return Constraint(allowed=allowed, bad=bad, matcher=matcher, thinking=self._thinking(params))

    def fill(self, constraints: Sequence[Constraint]) -> NDArray[np.int32]:
        """int32 [m, words]: what each of them allows next."""
        bits = np.full((len(constraints), self.words), -1, dtype=np.int32)
        rows = [row for row, each in enumerate(constraints) if each.matcher is not None]
        if rows:
            matchers = [matcher for each in constraints if (matcher := each.matcher) is not None]
            self._compiler().fill(matchers, rows, bits)
        for row, each in enumerate(constraints):
            each.narrow(bits[row])
        return bits

    def _bad_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Their tokens, at the beginning of a text and after other words."""
        if not words:
            return []
        tokenizer = self._need_tokenizer()
        spellings = [spelling for word in words for spelling in (word.lstrip(), f" {word.lstrip()}") if word.strip()]
        encoded = [tuple(tokenizer.encode(each, add_special_tokens=False)) for each in spellings]
        return [tokens for tokens in dict.fromkeys(encoded) if tokens and max(tokens) < self._vocab_size]

    def _thinking(self, params: SamplingParams) -> Thinking | None:
        if params.thinking_budget is None:
            return None
        tokenizer = self._need_tokenizer()
        begin, end = (tuple(tokenizer.encode(mark, add_special_tokens=False)) for mark in ("<think>", "</think>"))
        return Thinking(params.thinking_budget, begin, end, inside=params.thinking)

    def _compiler(self) -> GrammarCompiler:
        tokenizer = self._need_tokenizer()
        if not self._end_ids:
            raise InvalidRequest("this model has no end token, so structured output could not end", param="grammar")
        from ropeway.text.grammars import GrammarCompiler  # the library takes its time, and few need it

        with self._lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(tokenizer, self._vocab_size, self._end_ids)
            return self._grammars

    def _need_tokenizer(self) -> Tokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load_tokenizer()
        if self._tokenizer is None:
            raise InvalidRequest("this model has no tokenizer, which structured output and bad_words need")
        return self._tokenizer


def _bit(token: int) -> np.int32:
    return np.uint32(1 << (token & 31)).view(np.int32)
