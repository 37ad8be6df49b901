"""What every worker speaks: one JSON object per line on stdin, one per line on stdout in answer. Runs in the engines'
environments, so it needs nothing but the standard library.

    -> {"requests": [{"prompt": [5, 17], "output_tokens": 3}]}
    <- {"wall_s": 0.2, "tokens": [[8, 8, 1]]}

The first line out, when the engine takes requests, is ``{"ready": true}``. ``{"error": "..."}`` answers what cannot be
done.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

Generate = Callable[["list[dict[str, Any]]"], "list[list[int]]"]
"""Completes all requests, which come at once, and returns their output tokens in the same order."""


def settings() -> dict[str, Any]:
    """What the race wants of the engine: the JSON object that is the first argument."""
    return dict(json.loads(sys.argv[1]))


def serve(start: Callable[[dict[str, Any]], Generate]) -> None:
    """Start the engine and answer lines until there are no more."""
    # Engines print to stdout as they please: it is theirs, and the answers go to a copy.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    try:
        generate = start(settings())
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    answer({"ready": True})
    for line in sys.stdin:
        try:
            requests = json.loads(line)["requests"]
            began = time.perf_counter()
            tokens = generate(requests)
            answer({"wall_s": time.perf_counter() - began, "tokens": tokens})
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})
