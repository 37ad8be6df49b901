"""Operations of a recording put together where a native kernel does several at once.

Bits stay the same: the fused kernels compute what theirs would one after the other. A value that nobody reads any more
is not computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ropeway.devices.cpu.linear import MOST_PARTS
from ropeway.devices.cpu.operations import Linear, Operation, Reduction, RmsNorm, SiluAndMul
from ropeway.devices.recording import Value


def fuse(operations: Sequence[Operation], result: Value) -> list[Operation]:
    """The operations with the same effect: the same writes to caches, and the same ``result``.

    Products of one input become one; then the gated activation, the addition of a residual and the norm of the input
    become parts of the products beside them."""
    fused = _drop_unread(list(operations), result)
    for step in (_join_products, _gate_products, _add_residuals, _norm_inputs):
        fused = step(fused, result)
    return fused


def _uses(operations: Sequence[Operation], result: Value) -> Counter[Value]:
    """How many operations read a value; one more for the result."""
    uses = Counter(value for operation in operations for value in operation.reads())
    uses[result] += 1
    return uses


def _drop_unread(operations: list[Operation], result: Value) -> list[Operation]:
    kept: list[Operation] = []
    read = {result}
    for operation in reversed(operations):
        written = operation.writes()
        if written and not isinstance(operation, Reduction) and read.isdisjoint(written):
            continue  # ranks must meet all the same
        read.update(operation.reads())
        kept.append(operation)
    return kept[::-1]


def _join_products(operations: list[Operation], result: Value) -> list[Operation]:
    """Neighbours that read the same input: q, k and v; gate and up."""
    joined: list[Operation] = []
    for operation in operations:
        before = joined[-1] if joined else None
        if (
            isinstance(operation, Linear)
            and isinstance(before, Linear)
            and before.x is operation.x
            and len(before.parts) + len(operation.parts) <= MOST_PARTS
        ):
            joined[-1] = replace(before, parts=(*before.parts, *operation.parts))
        else:
            joined.append(operation)
    return joined


def _gate_products(operations: list[Operation], result: Value) -> list[Operation]:
    """silu(gate) * up right after the product that gives both."""
    uses = _uses(operations, result)
    gated: list[Operation] = []
    for operation in operations:
        before = gated[-1] if gated else None
        if (
            isinstance(operation, SiluAndMul)
            and isinstance(before, Linear)
            and [part.out for part in before.parts] == [operation.gate, operation.up]
            and uses[operation.gate] == uses[operation.up] == 1
        ):
            gate, up = before.parts
            parts = (replace(gate, out=operation.out), replace(up, out=None))
            gated[-1] = replace(before, parts=parts, gated=True)
        else:
            gated.append(operation)
    return gated


def _add_residuals(operations: list[Operation], result: Value) -> list[Operation]:
    """The sum of a product and a residual, right after it, is the product's; its norm stays, of the sum."""
    uses = _uses(operations, result)
    added: list[Operation] = []
    for operation in operations:
        before = added[-1] if added else None
        if (
            isinstance(operation, RmsNorm)
            and operation.residual is not None
            and operation.total is not None
            and isinstance(before, Linear)
            and len(before.parts) == 1
            and before.residual is None
            and before.parts[0].out is operation.x
            and operation.residual is not operation.x
            and uses[operation.x] == 1
        ):
            part = replace(before.parts[0], out=operation.total)
            added[-1] = replace(before, parts=(part,), residual=operation.residual)
            if uses[operation.out]:
                added.append(replace(operation, x=operation.total, residual=None, total=None))
        else:
            added.append(operation)
    return added


def _norm_inputs(operations: list[Operation], result: Value) -> list[Operation]:
    """A norm right before the only product that reads it."""
    uses = _uses(operations, result)
    normed: list[Operation] = []
    for operation in operations:
        before = normed[-1] if normed else None
        if (
            isinstance(operation, Linear)
            and isinstance(before, RmsNorm)
            and before.residual is None
            and before.out is operation.x
            and operation.residual is not operation.x
            and before.weight.shape[0] == operation.x.features
            and uses[operation.x] == 1
        ):
            normed[-1] = replace(operation, x=before.x, norm=(before.weight, before.eps))
        else:
            normed.append(operation)
    return normed
