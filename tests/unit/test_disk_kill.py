"""Processes killed in the middle of saving: a later one loads each block as it was saved, or not at all.

Killed is not switched off: what a write has handed to the system survives a process. That a file whose bytes were lost
by the disk itself is not used is in ``test_disk``.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ropeway.execution.disk import DiskStore
from tests.support.disk_blocks import BLOCK_BYTES, KEYS, LAYOUT, SPACE_BYTES, contents, key

ROUNDS = 6
"""Half of them kill at a random moment, half in the middle of writing a file."""
PATIENCE_S = 30.0


def start_writer(folder: Path, seed: int) -> subprocess.Popen[bytes]:
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.disk_blocks", str(folder), str(seed)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
    )


def unfinished(folder: Path) -> int:
    """How many files have been begun and not been given their name."""
    return len(list(folder.rglob("*.tmp")))


def stop_while_writing(processes: list[subprocess.Popen[bytes]], folder: Path, left_behind: int) -> None:
    """Stop them all, again and again, until one is in the middle of writing a file."""
    until = time.monotonic() + PATIENCE_S
    while True:
        for process in processes:
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
        if unfinished(folder) > left_behind:
            return
        assert time.monotonic() < until
        for process in processes:
            process.send_signal(signal.SIGCONT)
        time.sleep(0.001)


def load_everything(folder: Path) -> Counter[str]:
    """Every key a writer may have saved, found or not; "wrong" must stay 0."""
    host = np.zeros((KEYS, BLOCK_BYTES), dtype=np.uint8)
    store = DiskStore(folder, LAYOUT, host, SPACE_BYTES)
    seen: Counter[str] = Counter()
    try:
        assert store.failure is None
        for number in range(KEYS):
            seen["found"] += store.find(key(number))
            store.load(key(number), number)
        until = time.monotonic() + PATIENCE_S
        answers = 0
        while answers < KEYS:
            assert time.monotonic() < until
            for done in store.finished():
                answers += 1
                if done.ok:
                    seen["loaded"] += 1
                    seen["wrong"] += not np.array_equal(host[done.host_block], contents(done.host_block, BLOCK_BYTES))
        seen["errors"] = store.errors
    finally:
        store.close()
    return seen


@pytest.mark.parametrize("writers", [1, 2])
def test_a_process_killed_while_saving_never_leaves_a_wrong_block(tmp_path: Path, writers: int) -> None:
    rng = random.Random(writers)
    total: Counter[str] = Counter()
    for round_number in range(ROUNDS):
        left_behind = unfinished(tmp_path)
        processes = [start_writer(tmp_path, 10 * round_number + i) for i in range(writers)]
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == b"saving\n"
            time.sleep(rng.uniform(0.0, 0.25))
            if round_number % 2:
                stop_while_writing(processes, tmp_path, left_behind)
        finally:
            for process in processes:
                process.send_signal(signal.SIGKILL)
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
        assert [process.returncode for process in processes] == [-signal.SIGKILL] * writers
        total += load_everything(tmp_path)
    assert total["wrong"] == 0
    assert total["errors"] == 0
    assert total["loaded"] == total["found"] > 0
    assert unfinished(tmp_path) >= ROUNDS // 2
