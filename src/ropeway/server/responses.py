"""POST /v1/responses, in OpenAI's format. Nothing is stored: a conversation is sent whole every time."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ropeway.errors import InvalidRequest, RopewayError
from ropeway.request import Completion, FinishReason
from ropeway.server.answering import respond
from ropeway.server.auth import caller_of
from ropeway.server.blocks import Block, BlockNews, Blocks, blocks_of
from ropeway.server.chat import call_id
from ropeway.server.chatting import Chat, ChoiceReaders, prepare_chat, read_message
from ropeway.server.generating import Generating
from ropeway.server.options import request_options
from ropeway.server.protocol import (
    ChatCompletionRequest,
    FunctionDefinition,
    JsonSchemaFormat,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    ToolDefinition,
)
from ropeway.server.state import state_of
from ropeway.server.streaming import named_event


class TextFormat(msgspec.Struct, kw_only=True):
    type: str = "text"
    """``text``, ``json_object`` or ``json_schema``."""
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None
    """Changes nothing."""


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    """Changes nothing: reasoning is told as it is."""
    generate_summary: str | None = None


class ResponsesTool(msgspec.Struct, kw_only=True):
    type: str
    """Only ``function``."""
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesNamedTool(msgspec.Struct, kw_only=True):
    type: str = "function"
    name: str


class ResponsesRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | ResponsesNamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    priority: int | str | None = None
    """Ropeway's own, as are the next two; see the chat API."""
    timeout: float | None = None
    cache_salt: str | None = None
    previous_response_id: str | None = None
    """Refused: nothing is stored here."""
    background: bool | None = None
    """Refused when true."""
    prompt: dict[str, Any] | None = None
    """Refused: there are no templates of prompts here."""
    truncation: str | None = None
    """Only ``disabled``."""


async def create_response(request: Request) -> Response:
    arrival_s = time.monotonic()
    state = state_of(request)
    body = await state.read(request, ResponsesRequest)
    chat_request = _chat_request(body)
    options = request_options(chat_request, request.headers, state.engine.info.tiers, arrival_s, caller_of(request))
    model = state.model_name(body.model)
    try:
        chat = await prepare_chat(state, chat_request)
    except InvalidRequest as error:
        raise _in_our_words(error) from error
    answer = ResponseAnswer(body, chat, model)
    return await respond(request, answer, [chat.prompt], chat.params, options, stream=bool(body.stream))


_NAMES = {"max_completion_tokens": "max_output_tokens", "response_format": "text.format", "messages": "input"}
"""Fields of the chat API, as they are called here."""


def _in_our_words(error: InvalidRequest) -> InvalidRequest:
    ours = _NAMES.get(error.param or "")
    if ours is None or error.param is None:
        return error
    return type(error)(error.message.replace(error.param, ours), param=ours, code=error.code)


def _chat_request(body: ResponsesRequest) -> ChatCompletionRequest:
    """Raises ``InvalidRequest`` naming the place of what is wrong or not served."""
    if body.previous_response_id is not None:
        raise InvalidRequest(
            "previous_response_id: this server stores no responses; send the whole conversation as input",
            param="previous_response_id",
        )
    if body.prompt is not None:
        raise InvalidRequest("prompt: this server stores no prompts; send the text as input", param="prompt")
    if body.background:
        raise InvalidRequest("background is not supported by this server; leave it out", param="background")
    if body.truncation not in (None, "disabled"):
        raise InvalidRequest("truncation is not supported by this server; leave it out", param="truncation")
    request = ChatCompletionRequest(
        model=body.model,
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        user=body.user,
        priority=body.priority,
        timeout=body.timeout,
        cache_salt=body.cache_salt,
    )
    if body.tools:
        request.tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
    choice = body.tool_choice
    request.tool_choice = (
        NamedTool(function=NamedFunction(name=choice.name)) if isinstance(choice, ResponsesNamedTool) else choice
    )
    form = body.text.format if body.text is not None else None
    if form is not None:
        schema = JsonSchemaFormat(schema=form.schema) if form.type == "json_schema" else None
        request.response_format = ResponseFormat(type=form.type, json_schema=schema)
    return request


