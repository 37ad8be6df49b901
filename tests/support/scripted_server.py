"""``python -m tests.support.scripted_server MODEL [FLAGS AS JSON] [ENGINE ATTRIBUTES AS JSON]``: the real life of a
server process around a scripted engine. The attribute ``load_s`` is how long the model takes to load."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

from ropeway.config import Config
from ropeway.errors import RopewayError
from ropeway.server.run import serve
from ropeway.settings import resolve
from tests.support.scripted_engine import ScriptedEngine, scripted_tokenizer


def main(model: str, flags: str = "{}", attributes: str = "{}") -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    config = resolve({"model": model, **json.loads(flags)}, environ={}).config
    given: dict[str, Any] = json.loads(attributes)

    async def start(config: Config) -> ScriptedEngine:
        print("loading", flush=True)
        await asyncio.sleep(given.pop("load_s", 0))
        engine = ScriptedEngine(tokenizer=scripted_tokenizer())
        for name, value in given.items():
            setattr(engine, name, value)
        return engine

    try:
        return asyncio.run(serve(config, start))
    except RopewayError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
