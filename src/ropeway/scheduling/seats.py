"""The running requests as columns: one numpy array per counter, one entry per slot."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from ropeway.request import Request
from ropeway.scheduling.policy import Rank

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
        self._columns: NDArray[np.int64] = np.zeros((14, slots), dtype=np.int64)
        """A row per counter, so that those of a slot are written at once."""
        (
            self.request_id,  # -1: vacant
            self.tier,
            self.line,  # of the queue it came from: a lower number may take what a higher one holds
            self.length,
            self.computed,
            self.goal,  # tokens known when seated; up to here input ids are chunks of known tokens
            self.limit,
            self.last,  # limit - 1: positions below it are computed; the last token's keys and values are never needed
            self.prompt,
            self.blocks_held,
            self.watch,  # first position whose settling brings an event: the first token, a full block, the limit
            self.served,  # number of the last plan with a row of it
            self.length_class,
            self.end_count,  # number of its end ids
        ) = self._columns
        self.request_id[:] = -1
        self.protected = np.zeros(slots, dtype=np.bool_)
        """Preempted so often that it is no victim any more."""
        self.padding = np.zeros(slots, dtype=np.bool_)
        """Finished, and computed on until its batch ends."""
        self.luck: NDArray[np.float64] = np.zeros(slots, dtype=np.float64)
        self.tokens: NDArray[np.int32] = np.empty((slots, max_len), dtype=np.int32)
        self.blocks: NDArray[np.int32] = np.empty((slots, -(-max_len // block_size)), dtype=np.int32)
        self.end_ids: NDArray[np.int32] = np.empty((0, slots), dtype=np.int32)
        """As many rows as any request has had end ids; -1: none."""
        self._end_rows = 0
        """Of these, those that the seated need."""
        self.requests: list[Request | None] = [None] * slots
        self.prefilling = 0
        """Seated requests with computed < goal."""
        self.departures = 0
        """How many requests have left their seats, or gone on as padding."""
        self.limits = 0
        """Sum of ``limit`` over the seated."""
        self.ranked: Slots = np.empty(0, dtype=np.int64)
        """Seated slots in the order of ranks; not to be changed in place."""
        self._ranks: list[Rank] = []
        """Their ranks."""
        self._free = list(range(slots - 1, -1, -1))
        self._block_size = block_size

    @property
    def taken(self) -> int:
        return len(self.requests) - len(self._free)

    @property
    def vacant(self) -> int:
        return len(self._free)

    def seat(self, request: Request, rank: Rank, blocks: list[int], *, computed: int, protected: bool) -> int:
        """Give the request a slot; its first ``blocks`` hold the keys and values of positions [0, computed)."""
        slot = self._free.pop()
        length = len(request.tokens)
        request.slot = slot
        self.requests[slot] = request
        self._columns[:, slot] = (
            request.id,
            request.tier,
            rank[0],
            length,
            computed,
            length,
            request.limit,
            request.limit - 1,
            request.prompt_tokens,
            len(blocks),
            0,  # its first sampled token is an event, whatever it is
            0,
            request.length_class,
            len(request.end_ids),
        )
        self.limits += request.limit
        self.protected[slot] = protected
        self.padding[slot] = False
        self.luck[slot] = request.luck
        self.tokens[slot, :length] = request.tokens
        self.blocks[slot, : len(blocks)] = blocks
        self._set_end_ids(slot, request.end_ids)
        self.prefilling += 1
        place = bisect_left(self._ranks, rank)
        self._ranks.insert(place, rank)
        self.ranked = np.concatenate((self.ranked[:place], (slot,), self.ranked[place:]))
        return slot

    def unseat(self, slot: int, rank: Rank) -> Request:
        """Take the slot back; the request carries its tokens on. Its blocks are the caller's to release,
        and must be read before."""
        request = self.requests[slot]
        assert request is not None
        request.tokens = self.tokens[slot, : self.length[slot]].copy()
        request.slot = -1
        self.prefilling -= int(self.computed[slot] < self.goal[slot])
        self.limits -= int(self.limit[slot])
        self.requests[slot] = None
        self.request_id[slot] = -1
        self._free.append(slot)
        self.departures += 1
        place = bisect_left(self._ranks, rank)
        assert self.ranked[place] == slot
        del self._ranks[place]
        self.ranked = np.concatenate((self.ranked[:place], self.ranked[place + 1 :]))
        if self._end_rows and self.end_count[slot] == self._end_rows:
            self._end_rows = int(self.end_count[self.ranked].max(initial=0))
        return request

    def pad(self, slot: int) -> None:
        """The request in this slot has ended; its row goes on as padding, as far as the columns reach."""
        self.padding[slot] = True
        self.departures += 1
        self.limits += self.tokens.shape[1] - int(self.limit[slot])
        self.limit[slot] = self.tokens.shape[1]
        self.last[slot] = self.limit[slot] - 1
        self.end_ids[:, slot] = -1
        self.watch[slot] = self.tokens.shape[1]

    def held(self, slot: int) -> list[int]:
        """Block table of a slot."""
        held: list[int] = self.blocks[slot, : self.blocks_held[slot]].tolist()
        return held

    def append_blocks(self, slot: int, blocks: list[int]) -> None:
        held = self.blocks_held[slot]
        self.blocks[slot, held : held + len(blocks)] = blocks
        self.blocks_held[slot] = held + len(blocks)

    def ends_with(self, slots: NDArray[np.int32], tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether each slot's new token is one of its end ids; bool [n]."""
        ended = np.zeros(len(slots), dtype=np.bool_)
        for ids in self.end_ids[: self._end_rows]:
            ended |= ids[slots] == tokens
        return ended

    def check(self) -> None:
        """Raise ``AssertionError`` unless what is kept up beside the columns says what they say."""
        seated = self.ranked
        assert self.taken + self.vacant == len(self.requests)
        assert sorted(seated.tolist()) == np.flatnonzero(self.request_id >= 0).tolist()
        assert sorted(self._free) == np.flatnonzero(self.request_id < 0).tolist()
        assert self._ranks == sorted(self._ranks)
        assert len(self._ranks) == len(seated)
        assert self.prefilling == int((self.computed[seated] < self.goal[seated]).sum())
        assert self.limits == int(self.limit[seated].sum())
        assert (self.last[seated] == self.limit[seated] - 1).all()
        going_on = seated[~self.padding[seated]]
        assert self._end_rows >= int(self.end_count[going_on].max(initial=0))
        for slot in going_on.tolist():
            request, count = self.requests[slot], int(self.end_count[slot])
            assert request is not None
            assert tuple(self.end_ids[:count, slot].tolist()) == request.end_ids
            assert (self.end_ids[count : self._end_rows, slot] == -1).all()

    def _set_end_ids(self, slot: int, end_ids: tuple[int, ...]) -> None:
        rows, slots = self.end_ids.shape
        if len(end_ids) > rows:
            grown = np.full((len(end_ids), slots), -1, dtype=np.int32)
            grown[:rows] = self.end_ids
            self.end_ids = grown
        if rows or end_ids:
            self.end_ids[:, slot] = -1
            self.end_ids[: len(end_ids), slot] = end_ids
            self._end_rows = max(self._end_rows, len(end_ids))
