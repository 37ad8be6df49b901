"""Host memory in whole pages: taken from the system as it is written, in large pages where there are any."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from ropeway.devices.memory import host_memory
from ropeway.errors import OutOfMemory

LARGE_PAGE = 2 << 20
"""Bytes of a large page on x86-64 and, mostly, on aarch64; regions begin at a multiple of it."""
_REGION = 64 << 20
"""Least size of an arena's regions. What is not written takes no memory."""
_PIECE = 64
"""Pieces of an arena begin at a multiple of this: a cache line, and the widest vector."""


class Arena:
    """Memory for what stays as long as a model does. Pieces lie side by side in regions made of large pages, so that
    small matrices have them, too. A region is given back when the last of its pieces is gone.

    Not to be used from two threads at once."""

    def __init__(self) -> None:
        self._region = np.empty(0, dtype=np.uint8)
        self._used = 0

    def take(self, size: int) -> NDArray[np.uint8]:
        """uint8 [size] zeroed bytes, aligned to a cache line. Raises ``OutOfMemory`` if the system refuses."""
        begin = -(-self._used // _PIECE) * _PIECE
        if begin + size > self._region.size:
            whole = -(-max(size, _REGION) // LARGE_PAGE) * LARGE_PAGE
            self._region, begin = zeroed_pages(whole, "a part of the weights"), 0
        self._used = begin + size
        return self._region[begin : begin + size]


def zeroed_pages(size: int, what: str) -> NDArray[np.uint8]:
    """uint8 [size] zeroed bytes, aligned to a large page and made of such where the system has them. They take memory
    when they are first written. Raises ``OutOfMemory`` naming ``what`` if the system refuses."""
    try:
        memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise OutOfMemory(
            f"{what} needs {mib(size)}, which the system refuses ({error}); free memory, or ask for less"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system built without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    pages = np.frombuffer(memory, dtype=np.uint8)
    begin = -pages.ctypes.data % LARGE_PAGE
    return pages[begin : begin + size]


def host_blocks(count: int, block_bytes: int) -> NDArray[np.uint8]:
    """uint8 [count, block_bytes] for copies of device blocks. Raises ``OutOfMemory`` when that is more than is
    available now, or the system refuses."""
    size = count * block_bytes
    available = host_memory().available
    if size > available:
        largest = available // block_bytes
        raise OutOfMemory(
            f"a swap space of {count} blocks needs {mib(size)}, but only {mib(available)} of memory are available; "
            f"the largest that fits is {largest} blocks (swap_space {largest * block_bytes / 2**30:.2f})",
            param="swap_space",
        )
    return zeroed_pages(size, f"a swap space of {count} blocks").reshape(count, block_bytes)


def copy_pairs(
    blocks: NDArray[np.int32], num_blocks: int, places: NDArray[np.int32], host_blocks: int
) -> Iterator[tuple[int, int]]:
    """(device block, host block) of every copy. Raises ``ValueError`` before the first if one is out of range: a
    negative index would quietly be another block."""
    if len(blocks) != len(places):
        raise ValueError(f"{len(blocks)} device blocks cannot be paired with {len(places)} host blocks")
    for name, indices, count in (("device", blocks, num_blocks), ("host", places, host_blocks)):
        if len(indices) and not 0 <= indices.min() <= indices.max() < count:
            raise ValueError(
                f"{name} blocks {indices.min()} to {indices.max()} are not all among the {count} there are"
            )
    return zip(blocks.tolist(), places.tolist(), strict=True)


def mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
