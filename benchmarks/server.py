"""A server process of its own, for measurements from outside."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

_START_S = 120.0
_IDLE_S = 60.0


@dataclass
class Server:
    port: int
    management_port: int
    process: subprocess.Popen[bytes]
    log: Path
    """What it writes to stderr."""
    name: str = "model"
    """What clients call the model."""
    flags: tuple[str, ...] = field(default=())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine(self) -> psutil.Process:
        """The engine's process. Raises ``RuntimeError`` when there is none."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if "ropeway.engine.child" in " ".join(child.cmdline()):
                    return child
            except psutil.Error:
                continue
        raise RuntimeError("there is no engine process")

    def samples(self) -> dict[str, float]:
        """The samples of the metrics page by name and labels."""
        response = httpx.get(f"http://127.0.0.1:{self.management_port}/metrics", timeout=30, trust_env=False)
        lines = (line.rsplit(" ", 1) for line in response.text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """Of as many connections as are asked for."""
        limits = httpx.Limits(max_connections=1000, max_keepalive_connections=100)
        async with httpx.AsyncClient(base_url=self.url, timeout=120.0, limits=limits, trust_env=False) as client:
            yield client

    def until_idle(self) -> None:
        """Return when no request runs or waits, after a minute in any case."""
        deadline = time.monotonic() + _IDLE_S
        while time.monotonic() < deadline:
            samples = self.samples()
            if samples["ropeway_num_requests_running"] + samples["ropeway_num_requests_waiting"] == 0:
                return
            time.sleep(0.1)

    def held_blocks(self) -> float:
        """Blocks of the KV pool that are held when it is idle."""
        self.until_idle()
        return self.samples()['ropeway_kv_blocks{state="live"}']

    def serves(self) -> bool:
        """Whether a chat is answered."""
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        return bool(answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"])

    def ready(self) -> bool:
        try:
            url = f"http://127.0.0.1:{self.management_port}/ready"
            return httpx.get(url, timeout=2, trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def until_ready(self, within_s: float = _START_S) -> float:
        """Seconds until requests are welcome. Raises ``RuntimeError`` with the log's end when they never are."""
        began = time.monotonic()
        while self.process.poll() is None and time.monotonic() - began < within_s:
            if self.ready():
                return time.monotonic() - began
            time.sleep(0.05)
        end = self.log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"the server was not ready within {within_s:g} s (exit code {self.process.poll()}):\n{end}")

    def resident_bytes(self) -> int:
        """Of the server and everything it started: pages that are its own, and its share of others."""
        processes = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        return sum(process.memory_full_info().pss for process in processes)


@contextmanager
def running(
    model: str,
    *flags: str,
    python: Path | str = sys.executable,
    bare: bool = False,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Iterator[Server]:
    """Started on entering, ready; ended, with everything it started, on leaving. ``bare``: with nothing in reach that
    ``python`` does not have itself. ``environment``: beside this process's. ``log``: the file it writes to; by default
    one that is gone on leaving."""
    with tempfile.TemporaryDirectory() as folder:
        log = log or Path(folder) / "log"
        ports = free_port(), free_port()
        command = [
            *(str(python), "-m", "ropeway", "serve", model, "--served-model-name", "model"),
            *("--port", str(ports[0]), "--management-port", str(ports[1])),
            *flags,
        ]
        variables = {name: value for name, value in os.environ.items() if not bare or name != "PYTHONPATH"}
        variables |= environment or {}
        with (
            log.open("wb") as out,
            subprocess.Popen(command, stdout=out, stderr=out, cwd=folder if bare else None, env=variables) as process,
        ):
            server = Server(*ports, process, log, flags=flags)
            try:
                server.until_ready()
                yield server
            finally:
                children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
                process.terminate()
                process.wait(timeout=60)
                psutil.wait_procs(children, timeout=10)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])
