"""The device's own rows: what a slot's request is, sent once when it is seated and kept up by the steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ropeway.devices.base import Device, SampleInputs
from ropeway.plan import Masks, Plan, Seat

_MASKED = float("-inf")
BANNED = -100.0
"""OpenAI's logit bias that bans a token."""


@dataclass(frozen=True, slots=True)
class PromptPositions:
    """Columns over positions of prompts."""

    request: NDArray[np.int64]
    slot: NDArray[np.int32]
    position: NDArray[np.int32]
    token: NDArray[np.int32]
    """Among the tokens of the step."""
    top: int
    """Most likeliest tokens that anybody asked for."""


class Rows:
    """Per slot: token ids (on the device, since only it knows the newest), block table and sampling
    parameters (columns on the host, gathered per step).

    The host's columns are a step ahead of the device, which may still append to the tokens of whoever had a slot
    before: so tokens are written in the device's order alone."""

    def __init__(self, device: Device, slots: int, max_len: int, block_size: int) -> None:
        self._device = device
        # Pages of these are touched only as far as sequences reach.
        self.tokens: Tensor = device.upload(np.zeros((slots, max_len), dtype=np.int32))
        self.block_tables = np.zeros((slots, -(-max_len // block_size)), dtype=np.int32)
        self.blocks_held = np.zeros(slots, dtype=np.int64)
        self.prompt_lengths = np.zeros(slots, dtype=np.int32)
        self.temperature = np.zeros(slots, dtype=np.float32)
        self.top_k = np.zeros(slots, dtype=np.int32)
        self.top_p = np.ones(slots, dtype=np.float32)
        self.min_p = np.zeros(slots, dtype=np.float32)
        self.repetition_penalty = np.ones(slots, dtype=np.float32)
        self.presence_penalty = np.zeros(slots, dtype=np.float32)
        self.frequency_penalty = np.zeros(slots, dtype=np.float32)
        self.seeds = np.zeros(slots, dtype=np.uint64)
        self.top_logprobs = np.full(slots, -1, dtype=np.int32)
        self.prompt_logprobs = np.full(slots, -1, dtype=np.int32)
        self._bias: dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}
        """Slot -> (token ids, values) of its logit bias."""
        self._held_back: dict[int, tuple[int, NDArray[np.int32]]] = {}
        """Slot -> (length from which end tokens are allowed, end ids)."""
        self._last: tuple[NDArray[np.int32], SampleInputs] | None = None
        """The slots sampled last and their parameters, while nobody takes a seat: most steps sample the same ones."""

    def apply(self, plan: Plan) -> None:
        """Seat the plan's new requests, but for their tokens, and append its new blocks."""
        for seat in plan.seats:
            self._seat(seat)
        given = 0
        for row in np.flatnonzero(plan.new_block_count).tolist():
            slot, count = plan.slot[row], int(plan.new_block_count[row])
            held = self.blocks_held[slot]
            self.block_tables[slot, held : held + count] = plan.new_blocks[given : given + count]
            self.blocks_held[slot] = held + count
            given += count

    def prompts_told(self, plan: Plan) -> PromptPositions | None:
        """Positions of the plan whose logits tell of a token of a prompt that somebody asked about; None: there are
        none. After ``apply``."""
        last = self.prompt_lengths[plan.slot] - 1  # its logits tell of the first token of the answer
        count = np.minimum(plan.start + plan.count, last) - plan.start
        count[self.prompt_logprobs[plan.slot] < 0] = 0
        rows = np.flatnonzero(count > 0)
        if not len(rows):
            return None
        count = count[rows]
        within = np.concatenate([np.arange(each, dtype=np.int32) for each in count])
        first = np.cumsum(plan.count) - plan.count
        return PromptPositions(
            request=np.repeat(plan.request[rows], count),
            slot=np.repeat(plan.slot[rows], count),
            position=np.repeat(plan.start[rows], count) + within,
            token=(np.repeat(first[rows], count) + within).astype(np.int32),
            top=int(self.prompt_logprobs[plan.slot[rows]].max()),
        )

    def write_prompts(self, seats: Iterable[Seat]) -> None:
        """Write the tokens of new seats; on the device's stream."""
        for seat in seats:
            self.tokens[seat.slot, : len(seat.token_ids)] = self._device.upload(seat.token_ids)

    def sample_inputs(
        self, slots: NDArray[np.int32], lengths: NDArray[np.int32], masks: Masks | None = None
    ) -> SampleInputs:
        """Parameters of the sampled rows; ``lengths`` are the tokens known, which is the position sampled."""
        inputs = self._parameters(slots, lengths)
        if masks is None:
            return inputs
        mask_of = np.full(len(slots), -1, dtype=np.int32)
        mask_of[masks.row] = np.arange(len(masks.row), dtype=np.int32)
        up = self._device.upload
        return replace(inputs, mask_of=up(mask_of), masks=up(masks.bits))

    def _parameters(self, slots: NDArray[np.int32], lengths: NDArray[np.int32]) -> SampleInputs:
        up = self._device.upload
        if self._last is not None and np.array_equal(self._last[0], slots):
            return replace(self._last[1], lengths=up(lengths))
        start, ids, values = self._biases(slots, lengths)
        inputs = SampleInputs(
            temperature=up(self.temperature[slots]),
            top_k=up(self.top_k[slots]),
            top_p=up(self.top_p[slots]),
            min_p=up(self.min_p[slots]),
            repetition_penalty=up(self.repetition_penalty[slots]),
            presence_penalty=up(self.presence_penalty[slots]),
            frequency_penalty=up(self.frequency_penalty[slots]),
            seeds=up(self.seeds[slots].view(np.int64)),
            tokens=self.tokens,
            slots=up(slots),
            prompt_lengths=up(self.prompt_lengths[slots]),
            lengths=up(lengths),
            bias_start=up(start),
            bias_ids=up(ids),
            bias_values=up(values),
            top_logprobs=up(self.top_logprobs[slots]),
        )
        if not self._held_back:  # what is held back depends on the lengths
            self._last = slots, inputs
        return inputs

    def _seat(self, seat: Seat) -> None:
        slot, params = seat.slot, seat.params
        self._last = None
        self.blocks_held[slot] = len(seat.blocks)
        self.block_tables[slot, : len(seat.blocks)] = seat.blocks
        self.prompt_lengths[slot] = seat.prompt_tokens
        self.temperature[slot] = 0.0 if params.greedy else params.temperature
        self.top_k[slot] = max(params.top_k, 0)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition_penalty[slot] = params.repetition_penalty
        self.presence_penalty[slot] = params.presence_penalty
        self.frequency_penalty[slot] = params.frequency_penalty
        self.seeds[slot] = seat.seed
        self.top_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.prompt_logprobs[slot] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self._bias.pop(slot, None)
        self._held_back.pop(slot, None)
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias, dtype=np.int32)
            values = np.fromiter(params.logit_bias.values(), dtype=np.float32)
            self._bias[slot] = ids, np.where(values <= BANNED, _MASKED, values).astype(np.float32)
        if params.min_tokens and seat.end_ids:
            free_from = seat.prompt_tokens + params.min_tokens
            self._held_back[slot] = free_from, np.array(seat.end_ids, dtype=np.int32)

    def _biases(
        self, slots: NDArray[np.int32], lengths: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
        """(row starts, token ids, values) of all logit biases and held-back end tokens."""
        start = np.zeros(len(slots) + 1, dtype=np.int32)
        ids: list[NDArray[np.int32]] = []
        values: list[NDArray[np.float32]] = []
        if self._bias or self._held_back:
            for row, slot in enumerate(slots.tolist()):
                if slot in self._bias:
                    ids.append(self._bias[slot][0])
                    values.append(self._bias[slot][1])
                free_from, end_ids = self._held_back.get(slot, (0, None))
                if end_ids is not None and lengths[row] < free_from:
                    ids.append(end_ids)
                    values.append(np.full(len(end_ids), _MASKED, dtype=np.float32))
                start[row + 1] = sum(map(len, ids))
        if not ids:
            return np.zeros_like(start), np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)
        return start, np.concatenate(ids), np.concatenate(values)
