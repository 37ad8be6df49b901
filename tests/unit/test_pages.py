"""Memory taken in whole pages, and in pieces of them."""

from __future__ import annotations

import itertools
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropeway.devices.pages import LARGE_PAGE, Arena, zeroed_pages
from ropeway.errors import OutOfMemory

MIB = 1 << 20


@given(sizes=st.lists(st.sampled_from([0, 1, 63, 64, 65, 4096, MIB, 70 * MIB]), max_size=12))
def test_pieces_of_an_arena_are_zeroed_and_aligned_and_do_not_overlap(sizes: list[int]) -> None:
    arena = Arena()
    pieces = [arena.take(size) for size in sizes]
    assert [piece.nbytes for piece in pieces] == sizes
    for piece in filter(len, pieces):
        assert piece.ctypes.data % 64 == 0
        assert not piece[:4096].any()
    spans = sorted((piece.ctypes.data, piece.ctypes.data + piece.nbytes) for piece in pieces if piece.nbytes)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_small_pieces_share_a_region() -> None:
    arena = Arena()
    first, second = arena.take(100), arena.take(100)
    assert second.ctypes.data - first.ctypes.data == 128


def test_a_region_is_given_back_with_the_last_of_its_pieces() -> None:
    arena = Arena()
    first, second = arena.take(40 * MIB), arena.take(MIB)
    region = first.base
    assert region is second.base
    gone = weakref.ref(region)
    arena.take(64 * MIB)  # the next region
    del region, first
    assert gone() is not None
    del second
    assert gone() is None


@pytest.mark.parametrize("size", [0, 1, LARGE_PAGE, 5 * LARGE_PAGE + 1])
def test_pages_begin_at_a_large_page_and_can_be_written(size: int) -> None:
    pages = zeroed_pages(size, "a test")
    assert pages.nbytes == size
    assert pages.ctypes.data % LARGE_PAGE == 0
    assert not pages.any()
    pages[:] = 1


def test_more_than_the_system_has_is_an_error_that_names_what_needed_it() -> None:
    with pytest.raises(OutOfMemory, match=r"the weights of a giant needs .* MiB, which the system refuses"):
        zeroed_pages(1 << 62, "the weights of a giant")


def test_what_was_written_lies_in_large_pages_where_the_system_has_them() -> None:
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not mode.exists() or "[never]" in mode.read_text():
        pytest.skip("this system has no large pages")
    before = _large_bytes()
    arena = Arena()
    pieces = [arena.take(3 * MIB + 100) for _ in range(10)]
    for piece in filter(len, pieces):
        piece[:] = np.uint8(1)
    # All but the last, unfinished page; memory in pieces may leave the system none to give.
    if _large_bytes() == before:
        pytest.skip("the system had no large page left")
    assert _large_bytes() - before >= 16 * MIB


def _large_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0
