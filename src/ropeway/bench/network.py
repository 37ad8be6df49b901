"""Two hosts on one machine: network namespaces joined by a cable whose rate is set."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from ropeway.errors import RopewayError

_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of setns(2)."""


class NoNetwork(RopewayError):
    """Namespaces cannot be made here; the message says why."""


class TwoHosts:
    """Made on entering, taken down on leaving, which SIGTERM makes the main thread do, too. Needs root, and
    iproute2."""

    addresses = ("10.99.77.1", "10.99.77.2")

    def __init__(self) -> None:
        self._names = tuple(f"ropeway-{os.getpid()}-{side}" for side in "ab")
        self.interfaces = tuple(f"rw{os.getpid() % 100_000}{side}" for side in "ab")
        self._on_sigterm: Any = None

    def __enter__(self) -> Self:
        """Raises ``NoNetwork``."""
        if shutil.which("ip") is None or shutil.which("tc") is None:
            raise NoNetwork("network namespaces need the commands ip and tc (Debian: iproute2)")
        a, b = self.interfaces
        if threading.current_thread() is threading.main_thread():
            self._on_sigterm = signal.signal(signal.SIGTERM, _leave)
        try:
            for name in self._names:
                _run("ip", "netns", "add", name)
            _run("ip", "link", "add", a, "netns", self._names[0], "type", "veth", "peer", b, "netns", self._names[1])
            for name, interface, address in zip(self._names, self.interfaces, self.addresses, strict=True):
                _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", interface)
                _run("ip", "-n", name, "link", "set", "lo", "up")
                _run("ip", "-n", name, "link", "set", interface, "up")
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_down()

    def limit(self, rate: str) -> None:
        """Let no more than this pass per second, in each direction: "1gbit", as tc(8) writes it. Raises
        ``NoNetwork``."""
        for name, interface in zip(self._names, self.interfaces, strict=True):
            limits = ("rate", rate, "burst", "256kb", "latency", "100ms")
            _run("tc", "-n", name, "qdisc", "replace", "dev", interface, "root", "tbf", *limits)

    @contextmanager
    def first(self) -> Iterator[None]:
        """Be on the first host: this thread, and threads and processes that it starts."""
        libc = ctypes.CDLL(None, use_errno=True)
        before = os.open("/proc/self/ns/net", os.O_RDONLY)
        inside = os.open(Path("/run/netns") / self._names[0], os.O_RDONLY)
        try:
            if libc.setns(inside, _NEW_NETWORK):
                raise NoNetwork(f"the network namespace cannot be entered: {os.strerror(ctypes.get_errno())}")
            try:
                yield
            finally:
                libc.setns(before, _NEW_NETWORK)
        finally:
            os.close(inside)
            os.close(before)

    def on_second(self, command: Sequence[str]) -> list[str]:
        """A command line that runs ``command`` on the second host."""
        return ["ip", "netns", "exec", self._names[1], *command]

    def _take_down(self) -> None:
        for name in self._names:  # and the cable with them
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        if self._on_sigterm is not None:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            self._on_sigterm = None


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNetwork(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
