"""The building blocks of decoders over ``Device.kernels``, each holding this rank's part of its weights.

Matrices are cut as in Shoeybi et al., "Megatron-LM", 2019, section 3: first products by output features,
second ones by input features, so that a block needs one sum over ranks at its end.
"""

from __future__ import annotations

from torch import Tensor

from ropeway.devices.base import AttentionPlan, KVCache, Weight
from ropeway.errors import ConfigError
from ropeway.models.spec import DecoderSpec
from ropeway.models.weights import Shard, Weights


class Linear:
    """A product whose result is this rank's (column parallel) or, with no shard, everyone's."""

    def __init__(
        self, weights: Weights, name: str, n: int, k: int, *, bias: bool = False, shard: Shard | None = None
    ) -> None:
        self._kernels = weights.kernels
        self._weight = weights.matrix(f"{name}.weight", n, k, shard)
        self._bias = weights.vector(f"{name}.bias", n, shard) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self._weight, self._bias)


class ReducedLinear:
    """A product over input features that are spread over the ranks (row parallel), and its sum over them."""

    def __init__(self, weights: Weights, name: str, n: int, k: int, *, bias: bool = False) -> None:
        self._kernels = weights.kernels
        self._communicator = weights.communicator
        self._weight = weights.matrix(f"{name}.weight", n, k, weights.columns())
        vector = weights.vector(f"{name}.bias", n) if bias else None
        self._bias = vector if weights.communicator.rank == 0 else None
        self._features = n

    def __call__(self, x: Tensor) -> Tensor:
        return self._communicator.reduce_product(self._product, x, self._features)

    def _product(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self._weight, self._bias)


class Embedding:
    """The table of token vectors, cut by vocabulary."""

    def __init__(self, weights: Weights, name: str, vocab_size: int, hidden_size: int) -> None:
        self._kernels = weights.kernels
        self._communicator = weights.communicator
        self.table = weights.matrix(f"{name}.weight", vocab_size, hidden_size, weights.rows())
        self._first = self._communicator.rank * self.table.shape[0]

    def __call__(self, ids: Tensor) -> Tensor:
        if self._communicator.size == 1:
            return self._kernels.gather(self.table, ids)
        return self._communicator.all_reduce(self._kernels.gather(self.table, ids, self._first))


class Head:
    """Logits over the vocabulary; the embedding's own table where the model ties the two."""

    def __init__(self, weights: Weights, spec: DecoderSpec, embedding: Embedding, embedding_name: str) -> None:
        self._kernels = weights.kernels
        self._communicator = weights.communicator
        name = "lm_head.weight"
        if spec.tie_word_embeddings and weights.is_copy(name, of=f"{embedding_name}.weight"):
            self.weight: Weight = embedding.table
        else:
            self.weight = weights.matrix(name, spec.vocab_size, spec.hidden_size, weights.rows())

    def __call__(self, x: Tensor) -> Tensor:
        return self._communicator.all_gather(self._kernels.linear(x, self.weight), dim=1)


class RMSNorm:
    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self._kernels = weights.kernels
        self._weight = weights.vector(f"{name}.weight", size)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual)."""
        return self._kernels.add_rms_norm(x, residual, self._weight, self._eps)


class Attention:
    """Grouped-query attention with rotary positions over the paged cache.

    Source: Ainslie et al., "GQA", 2023. With fewer key-value heads than ranks, ranks share heads.
    """

    def __init__(
        self,
        weights: Weights,
        name: str,
        spec: DecoderSpec,
        layer: int,
        rope_table: Tensor,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        self._kernels = weights.kernels
        self._layer = layer
        self._rope_table = rope_table
        self._head_dim = spec.head_dim
        self._scale = spec.head_dim**-0.5
        self._window = spec.windows[layer]
        size = weights.communicator.size
        if spec.num_heads % size:
            raise ConfigError(f"{spec.num_heads} attention heads cannot be split evenly over {size} ranks")
        self._heads = spec.num_heads // size
        self._kv_heads = local_kv_heads(spec, size)
        kv_parts = spec.num_kv_heads // self._kv_heads
        kv_shard = Shard(0, weights.communicator.rank * kv_parts // size, kv_parts)
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._q = Linear(weights, f"{name}.q_proj", q_size, spec.hidden_size, bias=qkv_bias, shard=weights.rows())
        self._k = Linear(weights, f"{name}.k_proj", kv_size, spec.hidden_size, bias=qkv_bias, shard=kv_shard)
        self._v = Linear(weights, f"{name}.v_proj", kv_size, spec.hidden_size, bias=qkv_bias, shard=kv_shard)
        self._out = ReducedLinear(weights, f"{name}.o_proj", spec.hidden_size, q_size, bias=out_bias)
        self._q_norm = RMSNorm(weights, f"{name}.q_norm", spec.head_dim, spec.rms_norm_eps) if qk_norm else None
        self._k_norm = RMSNorm(weights, f"{name}.k_norm", spec.head_dim, spec.rms_norm_eps) if qk_norm else None

    def __call__(self, x: Tensor, positions: Tensor, cache: KVCache, plan: AttentionPlan) -> Tensor:
        t = x.shape[0]
        q = self._q(x).view(t, self._heads, self._head_dim)
        k = self._k(x).view(t, self._kv_heads, self._head_dim)
        v = self._v(x).view(t, self._kv_heads, self._head_dim)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q), self._k_norm(k)
        q = self._kernels.rope(q, positions, self._rope_table)
        k = self._kernels.rope(k, positions, self._rope_table)
        self._kernels.write_kv(cache, self._layer, k, v, plan)
        out = self._kernels.attention(q, cache, self._layer, plan, self._scale, self._window)
        return self._out(out.view(t, self._heads * self._head_dim))


def local_kv_heads(spec: DecoderSpec, size: int) -> int:
    """Key-value heads of one of ``size`` ranks; raises ``ConfigError`` for a split that does not come out even."""
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        raise ConfigError(
            f"{spec.num_kv_heads} key-value heads cannot be split over {size} ranks: one must divide the other"
        )
    return max(spec.num_kv_heads // size, 1)


class GatedMLP:
    """down(silu(gate(x)) * up(x)). Source: Shazeer, "GLU Variants Improve Transformer", 2020."""

    def __init__(self, weights: Weights, name: str, spec: DecoderSpec, *, bias: bool = False) -> None:
        self._kernels = weights.kernels
        inner, outer = spec.intermediate_size, spec.hidden_size
        self._gate = Linear(weights, f"{name}.gate_proj", inner, outer, bias=bias, shard=weights.rows())
        self._up = Linear(weights, f"{name}.up_proj", inner, outer, bias=bias, shard=weights.rows())
        self._down = ReducedLinear(weights, f"{name}.down_proj", outer, inner, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._kernels.silu_and_mul(self._gate(x), self._up(x)))
