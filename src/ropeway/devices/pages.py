"""Host memory in whole pages: taken from the system as it is written, in large pages where there are any."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ropeway.devices.memory import host_memory
from ropeway.errors import OutOfMemory


def zeroed_pages(size: int, what: str) -> NDArray[np.uint8]:
    """uint8 [size] zeroed bytes, aligned to a page. Raises ``OutOfMemory`` naming ``what`` if the system refuses."""
    try:
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise OutOfMemory(
            f"{what} needs {mib(size)}, which the system refuses ({error}); ask for fewer blocks"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8, count=size)


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
