"""Decode the block formats of GGUF into groups of codes, scales and minimums, exactly.

A row of a quantised matrix is a run of blocks of 32 or 256 values. The structured dtypes below are the blocks
as they lie in the file; each decoder turns an array of n blocks into columns. Source of the layouts:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. ``d`` is a block's scale, ``m`` or ``dmin`` its
minimum, ``qs``/``ql`` the low four bits of the codes, ``qh`` the high ones. The first half of a pair of groups
lies in the low nibbles of its bytes, the second half in the high ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from ropeway.devices.base import GroupedTensor

CHUNK_VALUES = 1 << 19
"""Values decoded at a time, so that intermediates stay in the cache of a core."""

LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)

Blocks = NDArray[Any]
"""[n] of a structured dtype."""


@dataclass(frozen=True, slots=True)
class Columns:
    """What a decoder fills for n blocks of b values in groups of g."""

    codes: NDArray[np.int8]
    """[n, b]."""
    scales: NDArray[Any]
    """float16 or float32 [n, b / g]."""
    minimums: NDArray[Any]
    """Like ``scales``; unused by formats without minimums."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    layout: np.dtype[Any]
    """One block in the file."""
    values: int
    """Values in a block."""
    group: int
    """Values under one scale."""
    bits: Literal[4, 8]
    """Kernel layout the codes fit into."""
    scale_dtype: torch.dtype
    """The narrowest type that holds every scale exactly."""
    has_minimums: bool
    decode: Callable[[Blocks, Columns], None]


