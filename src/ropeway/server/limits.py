"""Reading a request's body: bounded in size and depth, strict JSON, typed fields."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from ropeway.errors import InvalidRequest, PayloadTooLarge, RequestTimeout

MAX_MESSAGES = 4096
"""Most messages of one chat."""
MAX_LOGIT_BIAS = 1024
"""Most entries of ``logit_bias``."""

Body = TypeVar("Body", bound=msgspec.Struct)

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PLACE = re.compile(r"^(?P<problem>.*) - at `\$(?P<path>.*)`$", re.DOTALL)


async def read_body(request: Request, limit: int, timeout_s: float | None = None) -> bytes:
    """The whole body. Raises ``PayloadTooLarge`` beyond ``limit`` bytes, before reading where the client says its
    length and as soon as it is passed where not; ``RequestTimeout`` when it has not come after ``timeout_s``."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except TimeoutError as error:
        raise RequestTimeout(f"the request body had not arrived after {timeout_s:g} s (body_timeout_s)") from error
    except ClientDisconnect as error:
        raise InvalidRequest("the client closed the connection before its request was complete") from error
    return b"".join(parts)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``. Of a repeated key the last value counts.

    Raises ``InvalidRequest`` for anything else: NaN and infinities, numbers beyond float64, half surrogate pairs,
    invalid UTF-8 and nesting beyond Python's own limit (about 1,000) included.
    """
    try:
        content = msgspec.json.decode(body)
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        hint = " (half of a surrogate pair is not valid text)" if _SURROGATE.search(body) else ""
        reason = str(error).removesuffix(" - at `$[...]`")
        raise InvalidRequest(f"the body is not valid JSON: {reason}{hint}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_json_type(content)}", code="invalid_json")
    return content


def convert(content: dict[str, Any], kind: type[Body]) -> Body:
    """``content`` as a request of ``kind``. Raises ``InvalidRequest`` naming the field."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        place = _PLACE.match(text)
        if place is None:  # a missing field: "Object missing required field `messages`"
            missing = re.search(r"`(\w+)`", text)
            field = missing.group(1) if missing else None
            raise InvalidRequest(f"{field} is required" if field else text, param=field) from error
        path = place["path"].lstrip(".")
        field = re.split(r"[.\[]", path, maxsplit=1)[0] or None
        raise InvalidRequest(f"{path}: {place['problem'].replace('`', '')}", param=field) from error


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {limit} bytes, the limit of this server (max_body_mb)")


def _json_type(value: object) -> str:
    return {list: "an array", str: "text", type(None): "null", bool: "a truth value"}.get(type(value), "a number")
