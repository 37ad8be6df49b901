"""Kernels of the cpu device on handles: they check shapes as the real ones do, and note an operation."""

from __future__ import annotations

import torch
from torch import Tensor

from ropeway.devices.base import AttentionPlan, KVCache, Weight
from ropeway.devices.cpu.kv import CpuKVCache
from ropeway.devices.cpu.operations import (
    Attention,
    Gather,
    Linear,
    Operation,
    Part,
    Reduction,
    RmsNorm,
    Rope,
    SiluAndMul,
    WriteKV,
)
from ropeway.devices.cpu.weights import PackedWeight
from ropeway.devices.recording import Collective, Handle, PlanHandle, RowCount, Value, as_tensor
from ropeway.errors import Unsupported


class CpuRecorder:
    """The operations of one recording, in order. Kernel by kernel see ``devices.base.Kernels``; all raise
    ``ValueError`` for arguments that do not fit together, and ``Unsupported`` for a tensor that is no handle of this
    recording."""

    def __init__(self) -> None:
        self.rows = RowCount()
        self.plan = PlanHandle()
        self.operations: list[Operation] = []

    def input(self, features: int | None) -> tuple[Value, Tensor]:
        """A value that replays are given, and its handle."""
        value = Value(features or 1)
        shape = (self.rows,) if features is None else (self.rows, features)
        return value, as_tensor(Handle(self, value, shape))

    def collective(self, run: Collective, x: Value, out: Value) -> None:
        self.operations.append(Reduction(run, x, out))

    def gather(self, table: Weight, ids: Tensor, first: int | None) -> Tensor:
        assert isinstance(table, PackedWeight)
        out = Value(table.shape[1])
        self.operations.append(Gather(table, self._column("ids", ids), out, first))
        return self._handle(out, out.features)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, PackedWeight)
        n, k = weight.shape
        if bias is not None:
            _check_constant("bias", bias, (n,))
        out = Value(n)
        self.operations.append(Linear(self._value("x", x, k), (Part(weight, bias, out),)))
        return self._handle(out, n)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        sizes = self._known("x", x).sizes
        _check_constant("weight", weight, sizes[-1:])
        out = Value(self._value("x", x, *sizes).features)
        self.operations.append(RmsNorm(self._value("x", x, *sizes), None, weight, eps, out, None))
        return self._handle(out, *sizes)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        sizes = self._known("x", x).sizes
        _check_constant("weight", weight, sizes[-1:])
        value, other = self._value("x", x, *sizes), self._value("residual", residual, *sizes)
        out, total = Value(value.features), Value(value.features)
        self.operations.append(RmsNorm(value, other, weight, eps, out, total))
        return self._handle(out, *sizes), self._handle(total, *sizes)

    def rope(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        heads, size = self._known("x", x).sizes
        table_positions, _, half = table.shape
        _check_constant("table", table, (table_positions, 2, half))
        if 2 * half > size:
            raise ValueError(f"the table rotates {2 * half} features of heads that have {size}")
        value = self._value("x", x, heads, size)
        out = Value(value.features)
        self.operations.append(Rope(value, self._column("positions", positions), table, heads, out))
        return self._handle(out, heads, size)

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        sizes = self._known("gate", gate).sizes
        first, second = self._value("gate", gate, *sizes), self._value("up", up, *sizes)
        out = Value(first.features)
        self.operations.append(SiluAndMul(first, second, out))
        return self._handle(out, *sizes)

    def write_kv(self, cache: KVCache, layer: int, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        assert isinstance(cache, CpuKVCache)
        self._check_step(cache, layer, plan)
        sizes = cache.kv_heads, cache.head_dim
        self.operations.append(WriteKV(cache, layer, self._value("k", k, *sizes), self._value("v", v, *sizes)))

    def attention(
        self, q: Tensor, cache: KVCache, layer: int, plan: AttentionPlan, scale: float, window: int | None
    ) -> Tensor:
        assert isinstance(cache, CpuKVCache)
        self._check_step(cache, layer, plan)
        heads = self._known("q", q).sizes[0]
        value = self._value("q", q, heads, cache.head_dim)
        if heads % cache.kv_heads:
            raise ValueError(f"{heads} query heads cannot share {cache.kv_heads} key heads evenly")
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1, not {window}")
        out = Value(value.features)
        self.operations.append(Attention(value, heads, cache, layer, scale, window, out))
        return self._handle(out, heads, cache.head_dim)

    def _handle(self, value: Value, *sizes: int) -> Tensor:
        return as_tensor(Handle(self, value, (self.rows, *sizes)))

    def _known(self, name: str, x: Tensor) -> Handle:
        """The handle that a model took for a tensor."""
        handle: object = x
        if not isinstance(handle, Handle) or handle.recorder is not self:
            raise Unsupported(
                f"{name} of a kernel is no result of the forward that is being recorded ({type(handle).__name__}); "
                "its value would be the same in every step"
            )
        return handle

    def _value(self, name: str, x: Tensor, *sizes: int) -> Value:
        handle = self._known(name, x)
        if handle.sizes != sizes:
            raise ValueError(f"{name} must be float32 [rows, {_list(sizes)}], not [rows, {_list(handle.sizes)}]")
        return handle.value

    def _column(self, name: str, x: Tensor) -> Value:
        handle = self._known(name, x)
        if handle.sizes:
            raise ValueError(f"{name} must be int32 [rows], not [rows, {_list(handle.sizes)}]")
        return handle.value

    def _check_step(self, cache: CpuKVCache, layer: int, plan: AttentionPlan) -> None:
        if plan is not self.plan:
            raise Unsupported("a recorded model must use the attention plan that its forward is given")
        if not 0 <= layer < cache.layers:
            raise ValueError(f"layer {layer} is not one of the cache's {cache.layers}")


def _check_constant(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if isinstance(tensor, Handle) or tensor.dtype != torch.float32 or tensor.shape != shape:
        raise ValueError(f"{name} must be a float32 tensor [{_list(shape)}] of the model")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")


def _list(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
