"""What a scheduler hands to an executor, and what comes back.

A plan is *columns*: one numpy array per property, one entry per row. A row is some consecutive positions
of one request: a chunk of its prompt, or its next token; nothing tells the two apart. Objects appear only
for events (a request takes a seat). The device keeps a row of its own for every slot (token ids, block
table, sampling parameters), so a plan says only what changes.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from ropeway.outcome import LogprobColumns, PromptLogprobColumns
from ropeway.request import SamplingParams

Ints = NDArray[np.int32]
NO_COPIES: Ints = np.empty((0, 2), dtype=np.int32)


class Seat(msgspec.Struct, frozen=True, eq=False):
    """A request takes a slot. Sent once per seating; the device row is reset before the step's forward."""

    slot: int
    token_ids: Ints
    """int32 [n]: prompt and the output known so far. Later ones the device writes itself."""
    prompt_tokens: int
    params: SamplingParams
    seed: int
    """64-bit key of the request's random stream."""
    end_ids: tuple[int, ...]
    """Masked until ``params.min_tokens`` tokens exist."""
    blocks: Ints
    """int32: blocks that hold its first keys and values (found in the prefix cache, or copied back by this plan), in
    position order; its block table starts with them."""


class Plan(msgspec.Struct, frozen=True, eq=False):
    """One step. Rows are in batch order. Copies come first, then seats, then the rows."""

    seq: int
    """Steps are numbered without gaps; they run in this order."""
    request: NDArray[np.int64]
    """int64 [rows]: internal request ids, for the host's own use at settle."""
    slot: Ints
    """int32 [rows]: each slot at most once."""
    start: Ints
    """int32 [rows]: position of the row's first token."""
    count: Ints
    """int32 [rows]: the row computes positions [start, start + count)."""
    samples: NDArray[np.bool_]
    """bool [rows]: whether the token for position start + count is sampled."""
    new_blocks: Ints
    """int32 [sum(new_block_count)]: appended to the rows' block tables, in row order."""
    new_block_count: Ints
    """int32 [rows]."""
    seats: tuple[Seat, ...] = ()
    to_host: Ints = msgspec.field(default_factory=lambda: NO_COPIES)
    """int32 [m, 2]: (device block, host block) to copy before anything else."""
    to_device: Ints = msgspec.field(default_factory=lambda: NO_COPIES)
    """int32 [m, 2]: (host block, device block) to copy after that."""
    cut: int = 0
    """Where the executor cuts the step's tokens into two micro-batches: [0, cut) and [cut, num_tokens); 0: nowhere."""

    @property
    def num_tokens(self) -> int:
        return int(self.count.sum())

    @property
    def kv_tokens(self) -> int:
        """Positions whose keys the step reads, over all rows, their own included."""
        return int(self.start.sum() + self.count.sum())

    @property
    def copies(self) -> bool:
        """Whether blocks are copied."""
        return len(self.to_host) > 0 or len(self.to_device) > 0


class Masks(msgspec.Struct, frozen=True, eq=False):
    """Which tokens some rows of a step may sample."""

    row: Ints
    """int32 [m], increasing: index among the plan's sampling rows."""
    bits: Ints
    """int32 [m, words]: token t is allowed where bit t % 32 of word t // 32 is set; tokens beyond the words are not."""


class Result(msgspec.Struct, frozen=True, eq=False):
    """The sampled tokens of one plan."""

    token_ids: Ints
    """int32 [samples.sum()]: one per sampling row, in row order."""
    logprobs: LogprobColumns | None = None
    """``row`` indexes ``token_ids``."""
    elapsed_s: float = 0.0
    """What the step took on the device, copies not counted; 0: not measured."""
    copy_s: float = 0.0
    """What its copies took."""
    prompt_logprobs: PromptLogprobColumns | None = None
