"""The disk tier: published blocks in a folder that survives restarts.

What goes wrong with the disk costs hits, never answers: a block that cannot be read for whatever reason is a miss, and
one that cannot be written is not kept. ``block_file`` has the files, ``disk_index`` what there are of them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ropeway.cache.transfer import Transferred
from ropeway.execution.block_file import (
    HEADER_BYTES,
    KEY_BYTES,
    VERSION,
    DamagedBlock,
    read_block,
    write_block,
    write_whole,
)
from ropeway.execution.disk_index import DiskIndex

log = logging.getLogger(__name__)

RETRY_S = 30.0
"""After a save has failed, how long nothing is saved before it is tried again."""
QUEUED_SAVES = 64
_CLOSE_TIMEOUT_S = 10.0
_LAYOUT_FILE = "layout.json"


@dataclass(frozen=True, slots=True)
class Layout:
    """All that must be the same for a block's bytes to mean the same."""

    weights: str
    """``loading.digest.weights_digest``, hex."""
    kv_dtype: str
    kv_layout: str
    """The device's arrangement of a block, with a version: "cpu-1"."""
    block_size: int
    layers: int
    kv_heads: int
    head_dim: int
    settings: str = ""
    """Digest of whatever else decides the values of keys: the model's config, layouts of weights, activations."""
    adapter: str = ""
    rank: int = 0
    ranks: int = 1
    file_version: int = VERSION

    def json(self) -> bytes:
        """Canonical: equal layouts have equal bytes."""
        return json.dumps(asdict(self), sort_keys=True, indent=1).encode()

    def digest(self) -> bytes:
        """32 bytes."""
        return hashlib.sha256(self.json()).digest()


class _Unusable(Exception):
    """Nothing can be kept in the folder; the message is for ``failure``."""


