"""The rows of a plan while it is being made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]


class Rows:
    """Columns of the rows chosen so far, in batch order."""

    def __init__(self) -> None:
        self.slots: list[Slots] = []
        self.counts: list[Slots] = []
        self.block_counts: list[Slots] = []
        self.blocks: list[int] = []

    def __len__(self) -> int:
        return sum(map(len, self.slots))

    def __contains__(self, slot: int) -> bool:
        """Whether the slot has a row."""
        return any(slot in slots for slots in self.slots)

    def add(self, slots: Slots, counts: Slots, block_counts: Slots, blocks: Sequence[int]) -> None:
        """Add rows computing ``counts`` tokens each, with ``block_counts`` new blocks each out of ``blocks``."""
        self.slots.append(slots)
        self.counts.append(counts)
        self.block_counts.append(block_counts)
        self.blocks.extend(blocks)

    def add_one(self, slot: int, count: int, blocks: Sequence[int]) -> None:
        self.add(np.array([slot]), np.array([count]), np.array([len(blocks)]), blocks)

    def columns(self) -> tuple[Slots, Slots, Slots]:
        """(slots, counts, numbers of new blocks), int64, one entry per row."""
        if len(self.slots) == 1:
            return self.slots[0], self.counts[0], self.block_counts[0]
        if not self.slots:
            none = np.empty(0, dtype=np.int64)
            return none, none, none
        return np.concatenate(self.slots), np.concatenate(self.counts), np.concatenate(self.block_counts)
