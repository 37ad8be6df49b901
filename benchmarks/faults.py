"""What a machine may do to a server: a disk that fills up, a clock that jumps."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PAGE = 4096
_SOURCE, _LIBRARY = Path(__file__).with_name("wall_clock.c"), "wall_clock.so"


class Unavailable(Exception):
    """A fault that cannot be brought about on this machine; the message says why."""


class SmallDisk:
    """A file system of its own, and a file in it that takes what room is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self, most: int | None = None) -> None:
        """Take up to ``most`` bytes of what is left; all of it by default."""
        with self._filler.open("ab", buffering=0) as file:
            try:
                while most is None or file.tell() < most:
                    file.write(bytes(_PAGE))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def free(self) -> None:
        """Give it back."""
        self._filler.unlink()


@contextlib.contextmanager
def small_disk(nbytes: int) -> Iterator[SmallDisk]:
    """A file system of ``nbytes``, in memory. Raises ``Unavailable`` where this process may mount none."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", folder]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except OSError as error:
            raise Unavailable(f"there is no mount to make a small disk with: {error}") from error
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"a small disk takes the right to mount one: {error.stderr.strip()}") from error
        try:
            yield SmallDisk(Path(folder))
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


class FakeClock:
    """The wall's clock as processes see it that are started with ``environment``, and their children. It jumps; the one
    that only goes on (``CLOCK_MONOTONIC``) stays the machine's.

    libfaketime is of no use here: under its 0.9.10 Python's ``time.sleep`` fails, and a wait for the GIL spins."""

    def __init__(self, folder: Path) -> None:
        """``folder``: for files of its own. Raises ``Unavailable`` where C cannot be compiled."""
        library = folder / _LIBRARY
        try:
            command = ["cc", "-shared", "-fPIC", "-O2", "-o", library, _SOURCE, "-ldl"]
            subprocess.run(command, check=True, capture_output=True, text=True)
        except OSError as error:
            raise Unavailable(f"there is no C compiler to make a clock with: {error}") from error
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"{_SOURCE} cannot be compiled: {error.stderr.strip()}") from error
        self._offset = folder / "offset"
        preloaded = os.environ.get("LD_PRELOAD")
        self.environment = {
            "LD_PRELOAD": f"{library}:{preloaded}" if preloaded else str(library),
            "WALL_CLOCK_OFFSET": str(self._offset),
        }
        self.jump(0)

    def jump(self, offset_s: int) -> None:
        """So far from the machine's clock, from now on."""
        file = os.open(self._offset, os.O_WRONLY | os.O_CREAT, 0o600)  # in place: it is mapped
        os.write(file, offset_s.to_bytes(8, sys.byteorder, signed=True))
        os.close(file)

    @staticmethod
    def reaches(pid: int) -> bool:
        """Whether a process lives by it."""
        return _LIBRARY in Path(f"/proc/{pid}/maps").read_text()
