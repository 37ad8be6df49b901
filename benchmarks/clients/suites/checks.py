"""What the suites have in common. Runs in the client's environment, which knows nothing of Ropeway."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

URL = os.environ.get("ROPEWAY_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("ROPEWAY_MODEL", "model")
ASK = [{"role": "user", "content": "Say hello in one word."}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["x", "ok"],
    "additionalProperties": False,
}

_checks: list[Callable[[], Any]] = []


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """A function that raises when the client does not get what it should."""
    _checks.append(function)
    return function


def main() -> None:
    """Run all of them; a JSON line for each."""
    failed = 0
    for function in _checks:
        began = time.monotonic()
        problem = None
        try:
            result = function()
            if inspect.isawaitable(result):
                asyncio.run(_wait(result))
        except Exception:
            problem = traceback.format_exc(limit=-3)
            failed += 1
        line = {"check": function.__name__, "ok": problem is None, "seconds": round(time.monotonic() - began, 2)}
        print(json.dumps({**line, "problem": problem}), flush=True)
    sys.exit(1 if failed else 0)


async def _wait(result: Any) -> Any:
    return await result
