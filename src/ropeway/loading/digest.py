"""What tells one model from another where a whole read would take too long."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from numpy.typing import NDArray

from ropeway.errors import LoadError

HEAD_BYTES = 1 << 20
"""Of a file's beginning: names, types and places of tensors, in both formats."""
PIECE_BYTES = 64 << 10
PIECES = 256
"""Most pieces sampled from one file."""


def weights_digest(path: Path) -> str:
    """64 hex digits for the weights at ``path``: a ``.gguf`` file (with its other parts, if split), or a folder with
    safetensors files or a ``.gguf`` file.

    A hash over the files' names and sizes, the first MiB of each, its end, and 256 pieces of 64 KiB at equal
    distances. It is *not* a hash over all the bytes: what it cannot see is a change that stays within a 256th of a
    file and touches no piece. Training, merging, quantising or converting weights changes far more than that. Files
    beside the weights (config.json, the tokenizer's) have no part in it; see ``settings_digest``.

    Raises ``LoadError`` if there are no weights, or they cannot be read."""
    digest = hashlib.sha256(b"ropeway-weights-1")
    files = _weight_files(path)
    for file in files:
        try:
            with file.open("rb", buffering=0) as opened:
                _add(digest, file.name.encode())
                _add_samples(digest, opened, file.stat().st_size)
        except OSError as error:
            raise LoadError(f"{file}: cannot be read: {error}") from error
    return digest.hexdigest()


def settings_digest(settings: Mapping[str, Any]) -> str:
    """64 hex digits for settings that decide a model's values beside its weights, such as ``Checkpoint.config``;
    the order of names does not matter."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def array_digest(array: NDArray[Any]) -> str:
    """64 hex digits for an array's type, shape and every bit of it."""
    digest = hashlib.sha256()
    _add(digest, f"{array.dtype.str} {array.shape}".encode())
    _add(digest, array.tobytes())
    return digest.hexdigest()


def _weight_files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.gguf"))
        if not files:
            raise LoadError(f"{path}: no safetensors or .gguf files")
        return files
    from ropeway.loading.gguf.reader import part_paths

    return part_paths(path)


def _add_samples(digest: hashlib._Hash, file: BinaryIO, size: int) -> None:
    digest.update(size.to_bytes(8, "little"))
    _add(digest, file.read(HEAD_BYTES))
    distance = max(-(-(size - HEAD_BYTES) // PIECES), PIECE_BYTES)
    for offset in range(HEAD_BYTES, size, distance):
        file.seek(offset)
        _add(digest, file.read(PIECE_BYTES))
    file.seek(max(size - PIECE_BYTES, 0))
    _add(digest, file.read(PIECE_BYTES))


def _add(digest: hashlib._Hash, data: bytes) -> None:
    """With its length, so that what ends one field cannot begin the next."""
    digest.update(len(data).to_bytes(8, "little") + data)
