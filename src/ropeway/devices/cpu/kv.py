"""Storage of the paged KV cache; ``native/kernels/attention.h`` has the layout."""

from __future__ import annotations

import mmap

import numpy as np

from ropeway.devices.base import KVDtype
from ropeway.devices.cpu import _native
from ropeway.devices.memory import host_memory
from ropeway.errors import OutOfMemory

_ELEMENT_BYTES: dict[KVDtype, int] = {"fp32": 4, "bf16": 2}


def block_bytes(layers: int, kv_heads: int, head_dim: int, block_size: int, dtype: KVDtype) -> int:
    """Bytes of one block: keys and values of ``block_size`` positions in all layers."""
    return 2 * layers * kv_heads * head_dim * block_size * _ELEMENT_BYTES[dtype]


class CpuKVCache:
    """Keys and values of all layers; ``data`` is uint8 [num_blocks, block bytes], a block in one piece.

    Pages take memory when they are first written.
    """

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: KVDtype,
    ) -> None:
        """Raises ``OutOfMemory`` where it needs more than is available or the system refuses, and ``ValueError``
        for a block size that is not a power of two."""
        if block_size < 1 or block_size & (block_size - 1):
            raise ValueError(f"block_size must be a power of two, not {block_size}")
        self.layers = layers
        self.num_blocks = num_blocks
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.dtype = dtype
        bytes_each = block_bytes(layers, kv_heads, head_dim, block_size, dtype)
        self.nbytes = num_blocks * bytes_each
        available = host_memory().available
        if self.nbytes > available:
            raise OutOfMemory(
                f"a KV pool of {num_blocks} blocks needs {_mib(self.nbytes)}, but only {_mib(available)} are "
                f"available; the largest that fits is {available // bytes_each} blocks"
            )
        self.data = _allocate(self.nbytes, num_blocks).reshape(num_blocks, bytes_each)
        self.native = _native.KVStorage(self.data.ctypes.data, layers, kv_heads, head_dim, block_size, dtype == "bf16")


def _allocate(size: int, num_blocks: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Zeroed bytes, aligned to a page, in large pages where the system offers them."""
    try:
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise OutOfMemory(
            f"a KV pool of {num_blocks} blocks needs {_mib(size)}, which the system refuses ({error}); "
            "ask for fewer blocks"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8, count=size)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
