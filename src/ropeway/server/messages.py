"""POST /v1/messages, in Anthropic's format, and /v1/messages/count_tokens."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ropeway.errors import InvalidRequest, RopewayError
from ropeway.request import Completion, FinishReason
from ropeway.server.answering import respond
from ropeway.server.auth import caller_of
from ropeway.server.blocks import Block, BlockNews, Blocks, blocks_of
from ropeway.server.chatting import Chat, ChoiceReaders, prepare_chat, read_message
from ropeway.server.errors import message_error_body
from ropeway.server.generating import Generating
from ropeway.server.options import request_options
from ropeway.server.protocol import (
    ChatCompletionRequest,
    FunctionDefinition,
    NamedFunction,
    NamedTool,
    ToolDefinition,
)
from ropeway.server.state import state_of
from ropeway.server.streaming import json_response, named_event


class MessagesTool(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: str | None = None
    """Only ``custom``: tools that run at the provider are not served."""


class MessagesToolChoice(msgspec.Struct, kw_only=True):
    type: str
    """``auto``, ``any``, ``tool`` or ``none``."""
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: str
    """``enabled``, ``adaptive`` or ``disabled``."""
    budget_tokens: int | None = None


class MessagesMetadata(msgspec.Struct, kw_only=True):
    user_id: str | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """What a prompt is made of."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: MessagesMetadata | None = None


async def create_message(request: Request) -> Response:
    arrival_s = time.monotonic()
    state = state_of(request)
    body = await state.read(request, MessagesRequest)
    chat_request = _chat_request(body)
    options = request_options(chat_request, request.headers, state.engine.info.tiers, arrival_s, caller_of(request))
    model = state.model_name(body.model)
    chat = await prepare_chat(state, chat_request)
    answer = MessageAnswer(chat, model)
    return await respond(request, answer, [chat.prompt], chat.params, options, stream=bool(body.stream))


async def count_tokens(request: Request) -> Response:
    state = state_of(request)
    body = await state.read(request, CountTokensRequest)
    state.model_name(body.model)
    chat = await prepare_chat(state, _prompt_request(body))
    return json_response({"input_tokens": len(chat.prompt)})


def _chat_request(body: MessagesRequest) -> ChatCompletionRequest:
    request = _prompt_request(body)
    request.max_tokens = body.max_tokens
    request.stop = body.stop_sequences
    request.stream = body.stream
    request.temperature, request.top_p, request.top_k = body.temperature, body.top_p, body.top_k
    request.user = body.metadata.user_id if body.metadata is not None else None
    return request


def _prompt_request(body: CountTokensRequest) -> ChatCompletionRequest:
    """Raises ``InvalidRequest`` naming the place of what is wrong."""
    request = ChatCompletionRequest(model=body.model, messages=_messages(body))
    if body.tools:
        request.tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        request.tool_choice = _tool_choice(body.tool_choice)
        request.parallel_tool_calls = not body.tool_choice.disable_parallel_tool_use
    if body.thinking is not None:
        wanted = body.thinking.type != "disabled"
        request.chat_template_kwargs = {"enable_thinking": wanted}
        request.thinking_token_budget = body.thinking.budget_tokens if wanted else None
    return request


def _tool(tool: MessagesTool, place: str) -> ToolDefinition:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(f"{place}.type is {tool.type!r:.40}; this server runs no tools itself", param="tools")
    return ToolDefinition(
        function=FunctionDefinition(name=tool.name, description=tool.description, parameters=tool.input_schema)
    )


