"""A captured model's step, made ready where it is submitted: on the stream it is one native call, its sampling two.

Python is not only slow there. When a step ends, the engine's thread wants the interpreter's lock to settle it, and a
stream that needs the lock between the kernels of the next step would wait for that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ropeway.devices.base import KVCache, SampleInputs, StepShape
from ropeway.devices.cpu import _native
from ropeway.devices.cpu.attention import check_shape
from ropeway.devices.cpu.kv import CpuKVCache
from ropeway.devices.cpu.program import CpuProgram
from ropeway.devices.cpu.rows import check_places, write_tokens_call
from ropeway.devices.cpu.sampling import SampleCall
from ropeway.devices.programs import Program


class CpuStep:
    """See ``devices.base.PreparedStep``."""

    def __init__(
        self,
        context: _native.Context,
        forward: Program,
        logits: Program,
        cache: KVCache,
        tokens: Tensor,
        slots: Tensor,
        shape: StepShape,
        sampled: Tensor,
    ) -> None:
        """See ``devices.base.Device.prepare_step``."""
        assert isinstance(forward, CpuProgram)
        assert isinstance(logits, CpuProgram)
        assert isinstance(cache, CpuKVCache)
        rows = check_shape(shape)
        check_places(tokens, slots, shape.positions)
        if sampled.dtype != torch.int32 or not sampled.is_contiguous():
            raise ValueError(f"sampled must be contiguous int32 [s], not {sampled.dtype}")
        count, samples = len(slots), len(sampled)
        tables = shape.block_tables
        self._context = context
        self._tokens = tokens
        self._kept = (forward, logits, cache, slots, shape, sampled)
        self.logits: Tensor | None = logits.result(samples) if samples else None
        self._native = _native.Step(
            context,
            cache.native,
            cache.num_blocks,
            tokens.data_ptr(),
            tokens.shape[0],
            tokens.shape[1],
            tokens.stride(0),
            slots.data_ptr(),
            shape.positions.data_ptr(),
            shape.query_start.data_ptr(),
            shape.kv_lengths.data_ptr(),
            tables.data_ptr(),
            0 if shape.slots is None else shape.slots.data_ptr(),
            rows,
            count,
            tables.stride(0),
            tables.shape[1],
            forward.placed,
            logits.placed,
            0 if samples == count else sampled.data_ptr(),
            samples,
        )
        self.run = self._native.run

    def prepare_sample(self, inputs: SampleInputs, vocab_size: int) -> CpuSample:
        assert self.logits is not None
        return CpuSample(self._context, self.logits[:, :vocab_size], inputs, self._tokens)

    def times(self) -> dict[str, float]:
        read, plan, take = self._native.nanoseconds
        return {"read_tokens": read * 1e-9, "plan_attention": plan * 1e-9, "take": take * 1e-9}


class CpuSample:
    """See ``devices.base.PreparedSample``."""

    def __init__(self, context: _native.Context, logits: Tensor, inputs: SampleInputs, tokens: Tensor) -> None:
        call = SampleCall(context, logits, inputs)
        self.sampled = call.sampled
        self._sample = call.run
        self._write = write_tokens_call(tokens, inputs.slots, inputs.lengths, call.sampled.token_ids)

    def run(self) -> None:
        self._sample()
        self._write()


def unsegmented(*programs: Program) -> bool:
    """Whether none of them has collectives, for which Python is needed."""
    return all(isinstance(program, CpuProgram) and program.num_segments == 1 for program in programs)
