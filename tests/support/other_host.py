"""The second host's ranks, as a user starts them; on this machine, or in a network of their own on it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ropeway.bench.network import TwoHosts
from tests.support.server_process import free_port


def three_ports() -> int:
    """The first of three neighbours that are free."""
    while True:
        first = free_port()
        with contextlib.suppress(OSError, OverflowError), contextlib.ExitStack() as stack:
            for port in range(first, first + 3):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


@contextlib.contextmanager
def other_host(fields: Mapping[str, Any], hosts: TwoHosts | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """``fields``: of the engine on the first host, its ``master_port`` included. ``hosts``: whose second one it is."""
    command = [
        *(sys.executable, "-m", "ropeway", "serve", "--node-rank", "1"),
        *("--nnodes", str(fields["nnodes"]), "--tensor-parallel-size", str(fields["tensor_parallel_size"])),
        *("--master-port", str(fields["master_port"])),
    ]
    if hosts is not None:
        command = hosts.on_second([*command, "--master-addr", hosts.addresses[0]])
    node = subprocess.Popen(command, env=os.environ | {"ROPEWAY_CLUSTER_SECRET": fields["cluster_secret"]})
    try:
        yield node
    finally:
        if node.poll() is None:
            node.terminate()
        node.wait(15)
