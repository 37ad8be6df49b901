"""Storage of the paged KV cache; ``native/kernels/attention.h`` has the layout."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropeway.devices.base import FACTORED, KVDtype
from ropeway.devices.cpu import _native
from ropeway.devices.memory import host_memory
from ropeway.devices.pages import copy_pairs, mib, zeroed_pages
from ropeway.devices.stored import check_kv_dtype
from ropeway.errors import ConfigError, OutOfMemory

QUANTISED: tuple[KVDtype, ...] = ("int8", "int4", "int4-full")
_TILE = 16
_MOST_FEATURES = 512


def _storage(
    data: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: KVDtype,
    key_factors: Tensor | None = None,
    begun: _native.BegunKeys | None = None,
) -> _native.KVStorage:
    """Raises ``ConfigError`` for what the kernels cannot store so, ``ValueError`` for a block size that is not a power
    of two."""
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two, not {block_size}")
    check_kv_dtype(dtype, block_size)
    if dtype in QUANTISED and block_size < _TILE:
        raise ConfigError(
            f"kv_dtype {dtype} needs blocks of at least {_TILE} positions, not {block_size}; raise --block-size",
            param="block_size",
        )
    if dtype in QUANTISED and head_dim > _MOST_FEATURES:
        raise ConfigError(
            f"kv_dtype {dtype} holds heads of at most {_MOST_FEATURES} features, not {head_dim}; use bf16",
            param="kv_dtype",
        )
    factors = 0 if key_factors is None else key_factors.data_ptr()
    return _native.KVStorage(data, layers, kv_heads, head_dim, block_size, dtype, factors, begun)


def block_bytes(layers: int, kv_heads: int, head_dim: int, block_size: int, dtype: KVDtype) -> int:
    """Bytes of one block: keys and values of ``block_size`` positions in all layers, and what reads them.

    Raises as ``CpuKVCache`` does."""
    return _storage(0, layers, kv_heads, head_dim, block_size, dtype).block_bytes


class CpuKVCache:
    """Keys and values of all layers; ``data`` is uint8 [num_blocks, block bytes], a block in one piece.

    Pages take memory when they are first written. Beside it lie, with ``int4-full``, keys of groups that are not full.
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
        """Raises ``OutOfMemory`` where it needs more than is available or the system refuses, ``ConfigError`` for what
        the kernels cannot store so, and ``ValueError`` for a block size that is not a power of two and for factors
        that do not fit."""
        shape = (layers, kv_heads, head_dim)
        if key_factors is not None:
            if dtype not in FACTORED:
                raise ValueError(f"keys in {dtype} are not divided by factors")
            if key_factors.dtype != torch.float32 or tuple(key_factors.shape) != shape:
                raise ValueError(
                    f"key_factors must be float32 {list(shape)}, not {key_factors.dtype} {list(key_factors.shape)}"
                )
            key_factors = key_factors.contiguous()
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
        self.begun = _native.BegunKeys(layers, kv_heads, head_dim) if dtype == "int4-full" else None
        self.native = _storage(
            self.data.ctypes.data, layers, kv_heads, head_dim, block_size, dtype, key_factors, self.begun
        )

    def stored(self, layer: int, blocks: NDArray[np.int32]) -> tuple[Tensor, Tensor]:
        """See ``devices.base.KVCache``."""
        chosen = np.ascontiguousarray(blocks, np.int32)
        if not 0 <= layer < self.layers or ((chosen < 0) | (chosen >= self.num_blocks)).any():
            raise ValueError(f"layer {layer}, blocks {chosen.tolist()}: the cache has no such blocks")
        keys, values = (torch.empty(len(chosen) * self.block_size, self.kv_heads, self.head_dim) for _ in range(2))
        context = _native.Context(1, "auto")
        _native.read_kv(
            context, self.native, layer, chosen.ctypes.data, len(chosen), keys.data_ptr(), values.data_ptr()
        )
        return keys, values

    def to_host(self, blocks: NDArray[np.int32], host: NDArray[np.uint8], places: NDArray[np.int32]) -> None:
        """See ``devices.base.KVCache``. Pairs are copied in their order, each in one piece."""
        data = self.data
        for block, place in copy_pairs(blocks, self.num_blocks, places, len(host)):
            host[place] = data[block]
            if self.begun is not None:
                self.begun.to_host(block, host[place].ctypes.data)

    def to_device(self, places: NDArray[np.int32], host: NDArray[np.uint8], blocks: NDArray[np.int32]) -> None:
        """See ``devices.base.KVCache``. Pairs are copied in their order, each in one piece."""
        data = self.data
        for block, place in copy_pairs(blocks, self.num_blocks, places, len(host)):
            data[block] = host[place]
            if self.begun is not None:
                self.begun.to_device(host[place].ctypes.data, block)