def _tool_choice(choice: MessagesToolChoice) -> str | NamedTool:
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("tool_choice of type tool needs the name of one", param="tool_choice")
        return NamedTool(function=NamedFunction(name=choice.name))
    try:
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    except KeyError as error:
        raise InvalidRequest(
            f"tool_choice.type is {choice.type!r:.40}; it must be auto, any, tool or none", param="tool_choice"
        ) from error


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    """As the chat API has them."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for index, message in enumerate(body.messages):
        place = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise InvalidRequest(f"{place}.role is {role!r:.40}; it must be user or assistant", param="messages")
        if isinstance(content, list):
            messages += _from_blocks(role, content, place)
        else:
            messages.append({"role": role, "content": content})
    return messages


def _from_blocks(role: str, blocks: list[Any], place: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before what the user says with them."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        where = f"{place}.content[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append(_string(block, "text", where))
        elif kind == "thinking":
            reasoning.append(_string(block, "thinking", where))
        elif kind == "redacted_thinking":
            pass
        elif kind == "tool_use":
            function = {"name": _string(block, "name", where), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
        elif kind == "tool_result":
            text = _text(block.get("content") or "", f"{where}.content")
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": text})
        else:
            raise InvalidRequest(
                f"{where}.type is {kind!r:.40}; this server reads text, thinking, tool_use and tool_result",
                param="messages",
            )
    said: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if calls:
        said["tool_calls"] = calls
    if reasoning:
        said["reasoning_content"] = "\n".join(reasoning)
    return [*results, said] if texts or calls or reasoning or not results else results


def _text(given: Any, place: str) -> str:
    """Text, or the text of its blocks."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise InvalidRequest(f"{place} must be text or a list of text blocks", param=place.partition("[")[0])
    return "\n".join(_string(block, "text", f"{place}[{index}]") for index, block in enumerate(given))


def _string(block: Any, field: str, place: str) -> str:
    value = block.get(field) if isinstance(block, Mapping) else None
    if not isinstance(value, str):
        raise InvalidRequest(f"{place}.{field} must be text", param=place.partition("[")[0])
    return value


class MessageAnswer:
    """Writes the answer to one request, whole or in events."""

    def __init__(self, chat: Chat, model: str) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._chat = chat
        self.model = model

    def whole(
        self, generating: Generating, completions: Sequence[Completion], prompts: Sequence[list[int]]
    ) -> dict[str, Any]:
        (completion,) = completions
        said = read_message(self._chat, completion.text)
        return {
            **self._message([_content(block) for block in blocks_of(said)]),
            **_stop(completion.finish_reason, completion.stop_reason, called=bool(said.calls)),
            "usage": _usage(generating),
        }

    async def chunks(self, generating: Generating, prompts: Sequence[list[int]]) -> AsyncGenerator[bytes, None]:
        readers, blocks = ChoiceReaders(self._chat), Blocks()
        begun = False
        stop: dict[str, Any] = {}
        async with contextlib.aclosing(generating.deltas()) as deltas:
            async for delta in deltas:
                if not begun:
                    begun = True
                    start = {**self._message([]), "stop_reason": None, "stop_sequence": None}
                    usage = {**_usage(generating), "output_tokens": 0}
                    yield _event({"type": "message_start", "message": {**start, "usage": usage}})
                for news in blocks.take(readers.read(delta)):
                    yield _event(_block_event(news))
                if delta.finish_reason is not None:
                    stop = _stop(delta.finish_reason, delta.stop_reason, called=blocks.called)
        for news in blocks.end():
            yield _event(_block_event(news))
        yield _event({"type": "message_delta", "delta": stop, "usage": _usage(generating)})
        yield _event({"type": "message_stop"})

    def broken(self, error: RopewayError) -> bytes:
        return b"event: error\ndata: " + message_error_body(error) + b"\n\n"

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}


def _event(body: dict[str, Any]) -> bytes:
    return named_event(body["type"], body)


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": _call_id(), "name": block.name, "input": _object(block.text)}


def _block_event(news: BlockNews) -> dict[str, Any]:
    block = news.block
    if news.what == "begins":
        begun = Block(block.kind, block.index, block.name)
        return {"type": "content_block_start", "index": block.index, "content_block": _content(begun)}
    if news.what == "ends":
        return {"type": "content_block_stop", "index": block.index}
    delta = {
        "reasoning": {"type": "thinking_delta", "thinking": news.text},
        "text": {"type": "text_delta", "text": news.text},
        "call": {"type": "input_json_delta", "partial_json": news.text},
    }[block.kind]
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def _stop(reason: FinishReason | None, by: int | str | None, *, called: bool) -> dict[str, Any]:
    if reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(by, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": by}
    return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}


def _usage(generating: Generating) -> dict[str, Any]:
    usage = generating.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def _object(text: str) -> dict[str, Any]:
    """Arguments as an object; what is none, under a name of its own."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {"_raw": text}
    return value if isinstance(value, dict) else {"_raw": text}


def _call_id() -> str:
    return f"toolu_{uuid.uuid4().hex[:24]}"
