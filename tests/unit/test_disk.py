"""The disk tier: what was saved comes back bit for bit, in this process or a later one, or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropeway.cache.transfer import Transferred
from ropeway.execution import block_file, disk, disk_index
from ropeway.execution.block_file import HEADER_BYTES, DamagedBlock, read_block, write_block
from ropeway.execution.disk import Layout
from tests.support.disk_blocks import LAYOUT, contents, key
from tests.support.disk_store import BLOCK_BYTES, FILE_BYTES, HOST_BLOCKS, PATIENCE_S, Open, disks


@pytest.fixture
def stores() -> Iterator[Open]:
    with disks() as open_disk:
        yield open_disk


# --------------------------------------------------------------------------- blocks come back


def test_a_saved_block_comes_back_bit_for_bit(stores: Open, tmp_path: Path) -> None:
    one = stores(tmp_path / "new" / "folder")
    assert one.held(1, 2) == []
    assert one.save(1)
    assert one.held(1, 2) == [1]
    assert one.load(1)
    assert (one.store.blocks, one.store.nbytes, one.store.saved, one.store.loaded) == (1, FILE_BYTES, 1, 1)
    assert (one.store.errors, one.store.dropped, one.store.failure) == (0, 0, None)


def test_blocks_survive_the_process(stores: Open, tmp_path: Path) -> None:
    one = stores(tmp_path)
    assert all(one.save(number) for number in range(5))
    one.store.close()
    later = stores(tmp_path)
    assert later.held(*range(9)) == [0, 1, 2, 3, 4]
    assert later.store.blocks == 5
    assert all(later.load(number) for number in range(5))


def test_a_block_that_was_never_saved_is_a_miss(stores: Open, tmp_path: Path) -> None:
    one = stores(tmp_path)
    assert not one.load(7)
    assert one.store.errors == 0


def test_calls_return_at_once_and_are_done_in_their_order(
    stores: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stores(tmp_path)
    gate = threading.Event()
    real = disk.write_block
    monkeypatch.setattr(disk, "write_block", lambda *args: (gate.wait(PATIENCE_S), real(*args)))
    one.host[0], one.host[1] = contents(1, BLOCK_BYTES), contents(2, BLOCK_BYTES)
    one.store.save(key(1), 0)
    one.store.save(key(2), 1)
    one.store.load(key(1), 2)
    one.store.load(key(3), 3)
    assert one.store.finished() == []
    gate.set()
    done = one.wait(4)
    assert [(d.kind, d.key, d.host_block, d.ok) for d in done] == [
        ("save", key(1), 0, True),
        ("save", key(2), 1, True),
        ("load", key(1), 2, True),
        ("load", key(3), 3, False),
    ]
    assert np.array_equal(one.host[2], contents(1, BLOCK_BYTES))
    assert one.store.finished() == []


def test_a_block_saved_again_is_written_once(stores: Open, tmp_path: Path) -> None:
    one = stores(tmp_path)
    assert one.save(1)
    before = one.path(1).stat().st_ino
    assert one.save(1)
    assert one.path(1).stat().st_ino == before
    assert one.store.saved == 1


def test_a_block_whose_file_is_gone_is_written_again(stores: Open, tmp_path: Path) -> None:
    one = stores(tmp_path)
    assert one.save(1)
    one.path(1).unlink()
    assert one.save(1)
    assert one.load(1)


def test_a_key_that_is_no_block_key_is_refused(stores: Open, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="32 bytes, not 3"):
        stores(tmp_path).store.save(b"abc", 0)


# --------------------------------------------------------------------------- damage


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def set_version(path: Path, version: int) -> None:
    """As a later Ropeway might write it, its checksum right."""
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 8, version)
    fields, payload = bytes(data[: HEADER_BYTES - 32]), memoryview(data)[HEADER_BYTES:]
    data[HEADER_BYTES - 32 : HEADER_BYTES] = block_file._checksum(fields, payload)
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit in the first byte": lambda path: flip(path, 0),
    "a flipped bit in the key": lambda path: flip(path, 50),
    "a flipped bit in the checksum": lambda path: flip(path, HEADER_BYTES - 1),
    "a flipped bit in the contents": lambda path: flip(path, HEADER_BYTES + 400),
    "a flipped bit in the last byte": lambda path: flip(path, FILE_BYTES - 1),
    "cut off in the contents": lambda path: os.truncate(path, FILE_BYTES - 1),
    "cut off in the header": lambda path: os.truncate(path, 20),
    "empty": lambda path: os.truncate(path, 0),
    "longer than it was": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "zeros where the disk lost them": lambda path: path.write_bytes(path.read_bytes()[:600] + bytes(FILE_BYTES - 600)),
    "a text": lambda path: path.write_text("not a block " * 200),
    "another version": lambda path: set_version(path, block_file.VERSION + 1),
}


@pytest.mark.report("llm-d/llm-d-kv-cache#514")
@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_miss_is_counted_and_is_removed(
    stores: Open, tmp_path: Path, damage: str, restart: bool
) -> None:
    one = stores(tmp_path)
    assert all(one.save(number) for number in (1, 2))
    DAMAGE[damage](one.path(1))
    if restart:
        one.store.close()
        one = stores(tmp_path)
    assert not one.load(1)
    assert one.store.errors == 1
    assert not one.path(1).exists()
    assert one.held(1, 2) == [2]
    assert one.store.failure is None
    assert one.load(2)
    assert one.save(1)
    assert one.load(1)


@pytest.mark.report("llm-d/llm-d-kv-cache#514")
def test_a_file_that_vanished_is_a_miss_and_no_error(stores: Open, tmp_path: Path) -> None:
    one = stores(tmp_path)
    assert one.save(1)
    one.path(1).unlink()
    assert not one.load(1)
    assert one.held(1) == []
    assert one.store.errors == 0


def test_a_file_with_another_blocks_name_is_not_used(stores: Open, tmp_path: Path) -> None:
    one = stores(tmp_path)
    assert all(one.save(number) for number in (1, 2))
    one.path(2).replace(one.path(1))
    assert not one.load(1)
    assert one.store.errors == 1


def test_a_file_that_cannot_be_read_is_a_miss(stores: Open, tmp_path: Path) -> None:
    one = stores(tmp_path)
    assert one.save(1)
    one.path(1).unlink()
    one.path(1).mkdir()
    assert not one.load(1)
    assert one.store.errors == 1
    assert one.held(1) == []


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_of_a_file_goes_unseen(tmp_path: Path, data: st.DataObject) -> None:
    payload = contents(1, 200)
    path = tmp_path / "block.kv"
    write_block(path, LAYOUT.digest(), key(1), memoryview(payload))
    whole = path.read_bytes()
    changed = bytearray(whole)
    match data.draw(st.sampled_from(["flip", "cut", "splice"])):
        case "flip":
            changed[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del changed[data.draw(st.integers(0, len(whole) - 1)) :]
        case "splice":
            at = data.draw(st.integers(0, len(whole) - 1))
            piece = data.draw(st.binary(min_size=1, max_size=40))
            changed[at : at + len(piece)] = piece
    path.write_bytes(changed)
    into = np.zeros(200, dtype=np.uint8)
    if changed == whole:
        read_block(path, LAYOUT.digest(), key(1), memoryview(into))
        assert np.array_equal(into, payload)
    else:
        with pytest.raises(DamagedBlock):
            read_block(path, LAYOUT.digest(), key(1), memoryview(into))


# --------------------------------------------------------------------------- layouts

CHANGES: dict[str, Any] = {
    "weights": "ff" * 32,
    "kv_dtype": "fp32",
    "kv_layout": "cpu-2",
    "block_size": 32,
    "layers": 3,
    "kv_heads": 4,
    "head_dim": 128,
    "settings": "other",
    "adapter": "tuned",
    "rank": 1,
    "ranks": 2,
    "file_version": block_file.VERSION + 1,
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Layout)])
def test_blocks_of_another_layout_are_never_found(stores: Open, tmp_path: Path, field: str) -> None:
    one = stores(tmp_path)
    assert one.save(1)
    other = stores(tmp_path, dataclasses.replace(LAYOUT, **{field: CHANGES[field]}))
    assert other.held(1) == []
    assert not other.load(1)
    assert other.save(1)
    assert one.load(1)


def test_a_file_of_another_layout_is_not_used_wherever_it_lies(stores: Open, tmp_path: Path) -> None:
    one, other = stores(tmp_path), stores(tmp_path, dataclasses.replace(LAYOUT, weights="ff" * 32))
    assert one.save(1)
    assert other.save(1)
    shutil.copy(one.path(1), other.path(1))
    assert not other.load(1)
    assert other.store.errors == 1
    assert one.load(1)


def test_the_folder_says_in_words_what_its_blocks_are(stores: Open, tmp_path: Path) -> None:
    stores(tmp_path)
    (written,) = tmp_path.glob("*/layout.json")
    assert json.loads(written.read_text()) == dataclasses.asdict(LAYOUT)


@pytest.mark.parametrize("text", [b"", b"{}", b"\xff\xfe", LAYOUT.json() + b" "])
def test_a_sub_folder_that_says_to_be_something_else_is_left_alone(stores: Open, tmp_path: Path, text: bytes) -> None:
    one = stores(tmp_path)
    assert one.save(1)
    one.store.close()
    (written,) = tmp_path.glob("*/layout.json")
    written.write_bytes(text)
    later = stores(tmp_path)
    assert later.store.failure is not None
    assert str(written) in later.store.failure
    assert "remove" in later.store.failure
    assert later.held(1) == []
    assert not later.load(1)
    assert not later.save(2)
    assert written.read_bytes() == text
    assert one.path(1).exists()


# --------------------------------------------------------------------------- space


def test_the_longest_unused_blocks_make_room(stores: Open, tmp_path: Path) -> None:
    one = stores(tmp_path, blocks=3)
    assert all(one.save(number) for number in (1, 2, 3))
    assert one.load(1)
    assert one.save(2)
    assert one.save(4)
    assert one.held(1, 2, 3, 4) == [1, 2, 4]
    assert one.save(5)
    assert one.held(1, 2, 3, 4, 5) == [2, 4, 5]
    assert len(one.files()) == 3
    assert (one.store.evicted, one.store.blocks) == (2, 3)


def test_the_order_of_use_survives_the_process(stores: Open, tmp_path: Path) -> None:
    one = stores(tmp_path)
    for number in (1, 2, 3, 4):
        assert one.save(number)
        os.utime(one.path(number), (1000 + number, 1000 + number))
    assert one.load(2)
    one.store.close()
    later = stores(tmp_path, blocks=3)
    assert later.save(5)
    assert later.held(1, 2, 3, 4, 5) == [2, 4, 5]


def test_a_limit_lowered_between_two_runs_holds_from_the_first_save(stores: Open, tmp_path: Path) -> None:
    one = stores(tmp_path)
    assert all(one.save(number) for number in range(6))
    one.store.close()
    later = stores(tmp_path, blocks=2)
    assert later.save(9)
    assert len(later.files()) == 2
    assert later.held(9) == [9]


def test_unused_blocks_of_other_layouts_make_room_too(stores: Open, tmp_path: Path) -> None:
    other = stores(tmp_path, dataclasses.replace(LAYOUT, weights="ff" * 32))
    assert all(other.save(number) for number in (1, 2))
    os.utime(other.path(1), (1000, 1000))
    one = stores(tmp_path, blocks=2)
    assert one.save(3)
    assert not other.path(1).exists()
    assert other.path(2).exists()
    assert one.store.nbytes == 2 * FILE_BYTES
    assert one.save(4)
    assert one.held(3, 4) == [3, 4]
    assert not other.load(2)


def test_files_that_are_no_blocks_are_never_touched(stores: Open, tmp_path: Path) -> None:
    one = stores(tmp_path, blocks=1)
    assert one.save(1)
    beside = [
        tmp_path / "notes.txt",
        tmp_path / "deadbeef" / "ab" / one.path(1).name,
        one.path(1).parent / "notes.kv",
        one.path(1).parent / ".notes.tmp",
    ]
    for path in beside:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        os.utime(path, (1000, 1000))
    one.store.close()
    later = stores(tmp_path, blocks=1)
    assert all(later.save(number) for number in (2, 3))
    assert all(path.read_text() == "mine" for path in beside)
    assert later.held(1, 2, 3) == [3]


def test_what_an_interrupted_writer_left_is_removed_at_the_start(
    stores: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stores(tmp_path)
    assert one.save(1)
    one.path(2).parent.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: 1 / 0)
        patch.setattr(Path, "unlink", lambda *_: None)
        with pytest.raises(ZeroDivisionError):
            write_block(one.path(2), LAYOUT.digest(), key(2), memoryview(contents(2, BLOCK_BYTES)))
    one.store.close()
    (left,) = one.path(2).parent.glob(".*")
    assert left.stat().st_size == FILE_BYTES
    at_work = left.with_name(left.name.replace(left.suffixes[-2], ".0123456789abcdef"))
    at_work.write_text("another process is at it")
    an_hour_ago = time.time() - 3600
    os.utime(left, (an_hour_ago, an_hour_ago))
    later = stores(tmp_path)
    assert not later.load(2)  # the start is over
    assert later.files() == sorted([at_work, later.path(1)])


def test_a_disk_space_less_than_a_block_is_a_failure_that_says_how_much_is_needed(stores: Open, tmp_path: Path) -> None:
    one = stores(tmp_path, blocks=0)
    assert not one.save(1)
    assert one.store.failure is not None
    assert f"less than one block's file of {FILE_BYTES}" in one.store.failure


# --------------------------------------------------------------------------- a bounded queue, an end


def test_a_save_that_finds_the_queue_full_is_dropped_and_is_no_error(
    stores: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stores(tmp_path, queued_saves=2)
    assert one.save(0)
    begun, gate = threading.Event(), threading.Event()
    real = disk.write_block
    monkeypatch.setattr(disk, "write_block", lambda *args: (begun.set(), gate.wait(PATIENCE_S), real(*args)))
    one.store.save(key(1), 1)
    assert begun.wait(PATIENCE_S)
    for number in (2, 3, 4):
        one.store.save(key(number), number)
    one.store.load(key(0), 0)
    assert one.store.finished() == [Transferred("save", key(4), 4, False)]
    assert (one.store.dropped, one.store.errors, one.store.failure) == (1, 0, None)
    gate.set()
    assert [(d.kind, d.host_block, d.ok) for d in one.wait(4)] == [
        ("save", 1, True),
        ("save", 2, True),
        ("save", 3, True),
        ("load", 0, True),
    ]


def test_closing_finishes_the_block_at_hand_and_gives_up_the_rest(
    stores: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stores(tmp_path)
    begun = threading.Event()
    real = disk.write_block

    def slow(*args: Any) -> None:
        begun.set()
        time.sleep(0.1)
        real(*args)

    monkeypatch.setattr(disk, "write_block", slow)
    one.host[0] = contents(1, BLOCK_BYTES)
    one.store.save(key(1), 0)
    assert begun.wait(PATIENCE_S)
    one.store.save(key(2), 1)
    one.store.load(key(3), 2)
    one.store.close()
    assert sorted(one.store.finished(), key=lambda d: d.host_block) == [
        Transferred("save", key(1), 0, True),
        Transferred("save", key(2), 1, False),
        Transferred("load", key(3), 2, False),
    ]
    one.store.save(key(4), 3)
    one.store.load(key(1), 4)
    assert one.store.finished() == [Transferred("save", key(4), 3, False), Transferred("load", key(1), 4, False)]
    one.store.close()
    assert stores(tmp_path).load(1)


def test_a_fault_of_the_store_itself_leaves_nobody_waiting(
    stores: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stores(tmp_path)
    assert one.save(1)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "read_block", lambda *_: 1 / 0)
        assert not one.load(1)
    assert one.store.errors == 1
    assert one.load(1)


# --------------------------------------------------------------------------- several at once


def test_stores_that_share_a_folder_do_not_harm_each_other(
    stores: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three stores save, load, evict each other's blocks and damage files; ``load`` checks every block it gets."""
    monkeypatch.setattr(disk_index, "_LOOK_EVERY_S", 0.0)
    shared = [stores(tmp_path, blocks=6) for _ in range(3)]
    rng = random.Random(5)
    loaded = missed = 0
    for _ in range(600):
        one, number = rng.choice(shared), rng.randrange(12)
        match rng.random():
            case chance if chance < 0.4:
                assert one.save(number, place=rng.randrange(HOST_BLOCKS))
            case chance if chance < 0.95:
                if one.load(number, place=rng.randrange(HOST_BLOCKS)):
                    loaded += 1
                else:
                    missed += 1
            case _ if one.path(number).exists():
                flip(one.path(number), rng.randrange(FILE_BYTES))
    assert loaded > 50
    assert missed > 50
    assert sum(one.store.evicted for one in shared) > 20
    assert sum(one.store.errors for one in shared) > 0
    assert all(one.store.failure is None for one in shared)


def test_blocks_of_another_process_are_found_when_the_folder_is_looked_at_again(
    stores: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = stores(tmp_path), stores(tmp_path)
    assert two.load(5) is False
    assert one.save(1)
    assert two.held(1) == []
    monkeypatch.setattr(two.store._index, "_look_again", 0.0)
    assert two.save(2)
    assert two.held(1) == [1]
    assert two.load(1)
