"""Products with packed weights, and rows of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ropeway.devices.base import Weight
from ropeway.devices.cpu import _native
from ropeway.devices.cpu.weights import PackedWeight

MOST_PARTS = 3


class Norm(NamedTuple):
    """An RMS norm of a product's inputs."""

    weight: Tensor
    """float32 [k]."""
    eps: float


def linear(context: _native.Context, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See ``devices.base.Kernels.linear``. Raises ``ValueError`` for arguments that do not fit together."""
    return fused_linear(context, x, [(weight, bias)])[0]


def fused_linear(
    context: _native.Context,
    x: Tensor,
    parts: Sequence[tuple[Weight, Tensor | None]],
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    norm: Norm | None = None,
) -> list[Tensor]:
    """Products of ``x`` (float32 [rows, k]) with up to three matrices [n, k], each with a bias or none, as one run of
    the threads: float32 [rows, n] each. Bits are those of the kernels one after the other.

    ``norm``: rows of ``x`` are RMS-normed first. ``residual`` (float32 [rows, n], with one part): added at the end.
    ``gated``: two parts of the same n, the result is ``silu(first) * second``.

    Raises ``ValueError`` for arguments that do not fit together.
    """
    weights = [_packed(weight) for weight, _ in parts]
    if not 1 <= len(parts) <= MOST_PARTS:
        raise ValueError(f"a product has 1 to {MOST_PARTS} parts, not {len(parts)}")
    k, rows = weights[0].shape[1], x.shape[0]
    if any(weight.shape[1] != k for weight in weights):
        raise ValueError(f"parts of a product share their k, but have {[weight.shape[1] for weight in weights]}")
    _check("x", x, (rows, k), f"[rows, {k}]")
    for weight, (_, bias) in zip(weights, parts, strict=True):
        if bias is not None:
            _check("bias", bias, weight.shape[:1])
    if norm is not None:
        _check("norm weight", norm.weight, (k,))
    if residual is not None:
        if len(parts) != 1:
            raise ValueError(f"a residual goes with one part, not {len(parts)}")
        _check("residual", residual, (rows, weights[0].shape[0]))
    if gated and (len(parts) != 2 or weights[0].shape != weights[1].shape):
        raise ValueError(f"a gated product has two parts of one shape, not {[weight.shape for weight in weights]}")
    outs = [torch.empty((rows, weight.shape[0]), dtype=torch.float32) for weight in weights[: 1 if gated else None]]
    _native.linear(
        context,
        x.data_ptr(),
        rows,
        [
            (weight.native, _address(bias), outs[place].data_ptr() if place < len(outs) else 0)
            for place, (weight, (_, bias)) in enumerate(zip(weights, parts, strict=True))
        ],
        _address(residual),
        gated,
        0 if norm is None else norm.weight.data_ptr(),
        0.0 if norm is None else norm.eps,
    )
    return outs


def gather(context: _native.Context, table: Weight, ids: Tensor, first: int | None = None) -> Tensor:
    """See ``devices.base.Kernels.gather``. Raises ``IndexError`` for an id outside a whole table."""
    assert isinstance(table, PackedWeight)
    if ids.dtype != torch.int32 or ids.ndim != 1 or not ids.is_contiguous():
        raise ValueError(f"ids must be contiguous int32 [t], not {ids.dtype} {tuple(ids.shape)}")
    out = torch.empty((ids.shape[0], table.shape[1]), dtype=torch.float32)
    part = first is not None
    _native.gather(context, table.native, ids.data_ptr(), ids.shape[0], out.data_ptr(), first or 0, part)
    return out


def _packed(weight: Weight) -> PackedWeight:
    assert isinstance(weight, PackedWeight)
    return weight


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], shown: str | None = None) -> None:
    if tensor.dtype != torch.float32 or tensor.shape != shape or not tensor.is_contiguous():
        shown = str(list(shape)) if shown is None else shown
        raise ValueError(f"{name} must be contiguous float32 {shown}, not {tensor.dtype} {tuple(tensor.shape)}")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
