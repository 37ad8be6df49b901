"""POST /v1/chat/completions"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ropeway.engine.client import Delta
from ropeway.request import Completion, TokenLogprob
from ropeway.server.answering import respond
from ropeway.server.generating import Generating
from ropeway.server.logprobs import chat_logprobs
from ropeway.server.options import request_options
from ropeway.server.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
)
from ropeway.server.sampling import chat_params
from ropeway.server.state import State, state_of
from ropeway.server.streaming import DONE, event


async def create_chat_completion(request: Request) -> Response:
    arrival_s = time.monotonic()
    state = state_of(request)
    body = await state.read(request, ChatCompletionRequest)
    options = request_options(body, request.headers, state.engine.info.tiers, arrival_s)
    answer = ChatAnswer(state, body)
    params = chat_params(body, state.sampling_defaults)
    prompt = await state.prompts.chat(
        body.messages,
        add_special_tokens=body.add_special_tokens,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs,
    )
    return await respond(request, body, answer, [prompt], params, options)


def worth_a_chunk(delta: Delta, token_ids: bool) -> bool:
    """Whether a delta tells the client anything: tokens whose text is held back (half a character, what may become
    a stop string) don't, unless their ids or log-probabilities were asked for."""
    news = delta.text or delta.finish_reason is not None or delta.logprobs is not None
    return bool(news or (token_ids and delta.token_ids))


class ChatAnswer:
    """Writes the answer to one request, whole or in chunks. In a stream, a choice's first chunk has the role and
    comes with its first token; the chunk that ends it has its last text and ``finish_reason``."""

    def __init__(self, state: State, body: ChatCompletionRequest) -> None:
        self._tokenizer = state.engine.tokenizer
        self._token_ids = bool(body.return_token_ids)
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._frame: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": state.model_name(body.model),
        }

    def whole(
        self, generating: Generating, completions: Sequence[Completion], prompts: Sequence[list[int]]
    ) -> dict[str, Any]:
        choices = []
        for each in completions:
            assert each.finish_reason is not None
            choices.append(
                ChatChoice(
                    index=each.index,
                    message=AssistantMessage(content=each.text),
                    logprobs=self._logprobs(each.logprobs),
                    finish_reason=each.finish_reason,
                    stop_reason=each.stop_reason,
                    token_ids=each.token_ids if self._token_ids else UNSET,
                )
            )
        body = {**self._frame, "choices": choices, "usage": generating.usage()}
        return {**body, "prompt_token_ids": prompts[0]} if self._token_ids else body

    async def chunks(self, generating: Generating, prompts: Sequence[list[int]]) -> AsyncGenerator[bytes, None]:
        frame = {**self._frame, "object": "chat.completion.chunk"}
        if self._usage:
            frame["usage"] = None
        begun: set[int] = set()
        async with contextlib.aclosing(generating.deltas()) as deltas:
            async for delta in deltas:
                if delta.index not in begun:
                    first = {"prompt_token_ids": prompts[0]} if self._token_ids and not begun else {}
                    begun.add(delta.index)
                    role = ChatChunkChoice(index=delta.index, delta=ChatDelta(role="assistant", content=""))
                    yield event({**frame, "choices": [role], **first})
                if worth_a_chunk(delta, self._token_ids):
                    yield event({**frame, "choices": [self._choice(delta)]})
        if self._usage:
            yield event({**frame, "choices": [], "usage": generating.usage()})
        yield DONE

    def _choice(self, delta: Delta) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(content=delta.text) if delta.text else ChatDelta(),
            logprobs=self._logprobs(delta.logprobs),
            finish_reason=delta.finish_reason,
            stop_reason=UNSET if delta.finish_reason is None else delta.stop_reason,
            token_ids=delta.token_ids if self._token_ids else UNSET,
        )

    def _logprobs(self, tokens: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
        return None if tokens is None or self._tokenizer is None else chat_logprobs(tokens, self._tokenizer)
