"""Engines in processes of their own: started, asked, measured, ended."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

_TAIL = 15
_STOP_S = 20.0
_SAMPLE_S = 2.0
"""Between two looks at the memory. The kernel walks all pages for one (about 10 ms for a gigabyte), so more of them
would show in the times."""


class EngineFailed(Exception):
    """An engine died, hung, or answered something else than asked. What it wrote last is in the message."""


class TreeMemory:
    """Highest memory of a process and its descendants: the sum of their proportional set sizes, in which a page shared
    by n processes counts as 1/n of a page for each."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak_bytes = 0
        self._thread.start()

    def look(self) -> None:
        total = 0
        with suppress(psutil.Error):
            for process in (self._process, *self._process.children(recursive=True)):
                with suppress(psutil.Error):
                    memory = process.memory_full_info()
                    total += getattr(memory, "pss", memory.rss)
        self.peak_bytes = max(self.peak_bytes, total)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self.look()


class EngineProcess:
    """A process that leads a session of its own, so that all it starts ends with it. What it writes to stderr, and
    unless it is piped to stdout, goes to ``log``."""

    def __init__(
        self, command: Sequence[str], *, log: Path, variables: Mapping[str, str] | None = None, piped: bool = False
    ) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._began = time.perf_counter()
        with log.open("w") as out:
            out.write(f"{' '.join(command)}\n")
            out.flush()
            pipe = subprocess.PIPE if piped else None
            self._process = subprocess.Popen(
                command,
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or out,
                stderr=out if piped else subprocess.STDOUT,
                env=os.environ | dict(variables or {}),
                start_new_session=True,
            )
        self.memory = TreeMemory(self._process.pid)

    @property
    def age_s(self) -> float:
        return time.perf_counter() - self._began

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def failed(self, what: str) -> EngineFailed:
        """The error to raise, with the end of the log."""
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL:]
        return EngineFailed(f"{what}; the end of {self.log}:\n" + "\n".join(lines))

    def stop(self) -> None:
        """End it and everything it started: politely, then not."""
        self.memory.close()
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, sign)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
                break
        # Children outlive a leader that has gone; the session's group is theirs alone by now.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


class Worker(EngineProcess):
    """An engine behind ``workers/lines.py``: it reads one JSON object per line and answers each with another."""

    def __init__(self, command: Sequence[str], *, log: Path, variables: Mapping[str, str] | None = None) -> None:
        super().__init__(command, log=log, variables=variables, piped=True)
        self._unread = b""

    def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Raises ``EngineFailed``."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self.failed("the engine has ended") from None
        return self.answer(timeout_s)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The next line. Raises ``EngineFailed``."""
        assert self._process.stdout is not None
        until = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise self.failed(f"no answer within {timeout_s:.0f} s")
            read = os.read(self._process.stdout.fileno(), 1 << 16)
            if not read:
                raise self.failed("the engine has ended")
            self._unread += read
        line, self._unread = self._unread.split(b"\n", 1)
        answer = json.loads(line)
        if "error" in answer:
            raise self.failed(str(answer["error"]))
        return dict(answer)
