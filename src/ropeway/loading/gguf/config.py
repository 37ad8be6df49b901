"""Metadata of a GGUF file in the words of Hugging Face's ``config.json`` and ``generation_config.json``.

Source of the fields: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Standardized key-value pairs".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gguf.constants import GGMLQuantizationType

from ropeway.errors import LoadError, Unsupported
from ropeway.loading.gguf.metadata import Metadata
from ropeway.loading.gguf.reader import TensorEntry
from ropeway.loading.gguf.vocabulary import special_ids

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

DENSE_TYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
QUANTISED = "gguf-quantised"

SAMPLING_FIELDS: dict[str, tuple[str, type[float] | type[int]]] = {
    "general.sampling.temp": ("temperature", float),
    "general.sampling.top_k": ("top_k", int),
    "general.sampling.top_p": ("top_p", float),
    "general.sampling.min_p": ("min_p", float),
    "general.sampling.penalty_repeat": ("repetition_penalty", float),
}


def architecture(metadata: Metadata) -> str:
    """``general.architecture``; raises ``Unsupported`` for one that is not in ``ARCHITECTURES``, and for files
    that are no models (adapters, projectors)."""
    name = metadata.require("general.architecture", str)
    kind = metadata.scalar("general.type", str, "model")
    if kind != "model":
        raise Unsupported(f"{metadata.path}: holds a GGUF of the type '{kind}', not a model")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise Unsupported(f"{metadata.path}: GGUF architecture '{name}' is not supported; supported: {known}")
    if experts := metadata.scalar(f"{name}.expert_count", int, 0):
        raise Unsupported(f"{metadata.path}: '{name}' with {experts} experts (mixture of experts) is not supported")
    return name


def model_config(
    metadata: Metadata, tensors: Mapping[str, TensorEntry], rope_factors: list[float] | None
) -> dict[str, Any]:
    """``config.json`` of the file.

    Two values are this format's own: ``torch_dtype`` is "gguf-quantised" when any matrix is quantised, and
    a ``rope_scaling`` of ``{"rope_type": "factors", "factors": [...]}`` gives, for each of the head's
    rotary frequencies, the number it is divided by (how GGUF stores Llama 3's scaling).
    """
    arch = architecture(metadata)
    hidden = metadata.require(f"{arch}.embedding_length", int)
    heads = metadata.require(f"{arch}.attention.head_count", int)
    context = metadata.require(f"{arch}.context_length", int)
    if heads < 1 or hidden < 1:
        raise LoadError(f"{metadata.path}: damaged: {heads} attention heads, an embedding of {hidden}")
    head_dim = metadata.scalar(f"{arch}.attention.key_length", int, hidden // heads)
    require_equal(metadata, f"{arch}.attention.value_length", head_dim)
    require_equal(metadata, f"{arch}.rope.dimension_count", head_dim)
    if rope_factors is not None and len(rope_factors) != head_dim // 2:
        raise LoadError(f"{metadata.path}: damaged: {len(rope_factors)} rotary factors for heads of {head_dim}")
    layers = metadata.require(f"{arch}.block_count", int)
    if not 1 <= layers <= len(tensors):
        raise LoadError(f"{metadata.path}: damaged: '{arch}.block_count' is {layers}, with {len(tensors)} tensors")
    ids = special_ids(metadata)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": metadata.require(f"{arch}.feed_forward_length", int),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.scalar(f"{arch}.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": metadata.require(f"{arch}.attention.layer_norm_rms_epsilon", float),
        "rope_theta": metadata.scalar(f"{arch}.rope.freq_base", float, 10000.0),
        "rope_scaling": rope_scaling(metadata, arch, context, rope_factors),
        "vocab_size": vocabulary_size(metadata, arch, tensors),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "torch_dtype": matrix_dtype(tensors),
        "bos_token_id": ids.bos,
        "eos_token_id": list(ids.ends),
        "pad_token_id": ids.pad,
    }
    if window := metadata.scalar(f"{arch}.attention.sliding_window", int, 0):
        config["sliding_window"] = window
        config["use_sliding_window"] = True
        config["layer_types"] = ["sliding_attention"] * layers
    return config


def generation_config(metadata: Metadata) -> dict[str, Any]:
    """``generation_config.json``: the union of all end tokens, and sampling defaults where the file has any."""
    ids = special_ids(metadata)
    config: dict[str, Any] = {"eos_token_id": list(ids.ends)}
    for key, (name, kind) in SAMPLING_FIELDS.items():
        if (value := metadata.scalar(key, kind)) is not None:
            config[name] = value
    return config


def rope_scaling(metadata: Metadata, arch: str, context: int, factors: list[float] | None) -> dict[str, Any] | None:
    """Hugging Face's ``rope_scaling``, or None for plain rotary embeddings."""
    prefix = f"{arch}.rope.scaling"
    kind = metadata.scalar(f"{prefix}.type", str, "none")
    factor = metadata.scalar(f"{prefix}.factor", float, 0.0)
    if kind == "none" and f"{arch}.rope.scale_linear" in metadata:  # the name before scaling had types
        factor = metadata.require(f"{arch}.rope.scale_linear", float)
        kind = "linear" if factor not in (0.0, 1.0) else "none"
    if kind not in ("none", "linear", "yarn"):
        raise Unsupported(f"{metadata.path}: rotary scaling '{kind}' is not supported; supported: linear, yarn")
    if factors is not None:
        if kind != "none":
            raise Unsupported(f"{metadata.path}: rotary scaling '{kind}' together with factors per frequency")
        return {"rope_type": "factors", "factors": factors}
    if kind == "none":
        return None
    if factor <= 0:
        raise LoadError(f"{metadata.path}: field '{prefix}.factor' must be positive for '{kind}', not {factor}")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.scalar(f"{prefix}.original_context_length", int, context),
    }
    for name in ("beta_fast", "beta_slow"):
        if (beta := metadata.scalar(f"{prefix}.yarn_{name}", float)) is not None:
            scaling[name] = beta
    attention = metadata.scalar(f"{prefix}.yarn_attn_factor", float)
    if attention is None:
        attention = metadata.scalar(f"{prefix}.attn_factor", float)
    if attention is not None:  # GGUF multiplies YaRN's own factor (Peng et al., 2023, equation 22), HF replaces it
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return scaling


def vocabulary_size(metadata: Metadata, arch: str, tensors: Mapping[str, TensorEntry]) -> int:
    """Rows of the embedding, which decide; without one (a file to be refused later) what the metadata says."""
    if (embedding := tensors.get("token_embd.weight")) is not None:
        return embedding.shape[0]
    return metadata.scalar(f"{arch}.vocab_size", int, len(metadata.texts("tokenizer.ggml.tokens") or []))


def matrix_dtype(tensors: Mapping[str, TensorEntry]) -> str:
    """Type of all matrices, "float32" when dense types are mixed, or "gguf-quantised"."""
    kinds = {entry.type for entry in tensors.values() if len(entry.shape) > 1}
    if kinds - DENSE_TYPES.keys():
        return QUANTISED
    return DENSE_TYPES[kinds.pop()] if len(kinds) == 1 else "float32"


def require_equal(metadata: Metadata, key: str, head_dim: int) -> None:
    value = metadata.scalar(key, int, head_dim)
    if value != head_dim:
        raise Unsupported(f"{metadata.path}: field '{key}' is {value}, the head size {head_dim}; they must be equal")
