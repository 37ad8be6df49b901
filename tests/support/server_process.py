"""A real ``ropeway serve`` process for black-box tests."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import httpx
import openai
import psutil


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


class ServerProcess:
    """Started on entering; ended, with everything it started, on leaving. ``environment``: beside this process's;
    ``log``: the file it writes to."""

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        ready_s: float = 90.0,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self.port, self.management_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready_s = ready_s
        self._environment = environment or {}
        self._log: IO[bytes]
        if log is None:
            self._log = tempfile.NamedTemporaryFile(prefix="ropeway-log-", mode="w+b")  # noqa: SIM115
        else:
            self._log = log.open("wb")
        self.command = [
            *(sys.executable, "-m", "ropeway", "serve", str(model)),
            *("--port", str(self.port), "--management-port", str(self.management_port)),
            *("--served-model-name", "tiny"),
            *flags,
        ]
        self.process: subprocess.Popen[bytes]

    def start(self) -> Self:
        """Start without waiting."""
        variables = {**os.environ, **self._environment}
        self.process = subprocess.Popen(self.command, stdout=self._log, stderr=self._log, env=variables)
        return self

    def __enter__(self) -> Self:
        self.start()
        deadline = time.monotonic() + self._ready_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with code {self.process.returncode}:\n{self.log()}")
            if self.ready():
                return self
            time.sleep(0.05)
        self.end()
        raise AssertionError(f"the server was not ready after {self._ready_s} s:\n{self.log()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        if self.process.poll() is None:
            children = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait()
            psutil.wait_procs(children, timeout=10)
        self._log.close()

    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def ready(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.management_port}/ready", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def metric(self, name: str) -> float:
        """Sum of a metric's samples; labels may be part of the name (``x{state="live"}``)."""
        text = httpx.get(f"{self.url}/metrics", timeout=5).text
        pattern = re.escape(name) + (r"(?:\{[^}]*\})?" if "{" not in name else "") + r" ([0-9.e+-]+)$"
        found = re.findall(pattern, text, flags=re.MULTILINE)
        assert found, f"no metric {name}"
        return sum(map(float, found))

    def until(self, name: str, value: float, within_s: float = 5.0) -> None:
        """Wait until a metric has this value."""
        deadline = time.monotonic() + within_s
        while (now := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {now}, not {value}, after {within_s} s"
            time.sleep(0.05)
