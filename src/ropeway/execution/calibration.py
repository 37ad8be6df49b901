"""What is measured once, when a model with quantised keys and values is loaded: factors by which its keys are divided,
and how much its predictions change.

Some channels of some models' keys are tens of times larger than the others, and one scale per token and head would
leave nothing of the small ones. A factor is shared by the two channels that a rotary embedding turns into each other,
so that it holds at every position.

Source of moving a part of the difference from one side of a product to the other: Xiao et al., "SmoothQuant", 2023,
section 4. How large a part was measured here: docs/kernels.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropeway.devices.base import FACTORED, Device, KVCache, KVDtype, StepShape
from ropeway.models.model import Model

TOKENS = 64
"""Of the sequence that is measured with."""
PREDICTED = 24
"""Of them, the last ones, whose predictions are compared."""
EXPONENT = 0.75
"""0 would leave channels as they are, 1 would make them equally large."""
LARGEST_FACTOR = 64.0
WARN_ABOVE = 0.02
"""A cost that is told at start."""
_FREQUENT = 4096
"""Ids below it are frequent tokens, in most vocabularies."""
_BLOCK_SIZE = 32
_SEED = 0x6B657973


@dataclass(frozen=True)
class Calibration:
    key_factors: Tensor | None
    """For ``KVCache.key_factors``; None where the type has none."""
    cost: float
    """exp(mean Kullback-Leibler divergence) - 1 of predictions over such keys and values from those over float32 ones:
    by how much perplexity would rise on text that the model itself wrote. The sequence makes no sense, which is harder
    than text: a measure of what to expect at worst. 0 for types that are not quantised."""


@torch.inference_mode()
def calibrate(model: Model, device: Device, dtype: KVDtype, max_model_len: int) -> Calibration:
    """Two forwards over a fixed sequence of token ids, with a float32 cache and with one of ``dtype``; none for types
    that are not quantised. The same model and device give the same, whatever the number of threads.

    A pair's size is the largest absolute value of its two channels over the sequence, relative to the geometric mean of
    the head's pairs; its factor is that to the power of ``EXPONENT``, in [1/64, 64]. The first token has no part in it:
    models that use it as a sink of attention give it keys like no other's.

    Raises ``OutOfMemory``, and ``ConfigError`` for a type that the device cannot store."""
    if dtype in ("fp32", "bf16"):
        return Calibration(None, 0.0)
    exact = _Sequence(model, device, "fp32", max_model_len)
    want = exact.logprobs()
    factors = device.upload(_factors(exact.key_sizes()).numpy()) if dtype in FACTORED else None
    got = _Sequence(model, device, dtype, max_model_len, factors).logprobs()
    divergence = float((want.exp() * (want - got)).sum(-1).mean())
    return Calibration(factors, math.expm1(max(divergence, 0.0)))


def warning(dtype: KVDtype, cost: float) -> str | None:
    """What is to be said of a type with this cost, if anything."""
    if not cost > WARN_ABOVE and not math.isnan(cost):
        return None
    return (
        f"kv_dtype {dtype} may cost this model {cost:+.1%} of perplexity, by a short test; "
        "`ropeway bench perplexity` measures it on text, and int8 or bf16 cost less"
    )


class _Sequence:
    """The sequence, computed over a cache of its own."""

    def __init__(
        self, model: Model, device: Device, dtype: KVDtype, max_model_len: int, factors: Tensor | None = None
    ) -> None:
        self._model, self._tokens = model, min(TOKENS, max_model_len)
        self._blocks = -(-self._tokens // _BLOCK_SIZE)
        sizes = (model.num_kv_heads, model.head_dim, _BLOCK_SIZE, dtype)
        self._cache: KVCache = device.kv_cache(model.num_layers, self._blocks, *sizes, factors)
        with torch.inference_mode():
            positions = device.upload(np.arange(self._tokens, dtype=np.int32))
            shape = StepShape(
                positions=positions,
                query_start=device.upload(np.array([0, self._tokens], dtype=np.int32)),
                kv_lengths=device.upload(np.array([self._tokens], dtype=np.int32)),
                block_tables=device.upload(np.arange(self._blocks, dtype=np.int32)[None]),
            )
            plan = device.kernels.plan_attention(self._cache, shape)
            ids = device.upload(_token_ids(self._tokens, model.vocab_size))
            self._hidden = model.forward(ids, positions, self._cache, plan)

    def logprobs(self) -> Tensor:
        """float64 [PREDICTED or fewer, vocabulary]."""
        with torch.inference_mode():
            return self._model.logits(self._hidden[-PREDICTED:].contiguous()).double().log_softmax(-1)

    def key_sizes(self) -> Tensor:
        """Largest absolute value of every channel: [layers, kv_heads, head_dim]."""
        every, some = np.arange(self._blocks, dtype=np.int32), slice(min(1, self._tokens - 1), self._tokens)
        return torch.stack(
            [self._cache.stored(layer, every)[0][some].abs().amax(0) for layer in range(self._model.num_layers)]
        )


def _token_ids(count: int, vocab_size: int) -> NDArray[np.int32]:
    return np.random.Generator(np.random.Philox(_SEED)).integers(0, min(vocab_size, _FREQUENT), count, dtype=np.int32)


def _factors(largest: Tensor) -> Tensor:
    """From the largest absolute value of every channel, [layers, kv_heads, head_dim]; 1 throughout where a head's are
    all zero or one is not finite."""
    pairs = largest.double().view(*largest.shape[:-1], 2, -1).amax(-2)
    pairs = pairs.clamp(min=pairs.amax(-1, keepdim=True) / LARGEST_FACTOR**2)  # a dead pair says nothing of the others
    relative = (pairs.log2() - pairs.log2().mean(-1, keepdim=True)).exp2()
    factors = relative.pow(EXPONENT).clamp(1 / LARGEST_FACTOR, LARGEST_FACTOR)
    usable = factors.isfinite().all(-1, keepdim=True)
    return factors.where(usable, 1.0).float().repeat(1, 1, 2)
