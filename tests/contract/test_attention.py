"""Native attention over the paged cache: against exact math, and bit against bit however the work is cut."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ropeway.devices.base import FACTORED, KEY_GROUP, KVDtype
from ropeway.devices.reference import ReferenceDevice
from ropeway.devices.stored import quantize_signed, quantize_unsigned, quantize_values
from ropeway.devices.stream import InlineStream
from ropeway.errors import ConfigError, OutOfMemory
from tests.support.native import CONTEXTS, _native
from tests.support.paged import Rows, exact_attention, scattered_blocks  # isort: split

from ropeway.devices.cpu.attention import attention, plan_attention, write_kv
from ropeway.devices.cpu.kv import CpuKVCache, block_bytes

every_isa = pytest.mark.parametrize("isa", CONTEXTS)
LAYERS = 2
DTYPES: tuple[KVDtype, ...] = ("fp32", "bf16", "int8", "int4", "int4-full")
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
TOLERANCE: dict[KVDtype, float] = {"fp32": 2e-5, "bf16": 8e-3, "int8": 1e-3, "int4": 2e-3, "int4-full": 2e-3}
"""Absolute, of outputs around 1: bf16 rounds the softmax's weights to 8 bits, the quantised types to 15."""


def as_stored(k: Tensor, v: Tensor, dtype: KVDtype) -> tuple[Tensor, Tensor]:
    """Keys and values as a cache without factors gives them back; of ``int4-full``, those of groups that are full."""
    small_values = torch.cat([g.dequantize() for g in quantize_values(v)], dim=-1)
    match dtype:
        case "fp32":
            return k, v
        case "bf16":
            return k.bfloat16().float(), v.bfloat16().float()
        case "int8":
            return quantize_signed(k).dequantize(), quantize_signed(v).dequantize()
        case "int4":
            return quantize_signed(k).dequantize(), small_values
        case "int4-full":
            groups = k[: len(k) // KEY_GROUP * KEY_GROUP].bfloat16().float().unflatten(0, (-1, KEY_GROUP))
            keys = quantize_unsigned(groups.movedim(1, -1)).dequantize().movedim(-1, 1).flatten(0, 1)
            return torch.cat((keys, torch.full_like(k[len(keys) :], torch.nan))), small_values


def smallest_block(dtype: KVDtype) -> int:
    return KEY_GROUP if dtype == "int4-full" else 16 if dtype in FACTORED else 1


def usual_block(dtype: KVDtype) -> int:
    return max(16, smallest_block(dtype))


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Sequences:
    """Random queries, keys and values of whole sequences, held by position so that any cut of them is the same."""

    def __init__(self, lengths: Sequence[int], heads: int, kv_heads: int, head_dim: int, seed: int = 0) -> None:
        self.lengths = lengths
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.q = [2 * normal(n, heads, head_dim, seed=seed + 3 * i) for i, n in enumerate(lengths)]
        self.k = [normal(n, kv_heads, head_dim, seed=seed + 3 * i + 1) for i, n in enumerate(lengths)]
        self.v = [normal(n, kv_heads, head_dim, seed=seed + 3 * i + 2) for i, n in enumerate(lengths)]

    def cache(self, num_blocks: int, block_size: int, dtype: KVDtype) -> CpuKVCache:
        """A cache in which every value that nobody has written is a NaN."""
        cache = CpuKVCache(LAYERS, num_blocks, self.kv_heads, self.head_dim, block_size, dtype)
        cache.data.view(np.uint16)[:] = 0x7FFF
        return cache

    def run(
        self,
        context: _native.Context,
        cache: CpuKVCache,
        blocks: Sequence[Sequence[int]],
        steps: Sequence[Sequence[tuple[int, int]]],
        window: int | None = None,
    ) -> list[Tensor]:
        """Steps of (sequence, count) rows, each writing its keys before it attends -> outputs by sequence."""
        outputs: list[list[Tensor]] = [[] for _ in self.lengths]
        done = [0] * len(self.lengths)
        for rows in steps:
            spans = [(i, done[i], done[i] + count) for i, count in rows]
            shape = Rows([n for _, n in rows], [end for *_, end in spans], [blocks[i] for i, _ in rows]).step()
            plan = plan_attention(context, cache, shape)
            for layer in range(LAYERS):
                k, v, q = (torch.cat([x[i][a:b] for i, a, b in spans]) for x in (self.k, self.v, self.q))
                write_kv(context, cache, layer, k + layer, v, plan)
                out = attention(context, q, cache, layer, plan, self.head_dim**-0.5, window)
            for (i, _, end), part in zip(spans, out.split([n for _, n in rows]), strict=True):
                outputs[i].append(part)
                done[i] = end
        return [torch.cat(parts) for parts in outputs]

    def exact(self, dtype: KVDtype, window: int | None = None) -> list[Tensor]:
        """With a bf16 cache, scaled queries (for powers of two) are rounded to bf16, too."""
        outputs = []
        scale = torch.tensor(self.head_dim**-0.5) * torch.tensor(1.4426950408889634)
        for q, k, v in zip(self.q, self.k, self.v, strict=True):
            scaled = (q * scale).bfloat16().double() if dtype == "bf16" else q.double() * scale.double()
            k = k + (LAYERS - 1)
            keys, values = as_stored(k, v, dtype)
            parts, piece = [], KEY_GROUP if dtype == "int4-full" else len(k)
            for first in range(0, len(k), piece):
                last = min(first + piece, len(k))
                own = k[first:last].bfloat16().float() if dtype == "int4-full" else keys[first:last]
                seen = torch.cat((keys[:first], own))
                parts.append(exact_attention(scaled[first:last], seen, values[:last], 1 / 1.4426950408889634, window))
            outputs.append(torch.cat(parts))
        return outputs


def assert_close(outputs: Sequence[Tensor], exact: Sequence[Tensor], dtype: KVDtype) -> None:
    for out, want in zip(outputs, exact, strict=True):
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=TOLERANCE[dtype])


