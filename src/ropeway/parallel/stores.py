"""Where ranks that talk over a network find each other."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import FileStore, Store, TCPStore

from ropeway.errors import RopewayError


def local_store(folder: Path, size: int) -> Store:
    """Where ranks of one host meet: a file in a folder that only this user can enter."""
    return FileStore(str(folder / "ranks"), size)


def network_store(address: str, port: int, rank: int, size: int, timeout_s: float) -> Store:
    """Where ranks of several hosts meet: rank 0 listens at ``address``. Raises ``RopewayError``."""
    try:
        return TCPStore(address, port, size, rank == 0, timedelta(seconds=timeout_s), wait_for_workers=False)
    except RuntimeError as error:
        raise RopewayError(f"rank {rank} cannot reach the ranks' meeting place {address}:{port}: {error}") from error
