"""Which engine of a fleet a request goes to. A router knows what it has sent and what has come back, nothing else."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, Protocol

import numpy as np

from ropeway.cache.keys import chain, root_key
from ropeway.engine.messages import NewRequest

RouterName = Literal["round-robin", "least-tokens", "prefix"]

_FIRST_GUESS = 256.0
"""Output tokens that a request is taken to need before any was seen to its end."""
_MEMORY = 0.99
"""How much of the mean output length is kept at each end of a request."""


class Router(Protocol):
    """Called in the order of time."""

    def route(self, request: NewRequest) -> int:
        """The engine's number; the request counts as sent there."""
        ...

    def ended(self, request_id: int, output_tokens: int) -> None:
        """Its answer has come to its end, or it was refused (no output)."""
        ...


class RoundRobin:
    """Each engine in its turn."""

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._turn = -1

    def route(self, request: NewRequest) -> int:
        self._turn = (self._turn + 1) % self._engines
        return self._turn

    def ended(self, request_id: int, output_tokens: int) -> None:
        """Changes nothing."""


class LeastTokens:
    """The engine with the fewest tokens outstanding: prompts, and outputs predicted as the mean of those seen."""

    def __init__(self, engines: int) -> None:
        self.tokens = np.zeros(engines)
        """float64 [engines]: outstanding on each."""
        self._sent: dict[int, tuple[int, float]] = {}
        self._mean_output = _FIRST_GUESS

    def route(self, request: NewRequest) -> int:
        return self.send(request, int(np.argmin(self.tokens)))

    def send(self, request: NewRequest, engine: int) -> int:
        """Count a request as outstanding on the engine."""
        tokens = len(request.prompt) + min(self._mean_output, request.params.max_tokens or self._mean_output)
        self.tokens[engine] += tokens
        self._sent[request.id] = engine, tokens
        return engine

    def ended(self, request_id: int, output_tokens: int) -> None:
        engine, tokens = self._sent.pop(request_id)
        self.tokens[engine] -= tokens
        if output_tokens:
            self._mean_output += (1.0 - _MEMORY) * (output_tokens - self._mean_output)


class Prefix:
    """The engine that was sent the longest prefix of the prompt, of several the one with the fewest tokens outstanding;
    the least loaded of all when nobody was sent anything like it, or that one has too many outstanding: more than
    ``most_load`` times the mean, and more than the least loaded one and the prefix together.

    Prompts are known by the keys of their blocks, of each engine the most recent ones that its cache could hold."""

    def __init__(self, engines: int, block_size: int, blocks: int, *, most_load: float = 1.5) -> None:
        """``block_size``: tokens of a block here; ``blocks``: how many are remembered of each engine."""
        self._load = LeastTokens(engines)
        self._block_size = block_size
        self._blocks = blocks
        self._most_load = most_load
        self._holders: dict[bytes, set[int]] = {}
        self._recent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(engines)]

    def route(self, request: NewRequest) -> int:
        keys = list(chain(root_key(salt=request.salt), request.prompt, self._block_size))
        tokens = self._load.tokens
        engine = int(np.argmin(tokens))
        holders, known = self._longest(keys)
        if holders:
            best = min(holders, key=lambda each: (tokens[each], each))
            if tokens[best] <= max(self._most_load * tokens.mean(), tokens[engine] + known * self._block_size):
                engine = best
        self._remember(keys, engine)
        return self._load.send(request, engine)

    def ended(self, request_id: int, output_tokens: int) -> None:
        self._load.ended(request_id, output_tokens)

    def _longest(self, keys: list[bytes]) -> tuple[set[int], int]:
        """Engines that were sent the longest prefix, and its blocks."""
        found: set[int] = set()
        for blocks, key in enumerate(keys):
            holders = self._holders.get(key, set())
            further = holders & found if found else holders
            if not further:
                return found, blocks
            found = further
        return found, len(keys)

    def _remember(self, keys: list[bytes], engine: int) -> None:
        recent = self._recent[engine]
        for key in reversed(keys):  # a prefix is worth more than its continuation
            recent[key] = None
            recent.move_to_end(key)
            self._holders.setdefault(key, set()).add(engine)
        while len(recent) > self._blocks:
            key, _ = recent.popitem(last=False)
            holders = self._holders[key]
            holders.discard(engine)
            if not holders:
                del self._holders[key]


def make_router(name: RouterName, engines: int, *, block_size: int, num_blocks: int) -> Router:
    """``block_size`` and ``num_blocks``: of each engine's KV pool."""
    match name:
        case "round-robin":
            return RoundRobin(engines)
        case "least-tokens":
            return LeastTokens(engines)
        case "prefix":
            # Coarser than the engines' blocks: half as long again to look up would gain a few tokens.
            size = max(block_size, 128)
            return Prefix(engines, size, max(num_blocks * block_size // size, 1))
