"""Memory below the device: host blocks for swapped requests and cached prefixes, and the disk that keeps prefixes.

What cannot be had is a warning, not an error: the engine serves without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ropeway.cache.host import HostTier
from ropeway.cache.pool import BlockPool
from ropeway.config import Config
from ropeway.devices.base import Device, KVCache, KVDtype
from ropeway.devices.memory import host_memory
from ropeway.errors import LoadError, OutOfMemory
from ropeway.execution.disk import DiskStore, Layout
from ropeway.execution.part import beside_the_pool
from ropeway.loading.digest import array_digest, settings_digest, weights_digest
from ropeway.models.model import Model
from ropeway.version import __version__

GIB = 1 << 30


@dataclass
class HostMemory:
    """What there is of it."""

    blocks: NDArray[np.uint8] | None = None
    """uint8 [host blocks, block bytes]: where plans copy to and from."""
    tier: HostTier | None = None
    """The same as the scheduler sees it."""
    store: DiskStore | None = None
    warnings: list[str] = field(default_factory=list)
    """What was configured and cannot be had, and why."""


def make_host_memory(
    config: Config,
    device: Device,
    model: Model,
    *,
    path: Path,
    model_config: Mapping[str, Any],
    kv_dtype: KVDtype,
    pool: KVCache,
    local_ranks: int = 1,
) -> HostMemory:
    """Host memory as configured. ``path`` and ``model_config`` (as ``config.json``) say whose keys and values a folder
    on disk holds; ``pool`` is the KV pool, of type ``kv_dtype``, which need not have been written to yet.
    ``local_ranks``: how many on this host have a pool and swap space of this size."""
    cache = config.cache
    memory = HostMemory()
    if not cache.swap_space:
        return memory
    block_bytes = device.kv_block_bytes(
        model.num_layers, model.num_kv_heads, model.head_dim, cache.block_size, kv_dtype
    )
    try:
        pool_bytes = pool.nbytes + beside_the_pool(config, model)
        memory.blocks = _host_blocks(device, cache.swap_space, block_bytes, pool_bytes, local_ranks)
    except OutOfMemory as error:
        what = "swap_space" if cache.disk_cache is None else "swap_space, and so no disk_cache"
        memory.warnings.append(f"there is no {what}: {error.message}")
        return memory
    if cache.disk_cache is not None:
        try:
            layout = _layout(config, device, model, path, model_config, kv_dtype, pool.key_factors)
        except LoadError as error:
            memory.warnings.append(f"there is no disk_cache: {error.message}")
        else:
            memory.store = DiskStore(Path(cache.disk_cache), layout, memory.blocks, int(cache.disk_space * GIB))
    memory.tier = HostTier(BlockPool(len(memory.blocks), cache.block_size), memory.store)
    return memory


def _host_blocks(device: Device, swap_space: float, block_bytes: int, pool_bytes: int, ranks: int) -> NDArray[np.uint8]:
    """Raises ``OutOfMemory``."""
    count = int(swap_space * GIB) // block_bytes
    if count < 1:
        raise OutOfMemory(
            f"swap_space {swap_space} GiB is less than one block ({block_bytes} bytes); give at least "
            f"{block_bytes / GIB:.4f} GiB",
            param="swap_space",
        )
    # The pool lies in the same memory, and as long as nobody has written to it, it still counts as available.
    left = host_memory().available // ranks - pool_bytes
    if count * block_bytes > left:
        largest = max(left, 0) // block_bytes
        raise OutOfMemory(
            f"swap_space {swap_space} GiB is {count} blocks, and beside the KV pool of {pool_bytes / GIB:.2f} GiB "
            f"there is room for {largest} (swap_space {largest * block_bytes / GIB:.2f})",
            param="swap_space",
        )
    return device.host_blocks(count, block_bytes)


def _layout(
    config: Config,
    device: Device,
    model: Model,
    path: Path,
    model_config: Mapping[str, Any],
    kv_dtype: KVDtype,
    key_factors: Tensor | None,
) -> Layout:
    """All that decides the bytes of a block, down to the last bit: so that a request's tokens are the same with what
    another process has left as without. Raises ``LoadError``."""
    return Layout(
        weights=weights_digest(path),
        kv_dtype=kv_dtype,
        kv_layout=f"{device.name}-2",
        block_size=config.cache.block_size,
        layers=model.num_layers,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        settings=settings_digest(
            {
                "model": dict(model_config),
                "dtype": config.model.dtype,
                "weights": config.model.weights,
                "activations": config.engine.activations,
                "kernels": device.report().get("kernels"),  # instruction sets differ in last bits
                "version": __version__,
                "key_factors": None if key_factors is None else array_digest(device.download(key_factors)),
            }
        ),
    )
