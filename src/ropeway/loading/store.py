"""The folder downloaded models are kept in.

::

    blobs/<sha256>                    contents, each once; <name>.part while on its way
    models/<kind>/.../<file>          a model's files: links to blobs
    models/<kind>/.../ropeway-manifest.json
                                      written last: where it came from, and each file's size and SHA-256
    locks/                            locks held while something is fetched
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ropeway.errors import LoadError
from ropeway.loading.download import sha256_of

MANIFEST = "ropeway-manifest.json"


@dataclass(frozen=True)
class StoredFile:
    name: str
    """Path below the model's folder, with ``/``."""
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    source: str
    """As the user may write it."""
    revision: str
    """What exactly was fetched: a commit, or versions of packages."""
    files: tuple[StoredFile, ...]
    main: str = ""
    """What to open, below the model's folder: a ``.gguf`` file or a folder; "" is the model's folder."""
    note: str = ""
    """What a user should know of the packaging."""


class Store:
    def __init__(self, root: Path) -> None:
        self.root = root

    def model_folder(self, *key: str) -> Path:
        return self.root.joinpath("models", *(quote(part, safe="@=+,") for part in key))

    def find(self, folder: Path) -> Path | None:
        """What to open of the model in ``folder``, if it is completely there: all files, with the sizes they had when
        their contents were verified."""
        try:
            fields = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            files = [StoredFile(**entry) for entry in fields["files"]]
            main: str = fields["main"]
            if all((folder / file.name).stat().st_size == file.size for file in files):
                return folder / main
        except (OSError, ValueError, KeyError, TypeError):
            pass  # absent or damaged: to be fetched
        return None

    def blob(self, sha256: str) -> Path:
        return self.root / "blobs" / sha256

    def verified_size(self, sha256: str) -> int | None:
        """The size of the blob of that hash, read through to make sure; None if there is none, or a damaged one."""
        blob = self.blob(sha256)
        return blob.stat().st_size if blob.exists() and sha256_of(blob) == sha256 else None

    def part(self, name: str) -> Path:
        """Where a content on its way is written."""
        path = self.root / "blobs" / f"{name}.part"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def keep(self, part: Path, sha256: str) -> Path:
        """Give a verified content its final name."""
        with part.open("rb") as stream:
            os.fsync(stream)  # else a power cut may leave a file of the right size without its content
        blob = self.blob(sha256)
        os.replace(part, blob)
        return blob

    def publish(self, folder: Path, manifest: Manifest) -> Path:
        """Make the model appear in ``folder``; all its blobs are there. Returns what to open. A file of the model's
        that is called like the manifest is left out."""
        manifest = replace(manifest, files=tuple(file for file in manifest.files if file.name != MANIFEST))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        names = {file.name for file in manifest.files}
        for path in folder.rglob("*"):
            if not path.is_dir() and path.relative_to(folder).as_posix() not in names:
                path.unlink()  # of an earlier revision
        for file in manifest.files:
            _link(self.blob(file.sha256), folder / file.name)
        temporary = folder / f"{MANIFEST}.part"
        temporary.write_text(json.dumps(asdict(manifest), indent=2), encoding="utf-8")
        os.replace(temporary, folder / MANIFEST)
        return folder / manifest.main

    def check_space(self, size: int, origin: str) -> None:
        """Raises ``LoadError`` naming ``origin`` if there is no room for another ``size`` bytes."""
        free = shutil.disk_usage(self.root).free
        if size > free:
            raise LoadError(
                f"{origin} takes {size} bytes unpacked, and {free} are free in {self.root}; make room, or choose "
                "another folder (ROPEWAY_CACHE)"
            )

    @contextmanager
    def locked(self, *key: str) -> Iterator[None]:
        """Hold the lock of that name, waiting for it if need be. The kernel lets go of it when a process dies."""
        path = self.root / "locks" / quote("/".join(key), safe="@=+,")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield


def _link(blob: Path, path: Path) -> None:
    """Hard links, so that a file's own name (and suffix) is its real one; symbolic ones where there are none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    try:
        os.link(blob, path)
    except OSError:
        os.symlink(os.path.relpath(blob, path.parent), path)


def safe_name(name: Any, origin: str) -> str:
    """``name``, if it is a relative path that stays below its folder; raises ``LoadError`` naming ``origin``."""
    if not isinstance(name, str) or not _is_safe(name):
        raise LoadError(f"{origin} holds a file with the unsafe name {name!r}; it was refused")
    return name


def _is_safe(name: str) -> bool:
    parts = name.split("/")
    return not re.search(r"[\\:\0\ud800-\udfff]", name) and not any(part in ("", ".", "..") for part in parts)
