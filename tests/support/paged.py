"""Steps over a paged cache, and exact attention to hold kernels against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ropeway.devices.base import StepShape


@dataclass(frozen=True)
class Rows:
    """Rows of a step: row r computes the last ``counts[r]`` of its ``lengths[r]`` tokens, its blocks are
    ``blocks[r]`` in position order."""

    counts: Sequence[int]
    lengths: Sequence[int]
    blocks: Sequence[Sequence[int]]

    def step(self) -> StepShape:
        """Block tables are wider than any row needs; what lies past a row's blocks is not a block."""
        width = max((len(row) for row in self.blocks), default=0) + 2
        tables = np.full((len(self.blocks), width), -(2**31), dtype=np.int32)
        for table, row in zip(tables, self.blocks, strict=True):
            table[: len(row)] = row
        positions = [range(n - count, n) for count, n in zip(self.counts, self.lengths, strict=True)]
        return StepShape(
            positions=torch.tensor([p for row in positions for p in row], dtype=torch.int32),
            query_start=torch.tensor([0, *np.cumsum(self.counts)], dtype=torch.int32),
            kv_lengths=torch.tensor(self.lengths, dtype=torch.int32),
            block_tables=torch.from_numpy(tables),
        )


def scattered_blocks(lengths: Sequence[int], block_size: int, *, seed: int = 0, spare: int = 3) -> list[list[int]]:
    """Blocks for sequences of these lengths, in random places of a pool with ``spare`` blocks left over."""
    needed = [-(-length // block_size) for length in lengths]
    places = np.random.default_rng(seed).permutation(sum(needed) + spare).tolist()
    return [[places.pop() for _ in range(count)] for count in needed]


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
    """float64 attention of one sequence's last tokens: q [t, heads, d]; k, v [n, kv_heads, d], n >= t."""
    t, heads, _ = q.shape
    n, kv_heads, _ = k.shape
    k, v = (x.double().repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    scores = torch.einsum("thd,nhd->htn", q.double(), k) * scale
    distance = torch.arange(n - t, n)[:, None] - torch.arange(n)
    hidden = (distance < 0) | (distance >= (n if window is None else window))
    return torch.einsum("htn,nhd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
