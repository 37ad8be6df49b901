"""Attention over the paged cache: planned once per step, used by every layer."""

from __future__ import annotations

import torch
from torch import Tensor

from ropeway.devices.base import AttentionPlan, KVCache, StepShape
from ropeway.devices.cpu import _native
from ropeway.devices.cpu.kv import CpuKVCache


class CpuAttentionPlan:
    """Work of one step; keeps the block tables it refers to alive."""

    __slots__ = ("_block_tables", "kv_shape", "native", "tokens")

    def __init__(
        self, native: _native.AttentionPlan, block_tables: Tensor, tokens: int, kv_shape: tuple[int, int, int]
    ) -> None:
        self.native = native
        self.tokens = tokens
        self.kv_shape = kv_shape
        """Of a layer's new keys: (tokens, kv_heads, head_dim)."""
        self._block_tables = block_tables


def plan_attention(context: _native.Context, cache: KVCache, shape: StepShape) -> CpuAttentionPlan:
    """See ``devices.base.Kernels.plan_attention``.

    Raises ``ValueError`` where the step contradicts itself or names blocks the cache does not have."""
    assert isinstance(cache, CpuKVCache)
    rows = check_shape(shape)
    tokens, tables = shape.positions.shape[0], shape.block_tables
    native = _native.plan_attention(
        context,
        cache.native,
        cache.num_blocks,
        shape.positions.data_ptr(),
        shape.query_start.data_ptr(),
        shape.kv_lengths.data_ptr(),
        tables.data_ptr(),
        0 if shape.slots is None else shape.slots.data_ptr(),
        rows,
        tokens,
        tables.stride(0),
        tables.shape[1],
    )
    return CpuAttentionPlan(native, tables, tokens, (tokens, cache.kv_heads, cache.head_dim))


def check_shape(shape: StepShape) -> int:
    """The number of rows; raises ``ValueError`` for columns that a kernel cannot read."""
    rows, tables = shape.kv_lengths.shape[0], shape.block_tables
    for column in (shape.positions, shape.query_start, shape.kv_lengths, shape.slots):
        if column is None:
            continue
        if column.dtype != torch.int32 or not column.is_contiguous():
            raise ValueError(f"a step's columns must be contiguous int32, not {column.dtype} {list(column.shape)}")
    if shape.query_start.shape[0] != rows + 1 or tables.shape[0] != rows:
        raise ValueError(
            f"a step of {rows} rows needs query_start [{rows + 1}] and block_tables [{rows}, blocks], "
            f"not {list(shape.query_start.shape)} and {list(tables.shape)}"
        )
    if shape.slots is not None and shape.slots.shape[0] != rows:
        raise ValueError(f"a step of {rows} rows needs slots [{rows}], not {list(shape.slots.shape)}")
    if tables.dtype != torch.int32 or (tables.shape[1] > 1 and rows > 0 and tables.stride(1) != 1):
        raise ValueError(f"block_tables must be int32 rows, not {tables.dtype} with strides {list(tables.stride())}")
    return rows


def write_kv(context: _native.Context, cache: KVCache, layer: int, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
    """See ``devices.base.Kernels.write_kv``. Raises ``ValueError`` for arguments that do not fit together."""
    assert isinstance(cache, CpuKVCache)
    assert isinstance(plan, CpuAttentionPlan)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != torch.float32 or tensor.shape != plan.kv_shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous float32 {list(plan.kv_shape)}, not {tensor.dtype} {list(tensor.shape)}"
            )
    _check_layer(cache, layer)
    _native.write_kv(context, cache.native, layer, k.data_ptr(), v.data_ptr(), plan.native)


def attention(
    context: _native.Context,
    q: Tensor,
    cache: KVCache,
    layer: int,
    plan: AttentionPlan,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """See ``devices.base.Kernels.attention``. Raises ``ValueError`` for arguments that do not fit together."""
    assert isinstance(cache, CpuKVCache)
    assert isinstance(plan, CpuAttentionPlan)
    tokens, heads, head_dim = q.shape
    if q.dtype != torch.float32 or not q.is_contiguous() or (tokens, head_dim) != (plan.tokens, cache.head_dim):
        raise ValueError(
            f"q must be contiguous float32 [{plan.tokens}, heads, {cache.head_dim}], not {q.dtype} {list(q.shape)}"
        )
    if heads % cache.kv_heads:
        raise ValueError(f"{heads} query heads cannot share {cache.kv_heads} key heads evenly")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, not {window}")
    _check_layer(cache, layer)
    out = torch.empty_like(q)
    _native.attention(
        context, q.data_ptr(), cache.native, layer, plan.native, out.data_ptr(), heads, scale, window or 0
    )
    return out


def _check_layer(cache: CpuKVCache, layer: int) -> None:
    if not 0 <= layer < cache.layers:
        raise ValueError(f"layer {layer} is not one of the cache's {cache.layers}")
