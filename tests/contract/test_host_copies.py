"""Every device: blocks copied to host memory and back are the same, bit for bit, wherever they are put."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropeway.devices import pages
from ropeway.devices.base import Device, KVCache, KVDtype
from ropeway.devices.memory import Memory
from ropeway.errors import OutOfMemory
from tests.support.devices import DEVICES, device
from tests.support.paged import Rows, scattered_blocks

every_device = pytest.mark.parametrize("name", DEVICES)
every_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4"])

LAYERS, KV_HEADS, HEADS, HEAD_DIM, BLOCK_SIZE = 3, 2, 4, 24, 16
LENGTHS = (37, 5, 64)
NUM_BLOCKS = 40
HOST_BLOCKS = 25


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


NONE = ints()


class Filled:
    """A cache in which three sequences lie scattered, and host memory beside it."""

    def __init__(self, device: Device, dtype: KVDtype, seed: int = 0) -> None:
        self.kernels = device.kernels
        self.cache: KVCache = device.kv_cache(LAYERS, NUM_BLOCKS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, dtype)
        self.block_bytes = device.kv_block_bytes(LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, dtype)
        self.host = device.host_blocks(HOST_BLOCKS, self.block_bytes)
        self.blocks = scattered_blocks(LENGTHS, BLOCK_SIZE)
        self.spare = [b for b in range(NUM_BLOCKS) if b not in {b for row in self.blocks for b in row}]
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(len(LENGTHS), HEADS, HEAD_DIM, generator=generator)
        self.write(list(self.blocks), generator)

    def write(self, blocks: list[list[int]], generator: torch.Generator) -> None:
        """Random keys and values everywhere."""
        plan = self.kernels.plan_attention(self.cache, Rows(LENGTHS, LENGTHS, blocks).step())
        for layer in range(LAYERS):
            k, v = torch.randn(2, sum(LENGTHS), KV_HEADS, HEAD_DIM, generator=generator)
            self.kernels.write_kv(self.cache, layer, k, v, plan)

    def attention(self, blocks: list[list[int]]) -> Tensor:
        """[layers, sequences, heads, head_dim]: bits of the last token's output."""
        plan = self.kernels.plan_attention(self.cache, Rows([1] * len(LENGTHS), LENGTHS, blocks).step())
        out = [self.kernels.attention(self.q, self.cache, layer, plan, 0.2) for layer in range(LAYERS)]
        return torch.stack(out).view(torch.int32)

    def contents(self, blocks: list[int]) -> NDArray[np.uint8]:
        """uint8 [blocks, block bytes] as the device lays them out."""
        host = np.zeros((len(blocks), self.block_bytes), dtype=np.uint8)
        self.cache.to_host(ints(*blocks), host, np.arange(len(blocks), dtype=np.int32))
        return host

    def scribble(self, blocks: list[int]) -> None:
        """Whatever bytes, NaNs among them."""
        noise = np.random.default_rng(9).integers(0, 256, (len(blocks), self.block_bytes), dtype=np.uint8)
        self.cache.to_device(np.arange(len(blocks), dtype=np.int32), noise, ints(*blocks))


@every_device
@every_dtype
def test_blocks_that_went_to_the_host_and_back_give_the_same_attention_bits(name: str, dtype: KVDtype) -> None:
    filled = Filled(device(name), dtype)
    used = [block for row in filled.blocks for block in row]
    want, before = filled.attention(filled.blocks), filled.contents(used)
    places = np.random.default_rng(1).permutation(HOST_BLOCKS)[: len(used)].astype(np.int32)
    filled.cache.to_host(ints(*used), filled.host, places)
    filled.scribble(used)
    assert not torch.equal(filled.attention(filled.blocks), want)
    filled.cache.to_device(places, filled.host, ints(*used))
    assert torch.equal(filled.attention(filled.blocks), want)
    assert np.array_equal(filled.contents(used), before)


@every_device
@every_dtype
def test_blocks_may_come_back_to_other_places_of_the_device(name: str, dtype: KVDtype) -> None:
    filled = Filled(device(name), dtype)
    used = [block for row in filled.blocks for block in row]
    want = filled.attention(filled.blocks)
    filled.cache.to_host(ints(*used), filled.host, np.arange(len(used), dtype=np.int32))
    others = np.random.default_rng(2).permutation(NUM_BLOCKS)[: len(used)].tolist()
    filled.scribble(list(range(NUM_BLOCKS)))
    filled.cache.to_device(np.arange(len(used), dtype=np.int32), filled.host, ints(*others))
    moved = dict(zip(used, others, strict=True))
    assert torch.equal(filled.attention([[moved[block] for block in row] for row in filled.blocks]), want)


