"""Collectives between hosts over TCP, by the gloo library of ``torch.distributed``.

Its own all_reduce adds in an order that depends on the ranks' places in a ring (seen with three ranks), so sums are
made here: each rank gets everybody's share of the elements, adds them in rank order, and hands the result round. That
moves as many bytes as a ring does. Two ranks just show each other everything, in one go and with as many bytes.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from ropeway.errors import ConfigError, RopewayError
from ropeway.parallel.communicator import Product

_Gloo: Any = dist.ProcessGroupGloo  # the stubs do not have all of it

_WAIT_S = 24 * 3600.0
"""Collectives wait as long as the ranks live; who watches them ends the process."""
_ALL_AT_ONCE_BYTES = 4096
"""Up to here latency counts, and not how many bytes are moved."""


class GlooCommunicator:
    """Implements ``Communicator``. Tensors are contiguous."""

    def __init__(self, store: Store, rank: int, size: int, *, address: str, timeout_s: float = 60.0) -> None:
        """Meets the other ranks at ``store``; this one listens at ``address``. Raises ``ConfigError`` for one that is
        not this host's, ``RopewayError`` when a rank does not come within ``timeout_s``."""
        self.rank = rank
        self.size = size
        options = _Gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        try:
            device = _Gloo.create_device(hostname=address)
        except RuntimeError as error:
            raise ConfigError(
                f"gloo cannot listen at {address}: {error}; name an interface of this host with network_interface",
                param="network_interface",
            ) from error
        options._devices = [device]
        try:
            self._group = _Gloo(store, rank, size, options)
        except RuntimeError as error:
            raise RopewayError(f"rank {rank} of {size} did not meet the others: {error}") from error
        self._group._set_default_timeout(timedelta(seconds=_WAIT_S))

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size == 2 or x.nbytes <= _ALL_AT_ONCE_BYTES:
            parts = self._gathered(x)
            return _in_order(parts, out=x.view(-1)).view(x.shape)
        count = x.numel()
        share = -(-count // self.size)
        sent = x.new_zeros(share * self.size)
        sent[:count] = x.view(-1)
        mine = torch.empty_like(sent)
        self._group.alltoall_base(mine, sent, [], []).wait()
        total = _in_order(mine.view(self.size, share), out=mine[:share])
        self._group._allgather_base(sent, total).wait()
        return sent[:count].view(x.shape)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([part.view(x.shape) for part in self._gathered(x)], dim)

    def reduce_product(self, product: Product, x: Tensor, features: int) -> Tensor:
        return self.all_reduce(product(x))

    def broadcast(self, x: Tensor) -> None:
        self._group.broadcast([x]).wait()

    def fail(self) -> None:
        self._group.abort()

    def _gathered(self, x: Tensor) -> Tensor:
        """[size, elements]."""
        parts = x.new_empty(self.size, x.numel())
        self._group._allgather_base(parts.view(-1), x.view(-1)).wait()
        return parts


def _in_order(parts: Tensor, out: Tensor) -> Tensor:
    """The sum of parts [size, n], added from the first to the last, in ``out`` [n], which may be the first of them."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out += part
    return out
