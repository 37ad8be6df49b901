"""How quantised keys and values are stored: the formulas of ``devices.base`` in PyTorch. The reference device computes
with them, and the contract tests compare the native kernels' codes with theirs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ropeway.devices.base import KEY_GROUP, VALUE_GROUP, KVDtype
from ropeway.errors import ConfigError

_LARGEST_HALF = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True)
class Signed:
    """Codes in [-127, 127] with one scale per row: ``value = code * scale``."""

    codes: Tensor
    """int8 [..., d]."""
    scales: Tensor
    """float16 [...]."""

    def dequantize(self) -> Tensor:
        """float32 [..., d]."""
        return self.codes.float() * self.scales.float()[..., None]


@dataclass(frozen=True, slots=True)
class Unsigned:
    """Codes in [0, 15] with a scale and a minimum per group: ``value = code * scale + minimum``."""

    codes: Tensor
    """uint8 [..., n]."""
    scales: Tensor
    """float16 [...]."""
    minimums: Tensor
    """float16 [...]."""

    def dequantize(self) -> Tensor:
        """float32 [..., n]."""
        return self.codes.float() * self.scales.float()[..., None] + self.minimums.float()[..., None]


def check_kv_dtype(dtype: KVDtype, block_size: int) -> None:
    """Raises ``ConfigError`` where blocks of this size cannot hold such keys."""
    if dtype == "int4-full" and block_size % KEY_GROUP:
        raise ConfigError(
            f"kv_dtype int4-full keeps keys in groups of {KEY_GROUP} positions, which blocks of {block_size} cannot "
            f"hold; use --block-size {KEY_GROUP} or a larger power of two",
            param="block_size",
        )


def block_bytes(layers: int, kv_heads: int, head_dim: int, block_size: int, dtype: KVDtype) -> int:
    """Bytes of one block over all layers, scales and minimums included, nothing padded."""
    values = -(-head_dim // 2) + 4 * -(-head_dim // VALUE_GROUP)
    match dtype:
        case "fp32":
            token = 8 * head_dim
        case "bf16":
            token = 4 * head_dim
        case "int8":
            token = 2 * (head_dim + 2)
        case "int4":
            token = head_dim + 2 + values
        case "int4-full":
            return layers * kv_heads * (block_size * values + block_size // KEY_GROUP * head_dim * (KEY_GROUP // 2 + 4))
    return layers * kv_heads * block_size * token


def quantize_signed(x: Tensor) -> Signed:
    """One scale for each of the last dimension's vectors, x float32 [..., d]."""
    top = x.abs().amax(-1)
    scales = _up(top, 127)
    codes = _codes(x, scales, -127, 127)
    return Signed(codes.to(torch.int8), scales)


def quantize_unsigned(x: Tensor) -> Unsigned:
    """A scale and a minimum for each of the last dimension's vectors, x float32 [..., n]."""
    minimums = _finite(x.amin(-1).half())
    extent = x.amax(-1) - minimums.float()
    scales = _up(extent.clamp(min=0), 15)
    minimums = minimums.where(scales.isfinite(), torch.nan)
    codes = _codes(x - minimums.float()[..., None], scales, 0, 15)
    return Unsigned(codes.to(torch.uint8), scales, minimums)


def quantize_values(x: Tensor) -> list[Unsigned]:
    """Values float32 [..., d] in groups of ``VALUE_GROUP`` channels, the last perhaps shorter; group by group."""
    return [quantize_unsigned(group) for group in torch.split(x, VALUE_GROUP, dim=-1)]


def _up(extent: Tensor, limit: int) -> Tensor:
    """float16 scales with scale * limit >= extent (the product is exact); NaN where there is none."""
    scales = (extent / limit).half()
    scales = torch.where(
        scales.float() * limit < extent, torch.nextafter(scales, torch.full_like(scales, torch.inf)), scales
    )
    return _finite(scales)


def _finite(x: Tensor) -> Tensor:
    return x.where(x.isfinite(), torch.nan)


def _codes(x: Tensor, scales: Tensor, least: int, most: int) -> Tensor:
    """x / scale rounded, ties to even; 0 where the scale is 0 or NaN."""
    divisors = scales.float()[..., None]
    codes = (x / divisors).round().clamp(least, most)
    return codes.where(divisors > 0, 0.0)
