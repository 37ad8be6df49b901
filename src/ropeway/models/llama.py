"""Llama 2 and 3, and the many models with their architecture.

Source: Touvron et al., "Llama 2", 2023; Meta, "The Llama 3 Herd of Models", 2024.
"""

from __future__ import annotations

from torch import Tensor

from ropeway.devices.base import AttentionPlan, KVCache
from ropeway.models.layers import Attention, Embedding, GatedMLP, Head, RMSNorm, local_kv_heads
from ropeway.models.spec import DecoderSpec
from ropeway.models.weights import Weights


class Llama:
    """One rank's part of a Llama model; see ``models.model.Model``."""

    def __init__(self, spec: DecoderSpec, weights: Weights, rope_table: Tensor) -> None:
        self.spec = spec
        self.num_layers = spec.num_layers
        self.num_kv_heads = local_kv_heads(spec, weights.communicator.size)
        self.head_dim = spec.head_dim
        self.vocab_size = spec.vocab_size
        self.embedding = Embedding(weights, "model.embed_tokens", spec.vocab_size, spec.hidden_size)
        self.layers = [LlamaLayer(spec, weights, rope_table, layer) for layer in range(spec.num_layers)]
        self.norm = RMSNorm(weights, "model.norm", spec.hidden_size, spec.rms_norm_eps)
        self.next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        self.head = Head(weights, spec, self.embedding, "model.embed_tokens")
        self.weight_bytes = weights.nbytes
        self.dtype = weights.layout

    def forward(self, ids: Tensor, positions: Tensor, cache: KVCache, plan: AttentionPlan) -> Tensor:
        residual = self.embedding(ids)
        x = self.layers[0].input_norm(residual)
        for layer, next_norm in zip(self.layers, self.next_norms, strict=True):
            x = layer.attention(x, positions, cache, plan)
            x, residual = layer.post_attention_norm.add(x, residual)
            x, residual = next_norm.add(layer.mlp(x), residual)
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))


class LlamaLayer:
    """Attention and MLP, each behind a norm; biases where the config asks for them."""

    def __init__(self, spec: DecoderSpec, weights: Weights, rope_table: Tensor, layer: int) -> None:
        name = f"model.layers.{layer}"
        self.input_norm = RMSNorm(weights, f"{name}.input_layernorm", spec.hidden_size, spec.rms_norm_eps)
        self.attention = Attention(
            weights,
            f"{name}.self_attn",
            spec,
            layer,
            rope_table,
            qkv_bias=spec.attention_bias,
            out_bias=spec.attention_bias,
        )
        self.post_attention_norm = RMSNorm(
            weights, f"{name}.post_attention_layernorm", spec.hidden_size, spec.rms_norm_eps
        )
        self.mlp = GatedMLP(weights, f"{name}.mlp", spec, bias=spec.mlp_bias)
