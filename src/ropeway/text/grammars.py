"""Grammars as masks over a vocabulary, on the ``llguidance`` library.

A matcher follows one completion token by token; what may come next is a bit per token. All limits are the library's:
a grammar too large is refused when it is compiled, one that becomes too complex on the way ends its own request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark
from numpy.typing import NDArray

from ropeway.errors import InvalidRequest
from ropeway.grammar import Grammar, told_plainly
from ropeway.text.tokenizer import Tokenizer

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
_NO_TEXT = "NoExtensionBias"
"""The library's word for it."""
_MOST_SHOWN = 500
"""Characters of the library's words in a message."""


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Its methods may be called from several threads at once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        """``vocab_size``: token ids below it may be sampled. ``end_ids``: what ends a completion, at least one of them
        below ``vocab_size``."""
        self._end_ids = np.array([token for token in end_ids if token < vocab_size], dtype=np.int64)
        vocabulary: Any = _Vocabulary(tokenizer, vocab_size, int(self._end_ids[0]))
        self._vocabulary = LLTokenizer(llguidance.TokenizerWrapper(vocabulary), n_vocab=vocab_size)
        self._executor = LLExecutor()
        self._limits = LLParserLimits(verbose_errors=False)
        self.words = -(-vocab_size // 32)
        """32-bit words of a mask."""

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning. Raises ``InvalidRequest`` with what is wrong or not supported."""
        try:
            text = _source(grammar)
        except Exception as error:  # the converter of GBNF raises what it likes
            raise _invalid(grammar, str(error)) from error
        matcher = LLMatcher(self._vocabulary, text, log_level=0, limits=self._limits)
        # Some limits show when the first mask is made; that is here, not in the step loop.
        compiled = GrammarMatcher(matcher, frozenset(self._end_ids.tolist()))
        if not matcher.is_error():
            self.fill([compiled], [0], np.empty((1, self.words), dtype=np.int32))
        if compiled.failure is not None:
            raise _invalid(grammar, "no text fits it" if compiled.failure == _NO_TEXT else compiled.failure)
        return compiled

    def fill(self, matchers: Sequence[GrammarMatcher], rows: Sequence[int], bits: NDArray[np.int32]) -> None:
        """Write what each matcher allows to its row of ``bits`` (int32 [m, words]); see ``plan.Masks``."""
        native = [(matcher.native, row) for matcher, row in zip(matchers, rows, strict=True)]
        self._executor.unsafe_compute_mask_ptr(native, bits.ctypes.data, bits.shape[1] * 4, bits.shape[0])
        first, others = int(self._end_ids[0]), self._end_ids[1:]
        for row in rows:  # the library knows one end token
            if len(others) and bits[row, first >> 5] >> (first & 31) & 1:
                np.bitwise_or.at(bits[row], others >> 5, _bit(others))


class GrammarMatcher:
    """One completion's way through a grammar."""

    __slots__ = ("_end_ids", "native")

    def __init__(self, native: LLMatcher, end_ids: frozenset[int]) -> None:
        self.native = native
        self._end_ids = end_ids

    def fork(self) -> GrammarMatcher:
        """Another one at the same place."""
        return GrammarMatcher(self.native.deep_copy(), self._end_ids)

    def consume(self, token: int) -> None:
        """The completion goes on with ``token``. What the grammar does not allow is a ``failure`` from then on."""
        if token not in self._end_ids:
            self.native.consume_token(token)

    @property
    def failure(self) -> str | None:
        """Why it cannot go on."""
        return self.native.get_error().removesuffix("\n<non-verbose/>") if self.native.is_error() else None


class _Vocabulary:
    """A tokenizer as the library wants it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_id: int) -> None:
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.eos_token_id = end_id
        self.bos_token_id = None
        self.special_token_ids = sorted({end_id, *(token for token in tokenizer.special_ids if token < vocab_size)})
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        decoded = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(decoded, add_special_tokens=False, parse_special=False)


def _source(grammar: Grammar) -> str:
    """A grammar as the library reads it."""
    if grammar.kind == "json_schema":
        answer: dict[str, Any] = {"json_schema": told_plainly(json.loads(grammar.text))}
    elif grammar.kind == "regex":
        answer = {"lark_grammar": f"start: /{regex_to_lark(grammar.text, '')}/"}
    else:
        gbnf = _GBNF_RULE.search(grammar.text) is not None
        answer = {"lark_grammar": gbnf_to_lark(grammar.text) if gbnf else grammar.text}
    if not grammar.after:
        return json.dumps({"grammars": [answer]})
    before = f"start: before /[ \\n]{{0,4}}/ @answer\nbefore[suffix={json.dumps(grammar.after)}]: /(.|\\n)*/"
    return json.dumps({"grammars": [{"lark_grammar": before}, {"name": "answer", **answer}]})


def _bit(tokens: NDArray[np.int64]) -> NDArray[np.int32]:
    return (np.uint32(1) << (tokens & 31).astype(np.uint32)).view(np.int32)


def _invalid(grammar: Grammar, why: str) -> InvalidRequest:
    return InvalidRequest(f"the {grammar.noun} cannot be used: {why[:_MOST_SHOWN]}", param="grammar")
