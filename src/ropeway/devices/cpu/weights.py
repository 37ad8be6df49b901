"""Weights in the layout that the native kernels read (``native/core/packed.h``)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ropeway.devices.base import ROW_UNIT, DenseTensor, GroupedTensor, HostTensor, Layout
from ropeway.devices.cpu import _native
from ropeway.devices.pages import Arena
from ropeway.errors import Unsupported

_DENSE_LAYOUTS: dict[torch.dtype, Layout] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


_PANEL: dict[Layout, int] = {"fp32": 32, "bf16": 32, "fp16": 32, "int8": 16, "int4": 16}
"""Rows that lie together in a layout; ``devices.base.ROW_UNIT`` is a multiple of each."""


class PackedWeight:
    """A matrix [n, k], packed; it owns its memory and shares none with what it was packed from."""

    __slots__ = ("_form", "_memory", "layout", "native", "nbytes", "shape")

    def __init__(
        self,
        shape: tuple[int, int],
        layout: Layout,
        group: int = 0,
        half_scales: bool = False,
        minimums: bool = False,
        activation_digits: int = 2,
        *,
        arena: Arena,
    ) -> None:
        self.shape = shape
        self.layout = layout
        self._form = (group, half_scales, activation_digits)
        self.native = self._described(*shape)
        data = arena.take(self.native.data_bytes)
        scales = arena.take(self.native.scale_bytes)
        lowest = arena.take(self.native.scale_bytes if minimums else 0)
        self.native.place(*(part.ctypes.data if part.size else 0 for part in (data, scales, lowest)))  # 0: absent
        self._memory = (data, scales, lowest)
        self.nbytes = sum(part.nbytes for part in self._memory)

    def rows(self, start: int, count: int) -> _native.PackedMatrix:
        """Rows [start, start + count) as a matrix of their own over the same memory; ``start`` begins a panel."""
        n, k = self.shape
        width = _PANEL[self.layout]
        panels, first = -(-n // width), start // width
        part = self._described(count, k)
        part.place(*(m.ctypes.data + m.nbytes // panels * first if m.size else 0 for m in self._memory))
        return part

    def _described(self, n: int, k: int) -> _native.PackedMatrix:
        group, half_scales, activation_digits = self._form
        return _native.PackedMatrix(self.layout, n, k, group, half_scales, activation_digits)


def pack(
    context: _native.Context, tensor: HostTensor, activation_digits: int = 2, arena: Arena | None = None
) -> PackedWeight:
    """Pack a matrix into memory of ``arena`` (default: its own); the peak of memory is the packed size beside the
    tensor's own.

    ``activation_digits`` (1 or 2) tells how precisely products with a quantised matrix see their inputs
    (``devices.base.ACTIVATION_DIGITS``). Raises ``Unsupported`` for a type, or a group size, that no layout holds."""
    if len(tensor.shape) != 2:
        raise Unsupported(f"a weight must be a matrix, not of shape {tensor.shape}")
    return pack_slices(context, tensor.shape[0], [tensor], activation_digits, arena)


def pack_slices(
    context: _native.Context,
    n: int,
    slices: Iterable[HostTensor],
    activation_digits: int = 2,
    arena: Arena | None = None,
) -> PackedWeight:
    """See ``devices.base.Device.pack_slices``; into memory of ``arena``. Raises like ``pack``."""
    arena = arena or Arena()
    weight: PackedWeight | None = None
    start = 0
    for tensor in slices:
        if weight is None:
            weight = _empty(tensor, n, activation_digits, arena)
        if start % ROW_UNIT:
            raise ValueError(f"a slice begins at row {start}, which is not a multiple of {ROW_UNIT}")
        _fill(context, weight, start, tensor)
        start += tensor.shape[0]
    if weight is None or start != n:
        raise ValueError(f"slices of {start} rows are no matrix of {n}")
    return weight


def _empty(tensor: HostTensor, n: int, activation_digits: int, arena: Arena) -> PackedWeight:
    """Room for ``n`` rows like those of ``tensor``."""
    k = tensor.shape[1]
    if isinstance(tensor, DenseTensor):
        return PackedWeight((n, k), dense_layout(tensor.data), arena=arena)
    group = tensor.group
    if group not in (16, 32) or k % group:
        raise Unsupported(f"a matrix of shape {(n, k)} in groups of {group} is not supported: 16 or 32, dividing k")
    # Four-bit codes are packed in groups of 32; with smaller groups they take a byte each.
    layout: Layout = "int4" if tensor.bits == 4 and group == 32 else "int8"
    half = _scale_dtype(tensor) == torch.float16
    return PackedWeight((n, k), layout, group, half, tensor.minimums is not None, activation_digits, arena=arena)


def _fill(context: _native.Context, weight: PackedWeight, start: int, tensor: HostTensor) -> None:
    count, k = tensor.shape
    part = weight.rows(start, count)
    if isinstance(tensor, DenseTensor):
        data = tensor.data if tensor.data.stride(1) == 1 else tensor.data.contiguous()
        _native.pack(context, part, data.data_ptr(), data.stride(0), 0, 0)
        return
    codes = tensor.codes.contiguous()
    scales = tensor.scales.to(_scale_dtype(tensor)).contiguous()
    minimums = None if tensor.minimums is None else tensor.minimums.to(scales.dtype).contiguous()
    lowest = 0 if minimums is None else minimums.data_ptr()
    _native.pack(context, part, codes.data_ptr(), k, scales.data_ptr(), lowest)


def _scale_dtype(tensor: GroupedTensor) -> torch.dtype:
    half = tensor.scales.dtype == torch.float16 and (tensor.minimums is None or tensor.minimums.dtype == torch.float16)
    return torch.float16 if half else torch.float32


def dense_layout(data: Tensor) -> Layout:
    """The layout of values as they are. Raises ``Unsupported`` for a type that none holds."""
    layout = _DENSE_LAYOUTS.get(data.dtype)
    if layout is None:
        raise Unsupported(f"weights of type {data.dtype} are not supported; use float32, bfloat16 or float16")
    return layout
