"""Collectives between ranks on one host, through memory that they share: a few microseconds where a loopback socket
takes hundreds."""

from __future__ import annotations

import mmap
import os

import numpy as np
import torch
from torch import Tensor

from ropeway.devices.cpu import _native
from ropeway.errors import ConfigError
from ropeway.parallel.communicator import Product

MOST_RANKS = 64


def shared_memory(size: int) -> int:
    """A file descriptor of zeroed memory for ``size`` ranks, to be inherited by their processes; it is gone with the
    last of them. Raises ``ConfigError``."""
    if size > MOST_RANKS:
        raise ConfigError(f"{size} ranks on one host; there can be {MOST_RANKS}", param="tensor_parallel_size")
    try:
        descriptor = os.memfd_create("ropeway-ranks", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _native.SharedGroup.bytes(size))
    except OSError as error:
        raise ConfigError(f"no memory can be shared between ranks ({error}); use collectives gloo") from error
    return descriptor


class SharedMemoryCommunicator:
    """Implements ``Communicator``. Tensors are contiguous."""

    def __init__(self, descriptor: int, rank: int, size: int) -> None:
        """``descriptor``: of ``shared_memory(size)``."""
        self.rank = rank
        self.size = size
        self._memory = np.frombuffer(mmap.mmap(descriptor, _native.SharedGroup.bytes(size)), dtype=np.uint8)
        self._group = _native.SharedGroup(self._memory.ctypes.data, rank, size)

    def all_reduce(self, x: Tensor) -> Tensor:
        _check(x, torch.float32)
        self._group.all_reduce(x.data_ptr(), x.numel())
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        _check(x)
        parts = torch.empty(self.size, *x.shape, dtype=x.dtype)
        self._group.all_gather(x.data_ptr(), x.nbytes, parts.data_ptr())
        return torch.cat(list(parts), dim)

    def reduce_product(self, product: Product, x: Tensor, features: int) -> Tensor:
        return self.all_reduce(product(x))

    def broadcast(self, x: Tensor) -> None:
        _check(x)
        self._group.broadcast(x.data_ptr(), x.nbytes)

    def fail(self) -> None:
        self._group.fail()


def _check(x: Tensor, dtype: torch.dtype | None = None) -> None:
    if not x.is_contiguous() or dtype not in (None, x.dtype):
        raise ValueError(f"a collective takes a contiguous {dtype or 'tensor'}, not {x.dtype} {list(x.shape)}")