def decode(raw: NDArray[np.uint8], kind: GGMLQuantizationType) -> GroupedTensor:
    """Blocks uint8 [rows, bytes] of a type in ``FORMATS`` -> [rows, k]. A chunk of rows at a time, so
    that beside the result only a few MiB are needed."""
    form = FORMATS[kind]
    rows, row_bytes = raw.shape
    row_blocks = row_bytes // form.layout.itemsize
    k = row_blocks * form.values
    codes = torch.empty(rows, k, dtype=torch.int8)
    scales = torch.empty(rows, k // form.group, dtype=form.scale_dtype)
    minimums = torch.empty_like(scales) if form.has_minimums else None
    step = max(1, CHUNK_VALUES // k)
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        blocks = np.ascontiguousarray(raw[part]).view(form.layout).reshape(-1)
        form.decode(
            blocks,
            Columns(
                codes=codes[part].numpy().reshape(len(blocks), form.values),
                scales=scales[part].numpy().reshape(len(blocks), -1),
                minimums=(scales if minimums is None else minimums)[part].numpy().reshape(len(blocks), -1),
            ),
        )
    return GroupedTensor(codes, scales, minimums, form.group, form.bits)


def split_nibbles(packed: NDArray[np.uint8], codes: NDArray[np.int8], runs: int) -> None:
    """Write the low, then the high nibbles of each of ``runs`` runs of bytes: [n, runs * b] -> [n, runs * 2b].

    Eight bytes at a time: half the work of a load-time that is nothing but this."""
    n = len(packed)
    source = np.ascontiguousarray(packed).view(np.uint64).reshape(n, runs, -1)
    target = codes.view(np.uint64).reshape(n, runs, 2, -1)
    np.bitwise_and(source, LOW_NIBBLES, out=target[:, :, 0])
    np.bitwise_and(source >> np.uint64(4), LOW_NIBBLES, out=target[:, :, 1])


def add_fifth_bits(qh: NDArray[np.uint8], codes: NDArray[np.int8]) -> None:
    """Bit i of a block's four bytes is bit 4 of code i: qh [n, 4], codes [n, 32]."""
    bits = np.unpackbits(np.ascontiguousarray(qh), axis=1, bitorder="little")
    bits <<= 4
    codes |= bits.view(np.int8)


def six_bit_scales(packed: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Scales and minimums of the eight groups of a Q4_K or Q5_K block: [n, 12] -> [n, 8] twice.

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minimums 0-3 in their low six bits; bytes 8-11 the low four bits
    of scales 4-7 (low nibble) and minimums 4-7 (high nibble), whose upper two bits top bytes 0-3 and 4-7."""
    first, second, last = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (last & 15) | (first >> 6 << 4)], axis=1)
    minimums = np.concatenate([second & 63, (last >> 4) | (second >> 6 << 4)], axis=1)
    return scales, minimums


def decode_q8_0(blocks: Blocks, out: Columns) -> None:
    out.codes[:] = blocks["qs"]
    out.scales[:, 0] = blocks["d"]


def decode_q4_0(blocks: Blocks, out: Columns) -> None:
    split_nibbles(blocks["qs"], out.codes, runs=1)
    np.subtract(out.codes, 8, out=out.codes)
    out.scales[:, 0] = blocks["d"]


def decode_q4_1(blocks: Blocks, out: Columns) -> None:
    split_nibbles(blocks["qs"], out.codes, runs=1)
    out.scales[:, 0] = blocks["d"]
    out.minimums[:, 0] = blocks["m"]


def decode_q5_0(blocks: Blocks, out: Columns) -> None:
    split_nibbles(blocks["qs"], out.codes, runs=1)
    add_fifth_bits(blocks["qh"], out.codes)
    np.subtract(out.codes, 16, out=out.codes)
    out.scales[:, 0] = blocks["d"]


def decode_q5_1(blocks: Blocks, out: Columns) -> None:
    split_nibbles(blocks["qs"], out.codes, runs=1)
    add_fifth_bits(blocks["qh"], out.codes)
    out.scales[:, 0] = blocks["d"]
    out.minimums[:, 0] = blocks["m"]


def decode_k_scales(blocks: Blocks, out: Columns) -> None:
    """scale = d * s, minimum = -(dmin * m): 11 by 6 bits of significand, exact in float32."""
    scales, minimums = six_bit_scales(blocks["scales"])
    np.multiply(blocks["d"].astype(np.float32)[:, None], scales, out=out.scales, casting="same_kind")
    np.multiply(-blocks["dmin"].astype(np.float32)[:, None], minimums, out=out.minimums, casting="same_kind")


def decode_q4_k(blocks: Blocks, out: Columns) -> None:
    split_nibbles(blocks["qs"], out.codes, runs=4)
    decode_k_scales(blocks, out)


def decode_q5_k(blocks: Blocks, out: Columns) -> None:
    split_nibbles(blocks["qs"], out.codes, runs=4)
    high = np.ascontiguousarray(blocks["qh"])
    groups = out.codes.view(np.uint8).reshape(-1, 8, 32)
    for group in range(8):  # bit g of byte i is bit 4 of code i in group g
        groups[:, group] |= (high >> group & 1) << 4
    decode_k_scales(blocks, out)


def decode_q6_k(blocks: Blocks, out: Columns) -> None:
    split_nibbles(blocks["ql"], out.codes, runs=2)
    high = np.ascontiguousarray(blocks["qh"]).reshape(-1, 2, 32)
    quarters = out.codes.view(np.uint8).reshape(-1, 2, 4, 32)
    for quarter in range(4):  # two bits of byte i are bits 4 and 5 of code i in that quarter of a half
        quarters[:, :, quarter] |= (high >> (2 * quarter) & 3) << 4
    np.subtract(out.codes, 32, out=out.codes)
    np.multiply(blocks["d"].astype(np.float32)[:, None], blocks["scales"], out=out.scales, casting="same_kind")


def layout(*fields: tuple[str, str] | tuple[str, str, int]) -> np.dtype[Any]:
    return np.dtype(list(fields))


K_HEAD = (("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12))
Type = GGMLQuantizationType
half, single = torch.float16, torch.float32

FORMATS: dict[GGMLQuantizationType, BlockFormat] = {
    Type.Q4_0: BlockFormat(layout(("d", "<f2"), ("qs", "u1", 16)), 32, 32, 4, half, False, decode_q4_0),
    Type.Q4_1: BlockFormat(layout(("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)), 32, 32, 4, half, True, decode_q4_1),
    Type.Q5_0: BlockFormat(
        layout(("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)), 32, 32, 8, half, False, decode_q5_0
    ),
    Type.Q5_1: BlockFormat(
        layout(("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)), 32, 32, 8, half, True, decode_q5_1
    ),
    Type.Q8_0: BlockFormat(layout(("d", "<f2"), ("qs", "i1", 32)), 32, 32, 8, half, False, decode_q8_0),
    Type.Q4_K: BlockFormat(layout(*K_HEAD, ("qs", "u1", 128)), 256, 32, 4, single, True, decode_q4_k),
    Type.Q5_K: BlockFormat(layout(*K_HEAD, ("qh", "u1", 32), ("qs", "u1", 128)), 256, 32, 8, single, True, decode_q5_k),
    Type.Q6_K: BlockFormat(
        layout(("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")),
        256, 16, 8, single, False, decode_q6_k,
    ),
}  # fmt: skip
