"""What ranks must know of each other, and know alike, before they can run a plan."""

from __future__ import annotations

import msgspec


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank has its part of the weights."""

    digest: str = ""
    """Of the whole model's weights and config, and of what this rank computes with: the same on all ranks."""
    available: int
    """Bytes that it has for its pool."""
    second_activations: int = 0
    """Bytes of them that a second micro-batch would take."""
    weight_bytes: int


class PoolSizes(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 decides for all."""

    num_blocks: int
    max_model_len: int
    vocab_size: int
    """Ids from here on are never sampled."""
    micro_batches: bool = False
    """Whether plans may be cut in two."""
