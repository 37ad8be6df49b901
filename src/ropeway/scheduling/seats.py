"""The running requests as columns: one numpy array per counter, one entry per slot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ropeway.request import Request

Slots = NDArray[np.int64]


class Seats:
    """Counters of the seated requests. Positions of a sequence, and what is known of them:

        0 ........ prompt ........ goal ........ length ........ limit
        [ known when seated       )
        [ known to the host now                 )
        [ keys and values planned ... computed )

    ``computed`` rises when a step is planned, ``length`` when it is settled, so ``computed`` may run ahead of
    ``length``: from ``goal`` on, the next input id need only be on the device.
    """

    def __init__(self, slots: int, max_len: int, block_size: int) -> None:
        def column(fill: int = 0) -> NDArray[np.int64]:
            return np.full(slots, fill, dtype=np.int64)

        max_blocks = -(-max_len // block_size)
        self.request_id = column(-1)
        self.order = column()
        """Place in the policy's order; lower goes first."""
        self.length = column()
        self.computed = column()
        self.goal = column()
        """Tokens known when seated; up to here input ids are chunks of known tokens."""
        self.limit = column()
        self.last = column()
        """limit - 1: positions below it are computed; the last token's keys and values are never needed."""
        self.prompt = column()
        self.blocks_held = column()
        self.watch = column()
        """First position whose settling brings an event: the first output token, a full block, the limit."""
        self.served = column()
        """Number of the last plan with a row of it."""
        self.protected = np.zeros(slots, dtype=np.bool_)
        """Preempted so often that it is no victim any more."""
        self.tokens: NDArray[np.int32] = np.empty((slots, max_len), dtype=np.int32)
        self.blocks: NDArray[np.int32] = np.empty((slots, max_blocks), dtype=np.int32)
        self.end_ids: NDArray[np.int32] = np.full((slots, 4), -1, dtype=np.int32)
        self.requests: list[Request | None] = [None] * slots
        self.prefilling = 0
        """Seated requests with computed < goal."""
        self._free = list(range(slots - 1, -1, -1))
        self._block_size = block_size
        self._ranked: Slots | None = None

    @property
    def taken(self) -> int:
        return len(self.requests) - len(self._free)

    @property
    def vacant(self) -> int:
        return len(self._free)

    @property
    def ranked(self) -> Slots:
        """Seated slots in policy order; not to be changed in place."""
        if self._ranked is None:
            seated = np.flatnonzero(self.request_id >= 0)
            self._ranked = seated[np.argsort(self.order[seated], kind="stable")]
        return self._ranked

    def seat(self, request: Request, blocks: list[int], *, protected: bool) -> int:
        """Give the request a slot, its first ``blocks`` already holding computed keys and values."""
        slot = self._free.pop()
        length = len(request.tokens)
        request.slot = slot
        self.requests[slot] = request
        self.request_id[slot] = request.id
        self.order[slot] = request.order
        self.length[slot] = self.goal[slot] = length
        self.computed[slot] = len(blocks) * self._block_size
        self.limit[slot] = request.limit
        self.last[slot] = request.limit - 1
        self.prompt[slot] = request.prompt_tokens
        self.blocks_held[slot] = len(blocks)
        request.published = len(blocks)
        self.protected[slot] = protected
        self.tokens[slot, :length] = request.tokens
        self.blocks[slot, : len(blocks)] = blocks
        self._set_end_ids(slot, request.end_ids)
        self.watch[slot] = 0  # its first sampled token is an event, whatever it is
        self.served[slot] = 0
        self.prefilling += 1
        self._ranked = None
        return slot

    def unseat(self, slot: int) -> Request:
        """Take the slot back; the request carries its tokens on. Its blocks are the caller's to release,
        and must be read before."""
        request = self.requests[slot]
        assert request is not None
        request.tokens = self.tokens[slot, : self.length[slot]].copy()
        request.slot = -1
        self.prefilling -= int(self.computed[slot] < self.goal[slot])
        self.requests[slot] = None
        self.request_id[slot] = -1
        self._free.append(slot)
        self._ranked = None
        return request

    def held(self, slot: int) -> list[int]:
        """Block table of a slot."""
        held: list[int] = self.blocks[slot, : self.blocks_held[slot]].tolist()
        return held

    def append_blocks(self, slot: int, blocks: list[int]) -> None:
        held = self.blocks_held[slot]
        self.blocks[slot, held : held + len(blocks)] = blocks
        self.blocks_held[slot] = held + len(blocks)

    def _set_end_ids(self, slot: int, end_ids: tuple[int, ...]) -> None:
        width = self.end_ids.shape[1]
        if len(end_ids) > width:
            grown = np.full((self.end_ids.shape[0], len(end_ids)), -1, dtype=np.int32)
            grown[:, :width] = self.end_ids
            self.end_ids = grown
        self.end_ids[slot] = -1
        self.end_ids[slot, : len(end_ids)] = end_ids
