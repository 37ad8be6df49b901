"""Ropeway: an LLM serving engine whose batch never stops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ropeway.grammar import Grammar
from ropeway.request import BeamSearchParams, Completion, FinishReason, RequestOutput, SamplingParams, TokenLogprob
from ropeway.version import __version__

if TYPE_CHECKING:
    from ropeway.llm import LLM, AsyncLLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "Completion",
    "FinishReason",
    "Grammar",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprob",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """``LLM`` and ``AsyncLLM`` bring torch, so they are imported at first use."""
    if name in ("LLM", "AsyncLLM"):
        from ropeway import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'ropeway' has no attribute {name!r}")
