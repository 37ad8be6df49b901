"""Names of full KV blocks: chained 256-bit hashes, so a key stands for the whole prefix before it.

A key of 256 bits is taken as identity: two prefixes with one key would be a SHA-256 collision.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def root_key(*, salt: bytes = b"", adapter: bytes = b"", private: int | None = None) -> bytes:
    """Parent of a sequence's first block. Every field is typed and length-prefixed, so a salt can never
    pass for an adapter. ``private`` names a group of requests that share with nobody else."""
    digest = hashlib.sha256(b"ropeway-kv-1")
    for kind, value in ((b"s", salt), (b"a", adapter), (b"p", b"" if private is None else b"%d" % private)):
        digest.update(kind + len(value).to_bytes(8, "little") + value)
    return digest.digest()


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """Key of the block with these tokens (int32, little-endian) after the prefix ``parent``."""
    return hashlib.sha256(parent + tokens).digest()


def chain(parent: bytes, tokens: NDArray[np.int32], block_size: int) -> Iterator[bytes]:
    """Keys of the full blocks of ``tokens`` that follow the prefix ``parent``."""
    data = tokens.tobytes()
    stride = 4 * block_size
    for begin in range(0, len(data) - stride + 1, stride):
        parent = block_key(parent, data[begin : begin + stride])
        yield parent
