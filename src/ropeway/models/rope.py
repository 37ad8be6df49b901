"""The table of a rotary position embedding: cos and sin of every position, computed once at load.

Every step is float32 and in the order of Hugging Face transformers, so that angles agree bit for bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ropeway.models.spec import RopeSpec


def rope_table(spec: RopeSpec, head_dim: int, num_positions: int) -> Tensor:
    """float32 [num_positions, 2, head_dim / 2]: cos, then sin, with the attention factor folded in."""
    angles = torch.arange(num_positions).float()[:, None] * inverse_frequencies(spec, head_dim)
    table = torch.stack((angles.cos(), angles.sin()), dim=1)
    return table.mul_(spec.attention_factor)


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each feature pair, float32 [head_dim / 2]."""
    periods = spec.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    match spec.kind:
        case "default":
            return 1.0 / periods
        case "linear":
            return 1.0 / periods / spec.factor
        case "factors":
            return 1.0 / periods / torch.tensor(spec.factors)
        case "llama3":
            return _llama3(spec, 1.0 / periods)
        case "yarn":
            return _yarn(spec, periods, head_dim)


def _llama3(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended.

    Source: Meta, "The Llama 3 Herd of Models", 2024, and the released model code.
    """
    longest_kept = spec.original_context / spec.high_freq_factor
    shortest_stretched = spec.original_context / spec.low_freq_factor
    waves = 2 * math.pi / frequencies
    blend = (spec.original_context / waves - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blended = (1 - blend) * frequencies / spec.factor + blend * frequencies
    scaled = torch.where(waves > shortest_stretched, frequencies / spec.factor, blended)
    return torch.where(waves < longest_kept, frequencies, scaled)


def _yarn(spec: RopeSpec, periods: Tensor, head_dim: int) -> Tensor:
    """Features that turn often within the original context are kept, those that turn rarely stretched, with
    a linear ramp between.

    Source: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023, section 3.2.
    """

    def feature_with(turns: float) -> float:
        return head_dim * math.log(spec.original_context / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = feature_with(spec.beta_fast), feature_with(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    kept = 1 - torch.clamp((torch.arange(head_dim // 2).float() - low) / (high - low), 0, 1)
    return 1.0 / (spec.factor * periods) * (1 - kept) + 1.0 / periods * kept
