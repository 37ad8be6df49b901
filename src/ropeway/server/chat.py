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
from ropeway.errors import RopewayError
from ropeway.request import Completion, TokenLogprob
from ropeway.server.answering import respond
from ropeway.server.auth import caller_of
from ropeway.server.chatting import Chat, ChoiceReaders, prepare_chat, read_message, text_of
from ropeway.server.generating import Generating
from ropeway.server.logprobs import chat_logprobs, prompt_logprobs, score_of
from ropeway.server.options import request_options
from ropeway.server.protocol import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
    CompletionTokensDetails,
    ToolCall,
    ToolCallDelta,
    UsageBody,
)
from ropeway.server.state import State, state_of
from ropeway.server.streaming import DONE, error_event, event
from ropeway.text.answers.parts import Arguments, CallBegins, Content, Part, Reasoning


async def create_chat_completion(request: Request) -> Response:
    arrival_s = time.monotonic()
    state = state_of(request)
    body = await state.read(request, ChatCompletionRequest)
    options = request_options(body, request.headers, state.engine.info.tiers, arrival_s, caller_of(request))
    model = state.model_name(body.model)
    chat = await prepare_chat(state, body)
    answer = ChatAnswer(state, body, chat, model)
    streams = bool(body.stream)
    return await respond(request, answer, [chat.prompt], chat.params, options, stream=streams, beams=chat.beams)


class ChatAnswer:
    """Writes the answer to one request, whole or in chunks. In a stream, a choice's first chunk has the role and
    comes with its first token; the chunk that ends it has its last text and ``finish_reason``."""

    def __init__(self, state: State, body: ChatCompletionRequest, chat: Chat, model: str) -> None:
        self._chat = chat
        self._tokenizer = state.engine.tokenizer
        self._token_ids = bool(body.return_token_ids)
        self._reasoning = body.include_reasoning is not False
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.model = model
        self._frame: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(
        self, generating: Generating, completions: Sequence[Completion], prompts: Sequence[list[int]]
    ) -> dict[str, Any]:
        usage = self._usage_of(generating, [each.token_ids for each in completions])
        body = {**self._frame, "choices": [self._whole_choice(each) for each in completions], "usage": usage}
        if self._token_ids:
            body["prompt_token_ids"] = prompts[0]
        if (told := generating.prompt_logprobs(0)) is not None:
            body["prompt_logprobs"] = prompt_logprobs(told, self._tokenizer)
        return body

    def _whole_choice(self, completion: Completion) -> ChatChoice:
        assert completion.finish_reason is not None
        said = read_message(self._chat, completion.text)
        calls = [
            ToolCall(id=call_id(), function=CalledFunction(name=call.name, arguments=call.arguments))
            for call in said.calls
        ]
        return ChatChoice(
            index=completion.index,
            message=AssistantMessage(
                content=said.content or (None if calls else ""),
                reasoning_content=said.reasoning if said.reasoning and self._reasoning else UNSET,
                tool_calls=calls or UNSET,
            ),
            logprobs=self._logprobs(completion.logprobs),
            finish_reason=self._chat.finish_reason(completion.finish_reason, called=bool(calls)),
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._token_ids else UNSET,
            cumulative_logprob=score_of(completion.cumulative_logprob),
            score=score_of(completion.score),
        )

    async def chunks(self, generating: Generating, prompts: Sequence[list[int]]) -> AsyncGenerator[bytes, None]:
        frame = {**self._frame, "object": "chat.completion.chunk"}
        if self._usage:
            frame["usage"] = None
        begun: set[int] = set()
        readers = ChoiceReaders(self._chat)
        token_ids: dict[int, list[int]] = {}
        async with contextlib.aclosing(generating.deltas()) as deltas:
            async for delta in deltas:
                if delta.index not in begun:
                    first = {"prompt_token_ids": prompts[0]} if self._token_ids and not begun else {}
                    begun.add(delta.index)
                    role = ChatChunkChoice(index=delta.index, delta=ChatDelta(role="assistant", content=""))
                    yield event({**frame, "choices": [role], **first})
                parts = readers.read(delta)
                if self._usage and self._chat.writing.reasons:
                    token_ids.setdefault(delta.index, []).extend(delta.token_ids)
                called = readers.called(delta.index)
                if called and parts and delta.finish_reason is not None:
                    # Some clients look for calls in chunks without a reason to finish, and for nothing else there.
                    ending, delta.finish_reason = delta.finish_reason, None
                    yield event({**frame, "choices": [self._choice(delta, parts, called=called)]})
                    delta, parts = Delta(delta.index, "", [], None, ending, delta.stop_reason), []
                if worth_a_chunk(delta, parts, self._token_ids):
                    yield event({**frame, "choices": [self._choice(delta, parts, called=called)]})
        if self._usage:
            usage = self._usage_of(generating, list(token_ids.values()))
            yield event({**frame, "choices": [], "usage": usage})
        yield DONE

    def broken(self, error: RopewayError) -> bytes:
        return error_event(error)

    def _choice(self, delta: Delta, parts: Sequence[Part], *, called: bool) -> ChatChunkChoice:
        reason = None
        if delta.finish_reason is not None:
            reason = self._chat.finish_reason(delta.finish_reason, called=called)
        return ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(
                content=text_of(parts, Content) or UNSET,
                reasoning_content=(text_of(parts, Reasoning) or UNSET) if self._reasoning else UNSET,
                tool_calls=_call_deltas(parts) or UNSET,
            ),
            logprobs=self._logprobs(delta.logprobs),
            finish_reason=reason,
            stop_reason=UNSET if reason is None else delta.stop_reason,
            token_ids=delta.token_ids if self._token_ids else UNSET,
        )

    def _usage_of(self, generating: Generating, token_ids: Sequence[Sequence[int]]) -> UsageBody:
        """With the share of the reasoning, where the model reasons."""
        usage = generating.usage()
        if self._chat.writing.reasons:
            reasoning = sum(map(self._chat.reasoning_tokens, token_ids))
            usage.completion_tokens_details = CompletionTokensDetails(reasoning)
        return usage

    def _logprobs(self, tokens: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
        return None if tokens is None or self._tokenizer is None else chat_logprobs(tokens, self._tokenizer)


def worth_a_chunk(delta: Delta, news: object, token_ids: bool) -> bool:
    """Whether a delta tells the client anything: tokens without ``news`` for now (half a character, what may become a
    stop string or a call) don't, unless their ids or log-probabilities were asked for."""
    return bool(
        news or delta.finish_reason is not None or delta.logprobs is not None or (token_ids and delta.token_ids)
    )


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _call_deltas(parts: Sequence[Part]) -> list[ToolCallDelta]:
    deltas = []
    for part in parts:
        if isinstance(part, CallBegins):
            function = CalledFunction(name=part.name, arguments="")
            deltas.append(ToolCallDelta(index=part.index, id=call_id(), type="function", function=function))
        elif isinstance(part, Arguments):
            deltas.append(ToolCallDelta(index=part.index, function=CalledFunction(arguments=part.text)))
    return deltas
