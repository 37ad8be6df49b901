"""Rounding of dense matrices to grouped codes in plain PyTorch: what the native kernel computes, bit for bit.

Every sum over a group is taken in the order of its values, with a rounding after each product and each addition.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ropeway.devices.base import QUANTIZED_GROUP, DenseTensor, GroupedTensor
from ropeway.errors import Unsupported

TRIALS = 10
WIDEST_GROUP = 15 * 65504.0
"""int4: the largest range of a group, codes [0, 15] times the largest scale in float16."""
_SLICE = 1 << 22
"""Values at a time, so that a large matrix needs little extra memory."""


def quantize(tensor: DenseTensor, layout: Literal["int8", "int4"]) -> GroupedTensor:
    """See ``devices.base.Device.quantize``."""
    _, k = check_shape(tensor)
    slices = torch.split(tensor.data, max(_SLICE // max(k, 1), 1))
    parts = [_quantize(rows.float(), layout) for rows in slices]
    codes, scales, minimums = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return GroupedTensor(codes, scales, minimums if layout == "int4" else None, QUANTIZED_GROUP, int(layout[3:]))  # type: ignore[arg-type]


def check_shape(tensor: DenseTensor) -> tuple[int, int]:
    """[n, k]; raises ``Unsupported`` for what cannot be cut into groups."""
    if len(tensor.shape) != 2 or tensor.shape[1] % QUANTIZED_GROUP:
        raise Unsupported(
            f"a matrix of shape {list(tensor.shape)} cannot be quantised: its rows must be whole groups of "
            f"{QUANTIZED_GROUP} values"
        )
    n, k = tensor.shape
    return n, k


def refuse_values() -> Unsupported:
    return Unsupported("a value is not finite, or too large for a scale in float16")


def _quantize(rows: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """float32 [n, k] -> codes int8 [n, k], scales and minimums float16 [n, k / 32]; int8 has minimums of 0."""
    n, k = rows.shape
    x = rows.reshape(-1, QUANTIZED_GROUP)
    if layout == "int8":
        scale, minimum, lowest, highest = x.abs().amax(1) / 127, torch.zeros(len(x)), -127, 127
    else:
        scale, minimum = _least_squares(x)
        lowest, highest = 0, 15
    scales, minimums = scale.half(), minimum.half()
    if not (x.isfinite().all() and scales.isfinite().all() and minimums.isfinite().all()):
        raise refuse_values()
    inverse = _inverse(scales.float())
    codes = ((x - minimums.float()[:, None]) * inverse[:, None]).clamp(lowest, highest).round()
    groups = k // QUANTIZED_GROUP
    return codes.to(torch.int8).view(n, k), scales.view(n, groups), minimums.view(n, groups)


def _least_squares(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of groups [g, 32], float32 [g]: with the least squared error among those that fit the codes
    of ten trials best. Trial t spreads a group over [0, 13 + 0.3 t]: below 15, codes stay unused, but the inner values
    may lie better; above, the largest are cut off.

    Source of the search: ``make_qkx2_quants`` of ggml, https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c.
    """
    low, high = x.amin(1), x.amax(1)
    y = x - low[:, None]
    total = _ordered_sum(y)
    scale, minimum, gain = torch.zeros_like(low), low.clone(), torch.zeros_like(low)
    spread_over = high - low
    count = float(QUANTIZED_GROUP)
    for trial in range(TRIALS):
        top = torch.tensor(0.3, dtype=torch.float32) * trial + 13.0
        spread = torch.where(spread_over > 2.0**-120, top / spread_over, 0.0)
        trial_codes = (y * spread[:, None]).round().clamp(max=15)
        codes, squares, products = (
            _ordered_sum(values) for values in (trial_codes, trial_codes * trial_codes, y * trial_codes)
        )
        inverse = _inverse(count * squares - codes * codes)
        fitted_scale = (count * products - codes * total) * inverse
        fitted_minimum = (squares * total - codes * products) * inverse
        gained = fitted_scale * products + fitted_minimum * total
        better = gained > gain
        gain = torch.where(better, gained, gain)
        scale = torch.where(better, fitted_scale, scale)
        minimum = torch.where(better, fitted_minimum + low, minimum)
    return torch.where(spread_over > WIDEST_GROUP, WIDEST_GROUP, scale), minimum


def _ordered_sum(values: Tensor) -> Tensor:
    """[g, 32] -> [g], from the first to the last."""
    total = torch.zeros_like(values[:, 0])
    for column in values.unbind(1):
        total = total + column
    return total


def _inverse(values: Tensor) -> Tensor:
    return torch.where(values > 0, 1 / values, 0.0)
