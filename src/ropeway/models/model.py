"""What the executor sees of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ropeway.devices.base import AttentionPlan, KVCache, Layout
from ropeway.models.layers import Embedding, Head
from ropeway.models.spec import DecoderSpec


class Model(Protocol):
    """One rank's part of a decoder, its weights packed for one device.

    ``forward`` and ``logits`` call the device's kernels and the communicator's collectives, and do nothing else with
    tensors but view them: a device may record them (``Device.capture``)."""

    @property
    def spec(self) -> DecoderSpec: ...
    @property
    def embedding(self) -> Embedding: ...
    @property
    def head(self) -> Head: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int:
        """Of this rank."""
        ...

    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def weight_bytes(self) -> int:
        """Packed size of everything this rank holds."""
        ...

    @property
    def dtype(self) -> Layout:
        """The layout that holds most of the weights."""
        ...

    def forward(self, ids: Tensor, positions: Tensor, cache: KVCache, plan: AttentionPlan) -> Tensor:
        """Embedding and layers for ids (int32 [t]) at positions (int32 [t]) -> float32 [t, hidden], before
        the final norm. Writes the tokens' keys and values to the cache."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head of hidden (float32 [s, hidden]) -> float32 [s, vocab]."""
        ...
