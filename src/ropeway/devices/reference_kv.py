"""The reference device's KV cache: keys and values apart, each slot after slot, as ``devices.stored`` quantises them.
Block b holds slots [b * block_size, (b + 1) * block_size)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ropeway.devices import pages
from ropeway.devices.base import FACTORED, KEY_GROUP, VALUE_GROUP, KVDtype
from ropeway.devices.stored import Unsigned, quantize_signed, quantize_unsigned, quantize_values

_DENSE: dict[KVDtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


class _Column(Protocol):
    """Keys or values of all slots."""

    @property
    def planes(self) -> Sequence[Tensor]:
        """Each [layers, slots (or a part of them), ...]."""
        ...

    def write(self, layer: int, slots: Tensor, x: Tensor) -> None: ...
    def read(self, layer: int, slots: Tensor) -> Tensor:
        """float32 [n, kv_heads, head_dim]."""
        ...


class _Dense:
    def __init__(self, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        # calloc'ed pages take no memory until they are written
        self._data = torch.zeros((layers, slots, kv_heads, head_dim), dtype=dtype)
        self.planes = (self._data,)

    def write(self, layer: int, slots: Tensor, x: Tensor) -> None:
        self._data[layer, slots] = x.to(self._data.dtype)

    def read(self, layer: int, slots: Tensor) -> Tensor:
        return self._data[layer, slots].float()


class _Int8:
    """A scale per slot and head."""

    def __init__(self, layers: int, slots: int, kv_heads: int, head_dim: int) -> None:
        self._codes = torch.zeros((layers, slots, kv_heads, head_dim), dtype=torch.int8)
        self._scales = torch.zeros((layers, slots, kv_heads), dtype=torch.float16)
        self.planes = (self._codes, self._scales)

    def write(self, layer: int, slots: Tensor, x: Tensor) -> None:
        stored = quantize_signed(x)
        self._codes[layer, slots], self._scales[layer, slots] = stored.codes, stored.scales

    def read(self, layer: int, slots: Tensor) -> Tensor:
        return self._codes[layer, slots].float() * self._scales[layer, slots].float()[..., None]


class _Int4Values:
    """A scale and a minimum per slot, head and group of channels."""

    def __init__(self, layers: int, slots: int, kv_heads: int, head_dim: int) -> None:
        groups = -(-head_dim // VALUE_GROUP)
        self._head_dim = head_dim
        self._codes = torch.zeros((layers, slots, kv_heads, -(-head_dim // 2)), dtype=torch.uint8)
        self._scales = torch.zeros((layers, slots, kv_heads, groups), dtype=torch.float16)
        self._minimums = torch.zeros_like(self._scales)
        self.planes = (self._codes, self._scales, self._minimums)

    def write(self, layer: int, slots: Tensor, x: Tensor) -> None:
        groups = quantize_values(x)
        self._codes[layer, slots] = _packed(torch.cat([group.codes for group in groups], -1))
        self._scales[layer, slots] = torch.stack([group.scales for group in groups], -1)
        self._minimums[layer, slots] = torch.stack([group.minimums for group in groups], -1)

    def read(self, layer: int, slots: Tensor) -> Tensor:
        codes = _unpacked(self._codes[layer, slots], self._head_dim)
        scales, minimums = self._scales[layer, slots], self._minimums[layer, slots]
        groups = [
            Unsigned(part, scales[..., i], minimums[..., i]).dequantize()
            for i, part in enumerate(torch.split(codes, VALUE_GROUP, -1))
        ]
        return torch.cat(groups, -1)


class _Int4Keys:
    """A scale and a minimum per head and channel for every ``KEY_GROUP`` slots, which are written together."""

    def __init__(self, layers: int, slots: int, kv_heads: int, head_dim: int) -> None:
        groups = slots // KEY_GROUP
        self._codes = torch.zeros((layers, groups, kv_heads, head_dim, KEY_GROUP // 2), dtype=torch.uint8)
        self._scales = torch.zeros((layers, groups, kv_heads, head_dim), dtype=torch.float16)
        self._minimums = torch.zeros_like(self._scales)
        self.planes = (self._codes, self._scales, self._minimums)

    def write(self, layer: int, slots: Tensor, x: Tensor) -> None:
        """The slots are those of one group, in order."""
        group = int(slots[0]) // KEY_GROUP
        stored = quantize_unsigned(x.permute(1, 2, 0))
        self._codes[layer, group] = _packed(stored.codes)
        self._scales[layer, group], self._minimums[layer, group] = stored.scales, stored.minimums

    def read(self, layer: int, slots: Tensor) -> Tensor:
        groups, members = slots // KEY_GROUP, slots % KEY_GROUP
        codes = self._codes[layer, groups, :, :, members // 2] >> (members % 2 * 4)[:, None, None] & 15
        return codes.float() * self._scales[layer, groups].float() + self._minimums[layer, groups].float()


def _packed(codes: Tensor) -> Tensor:
    """uint8 [..., n] in [0, 15] -> [..., (n + 1) // 2], the first of a pair in the low half."""
    even = F.pad(codes, (0, codes.shape[-1] % 2))
    return even[..., 0::2] | even[..., 1::2] << 4


def _unpacked(packed: Tensor, n: int) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :n]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a step: tokens [first, last) of the batch over the keys at positions [0, len(slots))."""

    first: int
    last: int
    positions: Tensor
    """int64 [last - first], consecutive."""
    slots: Tensor
    """int64 [kv_length]: where each position's key and value lie."""


