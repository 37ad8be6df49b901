"""One KV block in a file that is either whole and named rightly, or of no use.

::

    0        8         12       44    76               84        116
    | magic  | version | layout | key | payload length | SHA-256 | payload ... |

Little-endian. The checksum is over everything else. A file is written under a temporary name in its folder, synced,
and renamed, so its name appears with all of it or not at all; what a disk or a person does to it later, the checksum
tells. The layout digest and the key tell a file in the wrong place.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import struct
from pathlib import Path

MAGIC = b"RopewyKV"
VERSION = 1
KEY_BYTES = 32
SUFFIX = ".kv"
TEMPORARY = ".tmp"

_FIELDS = struct.Struct("<8sI32s32sQ")
HEADER_BYTES = _FIELDS.size + hashlib.sha256().digest_size


class DamagedBlock(Exception):
    """A file that is not the block asked for; the message says what is wrong with it."""


def write_block(path: Path, layout: bytes, key: bytes, payload: memoryview) -> None:
    """Write a block to ``path``, whose folder exists. ``layout`` and ``key`` are 32 bytes; ``payload`` is contiguous.

    Raises ``OSError``; nothing is left behind then."""
    fields = _FIELDS.pack(MAGIC, VERSION, layout, key, payload.nbytes)
    write_whole(path, fields + _checksum(fields, payload), payload)


def read_block(path: Path, layout: bytes, key: bytes, into: memoryview) -> None:
    """Read the block's payload into ``into`` (contiguous, of its exact length).

    Raises ``DamagedBlock``, after which ``into`` holds nothing to be trusted, ``FileNotFoundError`` and other
    ``OSError``."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        header = os.read(file, HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            raise DamagedBlock(f"it ends after {len(header)} bytes, inside the header")
        magic, version, found_layout, found_key, length = _FIELDS.unpack_from(header)
        if magic != MAGIC:
            raise DamagedBlock("it is no block of keys and values")
        if version != VERSION:
            raise DamagedBlock(f"it has version {version} of the format; this is version {VERSION}")
        if found_layout != layout:
            raise DamagedBlock("it belongs to another model or another layout of blocks")
        if found_key != key:
            raise DamagedBlock(f"it holds the block {found_key.hex()}")
        size = os.fstat(file).st_size
        if length != into.nbytes or size != HEADER_BYTES + length:
            raise DamagedBlock(f"it has {size} bytes and tells of {length} in the block, which has {into.nbytes}")
        if _fill(file, into) < length:
            raise DamagedBlock("it became shorter while it was read")
    finally:
        os.close(file)
    if _checksum(header[: _FIELDS.size], into) != header[_FIELDS.size :]:
        raise DamagedBlock("its checksum is wrong")


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Make a file of these parts appear at once, replacing one of that name, and be there after a power failure.

    Raises ``OSError``; nothing is left behind then."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for part in parts:
                rest = memoryview(part).cast("B")
                while rest:
                    rest = rest[os.write(file, rest) :]
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _fill(file: int, into: memoryview) -> int:
    """Read until ``into`` is full or the file ends -> bytes read."""
    rest = into.cast("B")
    while rest and (count := os.readv(file, [rest])):
        rest = rest[count:]
    return into.nbytes - rest.nbytes


def _checksum(fields: bytes, payload: memoryview) -> bytes:
    digest = hashlib.sha256(fields)
    digest.update(payload)
    return digest.digest()