def assert_same_bits(outputs: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    for out, other in zip(outputs, others, strict=True):
        assert torch.equal(out.view(torch.int32), other.view(torch.int32))


# --------------------------------------------------------------------------- values


@every_isa
@pytest.mark.parametrize(
    ("dtype", "block_size"),
    [(dtype, size) for dtype in DTYPES for size in (1, 2, 4, 8, 16, 32, 64, 512) if size >= smallest_block(dtype)],
)
def test_attention_agrees_with_exact_math_for_every_block_size(isa: str, dtype: KVDtype, block_size: int) -> None:
    lengths = [1, 15, 300]
    sequences = Sequences(lengths, heads=6, kv_heads=2, head_dim=64)
    blocks = scattered_blocks(lengths, block_size)
    cache = sequences.cache(sum(map(len, blocks)) + 3, block_size, dtype)
    outputs = sequences.run(CONTEXTS[isa], cache, blocks, [[(0, 1), (1, 15), (2, 70)], [(2, 229)], [(2, 1)]])
    assert_close(outputs, sequences.exact(dtype), dtype)


@every_isa
@pytest.mark.parametrize("head_dim", [1, 5, 16, 31, 48, 64, 80, 128, 256])
def test_attention_agrees_with_exact_math_for_every_head_size(isa: str, head_dim: int) -> None:
    lengths = [40, 270]
    sequences = Sequences(lengths, heads=4, kv_heads=2, head_dim=head_dim)
    for dtype in DTYPES:
        blocks = scattered_blocks(lengths, usual_block(dtype))
        cache = sequences.cache(sum(map(len, blocks)) + 3, usual_block(dtype), dtype)
        outputs = sequences.run(CONTEXTS[isa], cache, blocks, [[(0, 40), (1, 257)], [(1, 12)], [(1, 1)]])
        assert_close(outputs, sequences.exact(dtype), dtype)


@every_isa
@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8])
def test_attention_agrees_with_exact_math_for_every_number_of_heads_in_a_group(isa: str, group: int) -> None:
    lengths = [33, 270]
    sequences = Sequences(lengths, heads=3 * group, kv_heads=3, head_dim=32)
    for dtype in DTYPES:
        blocks = scattered_blocks(lengths, usual_block(dtype))
        cache = sequences.cache(sum(map(len, blocks)) + 3, usual_block(dtype), dtype)
        outputs = sequences.run(CONTEXTS[isa], cache, blocks, [[(0, 32), (1, 264)], [(0, 1), (1, 5)], [(1, 1)]])
        assert_close(outputs, sequences.exact(dtype), dtype)


