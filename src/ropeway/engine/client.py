"""The client side of the engine, as servers and the asynchronous Python API see it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ropeway import errors
from ropeway.engine.messages import EngineInfo, Inspected, Stats
from ropeway.errors import QueueFull, RopewayError
from ropeway.outcome import Refusal
from ropeway.request import FinishReason, SamplingParams, Timeline, TokenLogprob
from ropeway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How a request is to be treated, beside what it asks."""

    tier: int | None = None
    """Rank in ``EngineInfo.tiers``; None: the default tier."""
    tenant: str = ""
    """Whose it is; tenants of one tier get equal shares."""
    arrival_s: float | None = None
    """When it arrived, on the clock of ``time.monotonic``; None: now."""
    deadline_s: float | None = None
    """When it is to be given up, on the same clock; None: never."""
    cache_salt: str | None = None
    """Prefixes in the cache are shared only under the same salt."""


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
    refusal: Refusal | None = None
    """For ``FinishReason.ERROR``: what happened."""
    timeline: Timeline | None = None
    """With the last delta: where its time went. None if it was ended on this side of the engine, by a stop string or
    ``cancel``; ``Generation.timelines`` has it a little later."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """With the first delta of the first completion, if they were asked for; None for the prompt's first token."""
    cumulative_logprob: float | None = None
    """Of a beam, as is ``score``; see ``Completion``."""
    score: float | None = None


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int = 0
    """Over all n completions."""
    cached_tokens: int = 0


class Timelines(Protocol):
    """Where the time of a request's completions goes; outlives the request."""

    @property
    def ended(self) -> Mapping[int, Timeline]:
        """Of those that have ended, by index."""
        ...

    async def ask(self) -> Mapping[int, Timeline]:
        """Of all completions; those under way are asked after. What the engine does not tell within a second or two is
        missing."""
        ...


class Generation(Protocol):
    """A request under way: iterate for its deltas until every completion has finished."""

    usage: Usage
    """Complete once iteration has ended."""

    @property
    def timelines(self) -> Timelines: ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...
    async def accepted(self) -> None:
        """Return when the engine has taken every completion into its queue (or one has ended some other way).

        Raises what it refused one with: ``Shed``, ``QueueFull``, ``QueueTimeout``, ``DeadlineExceeded``,
        ``InvalidRequest`` or ``EngineDead``."""
        ...

    def cancel(self) -> None:
        """Abort what is unfinished; iteration ends with ``FinishReason.ABORT`` deltas. Idempotent."""
        ...


class AsyncEngine(Protocol):
    """An engine in a process of its own; lives on one asyncio loop."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def tokenizer(self) -> Tokenizer | None:
        """None: the model folder has none, only token ids work."""
        ...

    @property
    def stats(self) -> Stats:
        """The engine's latest."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the engine is dead or does not answer; None: it lives."""
        ...

    async def died(self) -> str:
        """Return why when the engine has ended for good, and not because it was closed."""
        ...

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, options: RequestOptions = RequestOptions()
    ) -> Generation:
        """Hand a request to the engine; never blocks. What the engine itself refuses, ``Generation.accepted`` tells.

        Raises ``InvalidRequest`` (empty prompt, ids outside the vocabulary), ``ContextLengthExceeded``
        (prompt + max_tokens beyond ``info.max_model_len``), ``QueueFull`` (n counts n; not for a search under way) or
        ``EngineDead``."""
        ...

    async def record(self, on: bool) -> bytes:
        """Begin to trace what happens when (-> nothing), or end that (-> the trace as JSON). Raises ``EngineDead``."""
        ...

    async def inspect(self) -> Inspected:
        """The batch, the queues and the KV pool at this moment. Raises ``EngineDead``."""
        ...

    async def close(self) -> None: ...


def error_of(refusal: Refusal | None) -> RopewayError:
    """The error that a refusal stands for, as it would have been raised where it was made."""
    if refusal is None:
        return RopewayError("the request failed; the engine gave no reason", code="request_failed")
    kind = getattr(errors, refusal.error, None)
    if not (isinstance(kind, type) and issubclass(kind, RopewayError)) or kind is RopewayError:
        return RopewayError(f"the request failed: {refusal.message}", code="request_failed")
    if issubclass(kind, QueueFull) and refusal.retry_after_s is not None:
        return kind(refusal.message, retry_after_s=refusal.retry_after_s)
    return kind(refusal.message)
