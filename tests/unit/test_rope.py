"""Rotary tables against the angles transformers computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ropeway.models.rope import inverse_frequencies, rope_table
from ropeway.models.spec import DecoderSpec, RopeSpec

POSITIONS = 3000
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10_000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
        "rope_theta": 500_000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10_000.0},
    "yarn with all options": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 300,
        "rope_theta": 50_000.0,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 1.2,
        "mscale_all_dim": 0.8,
        "truncate": False,
    },
    "yarn with its own attention factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 1024,
        "rope_theta": 10_000.0,
        "attention_factor": 1.5,
    },
    "yarn whose ramp is a step": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 4,
        "rope_theta": 10_000.0,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_holds_the_angles_of_transformers(kind: str) -> None:
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"], rope_parameters=dict(KINDS[kind]), max_position_embeddings=4096, head_dim=64
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(POSITIONS)[None])
    spec = DecoderSpec.from_config(config.to_dict(), architecture="LlamaForCausalLM")
    table = rope_table(spec.rope, spec.head_dim, POSITIONS)
    assert table.shape == (POSITIONS, 2, 32)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table[:, 0], cos[0, :, :32], rtol=0, atol=1e-7 * spec.rope.attention_factor)
    torch.testing.assert_close(table[:, 1], sin[0, :, :32], rtol=0, atol=1e-7 * spec.rope.attention_factor)


def test_stated_factors_divide_the_frequencies() -> None:
    plain = inverse_frequencies(RopeSpec(), 8)
    divided = inverse_frequencies(RopeSpec(kind="factors", factors=(1.0, 2.0, 4.0, 8.0)), 8)
    assert torch.equal(divided, plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))
