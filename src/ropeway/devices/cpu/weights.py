"""Weights in the layout that the native kernels read (``native/core/packed.h``)."""

from __future__ import annotations

import torch
from torch import Tensor

from ropeway.devices.base import DenseTensor, GroupedTensor, HostTensor, Layout
from ropeway.devices.cpu import _native
from ropeway.devices.pages import Arena
from ropeway.errors import Unsupported

_DENSE_LAYOUTS: dict[torch.dtype, Layout] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class PackedWeight:
    """A matrix [n, k], packed; it owns its memory and shares none with what it was packed from."""

    __slots__ = ("_memory", "layout", "native", "nbytes", "shape")

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
        self.native = _native.PackedMatrix(layout, *shape, group, half_scales, activation_digits)
        data = arena.take(self.native.data_bytes)
        scales = arena.take(self.native.scale_bytes)
        lowest = arena.take(self.native.scale_bytes if minimums else 0)
        self.native.place(*(part.ctypes.data if part.size else 0 for part in (data, scales, lowest)))  # 0: absent
        self._memory = (data, scales, lowest)
        self.nbytes = sum(part.nbytes for part in self._memory)


def pack(
    context: _native.Context, tensor: HostTensor, activation_digits: int = 2, arena: Arena | None = None
) -> PackedWeight:
    """Pack a matrix into memory of ``arena`` (default: its own); the peak of memory is the packed size beside the
    tensor's own.

    ``activation_digits`` (1 or 2) tells how precisely products with a quantised matrix see their inputs
    (``devices.base.ACTIVATION_DIGITS``). Raises ``Unsupported`` for a type, or a group size, that no layout holds."""
    if len(tensor.shape) != 2:
        raise Unsupported(f"a weight must be a matrix, not of shape {tensor.shape}")
    arena = arena or Arena()
    if isinstance(tensor, DenseTensor):
        return _pack_dense(context, tensor, arena)
    return _pack_grouped(context, tensor, activation_digits, arena)


def _pack_dense(context: _native.Context, tensor: DenseTensor, arena: Arena) -> PackedWeight:
    data = tensor.data
    layout = dense_layout(data)
    if data.stride(1) != 1:
        data = data.contiguous()
    n, k = data.shape
    weight = PackedWeight((n, k), layout, arena=arena)
    _native.pack(context, weight.native, data.data_ptr(), data.stride(0), 0, 0)
    return weight


def dense_layout(data: Tensor) -> Layout:
    """The layout of values as they are. Raises ``Unsupported`` for a type that none holds."""
    layout = _DENSE_LAYOUTS.get(data.dtype)
    if layout is None:
        raise Unsupported(f"weights of type {data.dtype} are not supported; use float32, bfloat16 or float16")
    return layout


def _pack_grouped(
    context: _native.Context, tensor: GroupedTensor, activation_digits: int, arena: Arena
) -> PackedWeight:
    n, k = tensor.codes.shape
    group = tensor.group
    if group not in (16, 32) or k % group:
        raise Unsupported(f"a matrix of shape {(n, k)} in groups of {group} is not supported: 16 or 32, dividing k")
    # Four-bit codes are packed in groups of 32; with smaller groups they take a byte each.
    layout: Layout = "int4" if tensor.bits == 4 and group == 32 else "int8"
    half = tensor.scales.dtype == torch.float16
    if tensor.minimums is not None:
        half = half and tensor.minimums.dtype == torch.float16
    scale_dtype = torch.float16 if half else torch.float32
    codes = tensor.codes.contiguous()
    scales = tensor.scales.to(scale_dtype).contiguous()
    minimums = None if tensor.minimums is None else tensor.minimums.to(scale_dtype).contiguous()
    weight = PackedWeight((n, k), layout, group, half, minimums is not None, activation_digits, arena=arena)
    lowest = 0 if minimums is None else minimums.data_ptr()
    _native.pack(context, weight.native, codes.data_ptr(), k, scales.data_ptr(), lowest)
    return weight
