"""The formulas by which keys and values are quantised, and what devices make of them."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ropeway.devices.base import KEY_GROUP, Device, KVCache, KVDtype
from ropeway.devices.stored import block_bytes, quantize_signed, quantize_unsigned
from ropeway.errors import ConfigError
from tests.support.devices import DEVICES, device
from tests.support.paged import Rows, exact_attention, scattered_blocks

LAYERS, KV_HEADS, HEADS, HEAD_DIM = 2, 2, 4, 72
QUANTISED: tuple[KVDtype, ...] = ("int8", "int4", "int4-full")
FACTORS = torch.randn((LAYERS, KV_HEADS, HEAD_DIM), generator=torch.Generator().manual_seed(9)).exp()
every_quantised = pytest.mark.parametrize("dtype", QUANTISED)
every_device = pytest.mark.parametrize("name", DEVICES)

magnitudes = st.sampled_from([1.0, 1e-9, 1e-6, 1e-3, 30.0, 1e3])
seeds = st.integers(0, 2**32 - 1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------- formulas


@settings(max_examples=50, deadline=None)
@given(seeds, magnitudes)
def test_signed_codes_never_clip_and_are_within_half_a_step(seed: int, magnitude: float) -> None:
    x = random(20, 24, seed=seed) * magnitude
    stored = quantize_signed(x)
    scales = stored.scales.float()[:, None]
    assert (x.abs() <= 127 * scales).all()
    assert ((stored.dequantize() - x).abs() <= scales * (0.5 + 1e-4)).all()


@settings(max_examples=50, deadline=None)
@given(seeds, magnitudes, st.sampled_from([-3.0, 0.0, 5.0]))
def test_unsigned_codes_are_within_half_a_step_and_the_rounding_of_the_minimum(
    seed: int, magnitude: float, shift: float
) -> None:
    x = (random(20, 64, seed=seed) + shift) * magnitude
    stored = quantize_unsigned(x)
    scales, minimums = stored.scales.float()[:, None], stored.minimums.float()[:, None]
    bound = scales * (0.5 + 1e-4) + minimums.abs() * 2**-11 + 2**-25
    assert ((stored.dequantize() - x).abs() <= bound).all()
    assert stored.codes.max() <= 15


def test_zeros_are_kept_exactly() -> None:
    assert not quantize_signed(torch.zeros(2, 8)).dequantize().any()
    assert not quantize_unsigned(torch.zeros(2, 8)).dequantize().any()


def test_a_constant_group_is_kept_to_half_precision() -> None:
    for value in (1.0, -2.7, 0.1, 1e-7):
        x = torch.full((1, 64), value)
        assert (quantize_unsigned(x).dequantize() - x).abs().max() <= abs(value) * 2**-11 + 2**-25


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_poisons_its_own_vector_only(poison: float) -> None:
    x = random(3, 64)
    x[1, 7] = poison
    for stored in (quantize_signed(x), quantize_unsigned(x)):
        assert not stored.codes[1].any()
        assert stored.dequantize().isnan().all(1).tolist() == [False, True, False]
        assert stored.dequantize()[[0, 2]].isfinite().all()


def test_what_half_precision_cannot_scale_becomes_nan() -> None:
    assert quantize_signed(torch.full((1, 8), 1e9)).dequantize().isnan().all()
    assert quantize_unsigned(torch.tensor([[-1e6, 0.0]])).dequantize().isnan().all()
    assert quantize_unsigned(torch.tensor([[0.0, 1e7]])).dequantize().isnan().all()


@pytest.mark.parametrize(("dtype", "least"), [("int8", 1.9), ("int4", 2.3), ("int4-full", 3.3)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_pool_holds_so_many_times_the_tokens_of_a_bfloat16_one(dtype: KVDtype, least: float, head_dim: int) -> None:
    assert block_bytes(3, 2, head_dim, 32, "bf16") / block_bytes(3, 2, head_dim, 32, dtype) >= least


def test_int4_full_needs_blocks_of_whole_key_groups() -> None:
    with pytest.raises(ConfigError, match=r"groups of 32 positions.*--block-size 32"):
        device("reference").kv_cache(1, 1, 1, 8, 16, "int4-full")


# --------------------------------------------------------------------------- attention


class Sequences:
    """Random queries, keys and values of whole sequences, stored and attended in steps of any cut."""

    def __init__(
        self, lengths: list[int], dtype: KVDtype, *, on: str = "reference", factors: bool = False, seed: int = 0
    ) -> None:
        self.device: Device = device(on)
        self.lengths, self.dtype, self.block_size = lengths, dtype, 64
        total = sum(lengths)
        self.q = random(total, HEADS, HEAD_DIM, seed=seed).split(lengths)
        self.k, self.v = (random(total, KV_HEADS, HEAD_DIM, seed=seed + i).split(lengths) for i in (1, 2))
        self.blocks = scattered_blocks(lengths, self.block_size)
        self.factors = FACTORS if factors else None
        # channels as unequal as the factors say, which queries even out
        self.k = tuple(k * FACTORS[1] for k in self.k)
        self.q = tuple(q / FACTORS[1].repeat_interleave(HEADS // KV_HEADS, 0) for q in self.q)
        self.cache = self.empty_cache()

    def empty_cache(self) -> KVCache:
        """Filled with NaN."""
        sizes = (KV_HEADS, HEAD_DIM, self.block_size, self.dtype)
        blocks = sum(map(len, self.blocks)) + 3
        cache = self.device.kv_cache(LAYERS, blocks, *sizes, self.factors)
        noise = np.full((1, self.device.kv_block_bytes(LAYERS, *sizes)), 0xFF, dtype=np.uint8)
        cache.to_device(np.zeros(blocks, dtype=np.int32), noise, np.arange(blocks, dtype=np.int32))
        return cache

    def run(self, steps: list[list[tuple[int, int]]], window: int | None = None) -> list[Tensor]:
        """Steps of rows (sequence, count) -> outputs by sequence, of layer 1."""
        done, out = [0] * len(self.lengths), [[] for _ in self.lengths]
        for step in steps:
            spans = [(s, slice(done[s], done[s] + count)) for s, count in step]
            rows = Rows([c for _, c in step], [span.stop for _, span in spans], [self.blocks[s] for s, _ in step])
            shape = replace(rows.step(), slots=torch.tensor([s for s, _ in step], dtype=torch.int32))
            plan = self.device.kernels.plan_attention(self.cache, shape)
            q, k, v = (torch.cat([x[s][span] for s, span in spans]) for x in (self.q, self.k, self.v))
            for layer in range(LAYERS):
                self.device.kernels.write_kv(self.cache, layer, k * (layer + 1), v, plan)
                result = self.device.kernels.attention(q, self.cache, layer, plan, 0.2, window)
            for (s, span), part in zip(spans, result.split([c for _, c in step]), strict=True):
                out[s].append(part)
                done[s] = span.stop
        return [torch.cat([q[:0], *parts]) for q, parts in zip(self.q, out, strict=True)]


@every_device
@every_quantised
@pytest.mark.parametrize("window", [None, 40])
def test_attention_over_quantised_keys_is_near_the_exact_one(name: str, dtype: KVDtype, window: int | None) -> None:
    some = Sequences([150, 33, 64], dtype, on=name, factors=dtype != "int4-full")
    got = some.run([[(0, 150), (1, 33), (2, 64)]], window)
    for q, k, v, out in zip(some.q, some.k, some.v, got, strict=True):
        want = exact_attention(q, 2 * k, v, 0.2, window)
        error = (out - want).square().mean().sqrt() / want.square().mean().sqrt()
        assert error < {"int8": 0.02, "int4": 0.12, "int4-full": 0.3}[dtype]


def cut(lengths: list[int], seed: int) -> list[list[tuple[int, int]]]:
    """The sequences in steps of a few rows, each of (sequence, count), until all are whole."""
    chance, left, steps = Random(seed), list(lengths), []
    while any(left):
        waiting = [s for s, rest in enumerate(left) if rest]
        rows = [
            (s, chance.choice((1, chance.randint(1, left[s]), left[s])))
            for s in chance.sample(waiting, chance.randint(1, len(waiting)))
        ]
        for s, count in rows:
            left[s] -= count
        steps.append(rows)
    return steps


@every_device
@every_quantised
@settings(max_examples=6, deadline=None)
@given(seed=seeds)
def test_the_bits_do_not_depend_on_chunks_and_company(name: str, dtype: KVDtype, seed: int) -> None:
    some = Sequences([100, 31, 70], dtype, on=name)
    want = [some.run([[(s, some.lengths[s])]])[s] for s in range(3)]
    some.cache = some.empty_cache()
    for got, expected in zip(some.run(cut(some.lengths, seed)), want, strict=True):
        assert torch.equal(got, expected)


@every_device
def test_a_query_reads_its_own_group_of_keys_in_bfloat16_even_when_it_is_full(name: str) -> None:
    some = Sequences([KEY_GROUP], "int4-full", on=name)
    (got,) = some.run([[(0, KEY_GROUP)]])
    values = some.cache.stored(1, np.array(some.blocks[0], dtype=np.int32))[1][:KEY_GROUP]
    want = exact_attention(some.q[0], (2 * some.k[0]).bfloat16(), values, 0.2)
    # the native kernels round the softmax's weights to codes
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol={"reference": 1e-6, "cpu": 1e-3}[name])


@every_device
def test_a_group_that_has_begun_goes_with_its_block_to_the_host_and_back(name: str) -> None:
    some = Sequences([70], "int4-full", on=name)
    (want,) = some.run([[(0, 70)]])
    for cut in (5, 32, 40, 64, 66):
        some = Sequences([70], "int4-full", on=name)
        first = some.run([[(0, cut)]])[0]
        used = -(-cut // some.block_size)
        old, new = np.array(some.blocks[0][:used], dtype=np.int32), np.arange(used, dtype=np.int32)
        host = some.device.host_blocks(used, some.cache.nbytes // some.cache.num_blocks)
        some.cache.to_host(old, host, new)
        other = [b for b in range(some.cache.num_blocks) if b not in some.blocks[0]][:used]
        for blocks in (old, np.array(other, dtype=np.int32)):  # as often as it is wanted
            some.cache.to_device(new, host, blocks)
        some.blocks[0][:used] = other
        plan_rows = Rows([70 - cut], [70], some.blocks)
        plan = some.device.kernels.plan_attention(some.cache, plan_rows.step())
        k, v = some.k[0][cut:], some.v[0][cut:]
        some.device.kernels.write_kv(some.cache, 1, 2 * k, v, plan)
        rest = some.device.kernels.attention(some.q[0][cut:], some.cache, 1, plan, 0.2)
        assert torch.equal(torch.cat((first, rest)), want)


@every_device
def test_a_group_whose_beginning_is_not_kept_is_refused(name: str) -> None:
    some = Sequences([70], "int4-full", on=name)
    with pytest.raises(ValueError, match="goes on at position 40, but its group's earlier keys are not kept"):
        some.device.kernels.plan_attention(some.cache, Rows([30], [70], some.blocks).step())


def test_what_is_kept_beside_blocks_does_not_grow_with_the_sequences_that_had_a_slot() -> None:
    cpu = device("cpu")
    from ropeway.devices.cpu.kv import CpuKVCache

    cache = cpu.kv_cache(LAYERS, 50, KV_HEADS, HEAD_DIM, 32, "int4-full")
    assert isinstance(cache, CpuKVCache)
    assert cache.begun is not None
    kept = []
    for block in range(50):  # each goes on in a block that nobody had, and ends with a group that is not full
        shape = replace(Rows([7], [7], [[block]]).step(), slots=torch.tensor([3], dtype=torch.int32))
        cpu.kernels.plan_attention(cache, shape)
        kept.append(cache.begun.nbytes)
    assert kept[-1] == kept[2] == 2 * KEY_GROUP * LAYERS * KV_HEADS * HEAD_DIM


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_factors_make_channels_of_unequal_size_equally_exact(dtype: KVDtype) -> None:
    errors = []
    for factors in (False, True):
        some = Sequences([90], dtype, factors=factors)
        some.run([[(0, 90)]])
        read = some.cache.stored(1, np.array(some.blocks[0], dtype=np.int32))[0][:90]
        read = read * FACTORS[1] if factors else read
        errors.append(float((read - 2 * some.k[0]).abs().div(FACTORS[1]).max()))
    assert errors[1] < errors[0] / 5