class DiskStore:
    """Implements ``cache.transfer.BlockStore``. One thread does the work, first in, first out."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        host: NDArray[np.uint8],
        space_bytes: int,
        *,
        queued_saves: int = QUEUED_SAVES,
    ) -> None:
        """``host``: uint8 [host blocks, block bytes]. ``space_bytes``: most that all blocks in the folder, those of
        other layouts included, may take. ``queued_saves``: most waiting to be written; more are dropped.

        Raises nothing for a folder that cannot be used: ``failure`` says so."""
        self.folder = folder
        self._layout = layout
        self._digest = layout.digest()
        self._own_folder = folder / self._digest.hex()[:32]
        self._host = host
        self._space_bytes = space_bytes
        self._file_bytes = HEADER_BYTES + host.shape[1]
        self._index = DiskIndex(folder, self._own_folder.name, self._file_bytes)

        self.saved = 0
        self.loaded = 0
        self.evicted = 0
        self.dropped = 0
        """Saves given up because too many were waiting, or the folder was known to be unusable."""
        self._errors = 0
        self._failure: str | None = None
        self._retry_at = 0.0
        self._ready = False
        """The folder has been found to be usable, and nothing has failed since."""
        self._foreign = False
        """The sub-folder says that it belongs to another layout: nothing in it is read."""

        self._jobs: deque[tuple[Literal["save", "load"], bytes, int]] = deque()
        self._queued_saves = queued_saves
        self._waiting_saves = 0
        self._done: deque[Transferred] = deque()
        self._closed = False
        self._change = threading.Condition()
        """Guards the jobs and the counters that both threads change."""

        self._open()
        self._thread = threading.Thread(target=self._serve, name="disk-store", daemon=True)
        self._thread.start()

    # ----------------------------------------------------------------------- asked by the engine's thread

    def find(self, key: bytes) -> bool:
        return self._index.holds(key)

    def save(self, key: bytes, host_block: int) -> None:
        """Raises ``ValueError`` for a key that is not 32 bytes."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key on disk has {KEY_BYTES} bytes, not {len(key)}")
        with self._change:
            if self._closed or self._resting() or self._waiting_saves >= self._queued_saves:
                self.dropped += 1
                self._done.append(Transferred("save", key, host_block, False))
                return
            self._waiting_saves += 1
            self._jobs.append(("save", key, host_block))
            self._change.notify()

    def load(self, key: bytes, host_block: int) -> None:
        with self._change:
            if self._closed:
                self._done.append(Transferred("load", key, host_block, False))
                return
            self._jobs.append(("load", key, host_block))
            self._change.notify()

    def finished(self) -> Collection[Transferred]:
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    @property
    def blocks(self) -> int:
        return self._index.blocks

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks in the folder, as far as known."""
        return self._index.nbytes

    @property
    def errors(self) -> int:
        return self._errors

    @property
    def failure(self) -> str | None:
        return self._failure

    def close(self) -> None:
        """Finish the block at hand; those still waiting are not saved or loaded. May be called twice.

        A disk that does not answer is waited for a while only."""
        with self._change:
            self._closed = True
            while self._jobs:
                kind, key, host_block = self._jobs.popleft()
                self.dropped += kind == "save"
                self._done.append(Transferred(kind, key, host_block, False))
            self._waiting_saves = 0
            self._change.notify()
        self._thread.join(_CLOSE_TIMEOUT_S)

    # ----------------------------------------------------------------------- done by the store's own thread

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # what is wrong with the folder shows when something is saved
            if not self._foreign:
                self._index.look()
        while True:
            with self._change:
                while not self._jobs and not self._closed:
                    self._change.wait()
                if not self._jobs:
                    return
                kind, key, host_block = self._jobs.popleft()
                self._waiting_saves -= kind == "save"
            try:
                ok = self._save(key, host_block) if kind == "save" else self._load(key, host_block)
            except Exception:
                # A fault of this program must not leave somebody waiting for a block for ever.
                log.exception("the disk cache in %s failed", self.folder)
                self._errors += 1
                ok = False
            self._done.append(Transferred(kind, key, host_block, ok))

    def _save(self, key: bytes, host_block: int) -> bool:
        if self._index.holds(key) and self._index.touch(key):
            return True
        if self._resting():
            with self._change:
                self.dropped += 1
            return False
        if not self._ready and not self._open():
            self._errors += 1
            return False
        path = self._index.path(key)
        try:
            self.evicted += self._index.make_room(self._space_bytes - self._file_bytes)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_block(path, self._digest, key, memoryview(self._host[host_block]))
        except OSError as error:
            self._fail(self._reason(error))
            self._errors += 1
            return False
        self._index.add(key)
        self.saved += 1
        if self._failure is not None:
            log.warning("the disk cache in %s works again", self.folder)
            self._failure = None
        return True

    def _load(self, key: bytes, host_block: int) -> bool:
        if not self._index.holds(key):
            return False
        path = self._index.path(key)
        try:
            read_block(path, self._digest, key, memoryview(self._host[host_block]))
        except FileNotFoundError:  # removed by another process, or by a person
            self._index.forget(key)
            return False
        except DamagedBlock as damage:
            log.warning("%s is not used and removed: %s", path, damage)
            self._errors += 1
            self._index.remove(key)
            return False
        except OSError as error:
            log.warning("%s cannot be read: %s", path, error)
            self._errors += 1
            self._index.forget(key)
            return False
        self._index.touch(key)
        self.loaded += 1
        return True

    def _resting(self) -> bool:
        return self._failure is not None and time.monotonic() < self._retry_at

    # ----------------------------------------------------------------------- the folder

    def _open(self) -> bool:
        """Look at the sub-folder and make sure that files can be made there; sets ``failure`` where not. A block is
        larger than what is tried here: that a failure is over shows when one is saved."""
        try:
            self._check_layout()
            if not self.blocks:
                self._index.look_for_names()
            self._make_writable()
        except OSError as error:
            self._fail(self._reason(error))
        except _Unusable as unusable:
            self._fail(str(unusable))
        else:
            self._ready = True
        return self._ready

    def _check_layout(self) -> None:
        """The sub-folder's name is a hash of the layout; its file says the same, or it is not ours."""
        path = self._own_folder / _LAYOUT_FILE
        try:
            self._foreign = path.read_bytes() != self._layout.json()
        except FileNotFoundError:
            self._foreign = False
        if self._foreign:
            raise _Unusable(
                f"{path} does not describe this model's blocks, so none of that folder is used or added to; "
                f"remove {self._own_folder}, or choose another disk_cache"
            )

    def _make_writable(self) -> None:
        if self._file_bytes > self._space_bytes:
            raise _Unusable(
                f"{self.folder}: disk_space is {self._space_bytes} bytes, less than one block's file of "
                f"{self._file_bytes}; give at least {self._file_bytes / 2**30:.4f} GiB"
            )
        self._own_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Written even if it is there: that is what shows whether files can be.
        write_whole(self._own_folder / _LAYOUT_FILE, self._layout.json())

    def _fail(self, reason: str) -> None:
        if reason != self._failure:
            log.warning("the disk cache saves nothing: %s", reason)
        self._failure, self._ready = reason, False
        self._retry_at = time.monotonic() + RETRY_S

    def _reason(self, error: OSError) -> str:
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT:
                why = "the disk (or the quota) is full; free some of it, or lower disk_space"
            case errno.EROFS:
                why = "the file system is read-only; make it writable, or choose another disk_cache"
            case errno.EACCES | errno.EPERM:
                why = "this process may not write there; change the permissions, or choose another disk_cache"
            case errno.ENOTDIR | errno.EEXIST:
                parts = (self._own_folder, *self._own_folder.parents)
                file = next((part for part in parts if part.exists() and not part.is_dir()), error.filename)
                why = f"{file} is a file where a folder should be; remove it, or choose another disk_cache"
            case _:
                why = f"it cannot be written ({error}); mend that, or choose another disk_cache"
        return f"{self.folder}: {why}"
