"""Which block files a folder holds, the longest unused first.

::

    <folder>/<layout>/layout.json         what the blocks of this sub-folder are
    <folder>/<layout>/<2 digits>/<key>.kv  blocks, by the first digits of their keys

A file's modification time is when it was last used. Several processes may share the folder: each counts the blocks of
all layouts against its own limit and forgets what others have removed when it looks again.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ropeway.execution.block_file import KEY_BYTES, SUFFIX, TEMPORARY

_LAYOUT_NAME = re.compile(r"[0-9a-f]{32}")
_PREFIX_NAME = re.compile(r"[0-9a-f]{2}")
_BLOCK_NAME = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}{re.escape(SUFFIX)}")
_TEMPORARY_NAME = re.compile(rf"\..+\.[0-9a-f]{{16}}{re.escape(TEMPORARY)}")
_LOOK_EVERY_S = 60.0
"""How often to see what other processes did; less often where looking takes long."""
_ABANDONED_S = 60.0
"""Age of a temporary file whose writer must have died: it takes milliseconds to write one."""


class DiskIndex:
    """The blocks of one layout by key, and those of other layouts by path.

    One thread changes it; ``holds`` and ``blocks`` may be asked by another."""

    def __init__(self, folder: Path, layout: str, file_bytes: int) -> None:
        """``layout``: name of the sub-folder; ``file_bytes``: size of each of its files."""
        self._folder = folder
        self._own_folder = folder / layout
        self._file_bytes = file_bytes
        self._own: OrderedDict[bytes, float] = OrderedDict()
        """Key -> when it was last used."""
        self._other: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Path of another layout's block -> (when it was last used, its size)."""
        self._other_bytes = 0
        self._look_again = 0.0

    @property
    def blocks(self) -> int:
        return len(self._own)

    @property
    def nbytes(self) -> int:
        """Of all layouts' blocks."""
        return len(self._own) * self._file_bytes + self._other_bytes

    def holds(self, key: bytes) -> bool:
        return key in self._own

    def path(self, key: bytes) -> Path:
        name = key.hex()
        return self._own_folder / name[:2] / (name + SUFFIX)

    def add(self, key: bytes) -> None:
        """A block was written."""
        self._own[key] = time.time()
        self._own.move_to_end(key)

    def touch(self, key: bytes) -> bool:
        """A block is used: make it the newest, here and for whoever looks later. False: its file is gone."""
        try:
            os.utime(self.path(key))
        except FileNotFoundError:
            self.forget(key)
            return False
        except OSError:
            pass  # a read-only folder: its order stays as it is
        self.add(key)
        return True

    def forget(self, key: bytes) -> None:
        self._own.pop(key, None)

    def remove(self, key: bytes) -> None:
        """Remove a block's file, if the system lets us, and forget it."""
        self.forget(key)
        with contextlib.suppress(OSError):
            self.path(key).unlink()

    def make_room(self, limit: int) -> int:
        """Remove the longest unused files until all take at most ``limit`` bytes -> how many. Raises ``OSError``."""
        if time.monotonic() >= self._look_again:
            self.look()
        removed = 0
        while self.nbytes > limit and (self._own or self._other):
            self._remove_oldest()
            removed += 1
        return removed

    def look_for_names(self) -> None:
        """Take in the layout's blocks by their names alone: quick, in no order. Raises ``OSError``."""
        self._own = OrderedDict((_key(entry), 0.0) for entry in _files(self._own_folder) if _is_block(entry))

    def look(self) -> None:
        """Take in what the folder holds now, in the order of use, and remove what interrupted writers left behind.

        Raises ``OSError``."""
        began = time.monotonic()
        abandoned = time.time() - _ABANDONED_S
        own: list[tuple[bytes, float]] = []
        other: list[tuple[str, float, int]] = []
        for folder in _folders(self._folder, _LAYOUT_NAME):
            is_own = folder.name == self._own_folder.name
            try:
                for entry, status in _files_with_status(Path(folder)):
                    if _TEMPORARY_NAME.fullmatch(entry.name):
                        if status.st_mtime < abandoned:
                            with contextlib.suppress(OSError):
                                os.unlink(entry.path)
                    elif _is_block(entry):
                        if is_own:
                            own.append((_key(entry), status.st_mtime))
                        else:
                            other.append((entry.path, status.st_mtime, status.st_size))
            except PermissionError:  # what another user keeps to himself is not counted
                if is_own:
                    raise
        self._own = OrderedDict(own[i] for i in _by_age([used for _, used in own]))
        self._other = OrderedDict(
            (other[i][0], (other[i][1], other[i][2])) for i in _by_age([used for _, used, _ in other])
        )
        self._other_bytes = sum(size for _, _, size in other)
        ended = time.monotonic()
        self._look_again = ended + max(_LOOK_EVERY_S, 100 * (ended - began))

    def _remove_oldest(self) -> None:
        key, used = next(iter(self._own.items()), (b"", np.inf))
        path, (other_used, size) = next(iter(self._other.items()), ("", (np.inf, 0)))
        if used <= other_used:
            with contextlib.suppress(FileNotFoundError):
                self.path(key).unlink()
            self.forget(key)
        else:
            with contextlib.suppress(FileNotFoundError, PermissionError):  # it may be another user's
                os.unlink(path)
            del self._other[path]
            self._other_bytes -= size


def _by_age(used: list[float]) -> list[int]:
    """Indices, the longest unused first. numpy sorts without keeping other threads from running."""
    order: list[int] = np.argsort(np.array(used, dtype=np.float64), kind="stable").tolist()
    return order


def _files(layout_folder: Path) -> Iterator[os.DirEntry[str]]:
    """Everything in the layout's folder and its sub-folders."""
    prefixes = [prefix.path for prefix in _folders(layout_folder, _PREFIX_NAME)]
    for folder in (str(layout_folder), *prefixes):
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            yield from entries


def _files_with_status(layout_folder: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    for entry in _files(layout_folder):
        with contextlib.suppress(FileNotFoundError):  # another process was quicker
            yield entry, entry.stat()


def _folders(folder: Path, name: re.Pattern[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if name.fullmatch(entry.name) and entry.is_dir()]
    except FileNotFoundError:
        return []


def _is_block(entry: os.DirEntry[str]) -> bool:
    return _BLOCK_NAME.fullmatch(entry.name) is not None


def _key(entry: os.DirEntry[str]) -> bytes:
    return bytes.fromhex(entry.name[: 2 * KEY_BYTES])
