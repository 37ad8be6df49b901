"""An engine process that starts before anybody knows what it is to do: its imports take seconds, and those of the
process that serves it can go on meanwhile. So this module imports nothing heavy."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from ropeway.errors import ConfigError


class SpawnedEngine:
    """Runs ``engine/child.py`` from construction on. It ends when this process does, or when ``close`` is called."""

    def __init__(self) -> None:
        """Raises ``ConfigError`` when the system lets no process or folder be made."""
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="ropeway-"))
            self.address = f"ipc://{self._folder}/engine"
            """Where it looks for its messages; in a folder only this user can enter."""
            command = [sys.executable, "-m", "ropeway.engine.child", self.address]
            # Its standard input closes with this process, and it ends then.
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE)
        except OSError as error:
            raise ConfigError(
                f"an engine process cannot be started: {error}; TMPDIR must be writable, and one more process allowed"
            ) from error

    async def wait(self) -> int:
        """The exit code."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()

        def tell(code: int) -> None:
            if not ended.done():
                ended.set_result(code)

        def watch() -> None:
            code = self.process.wait()
            with contextlib.suppress(RuntimeError):  # the loop has ended before the process
                loop.call_soon_threadsafe(tell, code)

        threading.Thread(target=watch, name="engine-watch", daemon=True).start()
        return await ended

    def close(self) -> None:
        """End the process if it has not ended, and clean up. May be called twice."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
