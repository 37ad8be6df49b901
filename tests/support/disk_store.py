"""A disk store asked and waited for block by block, which checks all that it loads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ropeway.cache.transfer import Transferred
from ropeway.execution.block_file import HEADER_BYTES
from ropeway.execution.disk import DiskStore, Layout
from tests.support.disk_blocks import LAYOUT, contents, key

HOST_BLOCKS, BLOCK_BYTES = 8, 1000
FILE_BYTES = HEADER_BYTES + BLOCK_BYTES
PLENTY = 1 << 30
PATIENCE_S = 20.0


class Disk:
    """A store with its host memory, asked and waited for block by block."""

    def __init__(self, folder: Path, layout: Layout = LAYOUT, blocks: int | None = None, **options: Any) -> None:
        self.host = np.zeros((HOST_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        space = PLENTY if blocks is None else blocks * FILE_BYTES
        self.store = DiskStore(folder, layout, self.host, space, **options)

    def wait(self, count: int = 1) -> list[Transferred]:
        done: list[Transferred] = []
        until = time.monotonic() + PATIENCE_S
        while len(done) < count:
            assert time.monotonic() < until, "the store does not answer"
            done += self.store.finished()
            time.sleep(0.0005)
        assert len(done) == count
        return done

    def save(self, number: int, place: int = 0) -> bool:
        self.host[place] = contents(number, BLOCK_BYTES)
        self.store.save(key(number), place)
        (done,) = self.wait()
        assert (done.kind, done.key, done.host_block) == ("save", key(number), place)
        return done.ok

    def load(self, number: int, place: int = 1) -> bool:
        """Whether it was loaded; then it must be right."""
        self.host[place] = 0xEE
        self.store.load(key(number), place)
        (done,) = self.wait()
        assert (done.kind, done.key, done.host_block) == ("load", key(number), place)
        if done.ok:
            assert np.array_equal(self.host[place], contents(number, BLOCK_BYTES))
        return done.ok

    def held(self, *numbers: int) -> list[int]:
        return [number for number in numbers if self.store.find(key(number))]

    def path(self, number: int) -> Path:
        return self.store._index.path(key(number))

    def files(self) -> list[Path]:
        return sorted(path for path in self.store.folder.rglob("*") if path.is_file() and path.name != "layout.json")


Open = Callable[..., Disk]
"""Takes what ``Disk`` takes."""


@contextmanager
def disks() -> Iterator[Open]:
    """Opens stores and closes them in the end."""
    opened: list[Disk] = []

    def open_disk(*args: Any, **options: Any) -> Disk:
        opened.append(Disk(*args, **options))
        return opened[-1]

    try:
        yield open_disk
    finally:
        for each in opened:
            each.store.close()
