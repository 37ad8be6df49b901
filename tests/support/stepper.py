"""Drives a ``Model`` by hand: steps made row by row, with block tables in random order, before any engine."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ropeway.devices.base import Device, KVDtype, StepShape
from ropeway.models.model import Model


class Stepper:
    """Sequences of token ids in a paged cache of their own; each keeps what it has computed so far."""

    def __init__(
        self,
        model: Model,
        device: Device,
        *,
        sequences: int = 1,
        max_len: int = 256,
        block_size: int = 16,
        kv_dtype: KVDtype = "fp32",
        seed: int = 0,
    ) -> None:
        self.model = model
        self.device = device
        blocks = -(-max_len // block_size)
        self.cache = device.kv_cache(
            model.num_layers, sequences * blocks, model.num_kv_heads, model.head_dim, block_size, kv_dtype
        )
        order = list(range(sequences * blocks))
        random.Random(seed).shuffle(order)
        self.tables = np.array(order, dtype=np.int32).reshape(sequences, blocks)
        self.computed = [0] * sequences

    def step(self, rows: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Compute each (sequence, its next token ids) in one step -> logits of all tokens, float32 [t, vocab]."""
        starts = np.array([self.computed[sequence] for sequence, _ in rows], dtype=np.int32)
        counts = np.array([len(ids) for _, ids in rows], dtype=np.int32)
        positions = [np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
        flat = np.concatenate([np.asarray(ids) for _, ids in rows]).astype(np.int32)
        shape = StepShape(
            positions=self._upload(np.concatenate(positions)),
            query_start=self._upload(np.concatenate(([0], counts.cumsum()))),
            kv_lengths=self._upload(starts + counts),
            block_tables=self._upload(self.tables[[sequence for sequence, _ in rows]]),
        )
        plan = self.device.kernels.plan_attention(self.cache, shape)
        hidden = self.model.forward(self._upload(flat), shape.positions, self.cache, plan)
        for sequence, ids in rows:
            self.computed[sequence] += len(ids)
        return self.model.logits(hidden)

    def prefill(self, ids: Sequence[int], *, chunk: int | None = None, sequence: int = 0) -> Tensor:
        """Logits of all positions of one sequence, computed whole or in chunks, float32 [len(ids), vocab]."""
        size = chunk or len(ids)
        return torch.cat([self.step([(sequence, ids[at : at + size])]) for at in range(0, len(ids), size)])

    def generate(
        self, prompt: Sequence[int], count: int, *, chunk: int | None = None, banned: int | None = None
    ) -> list[int]:
        """The ``count`` greedy tokens that follow the prompt, none of them ``banned``."""
        tokens: list[int] = []
        logits = self.prefill(prompt, chunk=chunk)[-1]
        while True:
            if banned is not None:
                logits[banned] = -torch.inf
            tokens.append(int(logits.argmax()))
            if len(tokens) == count:
                return tokens
            logits = self.step([(0, tokens[-1:])])[-1]

    def _upload(self, array: np.ndarray) -> Tensor:
        return self.device.upload(np.ascontiguousarray(array, dtype=np.int32))
