"""The reference device against the words of ``devices.base``, computed once more by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ropeway.devices.base import (
    Activations,
    DenseTensor,
    GroupedTensor,
    HostTensor,
    KVCache,
    KVDtype,
    StepShape,
    philox_uniform,
)
from ropeway.devices.reference import ReferenceDevice
from ropeway.devices.stream import InlineStream
from ropeway.errors import OutOfMemory

DEVICE = ReferenceDevice(stream=InlineStream())
KERNELS = DEVICE.kernels


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def grouped(n: int, k: int, group: int, bits: int, minimums: bool, scale_dtype: torch.dtype) -> GroupedTensor:
    low, high = (-128, 128) if bits == 8 else (0, 16) if minimums else (-8, 8)
    generator = torch.Generator().manual_seed(bits + group)
    codes = torch.randint(low, high, (n, k), generator=generator, dtype=torch.int8)
    scales = (torch.rand(n, k // group, generator=generator) * 0.02).to(scale_dtype)
    offsets = (torch.rand(n, k // group, generator=generator) - 0.5).to(scale_dtype) if minimums else None
    return GroupedTensor(codes, scales, offsets, group, 8 if bits == 8 else 4)


# --------------------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_products_round_inputs_as_the_layout_says(dtype: torch.dtype) -> None:
    x, weight, bias = random(5, 70), random(9, 70, seed=1).to(dtype), random(9, seed=2)
    inputs = x.bfloat16() if dtype == torch.bfloat16 else x
    exact = inputs.numpy(force=True).astype(np.float64) if dtype != torch.bfloat16 else inputs.double().numpy()
    want = exact @ weight.double().numpy().T + bias.double().numpy()
    got = KERNELS.linear(x, DEVICE.pack(DenseTensor(weight)), bias)
    assert torch.equal(got, torch.from_numpy(want).float())


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("minimums", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(8, 32), (8, 16), (4, 32)])
@pytest.mark.parametrize(("activations", "limit"), [("int16", 32512), ("int8", 127)])
def test_quantised_products_sum_integers_per_group(
    activations: Activations, limit: int, bits: int, group: int, minimums: bool, scale_dtype: torch.dtype
) -> None:
    x, weight = random(3, 96), grouped(4, 96, group, bits, minimums, scale_dtype)
    x[1, 32:64] = 0
    want = np.zeros((3, 4))
    for row in range(3):
        for at in range(0, 96, 32):
            part = x[row, at : at + 32].numpy()
            scale = np.abs(part).max() / np.float32(limit)
            inverse = np.float32(1) / scale if scale else np.float32(0)
            codes = np.rint(part * inverse).astype(np.int64)  # rint rounds half to even
            for n in range(4):
                for sub in range(0, 32, group):
                    w = weight.codes[n, at + sub : at + sub + group].numpy().astype(np.int64)
                    c = codes[sub : sub + group]
                    g = (at + sub) // group
                    want[row, n] += float(scale) * float(weight.scales[n, g]) * int((c * w).sum())
                    if weight.minimums is not None:
                        want[row, n] += float(scale) * float(weight.minimums[n, g]) * int(c.sum())
    device = ReferenceDevice(stream=InlineStream(), activations=activations)
    got = device.kernels.linear(x, device.pack(weight))
    np.testing.assert_allclose(got.numpy(), want, rtol=2e-7, atol=1e-9)


@pytest.mark.parametrize("layout", ["fp32", "bf16", "fp16", "int8", "int4"])
def test_gathered_rows_are_the_dequantised_ones(layout: str) -> None:
    tensor: HostTensor
    if layout in ("int8", "int4"):
        tensor = grouped(6, 64, 32, 8 if layout == "int8" else 4, True, torch.float16)
    else:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[layout]
        tensor = DenseTensor(random(6, 64).to(dtype))
    weight = DEVICE.pack(tensor)
    assert weight.layout == layout
    assert weight.shape == (6, 64)
    ids = torch.tensor([5, 0, 5], dtype=torch.int32)
    assert torch.equal(KERNELS.gather(weight, ids), tensor.dequantize()[ids])


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_a_row_of_a_product_does_not_depend_on_the_others(bits: int) -> None:
    x = random(33, 256)
    weight = DEVICE.pack(
        DenseTensor(random(40, 256, seed=1)) if not bits else grouped(40, 256, 32, bits, True, torch.half)
    )
    together = KERNELS.linear(x, weight)
    assert all(torch.equal(together[i : i + 1], KERNELS.linear(x[i : i + 1], weight)) for i in range(33))


def test_a_product_in_slices_equals_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, bias = DEVICE.pack(DenseTensor(random(50, 30))), random(4, 30, seed=1), random(50, seed=2)
    whole = KERNELS.linear(x, weight, bias)
    monkeypatch.setattr("ropeway.devices.reference._PRODUCT_SLICE", 30 * 7)
    assert torch.equal(KERNELS.linear(x, weight, bias), whole)


# --------------------------------------------------------------------------- attention


def cache_of(
    kv_heads: int, head_dim: int, *, blocks: int = 12, block_size: int = 4, dtype: KVDtype = "fp32"
) -> KVCache:
    cache = DEVICE.kv_cache(2, blocks, kv_heads, head_dim, block_size, dtype)
    block_bytes = DEVICE.kv_block_bytes(2, kv_heads, head_dim, block_size, dtype)
    noise = np.full((1, block_bytes), 0xFF, dtype=np.uint8)  # NaN, in every type
    cache.to_device(np.zeros(blocks, dtype=np.int32), noise, np.arange(blocks, dtype=np.int32))
    return cache


def shape_of(rows: list[tuple[int, int]], tables: list[list[int]]) -> StepShape:
    """Rows (start, count)."""

    def ints(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return StepShape(
        positions=ints([p for start, count in rows for p in range(start, start + count)]),
        query_start=ints(np.cumsum([0] + [count for _, count in rows]).tolist()),
        kv_lengths=ints([start + count for start, count in rows]),
        block_tables=ints(tables),
    )


def naive(q: Tensor, k: Tensor, v: Tensor, position: int, scale: float, window: int | None) -> Tensor:
    """One query [heads, d] over the keys and values of its sequence [n, kv_heads, d]."""
    first = 0 if window is None else max(position - window + 1, 0)
    share = q.shape[0] // k.shape[1]
    out = []
    for head in range(q.shape[0]):
        keys, values = k[first : position + 1, head // share], v[first : position + 1, head // share]
        out.append((keys @ q[head] * scale).softmax(0) @ values)
    return torch.stack(out)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_attention_sees_exactly_the_visible_keys_of_its_own_sequence(window: int | None, dtype: KVDtype) -> None:
    cache = cache_of(2, 8, dtype=dtype)
    lengths, tables = [10, 3, 7], [[5, 0, 9], [2, 77, 77], [7, 1, 77]]  # 77: undefined, never followed
    q, k, v = ([random(n, heads, 8, seed=s + n) for n in lengths] for s, heads in ((0, 4), (50, 2), (90, 2)))
    stored = torch.bfloat16 if dtype == "bf16" else torch.float32
    done = [0, 0, 0]
    for counts in ([6, 1, 7], [1, 2, 0], [3, 0, 0]):
        live = [i for i, count in enumerate(counts) if count]
        spans = [slice(done[i], done[i] + counts[i]) for i in live]
        shape = shape_of([(done[i], counts[i]) for i in live], [tables[i] for i in live])
        plan = KERNELS.plan_attention(cache, shape)
        for layer in (1, 0):
            step_k, step_v = (torch.cat([x[i][s] for i, s in zip(live, spans, strict=True)]) for x in (k, v))
            KERNELS.write_kv(cache, layer, step_k + layer, step_v, plan)
        step_q = torch.cat([q[i][s] for i, s in zip(live, spans, strict=True)])
        got = KERNELS.attention(step_q, cache, 0, plan, 0.3, window).split([counts[i] for i in live])
        for i, span, part in zip(live, spans, got, strict=True):
            for at, position in enumerate(range(span.start, span.stop)):
                want = naive(q[i][position], k[i].to(stored).float(), v[i].to(stored).float(), position, 0.3, window)
                torch.testing.assert_close(part[at], want, rtol=1e-5, atol=1e-6)
            done[i] = span.stop


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_reaches_only_those_who_see_it(poison: float) -> None:
    cache = cache_of(1, 4)
    plan = KERNELS.plan_attention(cache, shape_of([(0, 8)], [[3, 6]]))
    q, k, v = random(8, 2, 4), random(8, 1, 4, seed=1), random(8, 1, 4, seed=2)
    v[5] = poison
    KERNELS.write_kv(cache, 0, k, v, plan)
    assert KERNELS.attention(q, cache, 0, plan, 0.5).isfinite().all(dim=(1, 2)).tolist() == [True] * 5 + [False] * 3
    seen = KERNELS.attention(q, cache, 0, plan, 0.5, window=2).isfinite().all(dim=(1, 2)).tolist()
    assert seen == [True] * 5 + [False] * 2 + [True]


def test_a_key_that_is_not_a_number_reaches_only_those_who_see_it() -> None:
    cache = cache_of(1, 4)
    plan = KERNELS.plan_attention(cache, shape_of([(0, 4)], [[3]]))
    k = random(4, 1, 4, seed=1)
    k[2] = math.nan
    KERNELS.write_kv(cache, 0, k, random(4, 1, 4, seed=2), plan)
    out = KERNELS.attention(random(4, 2, 4), cache, 0, plan, 0.5)
    assert out.isfinite().all(dim=(1, 2)).tolist() == [True, True, False, False]


def test_what_is_written_is_written_to_its_slots_and_nowhere_else() -> None:
    cache = cache_of(1, 2)
    plan = KERNELS.plan_attention(cache, shape_of([(2, 4)], [[5, 1]]))
    KERNELS.write_kv(cache, 1, torch.ones(4, 1, 2), torch.ones(4, 1, 2), plan)
    for layer, slots in ((0, []), (1, [4, 5, 22, 23])):  # blocks of 4: block 1 holds slots 4 to 7
        for stored in cache.stored(layer, np.arange(12, dtype=np.int32)):
            assert stored.isfinite().all(dim=(1, 2)).nonzero().flatten().tolist() == slots


# --------------------------------------------------------------------------- small kernels


def test_rotation_turns_feature_pairs_half_a_head_apart_and_leaves_the_rest() -> None:
    angles = torch.tensor([[0.0, 0.0], [0.5, 2.0], [1.0, 4.0]])
    table = torch.stack((angles.cos(), angles.sin()), 1)
    x = random(2, 3, 6)
    out = KERNELS.rope(x, torch.tensor([2, 0], dtype=torch.int32), table)
    assert torch.equal(out[1], x[1])
    assert torch.equal(out[..., 4:], x[..., 4:])
    turned = torch.complex(x[0, :, :2], x[0, :, 2:4]) * torch.polar(torch.ones(2), angles[2])
    torch.testing.assert_close(torch.complex(out[0, :, :2], out[0, :, 2:4]), turned)


def test_norms_and_gate_are_those_of_torch() -> None:
    x, residual, weight = random(3, 2, 16), random(3, 2, 16, seed=1), random(16, seed=2)
    want = torch.nn.functional.rms_norm(x + residual, (16,), weight, 1e-5)
    got, total = KERNELS.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(got, want)
    assert torch.equal(total, x + residual)
    assert torch.equal(KERNELS.rms_norm(total, weight, 1e-5), got)
    torch.testing.assert_close(KERNELS.silu_and_mul(x, residual), torch.nn.functional.silu(x) * residual)


def test_empty_batches_are_allowed_everywhere() -> None:
    cache = cache_of(1, 4)
    plan = KERNELS.plan_attention(cache, shape_of([], []))
    none = torch.empty(0, dtype=torch.int32)
    for tensor in (DenseTensor(random(3, 64)), grouped(3, 64, 32, 4, True, torch.half)):
        weight = DEVICE.pack(tensor)
        assert KERNELS.linear(torch.empty(0, 64), weight, torch.ones(3)).shape == (0, 3)
        assert KERNELS.gather(weight, none).shape == (0, 64)
    KERNELS.write_kv(cache, 0, torch.empty(0, 1, 4), torch.empty(0, 1, 4), plan)
    assert KERNELS.attention(torch.empty(0, 2, 4), cache, 0, plan, 1.0).shape == (0, 2, 4)
    assert KERNELS.rms_norm(torch.empty(0, 4), torch.ones(4), 1e-6).shape == (0, 4)
    assert KERNELS.rope(torch.empty(0, 2, 4), none, torch.ones(9, 2, 2)).shape == (0, 2, 4)
    assert KERNELS.silu_and_mul(torch.empty(0, 4), torch.empty(0, 4)).shape == (0, 4)


# --------------------------------------------------------------------------- the device


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_block_has_the_announced_size(dtype: KVDtype) -> None:
    cache = DEVICE.kv_cache(3, 5, 2, 8, 16, dtype)
    assert cache.nbytes == 5 * DEVICE.kv_block_bytes(3, 2, 8, 16, dtype)
    assert (cache.num_blocks, cache.block_size) == (5, 16)


def test_a_pool_that_does_not_fit_names_the_largest_that_would() -> None:
    block = DEVICE.kv_block_bytes(32, 8, 128, 16, "fp32")
    blocks = DEVICE.memory().total // block + 1
    with pytest.raises(OutOfMemory, match=rf"{blocks} blocks needs .* the largest that fits is \d+ blocks"):
        DEVICE.kv_cache(32, blocks, 8, 128, 16, "fp32")


def test_arrays_go_up_without_a_copy_and_come_back_equal() -> None:
    array = np.arange(6, dtype=np.int32)
    tensor = DEVICE.upload(array)
    array[0] = 9
    assert DEVICE.download(tensor).tolist() == [9, 1, 2, 3, 4, 5]
    array.flags.writeable = False
    DEVICE.upload(array)[1] = 7
    assert array[1] == 1


def test_the_random_numbers_are_philox() -> None:
    # First word for an all-zero key and counter: the known-answer test that comes with Random123.
    zero = np.zeros(1, dtype=np.uint64)
    assert philox_uniform(zero, zero)[0] == np.float32((0x6627E8D5 >> 8) * 2.0**-24)
