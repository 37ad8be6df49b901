"""One device with its part of the model: runs plans. Called on the device's stream, in plan order."""

from __future__ import annotations

import numpy as np
import torch

from ropeway.devices.base import Device, KVCache, Sampled
from ropeway.execution.batch import Batch, build_batch
from ropeway.execution.rows import Rows
from ropeway.models.model import Model
from ropeway.outcome import LogprobColumns
from ropeway.plan import Plan, Result

_NOTHING = Result(np.empty(0, dtype=np.int32))


class Worker:
    """Holds the rows, the KV cache and the step between its forward and its sampling."""

    def __init__(
        self,
        device: Device,
        model: Model,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        """``vocab_size``: ids from here on are never sampled, though the model may have logits for them."""
        self.device = device
        self.model = model
        self.cache = cache
        self.vocab_size = vocab_size
        self.rows = Rows(device, max_num_seqs, max_model_len, cache.block_size)
        self._batch: Batch | None = None
        self._hidden: torch.Tensor | None = None

    @torch.inference_mode()
    def forward(self, plan: Plan) -> None:
        """Compute the plan's positions: their keys and values, and the hidden states of its sampling rows."""
        self._batch = self._hidden = None
        self.rows.apply(plan)
        if not len(plan.slot):
            return
        batch = build_batch(plan, self.rows, self.device, self.cache.block_size)
        attention = self.device.kernels.plan_attention(self.cache, batch.shape)
        hidden = self.model.forward(batch.ids, batch.shape.positions, self.cache, attention)
        if len(batch.slots):
            self._batch = batch
            self._hidden = hidden if len(batch.slots) == len(hidden) else hidden[batch.sampled]

    @torch.inference_mode()
    def sample(self) -> Result:
        """Sample the step whose forward ran last, append the tokens to their rows, bring them to the host."""
        batch, hidden = self._batch, self._hidden
        if batch is None or hidden is None:
            return _NOTHING
        logits = self.model.logits(hidden)[:, : self.vocab_size]
        inputs = self.rows.sample_inputs(batch.slots, batch.lengths)
        sampled = self.device.kernels.sample(logits, inputs)
        self.rows.tokens[inputs.slots, inputs.lengths] = sampled.token_ids
        return Result(self.device.download(sampled.token_ids), self._logprobs(sampled, batch))

    def _logprobs(self, sampled: Sampled, batch: Batch) -> LogprobColumns | None:
        if sampled.logprobs is None or sampled.top_ids is None or sampled.top_logprobs is None:
            return None
        row = np.flatnonzero(self.rows.top_logprobs[batch.slots] >= 0).astype(np.int32)
        down = self.device.download
        return LogprobColumns(
            row=row,
            chosen=down(sampled.logprobs)[row],
            top_ids=down(sampled.top_ids)[row],
            top=down(sampled.top_logprobs)[row],
        )
