"""Rounding to grouped codes: natively as in plain PyTorch, and never worse than plain rounding."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from ropeway.devices.base import DenseTensor, GroupedTensor
from ropeway.devices.reference_quantization import quantize as reference
from ropeway.errors import Unsupported
from tests.support.native import CONTEXTS, _native  # isort: split

from ropeway.devices.cpu.quantization import quantize

every_isa = pytest.mark.parametrize("isa", CONTEXTS)
every_layout = pytest.mark.parametrize("layout", ["int8", "int4"])
Layout = Literal["int8", "int4"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def parts(tensor: GroupedTensor) -> list[Tensor]:
    return [tensor.codes, tensor.scales, *([] if tensor.minimums is None else [tensor.minimums])]


def assert_same(got: GroupedTensor, want: GroupedTensor) -> None:
    assert (got.group, got.bits, len(parts(got))) == (want.group, want.bits, len(parts(want)))
    for mine, other in zip(parts(got), parts(want), strict=True):
        assert torch.equal(mine, other)


def error(tensor: GroupedTensor, values: Tensor) -> Tensor:
    """Squared, of every group."""
    return (tensor.dequantize() - values).square().view(-1, 32).sum(1)


@every_isa
@every_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_instruction_set_gives_the_bits_of_plain_pytorch(isa: str, layout: Layout, dtype: torch.dtype) -> None:
    for n, k in [(1, 32), (3, 96), (17, 160), (40, 1024)]:
        tensor = DenseTensor(normal(n, k).to(dtype))
        assert_same(quantize(CONTEXTS[isa], tensor, layout), reference(tensor, layout))


@every_isa
@every_layout
def test_extreme_groups_have_the_bits_of_plain_pytorch(isa: str, layout: Layout) -> None:
    values = normal(24, 32)
    values[0] = 0
    values[1] = 0.25
    values[2] = -3e-7 * torch.arange(32)
    values[3, 5] = 60000.0
    values[4] = torch.linspace(-6e4, 6e4, 32)
    values[5] *= 1e-4
    values[6] = values[6].abs() + 100
    values[7, 1:] = 0
    values[8] = 1e-30
    values[9, ::2] = -0.0
    tensor = DenseTensor(values)
    assert_same(quantize(CONTEXTS[isa], tensor, layout), reference(tensor, layout))


@every_layout
def test_a_part_is_the_part_of_the_whole_whatever_its_strides(layout: Layout) -> None:
    values = normal(48, 256)
    whole = reference(DenseTensor(values), layout)
    for rows, columns in [(slice(5, 9), slice(0, 256)), (slice(0, 48), slice(64, 160)), (slice(7, 8), slice(32, 64))]:
        part = DenseTensor(values[rows, columns])
        groups = slice(columns.start // 32, columns.stop // 32)
        for got in (reference(part, layout), *(quantize(context, part, layout) for context in CONTEXTS.values())):
            assert torch.equal(got.codes, whole.codes[rows, columns])
            assert torch.equal(got.scales, whole.scales[rows, groups])
    transposed = DenseTensor(values.T.contiguous().T)
    assert_same(quantize(CONTEXTS["portable"], transposed, layout), whole)


@every_layout
def test_threads_change_no_bit(layout: Layout) -> None:
    tensor = DenseTensor(normal(300, 512).bfloat16())
    assert_same(quantize(_native.Context(3, "auto"), tensor, layout), quantize(CONTEXTS["portable"], tensor, layout))


def test_int8_is_off_by_half_a_step_at_most() -> None:
    values = normal(40, 512)
    rounded = reference(DenseTensor(values), "int8")
    step = values.view(40, -1, 32).abs().amax(-1) / 127
    off = (rounded.dequantize() - values).view(40, -1, 32).abs().amax(-1)
    assert (off <= step * (0.5 + 127 * 2.0**-11)).all()  # a scale in float16 moves the largest code's value


def test_int4_is_better_than_spreading_each_group_over_all_codes() -> None:
    values = normal(64, 1024)
    groups = values.view(64, -1, 32)
    low = groups.amin(-1).half()
    scales = ((groups.amax(-1) - groups.amin(-1)) / 15).half()
    codes = ((groups - low.float()[..., None]) / scales.float()[..., None]).round().clamp(0, 15)
    plain = GroupedTensor(codes.to(torch.int8).view(64, 1024), scales, low, 32, 4)
    searched = reference(DenseTensor(values), "int4")
    assert error(searched, values).sum() < 0.85 * error(plain, values).sum()


@every_layout
def test_values_on_a_grid_of_codes_are_kept(layout: Layout) -> None:
    random = torch.Generator().manual_seed(3)
    low, high = (-127, 127) if layout == "int8" else (0, 15)
    codes = torch.randint(low, high + 1, (8, 64), generator=random)
    codes[:, ::32], codes[:, 1::32] = low, high
    values = codes * 2.0**-7 - (0.5 if layout == "int4" else 0)
    assert torch.equal(reference(DenseTensor(values), layout).dequantize(), values)


@every_isa
@every_layout
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_values_that_no_scale_can_hold_are_refused(isa: str, layout: Layout, bad: float) -> None:
    values = normal(20, 96)
    values[13, 70] = bad
    for quantizer in (reference, lambda *arguments: quantize(CONTEXTS[isa], *arguments)):
        with pytest.raises(Unsupported, match="not finite, or too large"):
            quantizer(DenseTensor(values), layout)


@every_layout
@pytest.mark.parametrize("shape", [(4, 40), (4, 16), (32,), (2, 2, 32)])
def test_rows_that_are_not_whole_groups_are_refused(layout: Layout, shape: tuple[int, ...]) -> None:
    for quantizer in (reference, lambda *arguments: quantize(CONTEXTS["portable"], *arguments)):
        with pytest.raises(Unsupported, match=r"whole groups of 32"):
            quantizer(DenseTensor(torch.ones(shape)), layout)


@every_layout
def test_a_matrix_without_rows_stays_one(layout: Layout) -> None:
    assert quantize(CONTEXTS["portable"], DenseTensor(torch.empty(0, 64)), layout).shape == (0, 64)
