"""The block pool: who holds which KV block, and which unreferenced blocks still hold a known prefix.

    unreferenced (evicted from the left): [ blank blocks ... | published blocks, least recently used first ]
                                            no key             key, ref == 0: "cached"

A block is *live* while a request references it, *cached* when nobody does but a published prefix lies in
it, else *free*; ``live + cached + free == total`` always. The list is an ordered dictionary, so a hit is pulled out of
its middle in O(1); the LRU of the prefix cache is nothing but its right part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Bookkeeping only: the pool knows block numbers, never their contents. Not thread-safe."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1 or block_size & (block_size - 1):
            raise ValueError(f"{num_blocks} blocks of {block_size}: need at least one, of a power-of-two size")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._key: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._unreferenced = OrderedDict.fromkeys(range(num_blocks))
        """In the order of eviction."""
        self.cached = 0
        """Of the available blocks, the published ones."""
        self.releases = 0
        """How often blocks were given back: as long as it stays, ``available`` does not rise."""

    @property
    def available(self) -> int:
        """Blocks nobody references: free and cached ones."""
        return len(self._unreferenced)

    @property
    def live(self) -> int:
        return self.num_blocks - self.available

    @property
    def free(self) -> int:
        return self.available - self.cached

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest published prefix of ``keys``. Takes no reference: acquire before anything else."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def states(self) -> bytes:
        """A byte per block: 0 free, 1 cached, 2 live, 3 live and shared."""
        return bytes(
            min(references + 1, 3) if references else key is not None
            for references, key in zip(self._references, self._key, strict=True)
        )

    def references(self, block: int) -> int:
        """How many requests hold the block."""
        return self._references[block]

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of these nobody references, so that acquiring them lowers ``available``."""
        return sum(not self._references[block] for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Take one more reference on each."""
        for block in blocks:
            if not self._references[block]:
                del self._unreferenced[block]
                if self._key[block] is not None:
                    self.cached -= 1
            self._references[block] += 1

    def take(self, count: int) -> list[int]:
        """``count`` blocks with one reference and no key, evicting the least recently used prefixes.

        The caller has checked ``available``; raises ``IndexError`` if it did not."""
        if count > self.available:
            raise IndexError(f"{count} blocks asked, {self.available} available")
        taken = [self._unreferenced.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._references[block] = 1
            key = self._key[block]
            if key is not None:
                del self._block_of[key]
                self._key[block] = None
                self.cached -= 1
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give one reference back on each. Of a sequence's blocks, given in position order, the last is
        evicted first, since a prefix is worth more than its continuation."""
        self.releases += 1
        for block in reversed(blocks):
            references = self._references[block] - 1
            if references < 0:
                raise ValueError(f"block {block} released more often than it was taken")
            self._references[block] = references
            if not references:
                self._unreferenced[block] = None
                if self._key[block] is None:
                    self._unreferenced.move_to_end(block, last=False)
                else:
                    self.cached += 1

    def publish(self, block: int, key: bytes) -> bool:
        """Make a referenced, full block findable. The first block published under a key keeps it; False: this one was
        not the first, or has a key."""
        if self._key[block] is not None or key in self._block_of:
            return False
        self._key[block] = key
        self._block_of[key] = block
        return True

    def find(self, key: bytes) -> int | None:
        """The block published under a key. Takes no reference."""
        return self._block_of.get(key)

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise ``AssertionError`` unless every invariant holds, given all block tables that hold references."""
        expected = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                expected[block] += 1
        assert expected == self._references, "reference counts differ from the block tables"
        listed = list(self._unreferenced)
        assert sorted(listed) == [b for b in range(self.num_blocks) if not expected[b]], "the available blocks differ"
        assert sum(self._key[b] is not None for b in listed) == self.cached
        assert self.live + self.cached + self.free == self.num_blocks
        keyed = {key: block for block, key in enumerate(self._key) if key is not None}
        assert keyed == self._block_of, "published keys differ"
