"""The block pool: accounting, sharing and the order of eviction."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ropeway.cache.keys import block_key
from ropeway.cache.pool import BlockPool

KEYS = [bytes([number]) * 32 for number in range(8)]


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.live, pool.cached, pool.free


def published(pool: BlockPool, count: int) -> list[int]:
    """Blocks published under the first ``count`` keys and released: cached."""
    blocks = pool.take(count)
    for block, key in zip(blocks, KEYS[:count], strict=True):
        pool.publish(block, key)
    pool.release(blocks)
    return blocks


@pytest.mark.parametrize(("blocks", "size"), [(0, 16), (-1, 16), (4, 0), (4, 24), (4, -8)])
def test_a_pool_needs_a_block_and_a_power_of_two(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"{blocks} blocks of {size}"):
        BlockPool(blocks, size)


def test_live_cached_and_free_are_told_apart_and_add_up() -> None:
    pool = BlockPool(5, 4)
    assert counts(pool) == (0, 0, 5)
    blocks = pool.take(3)
    pool.publish(blocks[0], KEYS[0])
    assert counts(pool) == (3, 0, 2)
    pool.release(blocks)
    assert counts(pool) == (0, 1, 4)


def test_a_hit_is_taken_out_of_the_middle_of_the_free_list() -> None:
    pool = BlockPool(4, 4)
    blocks = published(pool, 3)
    assert pool.match(KEYS[:3]) == blocks
    assert pool.idle([blocks[1]]) == 1
    pool.acquire([blocks[1]])
    assert pool.idle([blocks[1]]) == 0
    assert counts(pool) == (1, 2, 1)
    pool.check([[blocks[1]]])


def test_a_match_ends_at_the_first_unknown_key() -> None:
    pool = BlockPool(4, 4)
    blocks = published(pool, 3)
    assert pool.match([KEYS[0], KEYS[7], KEYS[1]]) == blocks[:1]
    assert pool.match([KEYS[7], KEYS[0]]) == []


def test_a_shared_block_is_live_until_its_last_holder_releases_it() -> None:
    pool = BlockPool(2, 4)
    (block,) = published(pool, 1)
    pool.acquire([block])
    pool.acquire([block])
    pool.release([block])
    assert counts(pool) == (1, 0, 1)
    pool.release([block])
    assert counts(pool) == (0, 1, 1)


def test_blank_blocks_go_before_published_ones() -> None:
    pool = BlockPool(4, 4)
    cached = published(pool, 2)
    assert not set(pool.take(2)) & set(cached)
    assert pool.match(KEYS[:2]) == cached


def test_of_a_sequence_the_tail_is_evicted_first() -> None:
    pool = BlockPool(3, 4)
    blocks = published(pool, 3)
    for left in (2, 1, 0):
        pool.take(1)
        assert pool.match(KEYS[:3]) == blocks[:left]


def test_the_least_recently_used_sequence_is_evicted_first() -> None:
    pool = BlockPool(2, 4)
    first, second = published(pool, 2)
    pool.acquire([first])
    pool.release([first])  # used again, so the other one is the older
    assert pool.take(1) == [second]
    assert pool.match(KEYS[:1]) == [first]


def test_the_first_block_under_a_key_keeps_it() -> None:
    pool = BlockPool(3, 4)
    (first,) = published(pool, 1)
    (other,) = pool.take(1)
    pool.publish(other, KEYS[0])
    assert pool.match(KEYS[:1]) == [first]
    pool.release([other])
    assert counts(pool) == (0, 1, 2)


def test_more_than_available_is_an_error_and_takes_nothing() -> None:
    pool = BlockPool(3, 4)
    held = pool.take(2)
    with pytest.raises(IndexError, match="2 blocks asked, 1 available"):
        pool.take(2)
    pool.check([held])


def test_a_block_released_twice_is_an_error() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="released more often"):
        pool.release(blocks)


class Pool(RuleBasedStateMachine):
    """Sequences over three letters, a letter per block, take, share, publish and release; a model knows what
    each block was last published as."""

    BLOCKS = 7

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.BLOCKS, 1)
        self.tables: list[tuple[str, list[int]]] = []
        """(letters, block table) of every holder."""
        self.holds: dict[int, str] = {}
        """Block -> the prefix it was published as."""

    @staticmethod
    def keys(letters: str) -> list[bytes]:
        keys, parent = [], b"root"
        for letter in letters:
            parent = block_key(parent, letter.encode())
            keys.append(parent)
        return keys

    @rule(letters=st.text("abc", min_size=1, max_size=5))
    def start(self, letters: str) -> None:
        hits = self.pool.match(self.keys(letters))
        for length, block in enumerate(hits, 1):
            assert self.holds[block] == letters[:length], "a hit on other contents"
        need = len(letters) - len(hits)
        if need > self.pool.available - self.pool.idle(hits):
            return
        self.pool.acquire(hits)
        new = self.pool.take(need)
        for block in new:
            self.holds.pop(block, None)
        self.tables.append((letters, hits + new))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), count=st.integers(1, 5))
    def publish(self, which: int, count: int) -> None:
        letters, table = self.tables[which % len(self.tables)]
        for length, (block, key) in enumerate(zip(table[:count], self.keys(letters), strict=False), 1):
            before = self.pool.match(self.keys(letters[:length]))
            self.pool.publish(block, key)
            if len(before) < length and block not in self.holds:
                self.holds[block] = letters[:length]

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        self.pool.release(self.tables.pop(which % len(self.tables))[1])

    @invariant()
    def accounts_are_exact(self) -> None:
        self.pool.check([table for _, table in self.tables])
        assert self.pool.live == len({block for _, table in self.tables for block in table})
        assert self.pool.live + self.pool.cached + self.pool.free == self.BLOCKS


TestAnyOrderOfCallsKeepsTheAccountsExact = Pool.TestCase
TestAnyOrderOfCallsKeepsTheAccountsExact.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
