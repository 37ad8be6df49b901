"""A model's forward as a native program (``native/program/program.h``): recorded once, replayed without Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ropeway.devices.base import AttentionPlan
from ropeway.devices.cpu import _native
from ropeway.devices.cpu.attention import CpuAttentionPlan
from ropeway.devices.cpu.fusion import fuse
from ropeway.devices.cpu.operations import Operation, Reduction
from ropeway.devices.cpu.placement import ALIGNMENT, place_values
from ropeway.devices.cpu.recorder import CpuRecorder
from ropeway.devices.memory import host_memory
from ropeway.devices.pages import mib
from ropeway.devices.programs import OperationTime, ProgramInput
from ropeway.devices.recording import Handle
from ropeway.errors import OutOfMemory, Unsupported


def capture(
    context: _native.Context, function: Callable[..., Tensor], inputs: Sequence[ProgramInput], max_rows: int
) -> CpuProgram:
    """See ``devices.base.Device.capture``."""
    recorder = CpuRecorder()
    handed = [recorder.input(described.features) for described in inputs]
    result: object = function(*(handle for _, handle in handed), recorder.plan)
    if not isinstance(result, Handle) or result.recorder is not recorder or len(result.sizes) != 1:
        raise Unsupported("a recorded function must return one handle [rows, features] that its kernels made")
    values = [value for value, _ in handed]
    if result.value in values:
        raise Unsupported("a recorded function must compute something: it returned its input")
    operations = fuse(recorder.operations, result.value)
    offsets, row_bytes = place_values(operations, result.value, values)
    places = {**offsets, **{value: -1 - index for index, value in enumerate(values)}}
    native = _native.Program(context, row_bytes, len(inputs))
    segments: list[tuple[int, _Exchange | None]] = []
    for operation in operations:
        operation.add_to(native, places.__getitem__)
        if isinstance(operation, Reduction):
            x, out = operation.x, operation.out
            segments.append((native.size, _Exchange(operation, (places[x], x.features), (places[out], out.features))))
    segments.append((native.size, None))
    return CpuProgram(
        native,
        [operation for operation in operations if not isinstance(operation, Reduction)],
        segments,
        inputs,
        max_rows=max_rows,
        row_bytes=row_bytes,
        result=(places[result.value], result.value.features),
    )


class _Exchange:
    """A collective between two segments, on (offset per row, features) in the arena."""

    def __init__(self, operation: Reduction, x: tuple[int, int], out: tuple[int, int]) -> None:
        self._run = operation.run
        self._x, self._out = x, out

    def __call__(self, arena: Tensor, rows: int, inputs: tuple[Tensor, ...]) -> None:
        place, features = self._x
        x = inputs[-1 - place] if place < 0 else view(arena, rows, place, features)
        view(arena, rows, *self._out).copy_(self._run(x))


class CpuProgram:
    """See ``devices.base.Program``. It has segments, and a collective between each and the next."""

    def __init__(
        self,
        native: _native.Program,
        operations: list[Operation],
        segments: list[tuple[int, _Exchange | None]],
        inputs: Sequence[ProgramInput],
        *,
        max_rows: int,
        row_bytes: int,
        result: tuple[int, int],
    ) -> None:
        self.max_rows = max_rows
        self.arena_bytes = max_rows * row_bytes
        self._native = native
        self._operations = operations
        self._segments = segments
        """(index of the native operation after its last, what follows)."""
        self._kept: list[tuple[Any, ...]] = [operation.keeps() for operation in operations]
        self._inputs = tuple(
            (torch.int32, ()) if described.features is None else (torch.float32, (described.features,))
            for described in inputs
        )
        self._result = result
        self._arena = self.arena()

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def arena(self) -> Tensor:
        """uint8 [arena_bytes]. Pages are touched only as far as steps have rows. Raises ``OutOfMemory``."""
        available = host_memory().available
        if self.arena_bytes > available:
            raise OutOfMemory(
                f"activations of {self.max_rows} rows need {mib(self.arena_bytes)}, but only {mib(available)} are "
                "available; lower max_batched_tokens or max_num_seqs"
            )
        memory = torch.empty(self.arena_bytes, dtype=torch.uint8)
        assert memory.data_ptr() % ALIGNMENT == 0
        return memory

    @property
    def placed(self) -> tuple[_native.Program, int, int, int, int]:
        """The native program, its arena and that one's bytes, its result's place and features."""
        return self._native, self._arena.data_ptr(), self._arena.nbytes, *self._result

    def result(self, rows: int) -> Tensor:
        """What a replay of so many rows in the program's own arena will return. Raises ``ValueError`` where it is too
        small."""
        if rows > self.max_rows:
            raise ValueError(f"the program's arena is for {self.max_rows} rows, not {rows}")
        return view(self._arena, rows, *self._result)

    def run(self, *inputs: Tensor, plan: AttentionPlan | None = None, arena: Tensor | None = None) -> Tensor:
        memory = self._arena if arena is None else arena
        rows = len(inputs[0])
        for tensor, (dtype, sizes) in zip(inputs, self._inputs, strict=True):
            if tensor.dtype != dtype or tensor.shape != (rows, *sizes) or not tensor.is_contiguous():
                raise ValueError(
                    f"an input of the program must be contiguous {dtype} {[rows, *sizes]}, not {tensor.dtype} "
                    f"{list(tensor.shape)}"
                )
        native_plan = plan.native if isinstance(plan, CpuAttentionPlan) else None
        addresses = [tensor.data_ptr() for tensor in inputs]
        begin = 0
        for end, exchange in self._segments:
            self._native.run(begin, end, memory.data_ptr(), memory.nbytes, rows, addresses, native_plan)
            if exchange is not None:
                exchange(memory, rows, inputs)
            begin = end
        return view(memory, rows, *self._result)

    def time_operations(self, on: bool) -> None:
        self._native.set_timed(on)

    def operation_times(self) -> list[OperationTime]:
        return [
            OperationTime(operation.kind, operation.weights, nanoseconds * 1e-9)
            for operation, nanoseconds in zip(self._operations, self._native.nanoseconds, strict=True)
        ]


def view(arena: Tensor, rows: int, place: int, features: int) -> Tensor:
    """float32 [rows, features] at ``place`` bytes per row."""
    begin = rows * place
    return arena[begin : begin + 4 * rows * features].view(torch.float32).view(rows, features)