def _tool(tool: ResponsesTool, place: str) -> ToolDefinition:
    if tool.type != "function":
        raise InvalidRequest(f"{place}.type is {tool.type!r:.40}; this server runs no tools itself", param="tools")
    if tool.name is None:
        raise InvalidRequest(f"{place}.name is required", param="tools")
    return ToolDefinition(
        function=FunctionDefinition(
            name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
        )
    )


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for index, item in enumerate(body.input):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], place: str) -> None:
    """Calls and reasoning belong to one message of the assistant with the text beside them."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        said = {"role": "system" if role == "developer" else role, "content": _content(item.get("content"), place)}
        if role == "assistant" and messages and _unfinished(messages[-1]):
            messages[-1]["content"] = said["content"]
        else:
            messages.append(said)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _content(item.get("output"), f"{place}.output")
        messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": output})
    elif kind == "reasoning":
        parts = item.get("content") or []
        if not isinstance(parts, list):
            raise InvalidRequest(f"{place}.content must be a list of parts", param="input")
        texts = [part.get("text", "") for part in parts if isinstance(part, Mapping)]
        if texts:
            messages.append({"role": "assistant", "content": "", "reasoning_content": "\n".join(map(str, texts))})
    else:
        raise InvalidRequest(
            f"{place}.type is {kind!r:.40}; this server reads message, function_call, function_call_output and "
            "reasoning",
            param="input",
        )


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that is being put together."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _unfinished(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and not message["content"] and "tool_calls" not in message


def _content(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{place}.content must be text or a list of parts", param="input")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "refusal":
            texts.append(str(part.get("refusal", "")))
        elif kind in ("input_text", "output_text", "text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise InvalidRequest(
                f"{place}.content[{index}].type is {kind!r:.40}; this server reads text only", param="input"
            )
    return "\n".join(texts)


class ResponseAnswer:
    """Writes the answer to one request, whole or in events."""

    def __init__(self, body: ResponsesRequest, chat: Chat, model: str) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self.model = model
        self._chat = chat
        self._ids: dict[int, tuple[str, str]] = {}
        """Of the items, by their place: their own, and that of the call they may be."""
        self._sequence = 0
        form = (body.text and body.text.format) or TextFormat()
        self._frame: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": chat.params.temperature,
            "text": {"format": {k: v for k, v in msgspec.to_builtins(form).items() if v is not None}},
            "tool_choice": msgspec.to_builtins(body.tool_choice) or "auto",
            "tools": [{"strict": None, **msgspec.to_builtins(tool)} for tool in body.tools or []],
            "top_p": chat.params.top_p,
            "truncation": "disabled",
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def whole(
        self, generating: Generating, completions: Sequence[Completion], prompts: Sequence[list[int]]
    ) -> dict[str, Any]:
        (completion,) = completions
        said = read_message(self._chat, completion.text)
        reasoning = self._chat.reasoning_tokens(completion.token_ids)
        return self._response(completion.finish_reason, blocks_of(said), _usage(generating, reasoning))

    async def chunks(self, generating: Generating, prompts: Sequence[list[int]]) -> AsyncGenerator[bytes, None]:
        readers, blocks = ChoiceReaders(self._chat), Blocks()
        begun = False
        reason: FinishReason | None = None
        token_ids: list[int] = []
        async with contextlib.aclosing(generating.deltas()) as deltas:
            async for delta in deltas:
                if not begun:
                    begun = True
                    for kind in ("response.created", "response.in_progress"):
                        yield self._event(kind, response=self._response(None, [], None))
                for news in blocks.take(readers.read(delta)):
                    for told in self._block_events(news):
                        yield told
                token_ids += delta.token_ids
                reason = delta.finish_reason or reason
        for news in blocks.end():
            for told in self._block_events(news):
                yield told
        kind = "response.incomplete" if reason is FinishReason.LENGTH else "response.completed"
        usage = _usage(generating, self._chat.reasoning_tokens(token_ids))
        yield self._event(kind, response=self._response(reason, blocks.all, usage))

    def broken(self, error: RopewayError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _response(
        self, reason: FinishReason | None, blocks: Sequence[Block], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        short = reason is FinishReason.LENGTH
        status = "in_progress" if reason is None else "incomplete" if short else "completed"
        return {
            **self._frame,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if short else None,
            "output": [self._item(block, status) for block in blocks],
            "usage": usage,
        }

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[block.kind]
        item_id, called = self._ids.setdefault(block.index, (f"{prefix}_{uuid.uuid4().hex}", call_id()))
        if block.kind == "text":
            parts = [_part(block.text)] if block.text or status != "in_progress" else []
            return {"type": "message", "id": item_id, "status": status, "role": "assistant", "content": parts}
        if block.kind == "reasoning":
            parts = [{"type": "reasoning_text", "text": block.text}] if block.text else []
            return {"type": "reasoning", "id": item_id, "status": status, "summary": [], "content": parts}
        call = {"id": item_id, "call_id": called, "name": block.name, "arguments": block.text}
        return {"type": "function_call", "status": status, **call}

    def _block_events(self, news: BlockNews) -> Iterator[bytes]:
        block, index = news.block, news.block.index
        if news.what == "begins":
            yield self._event("response.output_item.added", output_index=index, item=self._item(block, "in_progress"))
        place: dict[str, Any] = {"item_id": self._ids[index][0], "output_index": index}
        if block.kind != "call":
            place["content_index"] = 0
        if news.what == "begins" and block.kind == "text":
            yield self._event("response.content_part.added", **place, part=_part(""))
        elif news.what == "goes_on":
            kind = {
                "text": "response.output_text.delta",
                "reasoning": "response.reasoning_text.delta",
                "call": "response.function_call_arguments.delta",
            }[block.kind]
            more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            yield self._event(kind, **place, delta=news.text, **more)
        elif news.what == "ends":
            if block.kind == "text":
                yield self._event("response.output_text.done", **place, text=block.text, logprobs=[])
                yield self._event("response.content_part.done", **place, part=_part(block.text))
            elif block.kind == "reasoning":
                yield self._event("response.reasoning_text.done", **place, text=block.text)
            else:
                yield self._event(
                    "response.function_call_arguments.done", **place, name=block.name, arguments=block.text
                )
            yield self._event("response.output_item.done", output_index=index, item=self._item(block, "completed"))

    def _event(self, kind: str, **body: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **body})


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(generating: Generating, reasoning_tokens: int) -> dict[str, Any]:
    usage = generating.usage()
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
