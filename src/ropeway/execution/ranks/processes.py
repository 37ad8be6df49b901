"""The processes of ranks on this host."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterable

import msgspec

from ropeway.errors import ConfigError
from ropeway.execution.ranks.messages import Meeting

Process = subprocess.Popen[bytes]


def start_rank(meeting: Meeting) -> Process:
    """Raises ``ConfigError`` where the system does not let it."""
    command = [sys.executable, "-m", "ropeway.execution.ranks.follower"]
    inherited = () if meeting.shared_memory is None else (meeting.shared_memory,)
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=inherited)
        assert process.stdin is not None
        # Not on the command line, where everybody could read the secret. The pipe stays open as long as this process.
        process.stdin.write(msgspec.json.encode(meeting) + b"\n")
        process.stdin.flush()
    except OSError as error:
        raise ConfigError(
            f"the process of rank {meeting.rank} cannot be started: {error}", param="tensor_parallel_size"
        ) from error
    return process


def end(processes: Iterable[Process], patience_s: float = 0.0) -> None:
    """Wait for processes to end by themselves; those that have not by then are killed."""
    until = time.monotonic() + patience_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(until - time.monotonic(), 0.0))
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()


def ending(code: int) -> str:
    """How a process ended, in words."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
