"""Rounding of dense matrices to grouped codes, natively."""

from __future__ import annotations

from typing import Literal

import torch

from ropeway.devices.base import QUANTIZED_GROUP, DenseTensor, GroupedTensor
from ropeway.devices.cpu import _native
from ropeway.devices.cpu.weights import dense_layout
from ropeway.devices.reference_quantization import check_shape, refuse_values


def quantize(context: _native.Context, tensor: DenseTensor, layout: Literal["int8", "int4"]) -> GroupedTensor:
    """See ``devices.base.Device.quantize``. The values are read where they lie, in their own type."""
    n, k = check_shape(tensor)
    data = tensor.data if tensor.data.stride(1) == 1 else tensor.data.contiguous()
    codes = torch.empty((n, k), dtype=torch.int8)
    scales = torch.empty((n, k // QUANTIZED_GROUP), dtype=torch.float16)
    minimums = torch.empty_like(scales) if layout == "int4" else None
    places = (codes.data_ptr(), scales.data_ptr(), 0 if minimums is None else minimums.data_ptr())
    if not _native.quantize(context, data.data_ptr(), dense_layout(data), n, k, data.stride(0), *places):
        raise refuse_values()
    return GroupedTensor(codes, scales, minimums, QUANTIZED_GROUP, 8 if minimums is None else 4)
