"""The rows of a plan while it is being made."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]


class PlanRows:
    """Rows chosen so far: many at once as columns, then others one by one."""

    def __init__(self) -> None:
        self._many: tuple[Column, Column, Column] | None = None
        self._slots: list[int] = []
        self._counts: list[int] = []
        self._block_counts: list[int] = []
        self._taken: set[int] | None = None
        self.blocks: list[int] = []
        """New blocks of all rows, in the order of the rows."""

    def __len__(self) -> int:
        return len(self._slots) + (0 if self._many is None else len(self._many[0]))

    def __contains__(self, slot: int) -> bool:
        """Whether the slot has a row."""
        if self._taken is None:
            self._taken = {*self._slots, *([] if self._many is None else self._many[0].tolist())}
        return slot in self._taken

    def add_decodes(self, slots: Column, grows: NDArray[np.bool_], blocks: list[int]) -> None:
        """Rows of one token each, those that grow with a new block each. At most once in a plan."""
        assert self._many is None
        self._many = slots, np.ones_like(slots), grows.astype(np.int64)
        # Columns come before the single rows, so their blocks do too.
        self.blocks = blocks + self.blocks
        self._taken = None

    def add(self, slot: int, count: int, blocks: list[int]) -> None:
        """A row of ``count`` tokens with these new blocks."""
        self._slots.append(slot)
        self._counts.append(count)
        self._block_counts.append(len(blocks))
        self.blocks += blocks
        if self._taken is not None:
            self._taken.add(slot)

    def columns(self) -> tuple[Column, Column, Column]:
        """(slots, counts, numbers of new blocks), int64, one entry per row."""
        if self._many is not None and not self._slots:
            return self._many
        single = (
            np.array(self._slots, dtype=np.int64),
            np.array(self._counts, dtype=np.int64),
            np.array(self._block_counts, dtype=np.int64),
        )
        if self._many is None:
            return single
        slots, counts, block_counts = (np.concatenate(pair) for pair in zip(self._many, single, strict=True))
        return slots, counts, block_counts
