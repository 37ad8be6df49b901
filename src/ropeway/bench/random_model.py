"""Checkpoints with the shape of a known model and random weights: what speed is measured on where no hub is at hand."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ropeway.bench.shapes import SHAPES
from ropeway.errors import ConfigError
from ropeway.loading.sources import Places
from ropeway.loading.store import Store

_STD = 0.02
_SLICE = 1 << 22
"""Values drawn at a time, so that a large table needs little memory."""


def random_model(shape: str, root: Path | None = None, *, seed: int = 0) -> Path:
    """The folder of the checkpoint in bfloat16, written under ``root`` (default: ``cache_folder``) unless it is there.

    Raises ``ConfigError`` for a shape not in ``SHAPES``, ``LoadError`` where there is no room for it."""
    if shape not in SHAPES:
        raise ConfigError(f"there is no shape {shape!r}; known are {', '.join(SHAPES)}", param="shape")
    config = SHAPES[shape]
    folder = (root or cache_folder()) / f"{shape}-random-{seed}"
    config_file = folder / "config.json"
    if not config_file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        tensors = dict(_tensors(config))
        Store(folder).check_space(sum(2 * prod(each) for each in tensors.values()), f"{shape} with random weights")
        part = folder / f"model.safetensors.{os.getpid()}"
        try:
            with part.open("wb") as out:
                _write_safetensors(out, tensors, torch.Generator().manual_seed(seed))
            part.rename(folder / "model.safetensors")
        finally:
            part.unlink(missing_ok=True)
        # Written last: with it, the checkpoint is whole.
        config_file.write_text(json.dumps(config, indent=2))
    return folder


def cache_folder() -> Path:
    """Where models lie that are made for measuring."""
    return Places.from_environment(os.environ).cache / "benchmarks"


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor; vectors are the norms'."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.self_attn.q_proj.weight", (q_size, hidden)
        yield f"{name}.self_attn.k_proj.weight", (kv_size, hidden)
        yield f"{name}.self_attn.v_proj.weight", (kv_size, hidden)
        yield f"{name}.self_attn.o_proj.weight", (hidden, q_size)
        if config["model_type"] == "qwen3":
            yield f"{name}.self_attn.q_norm.weight", (head_dim,)
            yield f"{name}.self_attn.k_norm.weight", (head_dim,)
        yield f"{name}.post_attention_layernorm.weight", (hidden,)
        yield f"{name}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{name}.mlp.up_proj.weight", (inner, hidden)
        yield f"{name}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)


def _write_safetensors(out: BinaryIO, tensors: dict[str, tuple[int, ...]], generator: torch.Generator) -> None:
    """A header's length (uint64), the header, then the tensors in its order; never more than a slice in memory.

    Format: https://huggingface.co/docs/safetensors"""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)
    for shape in tensors.values():
        left = prod(shape)
        while left:
            count = min(left, _SLICE)
            values = torch.ones(count) if len(shape) == 1 else torch.randn(count, generator=generator) * _STD
            out.write(values.bfloat16().view(torch.int16).numpy().tobytes())
            left -= count
