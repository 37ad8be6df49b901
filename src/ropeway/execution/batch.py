"""From a plan's rows to the flat columns that kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ropeway.devices.base import Device, StepShape
from ropeway.execution.rows import Rows
from ropeway.plan import Ints, Plan


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens, row after row."""

    slot_of_token: Tensor
    """int32 [tokens]: with their positions, where the device finds their ids; a sampled one need not have reached the
    host."""
    shape: StepShape
    sampled: Tensor
    """int32 [s]: index of the last token of every sampling row."""
    slots: Ints
    """int32 [s]: slots of the sampling rows."""
    lengths: Ints
    """int32 [s]: position they sample."""


def build_batch(plan: Plan, rows: Rows, device: Device, block_size: int) -> Batch:
    """Call after ``rows.apply(plan)``."""
    end = plan.start + plan.count
    query_start = np.zeros(len(plan.count) + 1, dtype=np.int32)
    np.cumsum(plan.count, out=query_start[1:])
    tokens = int(query_start[-1])
    if tokens == len(plan.count):  # only single tokens
        slot_of, positions = plan.slot, plan.start
    else:
        slot_of = np.repeat(plan.slot, plan.count)
        positions = np.repeat(plan.start - query_start[:-1], plan.count) + np.arange(tokens, dtype=np.int32)
    width = -(-int(end.max()) // block_size)
    up = device.upload
    shape = StepShape(
        positions=up(positions),
        query_start=up(query_start),
        kv_lengths=up(end),
        block_tables=up(rows.block_tables[plan.slot, :width]),
    )
    last = query_start[1:][plan.samples] - 1
    return Batch(up(slot_of), shape, up(last), plan.slot[plan.samples], end[plan.samples])
