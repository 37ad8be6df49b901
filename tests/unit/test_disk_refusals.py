"""Disks that refuse: the engine goes on without what it cannot have, and ``failure`` says what to do."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.disk_blocks import LAYOUT
from tests.support.disk_store import BLOCK_BYTES, FILE_BYTES, Open, disks


@pytest.fixture
def stores() -> Iterator[Open]:
    with disks() as open_disk:
        yield open_disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("mounting a file system takes a privilege this process does not have")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_stops_saving_and_says_so_while_loads_go_on(
    stores: Open, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stores(small_disk)
    saved = 0
    while one.save(saved):
        saved += 1
    assert saved > 5
    assert one.store.failure is not None
    assert str(small_disk) in one.store.failure
    assert "full; free some" in one.store.failure
    assert one.store.errors == 1
    assert not one.save(100)
    assert (one.store.errors, one.store.dropped) == (1, 1)
    assert all(one.load(number) for number in range(saved))
    assert not [path for path in one.files() if path.suffix == ".tmp"]
    one.path(0).unlink()
    one.path(1).unlink()
    one.store._retry_at = 0.0
    assert one.save(100)
    assert one.store.failure is None
    assert one.load(100)


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "is full; free some of it, or lower disk_space"),
        (errno.EDQUOT, "is full; free some of it, or lower disk_space"),
        (errno.EROFS, "is read-only; make it writable"),
        (errno.EIO, "Input/output error); mend that"),
    ],
)
def test_an_error_while_writing_is_a_failure_with_advice_and_is_tried_again_later(
    stores: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    real = os.write

    def refuse_in_the_middle(file: int, data: Any) -> int:
        match len(data):
            case 1000:
                return real(file, data[:100])
            case 900:
                raise OSError(number, os.strerror(number))
        return real(file, data)

    one = stores(tmp_path)
    assert one.save(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse_in_the_middle)
        assert not one.save(2)
        assert one.store.failure is not None
        assert str(tmp_path) in one.store.failure
        assert advice in one.store.failure
        one.store._retry_at = 0.0
        assert not one.save(2)
        assert (one.store.errors, one.store.dropped) == (2, 0)
    assert not one.save(2)
    assert (one.store.errors, one.store.dropped) == (2, 1)
    assert 0 < one.store._retry_at - time.monotonic() <= 30
    assert one.load(1)
    assert one.files() == [one.path(1)]
    one.store._retry_at = 0.0
    assert one.save(3)
    assert one.store.failure is None
    assert one.held(1, 2, 3) == [1, 3]


def test_a_disk_that_stays_full_is_told_once(
    stores: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Though there is room for the small file that is written when it is tried again."""
    real = os.write

    def refuse_blocks(file: int, data: Any) -> int:
        if len(data) == BLOCK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data)

    one = stores(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse_blocks)
        for number in range(3):
            one.store._retry_at = 0.0
            assert not one.save(number)
            assert one.store.failure is not None
    assert one.store.errors == 3
    one.store._retry_at = 0.0
    assert one.save(3)
    assert one.store.failure is None
    told = [record.getMessage() for record in caplog.records]
    assert [("saves nothing" in line, "works again" in line) for line in told] == [(True, False), (False, True)]


@pytest.mark.parametrize("below", [False, True], ids=["the folder itself", "a folder above it"])
def test_a_file_where_the_folder_should_be_is_a_failure_that_names_it(
    stores: Open, tmp_path: Path, below: bool
) -> None:
    file = tmp_path / "cache"
    file.write_text("something else")
    one = stores(file / "kv" if below else file)
    assert one.store.failure is not None
    assert f"{file} is a file where a folder should be; remove it" in one.store.failure
    assert not one.save(1)
    assert not one.load(1)
    assert one.store.errors == 0
    assert file.read_text() == "something else"


def test_a_folder_that_becomes_usable_is_used(stores: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cache"
    file.write_text("something else")
    one = stores(file)
    assert not one.save(1)
    file.unlink()
    one.store._retry_at = 0.0
    assert one.save(1)
    assert one.store.failure is None
    assert one.load(1)


def test_a_folder_removed_by_somebody_is_made_again(
    stores: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stores(tmp_path / "cache")
    assert one.save(1)
    shutil.rmtree(tmp_path / "cache")
    assert not one.load(1)
    if not one.save(2):
        one.store._retry_at = 0.0
        assert one.save(2)
    assert one.load(2)


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder, and a user who is bound by its permissions."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    root = os.geteuid() == 0
    if root:
        os.chown(folder, 65534, -1)
        os.seteuid(65534)
    yield folder
    if root:
        os.seteuid(0)
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_folder_without_permission_to_write_is_a_failure_and_its_blocks_are_still_read(
    stores: Open, unprivileged: Path
) -> None:
    one = stores(unprivileged)
    assert one.save(1)
    one.store.close()
    folders = [path for path in unprivileged.rglob("*") if path.is_dir()]
    for path in folders:
        path.chmod(0o555)
    try:
        later = stores(unprivileged)
        assert later.store.failure is not None
        assert str(unprivileged) in later.store.failure
        assert "may not write there; change the permissions" in later.store.failure
        assert later.held(1) == [1]
        assert not later.save(2)
        assert later.load(1)
    finally:
        for path in folders:
            path.chmod(0o755)


def test_a_folder_that_may_not_even_be_read_is_a_failure(stores: Open, unprivileged: Path) -> None:
    one = stores(unprivileged)
    assert one.save(1)
    one.store.close()
    unprivileged.chmod(0o000)
    later = stores(unprivileged)
    assert later.store.failure is not None
    assert "may not write there" in later.store.failure
    assert not later.save(2)
    assert not later.load(1)


def test_what_another_user_keeps_to_himself_is_not_counted_and_no_failure(stores: Open, unprivileged: Path) -> None:
    other = stores(unprivileged, dataclasses.replace(LAYOUT, weights="ff" * 32))
    assert other.save(1)
    other.store.close()
    folder = other.path(1).parent.parent
    folder.chmod(0o000)
    one = stores(unprivileged, blocks=1)
    assert one.save(1)
    assert one.save(2)
    assert one.held(1, 2) == [2]
    assert one.store.failure is None
    assert one.store.nbytes == FILE_BYTES
    folder.chmod(0o755)
    assert other.path(1).exists()


def test_a_disk_mounted_read_only_is_a_failure_and_its_blocks_are_still_read(stores: Open, small_disk: Path) -> None:
    one = stores(small_disk)
    assert one.save(1)
    one.store.close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    later = stores(small_disk)
    assert later.store.failure is not None
    assert str(small_disk) in later.store.failure
    assert "is read-only; make it writable" in later.store.failure
    assert not later.save(2)
    assert later.load(1)
