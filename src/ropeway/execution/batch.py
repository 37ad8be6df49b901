"""From a plan's rows to the flat columns that kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
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
        slots=up(plan.slot),
    )
    last = query_start[1:][plan.samples] - 1
    return Batch(up(slot_of), shape, up(last), plan.slot[plan.samples], end[plan.samples])


def cut_plan(plan: Plan, cut: int) -> tuple[Plan, Plan]:
    """The plan's first ``cut`` tokens, 0 < cut < plan.num_tokens, and the others. A row may be cut in two: its second
    part sees the first as tokens before it."""
    end = np.cumsum(plan.count)
    row = int(np.searchsorted(end, cut, side="right"))
    done = cut - int(end[row] - plan.count[row])
    """Tokens of that row in the first part."""
    last = row + (done > 0)
    count = plan.count[:last].copy()
    samples = plan.samples[:last].copy()
    if done:
        count[row], samples[row] = done, False
    rest_start, rest_count = plan.start[row:].copy(), plan.count[row:].copy()
    rest_start[0] += done
    rest_count[0] -= done
    replace = msgspec.structs.replace
    return (
        replace(plan, slot=plan.slot[:last], start=plan.start[:last], count=count, samples=samples, cut=0),
        replace(plan, slot=plan.slot[row:], start=rest_start, count=rest_count, samples=plan.samples[row:], cut=0),
    )