@every_isa
@pytest.mark.parametrize("window", [1, 16, 100, 256, 257])
def test_a_window_hides_older_keys(isa: str, window: int) -> None:
    lengths = [600, 40]
    sequences = Sequences(lengths, heads=4, kv_heads=2, head_dim=32)
    steps = [[(0, 500), (1, 39)], [(0, 99)], [(1, 1), (0, 1)]]
    for dtype in DTYPES:
        blocks = scattered_blocks(lengths, usual_block(dtype))
        cache = sequences.cache(sum(map(len, blocks)) + 3, usual_block(dtype), dtype)
        outputs = sequences.run(CONTEXTS[isa], cache, blocks, steps, window)
        assert_close(outputs, sequences.exact(dtype, window), dtype)


@every_isa
def test_blocks_that_left_the_window_may_be_gone_from_the_table(isa: str) -> None:
    sequences = Sequences([600], heads=2, kv_heads=1, head_dim=32)
    for block_size in (4, 16):
        blocks = scattered_blocks([600], block_size)
        cache = sequences.cache(len(blocks[0]) + 3, block_size, "bf16")
        want = sequences.run(CONTEXTS[isa], cache, blocks, [[(0, 599)], [(0, 1)]], window=70)[0][-1]
        shape = Rows([1], [600], blocks).step()
        shape.block_tables[0, : (600 - 70) // block_size] = 0
        plan = plan_attention(CONTEXTS[isa], cache, shape)
        got = attention(CONTEXTS[isa], sequences.q[0][-1:], cache, LAYERS - 1, plan, 32**-0.5, 70)
        assert torch.equal(got[0], want)


@every_isa
def test_attention_agrees_with_the_reference_device(isa: str) -> None:
    lengths = [1, 77, 300]
    sequences = Sequences(lengths, heads=6, kv_heads=3, head_dim=64)
    reference = ReferenceDevice(stream=InlineStream())
    for dtype in DTYPES:
        blocks = scattered_blocks(lengths, usual_block(dtype))
        cache = sequences.cache(sum(map(len, blocks)) + 3, usual_block(dtype), dtype)
        expected = reference.kv_cache(LAYERS, cache.num_blocks, 3, 64, usual_block(dtype), dtype)
        done = [0, 0, 0]
        for counts in ([0, 7, 299], [1, 70, 1]):
            done = [a + b for a, b in zip(done, counts, strict=True)]
            shape = Rows(counts, done, blocks).step()
            q, k, v = (
                torch.cat([x[n - count : n] for x, n, count in zip(each, done, counts, strict=True)])
                for each in (sequences.q, sequences.k, sequences.v)
            )
            plan = plan_attention(CONTEXTS[isa], cache, shape)
            their_plan = reference.kernels.plan_attention(expected, shape)
            write_kv(CONTEXTS[isa], cache, 1, k, v, plan)
            reference.kernels.write_kv(expected, 1, k, v, their_plan)
            got = attention(CONTEXTS[isa], q, cache, 1, plan, 0.125, 50)
            want = reference.kernels.attention(q, expected, 1, their_plan, 0.125, 50)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=3e-2 if dtype == "bf16" else TOLERANCE[dtype])


