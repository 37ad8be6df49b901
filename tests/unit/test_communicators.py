"""Collectives between real processes: the sum in rank order bit for bit, on every transport."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ropeway.errors import ConfigError
from ropeway.parallel.shared_memory import MOST_RANKS, SharedMemoryCommunicator, shared_memory
from ropeway.parallel.tcp import replace_bbr

TRANSPORTS = ("shared", "tcp", "gloo")
COUNTS = (1, 7, 1000, 70_001)
"""Elements: of one, within a piece, and over several pieces whose last is not full."""

_RANK = """
import json, os, sys
import torch
from pathlib import Path
given = json.loads(sys.argv[1])
rank, size = given["rank"], given["size"]
if given["descriptor"] is not None:
    from ropeway.parallel.shared_memory import SharedMemoryCommunicator
    communicator = SharedMemoryCommunicator(given["descriptor"], rank, size)
else:
    from ropeway.parallel.gloo import GlooCommunicator
    from ropeway.parallel.stores import local_store
    from ropeway.parallel.tcp import TcpCommunicator
    kind = {"gloo": GlooCommunicator, "tcp": TcpCommunicator}[given["transport"]]
    communicator = kind(local_store(Path(given["folder"]), size), rank, size, address="127.0.0.1")

def part(count, rank, columns=1):
    generator = torch.Generator().manual_seed(1000 * count + rank)
    return torch.randn(count, columns, generator=generator) * 10.0 ** (rank % 3)

for count in given["counts"]:
    total = part(count, 0)
    for other in range(1, size):
        total = total + part(count, other)
    for _ in range(3):
        got = communicator.all_reduce(part(count, rank))
        assert torch.equal(got, total), (count, (got - total).abs().max())
    gathered = communicator.all_gather(part(count, rank, 3), 1)
    assert torch.equal(gathered, torch.cat([part(count, other, 3) for other in range(size)], 1))
    ids = torch.arange(count, dtype=torch.int32) if rank == 0 else torch.full((count,), -1, dtype=torch.int32)
    communicator.broadcast(ids)
    assert torch.equal(ids, torch.arange(count, dtype=torch.int32))
print("done", flush=True)
os._exit(0)  # gloo's threads do not like the interpreter's end
"""


def run(size: int, transport: str, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    descriptor = shared_memory(size) if transport == "shared" else None
    processes = []
    for rank in range(size):
        given = {
            "rank": rank,
            "size": size,
            "descriptor": descriptor,
            "folder": str(folder),
            "counts": COUNTS,
            "transport": transport,
        }
        command = [sys.executable, "-c", _RANK, json.dumps(given)]
        inherited = () if descriptor is None else (descriptor,)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(command, pass_fds=inherited, text=True, **pipes))
    if descriptor is not None:
        os.close(descriptor)
    ended = []
    for process in processes:
        out, error = process.communicate(timeout=120)
        ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, error))
    return ended


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_the_sum_in_rank_order_bit_for_bit(size: int, transport: str, tmp_path: Path) -> None:
    for ended in run(size, transport, tmp_path):
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout == "done\n"


def congestion_control(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no BBR")
def test_ranks_do_not_space_their_packets_by_timers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as link:
        for each in (listening, link):
            try:
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
            except OSError:
                pytest.skip("this kernel has no BBR, or not for this user")
            replace_bbr(each)
        link.connect(listening.getsockname())
        accepted, _ = listening.accept()
        with accepted:
            assert congestion_control(link) in (b"cubic", b"reno")
            assert congestion_control(accepted) == congestion_control(link)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other congestion controls")
def test_a_congestion_control_that_does_not_pace_is_left_alone() -> None:
    with socket.socket() as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        replace_bbr(link)
        assert congestion_control(link) == b"reno"


def test_one_rank_alone_keeps_what_it_has() -> None:
    alone = SharedMemoryCommunicator(shared_memory(1), 0, 1)
    x = torch.randn(100_000)
    assert torch.equal(alone.all_reduce(x.clone()), x)


def test_who_waits_for_a_failed_rank_is_told() -> None:
    communicator = SharedMemoryCommunicator(shared_memory(2), 0, 2)
    told: list[float] = []

    def wait() -> None:
        with pytest.raises(RuntimeError, match="another rank has failed"):
            communicator.all_reduce(torch.zeros(8))
        told.append(time.monotonic())

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive()
    failed = time.monotonic()
    communicator.fail()
    waiting.join(timeout=10)
    assert told[0] - failed < 1.0
    with pytest.raises(RuntimeError, match="another rank has failed"):
        communicator.broadcast(torch.zeros(8))


def test_tensors_that_a_collective_cannot_take_are_refused() -> None:
    communicator = SharedMemoryCommunicator(shared_memory(1), 0, 1)
    with pytest.raises(ValueError, match="contiguous"):
        communicator.all_reduce(torch.zeros(4, 4).T)
    with pytest.raises(ValueError, match="float32"):
        communicator.all_reduce(torch.from_numpy(np.zeros(4)))


def test_more_ranks_than_one_host_can_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"there can be {MOST_RANKS}"):
        shared_memory(MOST_RANKS + 1)
