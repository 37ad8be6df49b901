"""The client side of the engine, as servers and the asynchronous Python API see it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ropeway.engine.messages import EngineInfo, Stats
from ropeway.request import FinishReason, SamplingParams, TokenLogprob
from ropeway.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Delta:
    """News of one completion. ``text`` never holds half a character nor the beginning of a stop string, so
    it may be empty or run behind ``token_ids``; the concatenation over all deltas is the completion."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    """Set once per completion, in its last delta."""
    stop_reason: int | str | None = None
    error: str | None = None
    """For ``FinishReason.ERROR``: what happened."""


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int = 0
    """Over all n completions."""
    cached_tokens: int = 0


class Generation(Protocol):
    """A request under way: iterate for its deltas until every completion has finished."""

    usage: Usage
    """Complete once iteration has ended."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...
    def cancel(self) -> None:
        """Abort what is unfinished; iteration ends with ``FinishReason.ABORT`` deltas. Idempotent."""
        ...


class AsyncEngine(Protocol):
    """An engine in a process of its own; lives on one asyncio loop."""

    info: EngineInfo
    tokenizer: Tokenizer | None
    """None: the model folder has none, only token ids work."""

    @property
    def stats(self) -> Stats:
        """The engine's latest."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the engine is dead or does not answer; None: it lives."""
        ...

    def submit(self, prompt: Sequence[int], params: SamplingParams, *, cache_salt: str | None = None) -> Generation:
        """Hand a request to the engine; never blocks.

        Raises ``InvalidRequest`` (empty prompt, ids outside the vocabulary), ``ContextLengthExceeded``
        (prompt + max_tokens beyond ``info.max_model_len``), ``QueueFull`` (n counts n) or ``EngineDead``."""
        ...

    async def close(self) -> None: ...
