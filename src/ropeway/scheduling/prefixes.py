"""The prefix cache, seen by the scheduler: what a request finds there, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable

from ropeway.cache.host import HostTier
from ropeway.cache.keys import block_key, chain
from ropeway.cache.pool import BlockPool
from ropeway.request import Request
from ropeway.scheduling.seats import Seats


class PrefixCache:
    """Keeps ``Request.keys`` up to date: a root key, then one key per full block whose tokens are known."""

    def __init__(self, pool: BlockPool, host: HostTier | None) -> None:
        self.queries = 0
        """Prompt tokens looked up, once per request."""
        self.hits = 0
        """Prompt tokens found."""
        self.host_hits = 0
        """Of those, the ones that were in host memory only."""
        self.disk_hits = 0
        """Of these, the ones brought in from disk for the request."""
        self._pool = pool
        self._host = host

    def find(self, request: Request) -> list[int]:
        """Published blocks of the request's longest known prefix. Takes no reference on them."""
        keys, size, full = request.keys, self._pool.block_size, self._most(request)
        if keys is None or not full:
            return []
        leader = request.leader
        if len(keys) == 1 and leader is not None and leader.keys is not None:  # the same prompt under the same root
            keys += leader.keys[1 : request.prompt_tokens // size + 1]
        known = len(keys) - 1
        if known < full:
            keys.extend(chain(keys[-1], request.tokens[known * size : full * size], size))
        return self._pool.match(keys[1 : full + 1])

    def find_in_host(self, request: Request, found: int) -> list[int]:
        """Host blocks that continue the ``found`` blocks on the device. Takes no pin."""
        if self._host is None or request.keys is None:
            return []
        return self._host.find(request.keys[found + 1 : self._most(request) + 1])

    def fetch(self, request: Request, done: Callable[[], None]) -> bool:
        """Begin to bring in what only the disk has of the request's prompt, and call ``done`` when that is over. False:
        there is nothing."""
        host = self._host
        if host is None or host.store is None or request.keys is None:
            return False
        found = len(self.find(request))
        found += len(self.find_in_host(request, found))
        blocks = host.load(request.keys[found + 1 : self._most(request) + 1], done)
        request.fetched_blocks = blocks
        return blocks > 0

    def _most(self, request: Request) -> int:
        """Blocks that the request need not compute itself: all full ones, short of its last token, since one must be
        left to compute. A prompt that is to be told of is computed whole."""
        if request.params.prompt_logprobs is not None and not request.output_tokens:
            return 0
        return (len(request.tokens) - 1) // self._pool.block_size

    def count(self, request: Request, found: int, in_host: int) -> None:
        """Note what a request found when it was first seated, in blocks. What its sibling computed for the same call
        was not there before the request, and does not count."""
        if request.cached_tokens is not None:
            return
        cached = (found + in_host) * self._pool.block_size
        if request.leader is not None and request.leader.cached_tokens is not None:
            cached = min(cached, request.leader.cached_tokens)
        request.cached_tokens = cached
        if request.keys is not None:
            self.queries += request.prompt_tokens
            self.hits += cached
            self.host_hits += min(cached, in_host * self._pool.block_size)
            self.disk_hits += min(cached, min(in_host, request.fetched_blocks) * self._pool.block_size)

    def publish(self, request: Request, seats: Seats, end: int) -> None:
        """Make the blocks of a seated request findable that positions below ``end`` have filled."""
        size = self._pool.block_size
        if request.keys is not None:
            for index in range(request.published, end // size):
                self.publish_next(request, seats, (index + 1) * size)

    def publish_next(self, request: Request, seats: Seats, end: int) -> None:
        """The same for the one block that ends at ``end``, of a request with prefix caching; those before it are."""
        keys, slot, index = request.keys, request.slot, request.published
        assert keys is not None
        if len(keys) == index + 1:
            tokens = seats.tokens[slot, end - self._pool.block_size : end]
            keys.append(block_key(keys[index], tokens.tobytes()))
        block, key = int(seats.blocks[slot, index]), keys[index + 1]
        if self._pool.publish(block, key) and self._host is not None and not request.private:
            self._host.published(block, key)
        request.published = index + 1
