"""Host memory below the device: pinned copies of swapped requests' blocks, and cached copies of published ones.

It is a pool like the device's, under the same keys: a *pin* is a reference, an unpinned published block is cached. Data
moves by copies in a plan, which the device runs in order, so a block may be named as a source as soon as the copy into
it is planned. Only a store (a disk) reads and writes host blocks from outside that order: it pins them, and begins when
every plan with copies that was made before is settled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ropeway.cache.pool import BlockPool
from ropeway.cache.transfer import BlockStore

_MAX_UNWRITTEN = 1 << 14
"""Published blocks that may wait for their copy; beyond it the oldest are forgotten."""

Copy = tuple[int, int]
"""(source block, target block)."""


class HostTier:
    """Bookkeeping only. Not thread-safe."""

    def __init__(self, pool: BlockPool, store: BlockStore | None = None) -> None:
        self.pool = pool
        self.store = store
        self.swaps_out = 0
        """Blocks copied here for requests that gave way."""
        self.swaps_in = 0
        """And back."""
        self._unwritten: deque[tuple[int, bytes]] = deque(maxlen=_MAX_UNWRITTEN)
        """(device block, key) published and not copied yet, oldest first."""
        self._out: list[Copy] = []
        self._in: list[Copy] = []
        self._read: list[int] = []
        """Pins of the blocks that this plan reads."""
        self._written: list[tuple[bytes, int]] = []
        """Published by copies of this plan."""
        self._in_flight: deque[tuple[list[tuple[bytes, int]], list[tuple[bytes, int]]]] = deque()
        """For every plan with copies that is not settled yet: (key, host block) to save and to load after it."""
        self._loading: dict[bytes, list[Callable[[], None]]] = {}
        """Keys on their way from the store, and whom to tell."""
        self._transferring: list[int] = []
        """Pins of the blocks that the store reads or writes."""

    @property
    def has_work(self) -> bool:
        """Whether something waits to be copied or is on its way."""
        return bool(self._unwritten or self._loading)

    # ------------------------------------------------------------------ copies of the plan being made

    def swap_out(self, blocks: Sequence[int], keys: Sequence[bytes]) -> list[int] | None:
        """Pin a host copy of each device block of a request; ``keys`` are those of its leading, published ones. What
        is here already is not copied, nor what this very plan brings back: that is not on the device yet. None when
        there is not enough room; nothing has changed then."""
        coming = {block: place for place, block in self._in}
        known = [coming.get(block) for block in blocks]
        for index, key in enumerate(keys):
            if known[index] is None:
                known[index] = self.pool.find(key)
        held = [place for place in known if place is not None]
        if len(blocks) - len(held) > self.pool.available - self.pool.idle(set(held)):
            return None
        self.pool.acquire(held)
        pinned = []
        for index, block in enumerate(blocks):
            place = known[index]
            if place is None:
                (place,) = self.pool.take(1)
                self._out.append((block, place))
                self.swaps_out += 1
                if index < len(keys):
                    self._publish(place, keys[index])
            pinned.append(place)
        return pinned

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Host blocks of the longest prefix of ``keys`` that is here. Takes no pin."""
        return self.pool.match(keys)

    def count(self, keys: Iterable[bytes]) -> int:
        """How many of these are here."""
        return sum(self.pool.find(key) is not None for key in keys)

    def read(self, places: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy host blocks to device blocks; they stay as they are until the plan is made."""
        self.pool.acquire(places)
        self._read += places
        self._in += zip(places, blocks, strict=True)

    def unpin(self, places: Sequence[int]) -> None:
        """Give up a swapped request's pins. What ``read`` was told to copy stays until the plan is made."""
        self.pool.release(places)

    def published(self, block: int, key: bytes) -> None:
        """A device block was published: copy it when there is time."""
        self._unwritten.append((block, key))

    def write_through(self, most: int, current: Callable[[bytes], int | None]) -> None:
        """Copy up to ``most`` published blocks that are not here yet. ``current(key)`` is the device block under a key
        now: what was evicted meanwhile is passed over. Pinned copies are never displaced."""
        while most > 0 and self._unwritten and self.pool.available:
            block, key = self._unwritten.popleft()
            if current(key) != block or self.pool.find(key) is not None:
                continue
            (place,) = self.pool.take(1)
            self._out.append((block, place))
            self._publish(place, key)
            self._read.append(place)
            most -= 1
        if not self.pool.available:
            self._unwritten.clear()

    def take_copies(self) -> tuple[list[Copy], list[Copy]]:
        """(device to host, host to device) of this plan, and the pins of what it read end. A plan with either must be
        handed to the executor and later be given to ``settled``."""
        out, back = self._out, self._in
        self.pool.release(self._read)
        if out or back:
            self._in_flight.append((self._written, []))
            self._written = []
        self._out, self._in, self._read = [], [], []
        return out, back

    def settled(self) -> None:
        """The oldest plan with copies has run: the store may have what it wrote, and overwrite what it read."""
        written, to_load = self._in_flight.popleft()
        if self.store is None:
            return
        for key, place in written:
            if self.pool.find(key) == place and not self.store.find(key):
                self.pool.acquire([place])
                self._transferring.append(place)
                self.store.save(key, place)
        for key, place in to_load:
            self.store.load(key, place)

    # ------------------------------------------------------------------ the store

    def load(self, keys: Sequence[bytes], done: Callable[[], None]) -> int:
        """Begin to load the longest prefix of ``keys`` that the store has, as far as there is room; ``done`` is called
        by a later ``poll``. Returns the number of blocks; 0: nothing to wait for."""
        if self.store is None:
            return 0
        wanted = []
        for key in keys:
            if key not in self._loading and not self.store.find(key):
                break
            wanted.append(key)
        fresh = [key for key in wanted if key not in self._loading]
        room = self.pool.available
        if len(fresh) > room:
            fresh = fresh[:room]
            wanted = wanted[: wanted.index(fresh[-1]) + 1] if fresh else []
        for key in fresh:
            (place,) = self.pool.take(1)
            self._loading[key] = []
            self._transferring.append(place)
            if self._in_flight:
                self._in_flight[-1][1].append((key, place))
            else:
                self.store.load(key, place)
        if wanted:
            self._loading[wanted[-1]].append(done)
        return len(wanted)

    def poll(self) -> None:
        """Take in what the store has done since the last call."""
        if self.store is None:
            return
        for transfer in self.store.finished():
            told: list[Callable[[], None]] = []
            if transfer.kind == "load":
                told = self._loading.pop(transfer.key)
                if transfer.ok:
                    self.pool.publish(transfer.host_block, transfer.key)
            self._transferring.remove(transfer.host_block)
            self.pool.release([transfer.host_block])
            for done in told:
                done()

    def check(self, swapped: Iterable[Sequence[int]]) -> None:
        """Raise ``AssertionError`` unless every pin has a holder, given the pins of all swapped requests."""
        self.pool.check([*swapped, self._read, self._transferring])

    # ------------------------------------------------------------------ inside

    def _publish(self, place: int, key: bytes) -> None:
        self.pool.publish(place, key)
        self._written.append((key, place))
