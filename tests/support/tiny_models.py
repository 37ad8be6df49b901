"""Tiny Llama, Qwen2 and Qwen3 checkpoints with random weights, made by transformers, the oracle of parity."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

torch.set_num_threads(1)  # tiny matrices: threads only wait for each other
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CONFIGS = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}


@dataclass(frozen=True)
class Variant:
    """A family and what its config changes of ``SMALL``."""

    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    shard_bytes: int | None = None
    """Cut the checkpoint into files of this size."""
    dtype: torch.dtype = torch.float32


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10_000.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500_000.0,
}
_SLIDING = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}

VARIANTS: dict[str, Variant] = {
    "llama": Variant("llama"),
    "llama-tied": Variant("llama", {"tie_word_embeddings": True}),
    "llama-biased": Variant("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-multi-head": Variant("llama", {"num_key_value_heads": 4}),
    "llama-multi-query": Variant("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": Variant("llama", {"head_dim": 32}),
    "llama-sharded": Variant("llama", shard_bytes=150_000),
    "llama-linear": Variant("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
    "llama-llama3": Variant("llama", {"rope_parameters": _LLAMA3}),
    "qwen2": Variant("qwen2"),
    "qwen2-tied": Variant("qwen2", {"tie_word_embeddings": True}),
    "qwen2-sliding": Variant("qwen2", _SLIDING),
    "qwen2-yarn": Variant("qwen2", {"rope_parameters": _YARN}),
    "qwen3": Variant("qwen3", {"head_dim": 32}),
    "qwen3-tied-biased": Variant("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-sliding": Variant("qwen3", {"head_dim": 16, **_SLIDING}),
    "qwen3-yarn": Variant("qwen3", {"head_dim": 32, "rope_parameters": _YARN}),
}


@functools.cache
def _root() -> Path:
    """A folder for this process's checkpoints, removed with it."""
    path = Path(tempfile.mkdtemp(prefix="ropeway-tiny-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def tiny_checkpoint(name: str) -> Path:
    """The folder of a variant's checkpoint; made once per process, not to be changed."""
    variant = VARIANTS[name]
    folder = _root() / name
    model = _random_model(variant)
    sizes = {} if variant.shard_bytes is None else {"max_shard_size": variant.shard_bytes}
    model.to(variant.dtype).save_pretrained(folder, **sizes)
    return folder


@functools.cache
def tiny_oracle(name: str) -> transformers.PreTrainedModel:
    """The same model in transformers, in float32 with plain attention."""
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint(name), dtype=torch.float32, attn_implementation="eager"
    )
    return oracle.eval()


def _random_model(variant: Variant) -> transformers.PreTrainedModel:
    """Weights wide enough that logits differ clearly: norms around 1, biases that matter."""
    config = _CONFIGS[variant.family](**{**SMALL, **variant.changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5 * 1.5)
            elif "norm" in name:
                parameter.normal_(1, 0.2)
            else:
                parameter.normal_(0, 0.5)
        model.tie_weights()
    return model
