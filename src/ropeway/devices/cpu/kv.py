"""Storage of the paged KV cache; ``native/kernels/attention.h`` has the layout."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropeway.devices.base import KVDtype
from ropeway.devices.cpu import _native
from ropeway.devices.memory import host_memory
from ropeway.devices.pages import copy_pairs, mib, zeroed_pages
from ropeway.errors import ConfigError, OutOfMemory

_ELEMENT_DTYPES: dict[KVDtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_TILE = 16
"""Positions whose keys lie together, channel by channel."""


def block_bytes(layers: int, kv_heads: int, head_dim: int, block_size: int, dtype: KVDtype) -> int:
    """Bytes of one block: keys and values of ``block_size`` positions in all layers. Raises ``ConfigError``."""
    if dtype not in _ELEMENT_DTYPES:
        raise ConfigError(
            f"the cpu device stores keys and values as {', '.join(_ELEMENT_DTYPES)}, not {dtype}", param="kv_dtype"
        )
    return 2 * layers * kv_heads * head_dim * block_size * _ELEMENT_DTYPES[dtype].itemsize


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
        key_factors: Tensor | None = None,
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
        self.key_factors = key_factors
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

    def stored(self, layer: int, blocks: NDArray[np.int32]) -> tuple[Tensor, Tensor]:
        """See ``devices.base.KVCache``."""
        dtype, size, d = _ELEMENT_DTYPES[self.dtype], self.block_size, self.head_dim
        tile = min(_TILE, size)
        data = torch.from_numpy(self.data.reshape(self.num_blocks, self.layers, self.kv_heads, -1)[blocks, layer])
        keys, values = data.view(dtype).float().chunk(2, -1)
        keys = keys.view(len(blocks), self.kv_heads, size // tile, d, tile).transpose(-1, -2)
        return (
            keys.reshape(-1, self.kv_heads, size, d).transpose(1, 2).reshape(-1, self.kv_heads, d),
            values.view(-1, self.kv_heads, size, d).transpose(1, 2).reshape(-1, self.kv_heads, d),
        )

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
