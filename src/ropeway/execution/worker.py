"""One device with its part of the model: runs plans. Called on the device's stream, in plan order."""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray

from ropeway.devices.base import Device, KVCache, Sampled
from ropeway.execution.batch import Batch, build_batch
from ropeway.execution.rows import Rows
from ropeway.models.model import Model
from ropeway.outcome import LogprobColumns
from ropeway.plan import Plan, Result

_NO_TOKENS = np.empty(0, dtype=np.int32)


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
        host: NDArray[np.uint8] | None = None,
    ) -> None:
        """``vocab_size``: ids from here on are never sampled, though the model may have logits for them. ``host``:
        uint8 [host blocks, block bytes], where plans copy blocks to and from."""
        self.device = device
        self.model = model
        self.cache = cache
        self.vocab_size = vocab_size
        self.host = host
        self.rows = Rows(device, max_num_seqs, max_model_len, cache.block_size)
        self._batch: Batch | None = None
        self._hidden: torch.Tensor | None = None
        self._copy_s = self._forward_s = 0.0

    @torch.inference_mode()
    def forward(self, plan: Plan) -> None:
        """Copy the plan's blocks, to the host first; then compute its positions: their keys and values, and the hidden
        states of its sampling rows.

        Raises ``RuntimeError`` for copies without host memory."""
        self._batch = self._hidden = None
        began = time.perf_counter()
        self._copy(plan)
        copied = time.perf_counter()
        self.rows.apply(plan)
        if len(plan.slot):
            self._compute(plan)
        self._copy_s, self._forward_s = copied - began, time.perf_counter() - copied

    @torch.inference_mode()
    def sample(self) -> Result:
        """Sample the step whose forward ran last, append the tokens to their rows, bring them to the host."""
        batch, hidden = self._batch, self._hidden
        if batch is None or hidden is None:
            return Result(_NO_TOKENS, elapsed_s=self._forward_s, copy_s=self._copy_s)
        began = time.perf_counter()
        logits = self.model.logits(hidden)[:, : self.vocab_size]
        inputs = self.rows.sample_inputs(batch.slots, batch.lengths)
        sampled = self.device.kernels.sample(logits, inputs)
        self.rows.tokens[inputs.slots, inputs.lengths] = sampled.token_ids
        token_ids, logprobs = self.device.download(sampled.token_ids), self._logprobs(sampled, batch)
        return Result(token_ids, logprobs, self._forward_s + time.perf_counter() - began, self._copy_s)

    def _copy(self, plan: Plan) -> None:
        if not len(plan.to_host) and not len(plan.to_device):
            return
        if self.host is None:
            raise RuntimeError("a plan copies blocks, but the worker has no host memory")
        if len(plan.to_host):
            self.cache.to_host(plan.to_host[:, 0], self.host, plan.to_host[:, 1])
        if len(plan.to_device):
            self.cache.to_device(plan.to_device[:, 0], self.host, plan.to_device[:, 1])

    @torch.inference_mode()
    def hidden_states(self, plan: Plan) -> torch.Tensor:
        """A forward without sampling -> float32 [tokens, hidden] of all its tokens, as ``Model.logits`` takes them. For
        measuring: a step that is sampled keeps those of its sampling rows alone."""
        self.rows.apply(plan)
        return self._hidden_states(plan)[1]

    def _hidden_states(self, plan: Plan) -> tuple[Batch, torch.Tensor]:
        batch = build_batch(plan, self.rows, self.device, self.cache.block_size)
        attention = self.device.kernels.plan_attention(self.cache, batch.shape)
        return batch, self.model.forward(batch.ids, batch.shape.positions, self.cache, attention)

    def _compute(self, plan: Plan) -> None:
        batch, hidden = self._hidden_states(plan)
        if len(batch.slots):
            self._batch = batch
            self._hidden = hidden if len(batch.slots) == len(hidden) else hidden[batch.sampled]

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
