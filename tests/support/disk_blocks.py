"""Blocks for the disk tier that say themselves whether they are right: contents follow from the number.

As a program it saves blocks for ever, for a test that kills it: ``python -m tests.support.disk_blocks FOLDER SEED``.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ropeway.execution.block_file import HEADER_BYTES
from ropeway.execution.disk import DiskStore, Layout

LAYOUT = Layout(weights="ab" * 32, kv_dtype="bf16", kv_layout="cpu-1", block_size=16, layers=2, kv_heads=2, head_dim=64)

# What the program saves.
KEYS = 100
BLOCK_BYTES = 100_000
SPACE_BYTES = 25 * (HEADER_BYTES + BLOCK_BYTES)
"""So that it also removes blocks."""


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def contents(number: int, nbytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, nbytes, dtype=np.uint8)


def save_for_ever(folder: Path, seed: int) -> None:
    whole = os.write
    os.write = lambda file, data: whole(file, data[:1024])  # a file grows so slowly that it is easily interrupted
    rng = random.Random(seed)
    blocks = [contents(number, BLOCK_BYTES) for number in range(KEYS)]
    host = np.zeros((8, BLOCK_BYTES), dtype=np.uint8)
    free = list(range(len(host)))
    store = DiskStore(folder, LAYOUT, host, SPACE_BYTES)
    print("saving", flush=True)
    while True:
        while free:
            number, place = rng.randrange(KEYS), free.pop()
            host[place] = blocks[number]
            store.save(key(number), place)
        time.sleep(0.0002)
        free += [done.host_block for done in store.finished()]


if __name__ == "__main__":
    save_for_ever(Path(sys.argv[1]), int(sys.argv[2]))
