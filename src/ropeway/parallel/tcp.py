"""Collectives between ranks over plain TCP connections, one between every two of them.

A sum moves as many bytes as in gloo's and NCCL's rings, n * 2 * (size - 1) / size elements out of every rank and as
many in, but is added in rank order: everybody gets everybody's share of the elements, adds it, and hands the result
round. Two ranks show each other everything, in one go and with as many bytes. A receiver is woken for a MiB and not
for every packet, because the core that it takes may be computing.
"""

from __future__ import annotations

import hashlib
import hmac
import select
import socket
import struct
import sys
import time
from collections.abc import Mapping

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from ropeway.errors import ConfigError, RopewayError
from ropeway.parallel.communicator import Product

_AT_ONCE_BYTES = 4096
"""Up to here latency counts, and not how many bytes are moved."""
_WAKE_BYTES = 1 << 20
_LONGEST_NAME = 16
"""Bytes of a congestion control's name."""
_HELLO = struct.Struct("<I32s")
"""The first a connection carries: the rank that has made it, and what proves that it knows the secret."""


class TcpCommunicator:
    """Implements ``Communicator``. Tensors are contiguous."""

    def __init__(
        self, store: Store, rank: int, size: int, *, address: str, secret: str = "", timeout_s: float = 60.0
    ) -> None:
        """Meets the other ranks at ``store``, which tells them that this one is at ``address``. Whoever does not know
        the ``secret`` is turned away. Raises ``ConfigError`` for an address that is not this host's, ``RopewayError``
        when a rank does not come within ``timeout_s``."""
        self.rank = rank
        self.size = size
        self._links = _meet(store, rank, size, address, secret, timeout_s)
        self._woken_for = dict.fromkeys(self._links, 1)
        """Bytes that must have come before a rank's connection wakes this one."""

    def all_reduce(self, x: Tensor) -> Tensor:
        flat = x.view(-1)
        if self.size == 2 or x.nbytes <= _AT_ONCE_BYTES:
            self._sum(self._gathered(flat), flat)
            return x
        share = -(-len(flat) // self.size)
        shares = [flat[share * rank : share * (rank + 1)] for rank in range(self.size)]
        mine = shares[self.rank]
        parts = [mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.size)]
        self._exchange(shares, parts)
        self._sum(parts, mine)
        self._exchange([mine] * self.size, shares)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._gathered(x), dim)

    def reduce_product(self, product: Product, x: Tensor, features: int) -> Tensor:
        return self.all_reduce(product(x))

    def broadcast(self, x: Tensor) -> None:
        nothing = x.view(-1)[:0]
        if self.rank == 0:
            self._exchange([x] * self.size, [nothing] * self.size)
        else:
            self._exchange([nothing] * self.size, [x] + [nothing] * (self.size - 1))

    def fail(self) -> None:
        for link in self._links.values():
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # closed by the other side

    def _sum(self, parts: list[Tensor], out: Tensor) -> None:
        """Added from the first to the last; ``out`` is this rank's part."""
        total = out if self.rank < 2 else torch.empty_like(out)  # a later part is still needed
        torch.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            total += part
        if total is not out:
            out.copy_(total)

    def _gathered(self, x: Tensor) -> list[Tensor]:
        """Every rank's, in their order."""
        parts = [x if rank == self.rank else torch.empty_like(x) for rank in range(self.size)]
        self._exchange([x] * self.size, parts)
        return parts

    def _exchange(self, outgoing: list[Tensor], incoming: list[Tensor]) -> None:
        """Send ``outgoing[rank]`` to every other rank, and fill ``incoming[rank]`` with what it sends, all at once.

        Raises ``RuntimeError`` where a connection breaks."""
        out = {rank: _bytes(outgoing[rank]) for rank in self._links}
        into = {rank: _bytes(incoming[rank]) for rank in self._links}
        try:
            self._move(out, into)
        except OSError as error:
            raise RuntimeError(f"the connection to another rank broke: {error}") from error

    def _move(self, out: dict[int, memoryview], into: dict[int, memoryview]) -> None:
        waiting = select.poll()
        ranks = {link.fileno(): rank for rank, link in self._links.items()}
        while True:
            moved = False
            for rank, link in self._links.items():
                if out[rank] and (count := _try(link.send, out[rank])):
                    out[rank] = out[rank][count:]
                    moved = True
                if into[rank] and (count := _try(link.recv_into, into[rank])):
                    into[rank] = into[rank][count:]
                    moved = True
            if not any(out.values()) and not any(into.values()):
                return
            if not moved:
                for number, rank in ranks.items():
                    waiting.register(number, select.POLLIN * bool(into[rank]) | select.POLLOUT * bool(out[rank]))
                    self._wake_for(rank, len(into[rank]))
                waiting.poll()

    def _wake_for(self, rank: int, bytes_left: int) -> None:
        """Every wake interrupts what is computed on this core: it is to be worth it."""
        wanted = min(bytes_left, _WAKE_BYTES)
        if wanted and wanted != self._woken_for[rank]:
            self._woken_for[rank] = wanted
            self._links[rank].setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)


