"""Storage of the paged KV cache; ``native/kernels/attention.h`` has the layout."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ropeway.devices.base import KVDtype
from ropeway.devices.cpu import _native
from ropeway.devices.memory import host_memory
from ropeway.devices.pages import copy_pairs, mib, zeroed_pages
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
                f"a KV pool of {num_blocks} blocks needs {mib(self.nbytes)}, but only {mib(available)} are "
                f"available; the largest that fits is {available // bytes_each} blocks"
            )
        self.data = zeroed_pages(self.nbytes, f"a KV pool of {num_blocks} blocks").reshape(num_blocks, bytes_each)
        self.native = _native.KVStorage(self.data.ctypes.data, layers, kv_heads, head_dim, block_size, dtype == "bf16")

    def to_host(self, blocks: NDArray[np.int32], host: NDArray[np.uint8], places: NDArray[np.int32]) -> None:
        """See ``devices.base.KVCache``. Pairs are copied in their order, each in one piece."""
        data = self.data
        for block, place in copy_pairs(blocks, self.num_blocks, places, len(host)):
            host[place] = data[block]

    def to_device(self, places: NDArray[np.int32], host: NDArray[np.uint8], blocks: NDArray[np.int32]) -> None:
        """See ``devices.base.KVCache``. Pairs are copied in their order, each in one piece."""
        data = self.data
        for block, place in copy_pairs(blocks, self.num_blocks, places, len(host)):
            data[block] = host[place]
