"""Norms, rotary embedding and gated activation."""

from __future__ import annotations

import torch
from torch import Tensor

from ropeway.devices.cpu import _native


def rms_norm(context: _native.Context, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``devices.base.Kernels.rms_norm``. Raises ``ValueError`` for arguments that do not fit together."""
    size = _check_norm(x, weight)
    out = torch.empty_like(x)
    if size:
        _native.rms_norm(context, x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0, x.numel() // size, size, eps)
    return out


def add_rms_norm(
    context: _native.Context, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See ``devices.base.Kernels.add_rms_norm``. Raises ``ValueError`` for arguments that do not fit together."""
    size = _check_norm(x, weight)
    _check("residual", residual, x.shape)
    out, total = torch.empty_like(x), torch.empty_like(x)
    if size:
        _native.rms_norm(
            context,
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            total.data_ptr(),
            x.numel() // size,
            size,
            eps,
        )
    return out, total


def rope(context: _native.Context, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """See ``devices.base.Kernels.rope``. Raises ``IndexError`` for a position outside the table."""
    tokens, heads, size = x.shape
    table_positions, _, half = table.shape
    _check("x", x, x.shape)
    _check("table", table, (table_positions, 2, half))
    if positions.dtype != torch.int32 or positions.shape != (tokens,) or not positions.is_contiguous():
        raise ValueError(f"positions must be contiguous int32 [{tokens}], not {_describe(positions)}")
    if 2 * half > size:
        raise ValueError(f"the table rotates {2 * half} features of heads that have {size}")
    out = torch.empty_like(x)
    _native.rope(
        context,
        x.data_ptr(),
        positions.data_ptr(),
        table.data_ptr(),
        out.data_ptr(),
        tokens,
        heads,
        size,
        2 * half,
        table_positions,
    )
    return out


def silu_and_mul(context: _native.Context, gate: Tensor, up: Tensor) -> Tensor:
    """See ``devices.base.Kernels.silu_and_mul``. Raises ``ValueError`` for arguments that do not fit together."""
    _check("gate", gate, gate.shape)
    _check("up", up, gate.shape)
    out = torch.empty_like(gate)
    _native.silu_and_mul(context, gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.numel())
    return out


def _check_norm(x: Tensor, weight: Tensor) -> int:
    """The normed size."""
    size = x.shape[-1]
    _check("x", x, x.shape)
    _check("weight", weight, (size,))
    return size


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype != torch.float32 or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous float32 {list(shape)}, not {_describe(tensor)}")


def _describe(tensor: Tensor) -> str:
    strides = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    return f"{tensor.dtype} {list(tensor.shape)}{strides}"
