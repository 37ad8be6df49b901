"""What crosses between rank 0 and the other ranks. Each of these has one ordered connection for its work, and one for
signs of life.

    rank 0                     rank r
           <---- Join --------
           ----- Load ------->   read its part of the weights
           <---- Loaded ------
           ----- MakePool --->   (calibration may take collectives: all ranks at once)
           ----- MakeWorker ->
           <---- Ready -------
           ----- RunStep ---->   forward, take over the tokens that rank 0 has chosen
           ...
           ----- Stop ------->
"""

from __future__ import annotations

from typing import cast

import msgspec

from ropeway.config import Config, ParallelConfig
from ropeway.execution.sizes import Loaded, PoolSizes
from ropeway.plan import Plan
from ropeway.wire import decoder


class Join(msgspec.Struct, frozen=True, tag=True):
    """A rank's process is there."""

    rank: int
    version: str
    """Ropeway's."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """What to load."""

    config: Config
    path: str | None
    """Where the model lies; None: on another host, which has to find it by its name."""
    local_ranks: int
    """Ranks that share the host."""


class MakePool(msgspec.Struct, frozen=True, tag=True):
    sizes: PoolSizes


class MakeWorker(msgspec.Struct, frozen=True, tag=True):
    host_blocks: int
    """Of host memory, for copies of blocks."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A rank waits for steps."""


class RunStep(msgspec.Struct, frozen=True, tag=True):
    plan: Plan


class Rehearse(msgspec.Struct, frozen=True, tag=True):
    """A step that is run to see how long it takes, before any that counts."""

    plan: Plan
    fused: bool
    """Whether collectives that are fused with products are."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End after the steps so far."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """A sign of life."""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank cannot go on; its last sign."""

    error: str
    """Name of the error class of ``ropeway.errors``."""
    message: str
    param: str | None = None


ToRank = Load | MakePool | MakeWorker | Rehearse | RunStep | Stop
FromRank = Join | Loaded | Ready
Sign = Alive | RankFailed

_to_rank, _from_rank, _sign = decoder(ToRank), decoder(FromRank), decoder(Sign)


def decode_to_rank(data: bytes) -> ToRank:
    return cast(ToRank, _to_rank.decode(data))


def decode_from_rank(data: bytes) -> FromRank:
    return cast(FromRank, _from_rank.decode(data))


def decode_sign(data: bytes) -> Sign:
    return cast(Sign, _sign.decode(data))


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank finds the others: what its process is told first, as a line of JSON."""

    rank: int
    size: int
    control: str
    """Address of the connection for work."""
    signs: str
    """Of the one for signs of life."""
    secret: str | None = None
    """For both."""
    shared_memory: int | None = None
    """File descriptor of ``parallel.shared_memory``; None: the ranks talk over a network."""
    folder: str | None = None
    """Where those of one host meet."""
    host: str | None = None
    """Where those of several hosts do, on ``port``."""
    port: int = 0
    interface: str | None = None
    """Network interface of this host for that."""
    timeout_s: float


def meeting_of(parallel: ParallelConfig, rank: int, folder: str = "", shared_memory: int | None = None) -> Meeting:
    """``folder``: for the sockets of ranks on one host."""
    host, port = parallel.master_addr, parallel.master_port
    several = parallel.nnodes > 1
    return Meeting(
        rank=rank,
        size=parallel.tensor_parallel_size,
        control=f"tcp://{host}:{port}" if several else f"ipc://{folder}/control",
        signs=f"tcp://{host}:{port + 1}" if several else f"ipc://{folder}/signs",
        secret=parallel.cluster_secret if several else None,
        shared_memory=shared_memory,
        folder=None if several else folder,
        host=host if several else None,
        port=port + 2,
        interface=parallel.network_interface,
        timeout_s=parallel.join_timeout_s,
    )


BEAT_S = 0.5
"""Between two signs of life."""
SILENCE_S = 3.5
"""Without one for so long, a rank counts as lost: with what it takes to notice, it is less than five seconds."""
