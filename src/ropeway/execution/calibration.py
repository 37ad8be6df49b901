"""Factors by which keys are divided before they are quantised, measured once when a model is loaded.

Some channels of some models' keys are tens of times larger than the others, and one scale per token and head would
leave nothing of the small ones. A factor is shared by the two channels that a rotary embedding turns into each other,
so that it holds at every position.

Source of moving a part of the difference from one side of a product to the other: Xiao et al., "SmoothQuant", 2023,
section 4. How large a part was measured here: docs/kernels.md.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropeway.devices.base import Device, StepShape
from ropeway.models.model import Model

TOKENS = 96
"""Of the sequence that factors are measured with."""
EXPONENT = 0.75
"""0 would leave channels as they are, 1 would make them equally large."""
LARGEST_FACTOR = 64.0
_BLOCK_SIZE = 16
_SEED = 0x6B657973


@torch.inference_mode()
def key_factors(model: Model, device: Device, max_model_len: int) -> Tensor:
    """Factors for ``KVCache.key_factors``: float32 [layers, kv_heads, head_dim] on the device.

    One forward over a fixed sequence of token ids with a float32 cache. A pair's size is the largest absolute value of
    its two channels over the sequence, relative to the geometric mean of the head's pairs; its factor is that to the
    power of ``EXPONENT``, in [1/64, 64]. The first token has no part in it: models that use it as a sink of attention
    give it keys like no other's. The same model and device give the same factors, whatever the number of threads.
    Raises ``OutOfMemory``."""
    tokens = min(TOKENS, max_model_len)
    blocks = -(-tokens // _BLOCK_SIZE)
    cache = device.kv_cache(model.num_layers, blocks, model.num_kv_heads, model.head_dim, _BLOCK_SIZE, "fp32")
    positions = device.upload(np.arange(tokens, dtype=np.int32))
    plan = device.kernels.plan_attention(
        cache,
        StepShape(
            positions=positions,
            query_start=device.upload(np.array([0, tokens], dtype=np.int32)),
            kv_lengths=device.upload(np.array([tokens], dtype=np.int32)),
            block_tables=device.upload(np.arange(blocks, dtype=np.int32)[None]),
        ),
    )
    model.forward(device.upload(_token_ids(tokens, model.vocab_size)), positions, cache, plan)
    every = np.arange(blocks, dtype=np.int32)
    largest = [
        cache.stored(layer, every)[0][min(1, tokens - 1) : tokens].abs().amax(0) for layer in range(model.num_layers)
    ]
    return device.upload(_factors(torch.stack(largest)).numpy())


def _token_ids(count: int, vocab_size: int) -> NDArray[np.int32]:
    return np.random.Generator(np.random.Philox(_SEED)).integers(0, vocab_size, count, dtype=np.int32)


def _factors(largest: Tensor) -> Tensor:
    """From the largest absolute value of every channel, [layers, kv_heads, head_dim]; 1 throughout where a head's are
    all zero or one is not finite."""
    pairs = largest.double().view(*largest.shape[:-1], 2, -1).amax(-2)
    pairs = pairs.clamp(min=pairs.amax(-1, keepdim=True) / LARGEST_FACTOR**2)  # a dead pair says nothing of the others
    relative = (pairs.log2() - pairs.log2().mean(-1, keepdim=True)).exp2()
    factors = relative.pow(EXPONENT).clamp(1 / LARGEST_FACTOR, LARGEST_FACTOR)
    usable = factors.isfinite().all(-1, keepdim=True)
    return factors.where(usable, 1.0).float().repeat(1, 1, 2)
