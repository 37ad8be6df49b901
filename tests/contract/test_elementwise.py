"""Native norms, rotary embedding and gated activation against float64 math."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.native import CONTEXTS, _native  # isort: split

from ropeway.devices.cpu.elementwise import add_rms_norm, rms_norm, rope, silu_and_mul

every_isa = pytest.mark.parametrize("isa", CONTEXTS)
SIZES = [1, 7, 16, 48, 63, 64, 65, 576, 1000]
SHAPES = [(0, 8), (1, 1), (3, 7), (5, 64), (2, 3, 80), (40, 1023)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


# --------------------------------------------------------------------------- norms


@every_isa
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_agrees_with_exact_math(isa: str, shape: tuple[int, ...]) -> None:
    x, weight = 5 * normal(*shape), normal(shape[-1], seed=1)
    out = rms_norm(CONTEXTS[isa], x, weight, 1e-5)
    torch.testing.assert_close(out.double(), exact_norm(x, weight, 1e-5), rtol=5e-7, atol=1e-30)


@every_isa
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm_norms_the_sum_and_returns_it(isa: str, shape: tuple[int, ...]) -> None:
    x, residual, weight = normal(*shape), normal(*shape, seed=1), normal(shape[-1], seed=2)
    out, total = add_rms_norm(CONTEXTS[isa], x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(out.double(), exact_norm(x + residual, weight, 1e-6), rtol=5e-7, atol=1e-30)


@every_isa
@pytest.mark.parametrize("size", SIZES)
def test_a_row_is_normed_to_the_same_bits_in_any_batch(isa: str, size: int) -> None:
    x, weight = normal(300, size), normal(size, seed=1)
    whole = rms_norm(CONTEXTS[isa], x, weight, 1e-5)
    single = _native.Context(1, isa)
    for row in (0, 150, 299):
        assert torch.equal(rms_norm(single, x[row : row + 1], weight, 1e-5)[0], whole[row])
        alone, _ = add_rms_norm(single, x[row : row + 1], torch.zeros(1, size), weight, 1e-5)
        assert torch.equal(alone[0], whole[row])


@every_isa
def test_a_row_of_zeros_stays_zero(isa: str) -> None:
    assert torch.equal(rms_norm(CONTEXTS[isa], torch.zeros(2, 40), torch.ones(40), 1e-6), torch.zeros(2, 40))


# --------------------------------------------------------------------------- rotary embedding


@every_isa
@pytest.mark.parametrize(("size", "rotated"), [(2, 2), (32, 32), (64, 64), (80, 32), (128, 128), (10, 6), (70, 66)])
def test_rope_turns_each_feature_with_its_partner_half_a_head_away(isa: str, size: int, rotated: int) -> None:
    x = normal(9, 3, size)
    positions = torch.tensor([0, 1, 2, 49, 7, 7, 3, 48, 5], dtype=torch.int32)
    angles = torch.arange(50)[:, None] * 0.9 ** torch.arange(rotated // 2)
    table = torch.stack((angles.cos(), angles.sin()), dim=1).float().contiguous()
    out = rope(CONTEXTS[isa], x, positions, table)
    turns = torch.polar(torch.ones(50, rotated // 2).double(), angles.double())[positions.long()][:, None]
    half = rotated // 2
    turned = torch.complex(x[..., :half].double(), x[..., half:rotated].double()) * turns
    want = torch.cat((turned.real, turned.imag, x[..., rotated:].double()), dim=-1)
    torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=2e-6)
    assert torch.equal(out[..., rotated:], x[..., rotated:])
    assert torch.equal(out[0], x[0])


@every_isa
def test_a_position_outside_the_table_is_refused(isa: str) -> None:
    table = torch.zeros(4, 2, 4)
    for position in (4, -1):
        positions = torch.tensor([0, position], dtype=torch.int32)
        with pytest.raises(IndexError, match=f"position {position} of token 1 is outside the table of 4"):
            rope(CONTEXTS[isa], torch.zeros(2, 1, 8), positions, table)


# --------------------------------------------------------------------------- gated activation


@every_isa
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu_and_mul_agrees_with_exact_math(isa: str, shape: tuple[int, ...]) -> None:
    gate, up = 10 * normal(*shape), normal(*shape, seed=1)
    want = F.silu(gate.double()) * up.double()
    out = silu_and_mul(CONTEXTS[isa], gate, up)
    torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=1e-37)


@every_isa
def test_silu_is_accurate_over_the_whole_range_of_floats(isa: str) -> None:
    steps = torch.linspace(-86.0, 100.0, 200_001)
    ends = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38, -104.0, torch.inf])
    gate = torch.cat((steps, ends))
    out = silu_and_mul(CONTEXTS[isa], gate, torch.ones_like(gate))
    torch.testing.assert_close(out.double(), F.silu(gate.double()), rtol=1e-6, atol=1e-35)
    assert silu_and_mul(CONTEXTS[isa], torch.tensor([torch.nan]), torch.ones(1)).isnan().all()


# --------------------------------------------------------------------------- refusals


def test_arguments_that_do_not_fit_together_are_refused() -> None:
    context = CONTEXTS["portable"]
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="weight must be contiguous float32"):
        rms_norm(context, x, torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match=r"x must be contiguous float32 .* with strides \[1, 2\]"):
        rms_norm(context, torch.zeros(8, 2).T, torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="residual must be"):
        add_rms_norm(context, x, torch.zeros(1, 8), torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="up must be"):
        silu_and_mul(context, x, x.double())
    with pytest.raises(ValueError, match="rotates 10 features of heads that have 8"):
        rope(context, torch.zeros(1, 1, 8), torch.zeros(1, dtype=torch.int32), torch.zeros(4, 2, 5))
    with pytest.raises(ValueError, match="positions must be contiguous int32"):
        rope(context, torch.zeros(1, 1, 8), torch.zeros(1), torch.zeros(4, 2, 4))
