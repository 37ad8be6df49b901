"""The CPU device's kernels, gathered from the modules of their families."""

from __future__ import annotations

from torch import Tensor

from ropeway.devices.base import AttentionPlan, KVCache, Sampled, SampleInputs, StepShape, Weight
from ropeway.devices.cpu import _native, attention, elementwise, linear, sampling
from ropeway.devices.cpu import rows as rows_of
from ropeway.devices.cpu.recorder import CpuRecorder
from ropeway.devices.recording import Handle


class CpuKernels:
    """See ``devices.base.Kernels``. Every kernel is native; none falls back to PyTorch. Called on the handle of a
    recording, a kernel is recorded."""

    def __init__(self, context: _native.Context) -> None:
        self._context = context

    def gather(self, table: Weight, ids: Tensor, first: int | None = None) -> Tensor:
        if (recorder := recorder_of(ids)) is not None:
            return recorder.gather(table, ids, first)
        return linear.gather(self._context, table, ids, first)

    def take(self, x: Tensor, rows: Tensor) -> Tensor:
        return rows_of.take(x, rows)

    def read_tokens(self, tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        return rows_of.read_tokens(tokens, slots, positions)

    def write_tokens(self, tokens: Tensor, slots: Tensor, positions: Tensor, ids: Tensor) -> None:
        rows_of.write_tokens(tokens, slots, positions, ids)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if (recorder := recorder_of(x)) is not None:
            return recorder.linear(x, weight, bias)
        return linear.linear(self._context, x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if (recorder := recorder_of(x)) is not None:
            return recorder.rms_norm(x, weight, eps)
        return elementwise.rms_norm(self._context, x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if (recorder := recorder_of(x)) is not None:
            return recorder.add_rms_norm(x, residual, weight, eps)
        return elementwise.add_rms_norm(self._context, x, residual, weight, eps)

    def rope(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        if (recorder := recorder_of(x)) is not None:
            return recorder.rope(x, positions, table)
        return elementwise.rope(self._context, x, positions, table)

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        if (recorder := recorder_of(gate)) is not None:
            return recorder.silu_and_mul(gate, up)
        return elementwise.silu_and_mul(self._context, gate, up)

    def plan_attention(self, cache: KVCache, shape: StepShape) -> AttentionPlan:
        return attention.plan_attention(self._context, cache, shape)

    def write_kv(self, cache: KVCache, layer: int, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        if (recorder := recorder_of(k)) is not None:
            return recorder.write_kv(cache, layer, k, v, plan)
        attention.write_kv(self._context, cache, layer, k, v, plan)

    def attention(
        self, q: Tensor, cache: KVCache, layer: int, plan: AttentionPlan, scale: float, window: int | None = None
    ) -> Tensor:
        if (recorder := recorder_of(q)) is not None:
            return recorder.attention(q, cache, layer, plan, scale, window)
        return attention.attention(self._context, q, cache, layer, plan, scale, window)

    def sample(self, logits: Tensor, inputs: SampleInputs) -> Sampled:
        return sampling.sample(self._context, logits, inputs)


def recorder_of(x: Tensor) -> CpuRecorder | None:
    """Who records what is done with x; None: it is a tensor."""
    handle: object = x
    if not isinstance(handle, Handle):
        return None
    assert isinstance(handle.recorder, CpuRecorder)
    return handle.recorder