@every_device
@every_dtype
def test_copies_touch_nothing_but_the_blocks_they_name(name: str, dtype: KVDtype) -> None:
    filled = Filled(device(name), dtype)
    filled.host[:] = 0xA5
    everything = list(range(NUM_BLOCKS))
    before = filled.contents(everything)
    filled.cache.to_host(ints(7, 3, 39), filled.host, ints(24, 0, 11))
    assert np.array_equal(filled.host[[24, 0, 11]], before[[7, 3, 39]])
    assert (np.delete(filled.host, [24, 0, 11], axis=0) == 0xA5).all()
    filled.cache.to_device(ints(24), filled.host, ints(5))
    after = filled.contents(everything)
    assert np.array_equal(after[5], before[7])
    assert np.array_equal(np.delete(after, 5, axis=0), np.delete(before, 5, axis=0))


@every_device
@every_dtype
def test_a_host_block_may_be_written_and_read_again_and_again(name: str, dtype: KVDtype) -> None:
    filled = Filled(device(name), dtype)
    before = filled.contents(list(range(NUM_BLOCKS)))
    for block, other in ((2, 30), (9, 31), (2, 32)):
        filled.cache.to_host(ints(block), filled.host, ints(4))
        filled.cache.to_device(ints(4, 4), filled.host, ints(other, 35))
        assert np.array_equal(filled.contents([other, 35]), before[[block, block]])


@every_device
def test_empty_lists_copy_nothing(name: str) -> None:
    filled = Filled(device(name), "fp32")
    before = filled.contents(list(range(NUM_BLOCKS)))
    filled.cache.to_host(NONE, filled.host, NONE)
    filled.cache.to_device(NONE, filled.host, NONE)
    assert not filled.host.any()
    assert np.array_equal(filled.contents(list(range(NUM_BLOCKS))), before)


@every_device
def test_columns_of_a_plan_need_not_be_contiguous(name: str) -> None:
    filled = Filled(device(name), "bf16")
    before = filled.contents([1, 2])
    to_host = np.array([[1, 9], [2, 8]], dtype=np.int32)
    filled.cache.to_host(to_host[:, 0], filled.host, to_host[:, 1])
    assert np.array_equal(filled.host[[9, 8]], before)


@every_device
@pytest.mark.parametrize(
    ("block", "place", "message"),
    [
        (NUM_BLOCKS, 0, f"device blocks .*the {NUM_BLOCKS} there are"),
        (-1, 0, "device blocks -1"),
        (0, HOST_BLOCKS, f"host blocks .*the {HOST_BLOCKS} there are"),
        (0, -1, "host blocks -1"),
    ],
)
def test_a_block_that_does_not_exist_is_refused_before_anything_is_copied(
    name: str, block: int, place: int, message: str
) -> None:
    filled = Filled(device(name), "fp32")
    with pytest.raises(ValueError, match=message):
        filled.cache.to_host(ints(1, block), filled.host, ints(1, place))
    with pytest.raises(ValueError, match=message):
        filled.cache.to_device(ints(1, place), filled.host, ints(1, block))
    assert not filled.host.any()


@every_device
def test_lists_of_different_lengths_are_refused(name: str) -> None:
    filled = Filled(device(name), "fp32")
    with pytest.raises(ValueError, match="2 device blocks cannot be paired with 1 host"):
        filled.cache.to_host(ints(1, 2), filled.host, ints(1))


# --------------------------------------------------------------------------- host memory


@every_device
def test_host_memory_is_zeroed_writable_and_begins_on_a_page(name: str) -> None:
    host = device(name).host_blocks(5, 3000)
    assert (host.shape, host.dtype) == ((5, 3000), np.uint8)
    assert host.flags.c_contiguous
    assert host.ctypes.data % 4096 == 0
    assert not host.any()
    host[4] = 7
    assert host.sum() == 3000 * 7


@every_device
def test_no_host_blocks_are_an_empty_array(name: str) -> None:
    assert device(name).host_blocks(0, 3000).shape == (0, 3000)


@every_device
def test_a_swap_space_larger_than_the_memory_is_refused_with_the_largest_that_fits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "host_memory", lambda: Memory(total=8 << 30, available=3 << 30))
    with pytest.raises(OutOfMemory, match=r"needs 4096 MiB, but only 3072 MiB .* 3072 blocks \(swap_space 3.00\)") as e:
        device(name).host_blocks(4096, 1 << 20)
    assert e.value.param == "swap_space"


@every_device
def test_a_swap_space_that_the_system_refuses_is_out_of_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "host_memory", lambda: Memory(total=1 << 62, available=1 << 62))
    with pytest.raises(OutOfMemory, match="the system refuses"):
        device(name).host_blocks(1 << 30, 1 << 31)
