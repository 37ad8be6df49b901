"""What a recorded model does, operation by operation, before it becomes a native program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ropeway.devices.base import Weight
from ropeway.devices.cpu import _native
from ropeway.devices.cpu.kv import CpuKVCache
from ropeway.devices.cpu.weights import PackedWeight
from ropeway.devices.recording import Collective, Value

Place = Callable[[Value], int]
"""Where a value is, as ``native/program/program.h`` encodes it."""


class Operation(Protocol):
    """One native call, or one collective."""

    @property
    def kind(self) -> str:
        """Names it as ``Kernels`` does."""
        ...

    @property
    def weights(self) -> tuple[Weight, ...]: ...
    def reads(self) -> tuple[Value, ...]: ...
    def writes(self) -> tuple[Value, ...]: ...
    def add_to(self, program: _native.Program, place: Place) -> None: ...
    def keeps(self) -> tuple[Any, ...]:
        """Whose memory the native program refers to."""
        ...


@dataclass(eq=False)
class Gather:
    table: PackedWeight
    ids: Value
    out: Value
    first: int | None

    kind = "gather"

    @property
    def weights(self) -> tuple[Weight, ...]:
        return (self.table,)

    def reads(self) -> tuple[Value, ...]:
        return (self.ids,)

    def writes(self) -> tuple[Value, ...]:
        return (self.out,)

    def keeps(self) -> tuple[Any, ...]:
        return (self.table,)

    def add_to(self, program: _native.Program, place: Place) -> None:
        program.gather(self.table.native, place(self.ids), place(self.out), self.first or 0, self.first is not None)


@dataclass(frozen=True, eq=False)
class Part:
    """One matrix of a product. ``out``: None for the second of a gated one, whose result is the first one's."""

    weight: PackedWeight
    bias: Tensor | None
    out: Value | None


@dataclass(eq=False)
class Linear:
    """Products of x with one to three matrices, and what is fused with them: ``native/kernels/linear.h``."""

    x: Value
    parts: tuple[Part, ...]
    residual: Value | None = None
    gated: bool = False
    norm: tuple[Tensor, float] | None = None
    """(weight, eps) of the norm of x."""

    @property
    def kind(self) -> str:
        before = "" if self.norm is None else "rms_norm + "
        after = " + silu_and_mul" if self.gated else "" if self.residual is None else " + residual"
        return f"{before}linear{after}"

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(part.weight for part in self.parts)

    def reads(self) -> tuple[Value, ...]:
        return (self.x,) if self.residual is None else (self.x, self.residual)

    def writes(self) -> tuple[Value, ...]:
        return tuple(part.out for part in self.parts if part.out is not None)

    def keeps(self) -> tuple[Any, ...]:
        return (self.parts, self.norm)

    def add_to(self, program: _native.Program, place: Place) -> None:
        program.linear(
            place(self.x),
            [
                (
                    part.weight.native,
                    0 if part.bias is None else part.bias.data_ptr(),
                    0 if part.out is None else place(part.out),
                )
                for part in self.parts
            ],
            None if self.residual is None else place(self.residual),
            self.gated,
            0 if self.norm is None else self.norm[0].data_ptr(),
            0.0 if self.norm is None else self.norm[1],
        )


@dataclass(eq=False)
class RmsNorm:
    """out = norm of x, or of total = x + residual."""

    x: Value
    residual: Value | None
    weight: Tensor
    eps: float
    out: Value
    total: Value | None

    @property
    def kind(self) -> str:
        return "rms_norm" if self.residual is None else "add_rms_norm"

    weights: tuple[Weight, ...] = ()

    def reads(self) -> tuple[Value, ...]:
        return (self.x,) if self.residual is None else (self.x, self.residual)

    def writes(self) -> tuple[Value, ...]:
        return (self.out,) if self.total is None else (self.out, self.total)

    def keeps(self) -> tuple[Any, ...]:
        return (self.weight,)

    def add_to(self, program: _native.Program, place: Place) -> None:
        size = self.weight.shape[0]
        program.rms_norm(
            place(self.x),
            None if self.residual is None else place(self.residual),
            self.weight.data_ptr(),
            place(self.out),
            None if self.total is None else place(self.total),
            self.x.features // size,
            size,
            self.eps,
        )


@dataclass(eq=False)
class Rope:
    x: Value
    positions: Value
    table: Tensor
    heads: int
    out: Value

    kind = "rope"
    weights: tuple[Weight, ...] = ()

    def reads(self) -> tuple[Value, ...]:
        return (self.x, self.positions)

    def writes(self) -> tuple[Value, ...]:
        return (self.out,)

    def keeps(self) -> tuple[Any, ...]:
        return (self.table,)

    def add_to(self, program: _native.Program, place: Place) -> None:
        positions, _, half = self.table.shape
        size = self.x.features // self.heads
        program.rope(
            place(self.x),
            place(self.positions),
            self.table.data_ptr(),
            place(self.out),
            self.heads,
            size,
            2 * half,
            positions,
        )


@dataclass(eq=False)
class SiluAndMul:
    gate: Value
    up: Value
    out: Value

    kind = "silu_and_mul"
    weights: tuple[Weight, ...] = ()

    def reads(self) -> tuple[Value, ...]:
        return (self.gate, self.up)

    def writes(self) -> tuple[Value, ...]:
        return (self.out,)

    def keeps(self) -> tuple[Any, ...]:
        return ()

    def add_to(self, program: _native.Program, place: Place) -> None:
        program.silu_and_mul(place(self.gate), place(self.up), place(self.out), self.gate.features)


@dataclass(eq=False)
class WriteKV:
    cache: CpuKVCache
    layer: int
    k: Value
    v: Value

    kind = "write_kv"
    weights: tuple[Weight, ...] = ()

    def reads(self) -> tuple[Value, ...]:
        return (self.k, self.v)

    def writes(self) -> tuple[Value, ...]:
        return ()

    def keeps(self) -> tuple[Any, ...]:
        return (self.cache,)

    def add_to(self, program: _native.Program, place: Place) -> None:
        program.write_kv(self.cache.native, self.layer, place(self.k), place(self.v))


@dataclass(eq=False)
class Attention:
    q: Value
    heads: int
    cache: CpuKVCache
    layer: int
    scale: float
    window: int | None
    out: Value

    kind = "attention"
    weights: tuple[Weight, ...] = ()

    def reads(self) -> tuple[Value, ...]:
        return (self.q,)

    def writes(self) -> tuple[Value, ...]:
        return (self.out,)

    def keeps(self) -> tuple[Any, ...]:
        return (self.cache,)

    def add_to(self, program: _native.Program, place: Place) -> None:
        program.attention(
            self.cache.native,
            self.layer,
            place(self.q),
            place(self.out),
            self.heads,
            self.scale,
            self.window or 0,
        )


@dataclass(eq=False)
class Reduction:
    """A collective over the ranks: ends a segment of the program."""

    run: Collective
    x: Value
    out: Value

    kind = "collective"
    weights: tuple[Weight, ...] = ()

    def reads(self) -> tuple[Value, ...]:
        return (self.x,)

    def writes(self) -> tuple[Value, ...]:
        return (self.out,)

    def keeps(self) -> tuple[Any, ...]:
        return (self.run,)

    def add_to(self, program: _native.Program, place: Place) -> None:
        """Nothing: it runs between two segments."""
