"""The CPU device's kernels, gathered from the modules of their families."""

from __future__ import annotations

from torch import Tensor

from ropeway.devices.base import AttentionPlan, KVCache, Sampled, SampleInputs, StepShape, Weight
from ropeway.devices.cpu import _native, attention, elementwise, linear, sampling


class CpuKernels:
    """See ``devices.base.Kernels``. Every kernel is native; none falls back to PyTorch."""

    def __init__(self, context: _native.Context) -> None:
        self._context = context

    def gather(self, table: Weight, ids: Tensor) -> Tensor:
        return linear.gather(self._context, table, ids)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return linear.linear(self._context, x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(self._context, x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return elementwise.add_rms_norm(self._context, x, residual, weight, eps)

    def rope(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        return elementwise.rope(self._context, x, positions, table)

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return elementwise.silu_and_mul(self._context, gate, up)

    def plan_attention(self, cache: KVCache, shape: StepShape) -> AttentionPlan:
        return attention.plan_attention(self._context, cache, shape)

    def write_kv(self, cache: KVCache, layer: int, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        attention.write_kv(self._context, cache, layer, k, v, plan)

    def attention(
        self, q: Tensor, cache: KVCache, layer: int, plan: AttentionPlan, scale: float, window: int | None = None
    ) -> Tensor:
        return attention.attention(self._context, q, cache, layer, plan, scale, window)

    def sample(self, logits: Tensor, inputs: SampleInputs) -> Sampled:
        return sampling.sample(self._context, logits, inputs)
