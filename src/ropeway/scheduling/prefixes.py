"""The prefix cache, seen by the scheduler: what a request finds there, and what it leaves."""

from __future__ import annotations

from ropeway.cache.keys import block_key, chain
from ropeway.cache.pool import BlockPool
from ropeway.request import Request
from ropeway.scheduling.seats import Seats


class PrefixCache:
    """Keeps ``Request.keys`` up to date: a root key, then one key per full block whose tokens are known."""

    def __init__(self, pool: BlockPool) -> None:
        self.queries = 0
        """Prompt tokens looked up, once per request."""
        self.hits = 0
        """Prompt tokens found."""
        self._pool = pool

    def find(self, request: Request) -> list[int]:
        """Published blocks of the request's longest known prefix, short of its last token: one must be left to
        compute. Takes no reference on them."""
        keys, size = request.keys, self._pool.block_size
        if keys is None:
            return []
        leader = request.leader
        if len(keys) == 1 and leader is not None and leader.keys is not None:  # the same prompt under the same root
            keys += leader.keys[1 : request.prompt_tokens // size + 1]
        known, full = len(keys) - 1, (len(request.tokens) - 1) // size
        if known < full:
            keys.extend(chain(keys[-1], request.tokens[known * size : full * size], size))
        return self._pool.match(keys[1 : full + 1])

    def count(self, request: Request, found: list[int]) -> None:
        """Note what a request found when it was first seated. What its sibling computed for the same call was not
        there before the request, and does not count."""
        if request.cached_tokens is not None:
            return
        cached = len(found) * self._pool.block_size
        if request.leader is not None and request.leader.cached_tokens is not None:
            cached = min(cached, request.leader.cached_tokens)
        request.cached_tokens = cached
        if request.keys is not None:
            self.queries += request.prompt_tokens
            self.hits += cached

    def publish(self, request: Request, seats: Seats, end: int) -> None:
        """Make the blocks of a seated request findable that positions below ``end`` have filled."""
        keys, size, slot = request.keys, self._pool.block_size, request.slot
        if keys is None:
            return
        for block in range(request.published, end // size):
            if len(keys) == block + 1:
                tokens = seats.tokens[slot, block * size : (block + 1) * size]
                keys.append(block_key(keys[block], tokens.tobytes()))
            self._pool.publish(int(seats.blocks[slot, block]), keys[block + 1])
            request.published = block + 1
