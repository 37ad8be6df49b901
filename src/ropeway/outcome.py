"""What a settled step tells the outside: its tokens as columns, and the events in it.

msgspec structs, so the same object serves in process and over a socket."""

from __future__ import annotations

import msgspec
import numpy as np

from ropeway.request import FinishReason, Timeline


class LogprobColumns(msgspec.Struct, frozen=True, eq=False):
    """Log-probabilities of those sampled tokens that asked for them."""

    row: np.ndarray
    """int32 [m]: index into the tokens they belong to."""
    chosen: np.ndarray
    """float32 [m]."""
    top_ids: np.ndarray
    """int32 [m, k]: most likely first; k is the largest asked for in the step."""
    top: np.ndarray
    """float32 [m, k]."""


class PromptLogprobColumns(msgspec.Struct, frozen=True, eq=False):
    """Log-probabilities of tokens of prompts, each given those before it."""

    request: np.ndarray
    """int64 [m]: internal request ids."""
    position: np.ndarray
    """int32 [m]: of the token in its prompt."""
    token: np.ndarray
    """int32 [m]."""
    chosen: np.ndarray
    """float32 [m]: of that token."""
    rank: np.ndarray
    """int32 [m]: of that token; 1 is the likeliest of all."""
    top_ids: np.ndarray
    """int32 [m, k]: most likely first; k is the largest asked for in the step."""
    top: np.ndarray
    """float32 [m, k]."""


class Refusal(msgspec.Struct, frozen=True):
    """Why a request is not served, or not to its end."""

    error: str
    """Name of the error class of ``ropeway.errors``."""
    message: str
    retry_after_s: float | None = None


class Finished(msgspec.Struct, frozen=True):
    id: int
    reason: FinishReason
    end_token: int | None = None
    """The end token or stop token id met, the last one of the output."""
    refusal: Refusal | None = None
    """For ``FinishReason.ERROR``: what happened."""
    timeline: Timeline | None = None


class Started(msgspec.Struct, frozen=True):
    """A request's first token is in this message."""

    id: int
    cached_tokens: int


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, tag=True, eq=False):
    """The tokens of one settled step, and what happened in it."""

    ids: np.ndarray
    """int64 [m]: internal request ids."""
    tokens: np.ndarray
    """int32 [m]."""
    finished: list[Finished] = []
    started: list[Started] = []
    logprobs: LogprobColumns | None = None
    prompt_logprobs: PromptLogprobColumns | None = None
    accepted: list[int] = []
    """Requests that were put into the queue; the others of their message are in ``finished``, refused."""