@dataclass(frozen=True, slots=True)
class Begun:
    """Keys of a row from the beginning of its first token's group on, in bfloat16; ``int4-full`` only."""

    before: Tensor | None
    """bfloat16 [layers, KEY_GROUP, kv_heads, head_dim]: the group's keys from earlier steps; None if it begins here."""
    after: Tensor | None
    """Like it: where the row's last group is kept for later steps; None if it is full."""


class ReferenceKVCache:
    """See ``devices.base.KVCache``."""

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: KVDtype,
        key_factors: Tensor | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.key_factors = key_factors
        sizes = (layers, num_blocks * block_size, kv_heads, head_dim)
        self._group_shape = (layers, KEY_GROUP, kv_heads, head_dim)
        self._keys: _Column
        self._values: _Column
        if dtype in _DENSE:
            self._keys, self._values = _Dense(*sizes, _DENSE[dtype]), _Dense(*sizes, _DENSE[dtype])
        else:
            self._keys = _Int4Keys(*sizes) if dtype == "int4-full" else _Int8(*sizes)
            self._values = _Int8(*sizes) if dtype == "int8" else _Int4Values(*sizes)
        self._planes = [
            plane.view(torch.uint8).reshape(layers, num_blocks, -1).numpy()
            for column in (self._keys, self._values)
            for plane in column.planes
        ]
        self._begun: dict[int, Tensor] = {}
        """By block: the keys of its last group, while that is not full."""
        self._begun_on_host: dict[int, Tensor] = {}
        """The same by address of the host block."""
        self._recent: dict[int, Tensor] = {}
        """By a row's first token, of the layer written last: its keys from the beginning of its first group on."""

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self._planes)

    def begin(self, rows: Sequence[Row]) -> list[Begun]:
        """What the step's rows need of begun groups; called once per step, in device order.

        Raises ``ValueError`` for a row that goes on in a group whose beginning is not kept."""
        if self.dtype != "int4-full":
            return [Begun(None, None)] * len(rows)
        return [self._begin(row) for row in rows]

    def _begin(self, row: Row) -> Begun:
        if row.first == row.last:
            return Begun(None, None)
        first, last = int(row.positions[0]), int(row.positions[-1])
        block, before = int(row.slots[first]) // self.block_size, None
        if first % KEY_GROUP:
            before = self._begun.get(block)
            if before is None:
                raise ValueError(
                    f"block {block} goes on at position {first}, but its group's earlier keys are not kept"
                )
        for slot in row.slots[first : last + 1].tolist():
            self._begun.pop(slot // self.block_size, None)
        if (last + 1) % KEY_GROUP == 0:
            return Begun(before, None)
        same = first // KEY_GROUP == last // KEY_GROUP
        after = before if before is not None and same else torch.zeros(self._group_shape, dtype=torch.bfloat16)
        self._begun[int(row.slots[last]) // self.block_size] = after
        return Begun(before, after)

    def write(self, layer: int, k: Tensor, v: Tensor, rows: Sequence[Row], begun: Sequence[Begun]) -> None:
        slots = torch.cat([row.slots[row.positions] for row in rows]) if rows else torch.empty(0, dtype=torch.long)
        self._values.write(layer, slots, v)
        if self.dtype in FACTORED and self.key_factors is not None:
            k = k / self.key_factors[layer]
        if self.dtype != "int4-full":
            self._keys.write(layer, slots, k)
            return
        self._recent.clear()
        for row, kept in zip(rows, begun, strict=True):
            if row.first < row.last:
                self._write_groups(layer, k[row.first : row.last].bfloat16(), row, kept)

    def _write_groups(self, layer: int, k: Tensor, row: Row, begun: Begun) -> None:
        first = int(row.positions[0])
        start = first - first % KEY_GROUP
        if begun.before is not None:
            k = torch.cat((begun.before[layer, : first - start], k))
        self._recent[row.first] = k
        for at in range(0, len(k), KEY_GROUP):
            group = k[at : at + KEY_GROUP]
            if len(group) == KEY_GROUP:
                self._keys.write(layer, row.slots[start + at : start + at + KEY_GROUP], group.float())
            else:
                assert begun.after is not None
                begun.after[layer, : len(group)] = group

    def key_views(self, layer: int, row: Row, oldest: int) -> Iterator[tuple[slice, Tensor]]:
        """Pieces of the row's tokens, and the keys of positions [oldest, ...) as that piece's queries read them,
        float32; of positions after the last a piece may see, there may be fewer."""
        keys = self._keys.read(layer, row.slots[oldest:])
        if self.dtype != "int4-full":
            yield slice(row.first, row.last), keys
            return
        first, last = int(row.positions[0]), int(row.positions[-1]) + 1
        start = first - first % KEY_GROUP
        recent = self._recent[row.first].float()
        edges = [first, *range(start + KEY_GROUP, last, KEY_GROUP), last]
        for begin, end in itertools.pairwise(edges):
            own = begin - begin % KEY_GROUP  # the group of this piece's queries
            exact = recent[own - start : end - start]
            view = torch.cat((keys[: max(own - oldest, 0)], exact[max(oldest - own, 0) :]))
            yield slice(row.first + begin - first, row.first + end - first), view

    def values(self, layer: int, slots: Tensor) -> Tensor:
        """float32 [n, kv_heads, head_dim]."""
        return self._values.read(layer, slots)

    def stored(self, layer: int, blocks: NDArray[np.int32]) -> tuple[Tensor, Tensor]:
        """See ``devices.base.KVCache``."""
        places = torch.from_numpy(blocks.astype(np.int64))[:, None] * self.block_size + torch.arange(self.block_size)
        return self._keys.read(layer, places.flatten()), self._values.read(layer, places.flatten())

    def to_host(self, blocks: NDArray[np.int32], host: NDArray[np.uint8], places: NDArray[np.int32]) -> None:
        """See ``devices.base.KVCache``. A host block holds one plane after the other, of all layers."""
        for block, place in pages.copy_pairs(blocks, self.num_blocks, places, len(host)):
            host[place] = np.concatenate([plane[:, block].reshape(-1) for plane in self._planes])
            _carry(self._begun, block, self._begun_on_host, host[place].ctypes.data)

    def to_device(self, places: NDArray[np.int32], host: NDArray[np.uint8], blocks: NDArray[np.int32]) -> None:
        """See ``devices.base.KVCache``."""
        for block, place in pages.copy_pairs(blocks, self.num_blocks, places, len(host)):
            at = 0
            for plane in self._planes:
                size = plane[:, block].size
                plane[:, block] = host[place][at : at + size].reshape(len(plane), -1)
                at += size
            _carry(self._begun_on_host, host[place].ctypes.data, self._begun, block)


def _carry(source: dict[int, Tensor], key: int, target: dict[int, Tensor], to: int) -> None:
    if key in source:
        target[to] = source[key].clone()
    else:
        target.pop(to, None)
