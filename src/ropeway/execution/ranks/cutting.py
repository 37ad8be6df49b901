"""Whether a step is cut into two micro-batches, and where.

Cutting pays where the ranks' sums take about as long as what is computed meanwhile, and costs where a product of half
the rows takes more than half the time. So it is measured when the engine starts, step by step size, and never guessed.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from ropeway.models.spec import DecoderSpec
from ropeway.plan import Plan, Seat
from ropeway.request import SamplingParams

log = logging.getLogger(__name__)

REPEATS = 5
SMALLEST = 32
"""Tokens of the smallest step that is measured; smaller ones are not cut."""
GAIN = 0.98
"""A cut step must take at most this much of a whole one: what is measured to be as fast may be slower tomorrow."""
_PATIENCE_S = 2.0
"""Steps that take longer are measured once."""


@dataclass(frozen=True)
class CutTable:
    """Seconds of steps of so many tokens, in increasing order."""

    tokens: tuple[int, ...] = ()
    whole_s: tuple[float, ...] = ()
    cut_s: tuple[float, ...] = ()

    def pays(self, tokens: int) -> bool:
        """Whether a step of so many tokens is faster when it is cut: as the next smaller one in the table is."""
        at = int(np.searchsorted(self.tokens, tokens, side="right")) - 1
        return at >= 0 and self.cut_s[at] < GAIN * self.whole_s[at]


class Cutter:
    """Cuts plans."""

    def __init__(self, mode: Literal["auto", "on"], spec: DecoderSpec, table: CutTable = CutTable()) -> None:
        """``table``: for ``auto``; with ``on``, every step of two tokens is cut."""
        self.table = table
        self._mode = mode
        self._position_cost = position_cost(spec)

    def cut(self, plan: Plan) -> Plan:
        """The plan with its cut, at half of what it is estimated to cost; or as it is."""
        tokens = plan.num_tokens
        if tokens < 2 or (self._mode == "auto" and not self.table.pays(tokens)):
            return plan
        return msgspec.structs.replace(plan, cut=half(plan, self._position_cost))


def position_cost(spec: DecoderSpec) -> float:
    """What attention to one position costs, in units of what all products of a token cost."""
    heads = spec.num_heads * spec.head_dim
    products = spec.hidden_size * (2 * heads + 2 * spec.num_kv_heads * spec.head_dim + 3 * spec.intermediate_size)
    return 2 * heads / products


def half(plan: Plan, position_cost: float) -> int:
    """The number of tokens, 0 < n < plan.num_tokens, that cost half of what all do."""
    tokens = plan.num_tokens
    first = np.cumsum(plan.count) - plan.count
    position = np.repeat(plan.start - first, plan.count) + np.arange(tokens)
    cost = np.cumsum(1.0 + position_cost * position)
    return min(max(int(np.searchsorted(cost, cost[-1] / 2)) + 1, 1), tokens - 1)


def measure(
    run: Callable[[Plan], float],
    *,
    max_tokens: int,
    max_model_len: int,
    max_num_seqs: int,
    num_blocks: int,
    block_size: int,
) -> CutTable:
    """Time steps of 32, 64, ... up to ``max_tokens`` tokens, as far as they fit, whole and cut in turns. ``run``
    computes a plan and returns the seconds it took; the rows and blocks that the plans use hold nothing of use then."""
    longest = min(max_model_len, num_blocks * block_size)
    prompts = min(max_num_seqs, num_blocks // -(-longest // block_size))
    times: list[tuple[int, float, float]] = []
    size = SMALLEST
    while size <= min(max_tokens, longest * prompts):
        plans = [prompts_plan(size, longest, block_size, cut) for cut in (0, size // 2)]
        took: tuple[list[float], list[float]] = ([], [])
        for repeat in range(REPEATS + 1):
            for which in (0, 1) if repeat % 2 else (1, 0):
                took[which].append(run(plans[which]))
            if max(took[0][-1], took[1][-1]) > _PATIENCE_S:
                break
        # The first of several touches memory.
        whole_s, cut_s = (statistics.median(each[1:] or each) for each in took)
        times.append((size, whole_s, cut_s))
        size *= 2
    table = CutTable(*(tuple(column) for column in zip(*times, strict=True))) if times else CutTable()
    for tokens, whole_s, cut_s in times:
        verdict = "cut" if table.pays(tokens) else "whole"
        log.info("a step of %d tokens: %.1f ms, %.1f ms cut in two; %s", tokens, 1e3 * whole_s, 1e3 * cut_s, verdict)
    return table


def prompts_plan(tokens: int, longest: int, block_size: int, cut: int = 0) -> Plan:
    """A step of the first tokens of prompts, each but the last ``longest`` of them, on slots 0, 1, ... and blocks 0, 1,
    ...; nothing is sampled."""
    count = np.full(-(-tokens // longest), longest, dtype=np.int32)
    count[-1] = tokens - longest * (len(count) - 1)
    blocks = -(-count // block_size)
    rows = len(count)
    none = np.empty(0, dtype=np.int32)
    params = SamplingParams()
    return Plan(
        seq=0,
        request=np.zeros(rows, dtype=np.int64),
        slot=np.arange(rows, dtype=np.int32),
        start=np.zeros(rows, dtype=np.int32),
        count=count,
        samples=np.zeros(rows, dtype=np.bool_),
        new_blocks=np.arange(int(blocks.sum()), dtype=np.int32),
        new_block_count=blocks.astype(np.int32),
        seats=tuple(
            Seat(slot, np.zeros(int(n), dtype=np.int32), int(n), params, 0, (), none) for slot, n in enumerate(count)
        ),
        cut=cut,
    )
