"""Rows of activations and token ids, picked by index."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ropeway.devices.cpu import _native


def take(x: Tensor, rows: Tensor) -> Tensor:
    """See ``devices.base.Kernels.take``. Raises ``IndexError`` for a row that x does not have."""
    if x.dtype != torch.float32 or x.ndim != 2 or not x.is_contiguous():
        raise ValueError(f"x must be contiguous float32 [t, k], not {x.dtype} {list(x.shape)}")
    _check_column("rows", rows, len(rows))
    out = torch.empty((len(rows), x.shape[1]), dtype=torch.float32)
    _native.take(x.data_ptr(), len(x), x.shape[1], rows.data_ptr(), len(rows), out.data_ptr())
    return out


def read_tokens(tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """See ``devices.base.Kernels.read_tokens``. Raises ``IndexError`` for a place outside the table."""
    check_places(tokens, slots, positions)
    out = torch.empty(len(slots), dtype=torch.int32)
    _native.read_tokens(
        tokens.data_ptr(),
        tokens.shape[0],
        tokens.shape[1],
        tokens.stride(0),
        slots.data_ptr(),
        positions.data_ptr(),
        len(slots),
        out.data_ptr(),
    )
    return out


def write_tokens(tokens: Tensor, slots: Tensor, positions: Tensor, ids: Tensor) -> None:
    """See ``devices.base.Kernels.write_tokens``. Raises ``IndexError`` for a place outside the table."""
    write_tokens_call(tokens, slots, positions, ids)()


def write_tokens_call(tokens: Tensor, slots: Tensor, positions: Tensor, ids: Tensor) -> Callable[[], None]:
    """``write_tokens``, its arguments checked now, to be called later; the tensors are to be kept until then."""
    check_places(tokens, slots, positions)
    _check_column("ids", ids, len(slots))
    return partial(
        _native.write_tokens,
        tokens.data_ptr(),
        tokens.shape[0],
        tokens.shape[1],
        tokens.stride(0),
        slots.data_ptr(),
        positions.data_ptr(),
        len(slots),
        ids.data_ptr(),
    )


def check_places(tokens: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Raises ``ValueError`` for a table or columns that a kernel cannot read."""
    if tokens.dtype != torch.int32 or tokens.ndim != 2 or (tokens.shape[1] > 1 and tokens.stride(1) != 1):
        raise ValueError(f"tokens must be int32 [slots, positions], not {tokens.dtype} {list(tokens.shape)}")
    _check_column("slots", slots, len(slots))
    _check_column("positions", positions, len(slots))


def _check_column(name: str, column: Tensor, length: int) -> None:
    if column.dtype != torch.int32 or column.shape != (length,) or not column.is_contiguous():
        raise ValueError(f"{name} must be contiguous int32 [{length}], not {column.dtype} {list(column.shape)}")
