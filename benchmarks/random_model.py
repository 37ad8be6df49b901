"""Checkpoints with the shape of a known model and random weights: what speed is measured on where no hub is at hand.

python -m benchmarks.random_model qwen3-0.6b            # prints the folder
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import torch
import typer

_STD = 0.02
_SLICE = 1 << 22
"""Values drawn at a time, so that a large table needs little memory."""

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
    },
    # Wide layers, as models have that are spread over hosts; half of them, so that a step is short.
    "llama-2-7b-16-layers": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-5,
    },
    "smollm2-135m": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 1e5,
        "rms_norm_eps": 1e-5,
    },
}


def random_model(shape: str, root: Path | None = None, *, seed: int = 0) -> Path:
    """The folder of the checkpoint, written under ``root`` (default: Ropeway's cache) unless it is there.

    Raises ``KeyError`` for a shape not in ``SHAPES``."""
    config = SHAPES[shape]
    folder = (root or cache_folder()) / f"{shape}-random-{seed}"
    config_file = folder / "config.json"
    if not config_file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"model.safetensors.{os.getpid()}"
        with part.open("wb") as out:
            _write_safetensors(out, dict(_tensors(config)), torch.Generator().manual_seed(seed))
        part.rename(folder / "model.safetensors")
        # Written last: with it, the checkpoint is whole.
        config_file.write_text(json.dumps(config, indent=2))
    return folder


def cache_folder() -> Path:
    return Path(os.environ.get("ROPEWAY_CACHE") or Path.home() / ".cache" / "ropeway") / "benchmarks"


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


def _main(
    shape: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}.")],
    root: Annotated[Path | None, typer.Option(help="Where to write it; default: Ropeway's cache.")] = None,
) -> None:
    """Write a checkpoint with random weights and print its folder."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"{shape!r} is not one of {', '.join(SHAPES)}")
    typer.echo(random_model(shape, root))


if __name__ == "__main__":
    typer.run(_main)
