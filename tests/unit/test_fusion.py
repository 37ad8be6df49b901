"""Operations put together, and values put into an arena: over made-up recordings, without any kernel."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropeway.devices.base import DenseTensor, Weight
from ropeway.devices.recording import Value
from tests.support.devices import device
from tests.support.native import _native  # isort: split

from ropeway.devices.cpu.fusion import fuse
from ropeway.devices.cpu.operations import Linear, Operation, Part, Reduction, RmsNorm, SiluAndMul
from ropeway.devices.cpu.placement import place_values

NORM = torch.ones(8)


def product(x: Value, out: Value, n: int = 8, k: int = 8) -> Linear:
    weight: Any = device("cpu").pack(DenseTensor(torch.ones(n, k)))
    return Linear(x, (Part(weight, None, out),))


def norm(x: Value, out: Value, residual: Value | None = None, total: Value | None = None) -> RmsNorm:
    return RmsNorm(x, residual, NORM, 1e-5, out, total)


def values(count: int) -> list[Value]:
    return [Value(8) for _ in range(count)]


def kinds(operations: list[Operation]) -> list[str]:
    return [operation.kind for operation in operations]


def test_products_of_one_input_become_one_of_at_most_three_parts() -> None:
    x, *outs = values(5)
    reads = Reader(outs, Value(8))
    fused = fuse([*(product(x, out) for out in outs), reads], reads.out)
    assert [len(operation.weights) for operation in fused] == [3, 1, 0]


def test_a_gate_is_part_of_its_product_unless_somebody_else_reads_what_goes_into_it() -> None:
    x, gate, up, out = values(4)
    recorded = [product(x, gate), product(x, up), SiluAndMul(gate, up, out)]
    (fused,) = fuse(recorded, out)
    assert fused.kind == "linear + silu_and_mul"
    assert fused.writes() == (out,)
    reader = Reader([out, up], Value(8))
    assert kinds(fuse([*recorded, reader], reader.out)) == ["linear", "silu_and_mul", "reader"]
    crossed = [product(x, up), product(x, gate), SiluAndMul(gate, up, out)]
    assert kinds(fuse(crossed, out)) == ["linear", "silu_and_mul"]


def test_a_residual_is_part_of_the_product_before_and_its_norm_of_the_product_after() -> None:
    x, y, residual, total, normed, out = values(6)
    recorded = [product(x, y), norm(y, normed, residual, total), product(normed, out)]
    assert kinds(fuse(recorded, out)) == ["linear + residual", "rms_norm + linear"]
    reader = Reader([out, normed], Value(8))
    assert kinds(fuse([*recorded, reader], reader.out)) == ["linear + residual", "rms_norm", "linear", "reader"]
    reader = Reader([out, y], Value(8))
    assert kinds(fuse([*recorded, reader], reader.out)) == ["linear", "add_rms_norm", "linear", "reader"]
    assert kinds(fuse(recorded[:2], total)) == ["linear + residual"]


def test_a_collective_keeps_a_product_and_its_residual_apart() -> None:
    x, y, summed, residual, total, normed = values(6)
    recorded = [product(x, y), Reduction(lambda tensor: tensor, y, summed), norm(summed, normed, residual, total)]
    assert kinds(fuse(recorded, total)) == ["linear", "collective", "add_rms_norm"]


def test_a_norm_of_heads_is_no_norm_of_a_products_input() -> None:
    x, normed, out = Value(16), Value(16), Value(8)
    assert kinds(fuse([norm(x, normed), product(normed, out, k=16)], out)) == ["rms_norm", "linear"]


def test_what_nobody_reads_is_not_computed_but_ranks_meet_all_the_same() -> None:
    x, unread, summed, out = values(4)
    recorded = [product(x, unread), Reduction(lambda tensor: tensor, unread, summed), norm(x, Value(8)), norm(x, out)]
    assert kinds(fuse(recorded, out)) == ["linear", "collective", "rms_norm"]


@dataclass(eq=False)
class Reader:
    """An operation that reads anything."""

    read: list[Value]
    out: Value
    kind: str = "reader"
    weights: tuple[Weight, ...] = field(default=())

    def reads(self) -> tuple[Value, ...]:
        return tuple(self.read)

    def writes(self) -> tuple[Value, ...]:
        return (self.out,)

    def keeps(self) -> tuple[Any, ...]:
        return ()

    def add_to(self, program: _native.Program, place: Any) -> None:
        raise NotImplementedError


@st.composite
def recordings(draw: st.DrawFn) -> tuple[list[Operation], Value]:
    """Operations that read some of what is there, and the last one's result."""
    known = [Value(3)]
    recorded: list[Operation] = []
    for _ in range(draw(st.integers(1, 25))):
        read = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3))
        recorded.append(Reader(read, Value(draw(st.integers(1, 40)))))
        known.append(recorded[-1].writes()[0])
    return recorded, known[-1]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(recordings())
def test_no_value_is_overwritten_before_its_last_reader(recording: tuple[list[Operation], Value]) -> None:
    recorded, result = recording
    offsets, row_bytes = place_values(recorded, result, inputs=[])
    memory: dict[int, Value] = {}

    def lines(value: Value) -> range:
        return range(offsets[value] // 64, offsets[value] // 64 + -(-4 * value.features // 64))

    for operation in recorded:
        (out,) = operation.writes()
        for value in operation.reads():
            if value in offsets:
                assert all(memory[line] is value for line in lines(value))
                assert not set(lines(value)) & set(lines(out))
        memory.update(dict.fromkeys(lines(out), out))
        assert offsets[out] % 64 == 0
        assert max(lines(out)) * 64 + 64 <= row_bytes
    assert all(memory[line] is result for line in lines(result))


def test_memory_is_used_again_when_its_last_reader_is_done() -> None:
    chain = values(20)
    recorded = [product(a, b) for a, b in itertools.pairwise(chain)]
    _, row_bytes = place_values(recorded, chain[-1], inputs=chain[:1])
    assert row_bytes == 2 * 64
