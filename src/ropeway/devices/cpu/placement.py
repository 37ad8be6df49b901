"""Where the values of a program lie in its arena: memory is used again as soon as nobody reads it any more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ropeway.devices.cpu.operations import Operation
from ropeway.devices.recording import Value

ALIGNMENT = 64
"""Bytes: a cache line, and a vector register."""


def place_values(
    operations: Sequence[Operation], result: Value, inputs: Iterable[Value] = ()
) -> tuple[dict[Value, int], int]:
    """(offset in bytes per row of every value that an operation writes, bytes per row of all together).

    First fit, in the order of the operations. No two values that are needed at the same time overlap, an operation's
    results and what it reads included; ``result`` is needed to the end. ``inputs`` lie elsewhere."""
    outside = set(inputs)
    last_use: dict[Value, int] = {}
    for index, operation in enumerate(operations):
        for value in (*operation.reads(), *operation.writes()):
            last_use[value] = index
    last_use[result] = len(operations)
    offsets: dict[Value, int] = {}
    taken: list[tuple[int, int, Value]] = []  # [begin, end) and whose, by begin
    size = 0
    for index, operation in enumerate(operations):
        for value in operation.writes():
            if value in outside or value in offsets:
                continue
            length = -(-4 * value.features // ALIGNMENT) * ALIGNMENT
            begin = _first_fit(taken, length)
            offsets[value] = begin
            taken.append((begin, begin + length, value))
            taken.sort(key=lambda interval: interval[0])
            size = max(size, begin + length)
        taken = [interval for interval in taken if last_use[interval[2]] > index]
    return offsets, size


def _first_fit(taken: list[tuple[int, int, Value]], length: int) -> int:
    """The first gap between intervals that do not overlap."""
    begin = 0
    for start, end, _ in taken:
        if start - begin >= length:
            break
        begin = end
    return begin
