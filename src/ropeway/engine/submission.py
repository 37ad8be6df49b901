"""From a user's request to the engine's: checks that need only the model's numbers, and the n siblings."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ropeway.engine.messages import EngineInfo, NewRequest
from ropeway.errors import ContextLengthExceeded, InvalidRequest
from ropeway.request import SamplingParams
from ropeway.tiers import find_tier

MAX_TENANT = 256
"""Most characters of a tenant's name."""
_GOLDEN = 0x9E3779B97F4A7C15
"""Odd and near 2**64 / golden ratio: spreads siblings' seeds (Knuth, TAOCP 3, section 6.4)."""


class Submitter:
    """Numbers requests and checks them against one engine."""

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self._ids: Iterator[int] = itertools.count(1)

    def prepare(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        salt: str | None = None,
        tier: int | None = None,
        tenant: str = "",
        arrival_s: float | None = None,
        deadline_s: float | None = None,
    ) -> list[NewRequest]:
        """The ``params.n`` completions of a prompt. The keywords are those of ``RequestOptions``.

        Raises ``InvalidRequest`` or ``ContextLengthExceeded`` naming what was asked and the limit."""
        tokens = check_request(self.info, prompt, params)
        salt_bytes = b"" if salt is None else _utf8(salt, "cache_salt")
        _utf8(tenant, "user")
        if len(tenant) > MAX_TENANT:
            raise InvalidRequest(f"user has {len(tenant)} characters; the limit is {MAX_TENANT}", param="user")
        tiers = self.info.tiers
        rank = find_tier(tiers, None) if tier is None else tier
        if not 0 <= rank < len(tiers):
            raise InvalidRequest(f"there is no tier of rank {rank}; there are {len(tiers)}", param="priority")
        seed = secrets.randbits(64) if params.seed is None else params.seed % 2**64
        ids = [next(self._ids) for _ in range(params.n)]
        others = msgspec.structs.replace(params, prompt_logprobs=None)  # one tells of the prompt for all
        return [
            NewRequest(
                id=request_id,
                prompt=tokens,
                params=params if index == 0 else others,
                seed=(seed + index * _GOLDEN) % 2**64,
                salt=salt_bytes,
                leader=None if index == 0 else ids[0],
                group=params.n > 1,
                tier=rank,
                tenant=tenant,
                arrival_s=arrival_s,
                deadline_s=deadline_s,
            )
            for index, request_id in enumerate(ids)
        ]


def check_request(info: EngineInfo, prompt: Sequence[int], params: SamplingParams) -> NDArray[np.int32]:
    """The prompt's token ids, int32 [n]. Raises ``InvalidRequest`` (an empty prompt, ids outside the vocabulary) and
    ``ContextLengthExceeded`` for what the engine can never serve."""
    vocab, context = info.vocab_size, info.max_model_len
    if not len(prompt):
        raise InvalidRequest("the prompt is empty; it needs at least one token", param="prompt")
    wanted = params.max_tokens
    if len(prompt) + (wanted or 1) > context:
        output = f"{wanted} output tokens" if wanted is not None else "at least one output token"
        raise ContextLengthExceeded(
            f"this model's context here is {context} tokens (KV pool: {info.num_blocks} blocks of "
            f"{info.block_size}); the prompt has {len(prompt)} and {output} were asked: "
            "shorten the prompt or lower max_tokens",
            param="prompt" if len(prompt) >= context else "max_tokens",
        )
    if min(prompt) < 0 or max(prompt) >= vocab:
        bad = next(token for token in prompt if not 0 <= token < vocab)
        raise InvalidRequest(f"token id {bad} is not in the vocabulary (0 to {vocab - 1})", param="prompt")
    params.check_vocabulary(vocab)
    return np.array(prompt, dtype=np.int32)


def _utf8(text: str, field: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field} must be text without lone surrogates", param=field) from error
