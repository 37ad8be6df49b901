"""Chat messages in the shape templates expect, from the shapes the OpenAI API allows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ropeway.errors import InvalidRequest


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of ``messages`` in which a list of text parts is one text (joined by line breaks), and the arguments of
    tool calls are objects, not JSON text.

    Raises ``InvalidRequest`` for an empty list, an entry that is no object, and parts that are no text.
    """
    if not messages:
        raise InvalidRequest("messages is empty; send at least one", param="messages")
    return [_normalise(message, index) for index, message in enumerate(messages)]


def _normalise(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"messages[{index}] must be an object, not {type(message).__name__}", param="messages")
    result = dict(message)
    if isinstance(result.get("content"), list | tuple):
        result["content"] = "\n".join(_text_of_part(part, index) for part in result["content"])
    if isinstance(result.get("tool_calls"), list | tuple):
        result["tool_calls"] = [_with_object_arguments(call) for call in result["tool_calls"]]
    return result


def _text_of_part(part: Any, index: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type", "without a type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequest(f"messages[{index}] has a part {kind!r}; this model reads text only", param="messages")


def _with_object_arguments(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return call
    if not isinstance(parsed, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": parsed}}