@every_isa
def test_bfloat16_keys_are_rounded_to_nearest_even_and_nan_stays_nan(isa: str) -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x80000001, 0x7F800001, 0x7F800000], np.uint32)
    values = torch.from_numpy(bits.view(np.float32)).view(1, 1, 7)
    cache = CpuKVCache(1, 1, 1, 7, 1, "bf16")
    plan = plan_attention(CONTEXTS[isa], cache, Rows([1], [1], [[0]]).step())
    write_kv(CONTEXTS[isa], cache, 0, values, values, plan)
    for stored in cache.stored(0, np.zeros(1, np.int32)):
        torch.testing.assert_close(stored, values.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


@every_isa
def test_huge_scores_do_not_overflow(isa: str) -> None:
    sequences = Sequences([64], heads=2, kv_heads=1, head_dim=32)
    sequences.q[0] *= 1e4
    blocks = scattered_blocks([64], 16)
    cache = sequences.cache(7, 16, "fp32")
    outputs = sequences.run(CONTEXTS[isa], cache, blocks, [[(0, 64)]])
    assert_close(outputs, sequences.exact("fp32"), "fp32")


@every_isa
@every_dtype
def test_a_query_that_is_nan_spoils_only_itself(isa: str, dtype: KVDtype) -> None:
    sequences = Sequences([40], heads=2, kv_heads=1, head_dim=32)
    sequences.q[0][7] = torch.nan
    blocks = scattered_blocks([40], usual_block(dtype))
    (out,) = sequences.run(CONTEXTS[isa], sequences.cache(6, usual_block(dtype), dtype), blocks, [[(0, 40)]])
    assert out[7].isnan().all()
    assert not out[[*range(7), *range(8, 40)]].isnan().any()


@every_isa
@every_dtype
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_key_or_value_that_is_not_finite_spoils_only_those_who_see_it(
    isa: str, dtype: KVDtype, bad: float, which: str
) -> None:
    for length, window, spoilt in ((40, None, range(7, 40)), (300, 20, range(270, 290))):
        if window is not None and dtype == "int4-full" and which == "k":
            continue  # it spoils its group
        sequences = Sequences([length], heads=4, kv_heads=2, head_dim=32)
        getattr(sequences, which)[0][spoilt[0], 1, 3] = bad
        blocks = scattered_blocks([length], usual_block(dtype))
        for steps in ([[(0, length)]], [[(0, 7)], [(0, length - 8)], [(0, 1)]]):
            cache = sequences.cache(len(blocks[0]) + 3, usual_block(dtype), dtype)
            (out,) = sequences.run(CONTEXTS[isa], cache, blocks, steps, window)
            others = [i for i in range(length) if i not in spoilt]
            assert not out[:, :2].isnan().any()
            assert not out[others].isnan().any()
            assert (~out[spoilt[0] :][: len(spoilt), 2:].isfinite()).any(-1).all() or (
                which == "k" and bad == torch.inf
            )


@every_isa
@pytest.mark.parametrize("dtype", FACTORED)
def test_keys_are_divided_by_factors_and_queries_multiplied(isa: str, dtype: KVDtype) -> None:
    heads, kv_heads, head_dim, length = 4, 2, 48, 70
    sequences = Sequences([length], heads, kv_heads, head_dim)
    factors = 2 ** normal(LAYERS, kv_heads, head_dim, seed=5)
    blocks = scattered_blocks([length], 16)
    cache = CpuKVCache(LAYERS, len(blocks[0]) + 3, kv_heads, head_dim, 16, dtype, factors)
    (out,) = sequences.run(CONTEXTS[isa], cache, blocks, [[(0, 60)], [(0, 10)]])
    k, v = as_stored((sequences.k[0] + LAYERS - 1) / factors[-1], sequences.v[0], dtype)
    q = sequences.q[0] * factors[-1].repeat_interleave(heads // kv_heads, dim=0)
    assert_close([out], [exact_attention(q, k, v, head_dim**-0.5)], dtype)


@every_isa
@pytest.mark.parametrize("head_dim", [1, 5, 16, 64, 65, 80, 96, 128, 200])
def test_what_is_stored_is_the_reference_devices_bit_for_bit(isa: str, head_dim: int) -> None:
    reference = ReferenceDevice(stream=InlineStream())
    tokens, kv_heads = 70, 2
    sizes = 2.0 ** torch.arange(-30, 40)[:, None, None]
    k, v = (sizes * normal(tokens, kv_heads, head_dim, seed=i) for i in range(2))
    for tensor in (k, v):
        tensor[3] = 0.0
        tensor[5, 0] = 1.5
        tensor[8, 1, 0] = torch.nan
        tensor[9, 0, head_dim - 1] = -torch.inf
        tensor[10] = -0.0
        tensor[11] = 1e-42
        tensor[12] = tensor[12].abs()
        tensor[13] = -tensor[13].abs()
    blocks = scattered_blocks([tokens], 32)
    shape = Rows([tokens], [tokens], blocks).step()
    for dtype in DTYPES:
        factors = 2 ** normal(1, kv_heads, head_dim, seed=7) if dtype in FACTORED else None
        ours = CpuKVCache(1, len(blocks[0]) + 3, kv_heads, head_dim, 32, dtype, factors)
        theirs = reference.kv_cache(1, ours.num_blocks, kv_heads, head_dim, 32, dtype, factors)
        write_kv(CONTEXTS[isa], ours, 0, k, v, plan_attention(CONTEXTS[isa], ours, shape))
        reference.kernels.write_kv(theirs, 0, k, v, reference.kernels.plan_attention(theirs, shape))
        chosen = np.array(blocks[0], np.int32)
        keys = tokens // KEY_GROUP * KEY_GROUP if dtype == "int4-full" else tokens
        for got, want, known in zip(ours.stored(0, chosen), theirs.stored(0, chosen), (keys, tokens), strict=True):
            torch.testing.assert_close(got[:known], want[:known], rtol=0, atol=0, equal_nan=True)


# --------------------------------------------------------------------------- same request, same bits


@functools.cache
def context_of(isa: str, threads: int) -> _native.Context:
    return _native.Context(threads, isa)


@st.composite
def cuts(draw: st.DrawFn, lengths: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Steps of (sequence, count) rows that compute all of these sequences, in any order and in any chunks."""
    left = list(lengths)
    steps = []
    while any(left):
        rows = []
        for i in draw(st.permutations([i for i, n in enumerate(left) if n])):
            count = min(left[i], draw(st.sampled_from([1, 3, 33, 100, 400, 700])))
            if not rows or draw(st.booleans()):
                rows.append((i, count))
                left[i] -= count
        steps.append(rows)
    return steps


@every_isa
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_query_has_the_same_bits_however_the_work_is_cut(isa: str, data: st.DataObject) -> None:
    """Chunks, batches, the places of blocks, threads, and the split over spans that goes with few rows."""
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    sizes = [size for size in (1, 8, 16, 32, 64) if size >= smallest_block(dtype)]
    block_size = data.draw(st.sampled_from(sizes), "block size")
    head_dim = data.draw(st.sampled_from([24, 32, 80]), "head_dim")
    window = data.draw(st.sampled_from([None, 50, 300]), "window")
    group = data.draw(st.sampled_from([1, 2, 3, 7]), "group")
    lengths = data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=4), "lengths")
    steps = data.draw(cuts(lengths), "steps")
    threads = data.draw(st.sampled_from([1, 2, 5]), "threads")
    sequences = Sequences(lengths, heads=2 * group, kv_heads=2, head_dim=head_dim)
    outputs = []
    for seed, context, how in (
        (0, context_of(isa, 1), [[(i, n)] for i, n in enumerate(lengths)]),
        (1, context_of(isa, threads), steps),
    ):
        blocks = scattered_blocks(lengths, block_size, seed=seed)
        cache = sequences.cache(sum(map(len, blocks)) + 3, block_size, dtype)
        outputs.append(sequences.run(context, cache, blocks, how, window))
    alone, together = outputs
    assert not any(out.isnan().any() for out in alone)
    assert_same_bits(alone, together)


@every_isa
@every_dtype
def test_a_long_context_is_split_over_spans_with_the_same_bits(isa: str, dtype: KVDtype) -> None:
    length = 3000
    sequences = Sequences([length], heads=4, kv_heads=2, head_dim=64)
    blocks = scattered_blocks([length], usual_block(dtype))
    outputs = []
    for threads in (1, 8):
        context = context_of(isa, threads)
        cache = sequences.cache(len(blocks[0]) + 3, usual_block(dtype), "fp32")
        plan = plan_attention(context, cache, Rows([5], [length], blocks).step())
        assert (plan.native.merges > 0) == (threads == 8)
        cache = sequences.cache(len(blocks[0]) + 3, usual_block(dtype), dtype)
        (out,) = sequences.run(context, cache, blocks, [[(0, length - 5)], [(0, 5)]])
        outputs.append([out[-5:]])
    assert_same_bits(*outputs)
    assert_close(outputs[0], [sequences.exact(dtype)[0][-5:]], dtype)


# --------------------------------------------------------------------------- shapes and refusals


@every_isa
def test_an_empty_step_is_an_empty_result(isa: str) -> None:
    cache = CpuKVCache(1, 4, 2, 32, 16, "bf16")
    plan = plan_attention(CONTEXTS[isa], cache, Rows([], [], []).step())
    empty = torch.empty(0, 2, 32)
    write_kv(CONTEXTS[isa], cache, 0, empty, empty, plan)
    assert attention(CONTEXTS[isa], torch.empty(0, 4, 32), cache, 0, plan, 1.0).shape == (0, 4, 32)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (Rows([1], [17], [[0, 4]]), "block 4 is not one of the cache's 4"),
        (Rows([1], [17], [[0, -1]]), "block -1 is not one of the cache's 4"),
        (Rows([1], [65], [[0, 1]]), "65 tokens need 5 blocks; the table has 4"),
        (Rows([3], [2], [[0]]), "positions start at -1"),
    ],
)
def test_a_step_that_does_not_fit_the_cache_is_refused(rows: Rows, message: str) -> None:
    cache = CpuKVCache(1, 4, 2, 32, 16, "bf16")
    with pytest.raises(ValueError, match=message):
        plan_attention(CONTEXTS["portable"], cache, rows.step())


def test_positions_that_do_not_follow_each_other_are_refused() -> None:
    cache = CpuKVCache(1, 4, 2, 32, 16, "bf16")
    step = Rows([1, 4], [3, 9], [[0], [1]]).step()
    step.positions[3] = 8
    with pytest.raises(ValueError, match="row 1: token 2 is at position 8, not 7"):
        plan_attention(CONTEXTS["portable"], cache, step)


def test_a_row_without_tokens_may_have_any_length() -> None:
    cache = CpuKVCache(1, 4, 2, 32, 16, "bf16")
    step = Rows([2, 0], [2, 0], [[0], []]).step()
    for length in (-(2**31), 0, 2**31 - 1):
        step.kv_lengths[1] = length
        plan = plan_attention(CONTEXTS["portable"], cache, step)
        assert plan.native.tasks > 0


def test_arguments_that_do_not_fit_the_plan_are_refused() -> None:
    cache = CpuKVCache(1, 4, 2, 32, 16, "bf16")
    context = CONTEXTS["portable"]
    plan = plan_attention(context, cache, Rows([2], [2], [[0]]).step())
    good, q = torch.zeros(2, 2, 32), torch.zeros(2, 4, 32)
    with pytest.raises(ValueError, match="v must be contiguous float32"):
        write_kv(context, cache, 0, good, good[:1], plan)
    with pytest.raises(ValueError, match="layer 1 is not one"):
        write_kv(context, cache, 1, good, good, plan)
    with pytest.raises(ValueError, match="q must be contiguous float32"):
        attention(context, q.double(), cache, 0, plan, 1.0)
    with pytest.raises(ValueError, match="3 query heads cannot share 2"):
        attention(context, q[:, :3].contiguous(), cache, 0, plan, 1.0)
    with pytest.raises(ValueError, match="window"):
        attention(context, q, cache, 0, plan, 1.0, 0)


def test_a_pool_too_large_for_the_memory_is_refused_with_the_largest_that_fits() -> None:
    with pytest.raises(OutOfMemory, match=r"needs \d+ MiB, but only \d+ MiB .* largest that fits is \d+ blocks"):
        CpuKVCache(32, 1 << 30, 8, 128, 16, "bf16")


def test_block_bytes_count_keys_and_values_of_all_layers() -> None:
    assert block_bytes(3, 2, 64, 16, "bf16") == 2 * 3 * 2 * 64 * 16 * 2
    assert CpuKVCache(3, 5, 2, 64, 16, "fp32").nbytes == 5 * block_bytes(3, 2, 64, 16, "fp32")


def test_quantised_blocks_hold_scales_and_little_else() -> None:
    plain = block_bytes(3, 2, 128, 16, "bf16")
    assert block_bytes(3, 2, 128, 16, "int8") == 3 * 2 * 16 * (128 + 2) * 2
    assert plain / block_bytes(3, 2, 128, 16, "int8") > 1.9
    assert plain / block_bytes(3, 2, 128, 16, "int4") > 2.5
    assert block_bytes(3, 2, 64, 16, "bf16") / block_bytes(3, 2, 64, 16, "int4") > 2.4
    assert block_bytes(3, 2, 64, 32, "bf16") / block_bytes(3, 2, 64, 32, "int4-full") > 3.3


def test_quantised_blocks_smaller_than_a_tile_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"int8 needs blocks of at least 16 positions, not 8") as error:
        block_bytes(1, 1, 32, 8, "int8")
    assert error.value.param == "block_size"


def test_int4_full_needs_blocks_of_whole_groups() -> None:
    with pytest.raises(ConfigError, match=r"groups of 32 positions.*--block-size 32"):
        block_bytes(1, 1, 32, 16, "int4-full")


def test_heads_too_large_for_exact_integers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"int4 holds heads of at most 512 features, not 576"):
        CpuKVCache(1, 4, 1, 576, 16, "int4")


def test_factors_that_do_not_fit_the_cache_are_refused() -> None:
    with pytest.raises(ValueError, match="bf16 are not divided"):
        CpuKVCache(1, 4, 1, 32, 16, "bf16", torch.ones(1, 1, 32))
    with pytest.raises(ValueError, match=r"key_factors must be float32 \[1, 1, 32\]"):
        CpuKVCache(1, 4, 1, 32, 16, "int8", torch.ones(1, 32))


def test_a_block_size_must_be_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="power of two, not 12"):
        CpuKVCache(1, 4, 1, 32, 12, "fp32")