def _try(move: object, data: memoryview) -> int:
    """Bytes moved; 0 where there is nothing to do now. Raises ``ConnectionError`` at the end of a connection."""
    try:
        count: int = move(data)  # type: ignore[operator]
    except BlockingIOError:
        return 0
    if not count:
        raise ConnectionResetError("closed by the other side")
    return count


def _bytes(x: Tensor) -> memoryview:
    return memoryview(x.view(-1).numpy().data).cast("B") if x.numel() else memoryview(b"")


def _meet(
    store: Store, rank: int, size: int, address: str, secret: str, timeout_s: float
) -> Mapping[int, socket.socket]:
    """Connections to all other ranks: to lower ones this rank goes, the higher ones come."""
    until = time.monotonic() + timeout_s
    try:
        listening = socket.create_server((address, 0), backlog=size)
    except OSError as error:
        raise ConfigError(
            f"rank {rank} cannot listen at {address}: {error}; name an interface of this host with network_interface",
            param="network_interface",
        ) from error
    links: dict[int, socket.socket] = {}
    with listening:
        replace_bbr(listening)
        store.set(f"rank {rank}", f"{address} {listening.getsockname()[1]}")
        try:
            for other in range(rank):
                host, port = store.get(f"rank {other}").decode().split()
                link = _connected(host, int(port), max(until - time.monotonic(), 0.1))
                link.sendall(_HELLO.pack(rank, _proof(secret, rank, other)))
                links[other] = link
            while len(links) < size - 1:
                listening.settimeout(max(until - time.monotonic(), 0.1))
                link, _ = listening.accept()
                comes = _admitted(link, rank, secret)
                if comes is None or not rank < comes < size or comes in links:
                    link.close()
                else:
                    links[comes] = link
        except (OSError, RuntimeError) as error:
            missing = ", ".join(str(other) for other in range(size) if other != rank and other not in links)
            raise RopewayError(f"rank {rank} did not meet rank {missing} within {timeout_s:g} s: {error}") from error
    for link in links.values():
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setblocking(False)
    return links


def _connected(host: str, port: int, timeout_s: float) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    link = socket.socket(family, kind, protocol)
    try:
        replace_bbr(link)
        link.settimeout(timeout_s)
        link.connect(address)
    except OSError:
        link.close()
        raise
    return link


def replace_bbr(connection: socket.socket) -> None:
    """Before it is made, or for what a listening socket accepts: another congestion control in place of BBR, which
    hosts have for long ways. BBR spaces packets by timers that interrupt what the core computes, and leaves a short
    link idle in between."""
    if sys.platform != "linux":
        return
    option = socket.IPPROTO_TCP, socket.TCP_CONGESTION
    if connection.getsockopt(*option, _LONGEST_NAME).rstrip(b"\0") != b"bbr":
        return
    for name in (b"cubic", b"reno"):
        try:
            connection.setsockopt(*option, name)
        except OSError:
            continue  # not in this kernel, or not for this user
        return


def _admitted(link: socket.socket, rank: int, secret: str) -> int | None:
    """Which rank has connected, if it knows the secret."""
    link.settimeout(5.0)
    try:
        data = link.recv(_HELLO.size, socket.MSG_WAITALL)
        other, proof = _HELLO.unpack(data)
    except (OSError, struct.error):
        return None
    return other if hmac.compare_digest(proof, _proof(secret, other, rank)) else None


def _proof(secret: str, sender: int, receiver: int) -> bytes:
    return hmac.digest(secret.encode(), f"ropeway rank {sender} to {receiver}".encode(), hashlib.sha256)
