"""Products with packed weights, and rows of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ropeway.devices.base import Weight
from ropeway.devices.cpu import _native
from ropeway.devices.cpu.weights import PackedWeight


def linear(context: _native.Context, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See ``devices.base.Kernels.linear``. Raises ``ValueError`` for arguments that do not fit together."""
    assert isinstance(weight, PackedWeight)
    n, k = weight.shape
    rows = x.shape[0]
    if x.dtype != torch.float32 or x.shape != (rows, k) or not x.is_contiguous():
        raise ValueError(f"x must be contiguous float32 [rows, {k}], not {x.dtype} {tuple(x.shape)}")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (n,) or not bias.is_contiguous()):
        raise ValueError(f"bias must be contiguous float32 [{n}], not {bias.dtype} {tuple(bias.shape)}")
    out = torch.empty((rows, n), dtype=torch.float32)
    if rows:
        bias_address = 0 if bias is None else bias.data_ptr()
        _native.linear(context, weight.native, x.data_ptr(), bias_address, out.data_ptr(), rows)
    return out


def gather(context: _native.Context, table: Weight, ids: Tensor) -> Tensor:
    """See ``devices.base.Kernels.gather``. Raises ``IndexError`` for an id outside the table."""
    assert isinstance(table, PackedWeight)
    if ids.dtype != torch.int32 or ids.ndim != 1 or not ids.is_contiguous():
        raise ValueError(f"ids must be contiguous int32 [t], not {ids.dtype} {tuple(ids.shape)}")
    out = torch.empty((ids.shape[0], table.shape[1]), dtype=torch.float32)
    _native.gather(context, table.native, ids.data_ptr(), ids.shape[0], out.data_ptr())
    return out
