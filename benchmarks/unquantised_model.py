"""An unquantised checkpoint out of a quantised GGUF file, for measuring what quantisation costs on real weights where
no hub is at hand.

python -m benchmarks.unquantised_model smollm2-135m            # prints the folder

The file's values lie on the grids of its own groups, so quantising them in the same groups again would cost next to
nothing and prove nothing. Here features are put into another order first: those of the hidden state, of each MLP and of
each head's values. The model computes the same function, but a group now holds values of many groups of the file, which
no 4-bit grid fits.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor

from ropeway.bench.random_model import cache_folder
from ropeway.errors import Unsupported
from ropeway.loading.checkpoint import Checkpoint
from ropeway.loading.gguf.checkpoint import GGUFCheckpoint
from ropeway.loading.sources import resolve
from ropeway.text.tokenizer import Tokenizer

_HIDDEN_COLUMNS = re.compile(r"(embed_tokens|lm_head|q_proj|k_proj|v_proj|gate_proj|up_proj)\.weight$")
_HIDDEN_ROWS = re.compile(r"(o_proj\.(weight|bias)|down_proj\.(weight|bias)|layernorm\.weight|model\.norm\.weight)$")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def unquantised_model(model: str, root: Path | None = None, *, seed: int = 0) -> Path:
    """The folder of the checkpoint in bfloat16, written under ``root`` (default: Ropeway's cache) unless it is there.

    Raises what resolving and reading the model raise, and ``Unsupported`` for what is not a GGUF file."""
    path = resolve(model)
    folder = (root or cache_folder()) / f"{path.stem}-unquantised-{seed}"
    if not (folder / "config.json").exists():
        if path.suffix != ".gguf":
            raise Unsupported(f"{path} is not a .gguf file; only those are converted")
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint, tokenizer = GGUFCheckpoint(path), Tokenizer.from_path(path)
        assert tokenizer is not None
        save_file(_shuffled(checkpoint, seed), folder / "model.safetensors")
        (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(), encoding="utf-8")
        (folder / "generation_config.json").write_text(json.dumps(checkpoint.generation_config))
        # Written last: with it, the checkpoint is whole.
        (folder / "config.json").write_text(json.dumps(checkpoint.config | {"torch_dtype": "bfloat16"}, indent=2))
    return folder


def _shuffled(checkpoint: Checkpoint, seed: int) -> dict[str, Tensor]:
    """All tensors in bfloat16, features in another order."""
    config: dict[str, Any] = checkpoint.config
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    random = torch.Generator().manual_seed(seed)
    of_hidden = torch.randperm(hidden, generator=random)
    of_inner = [torch.randperm(inner, generator=random) for _ in range(layers)]
    of_values = [
        torch.stack([torch.randperm(head_dim, generator=random) for _ in range(kv_heads)]) for _ in range(layers)
    ]
    tensors = {}
    for name in checkpoint.names():
        values = checkpoint.get(name).dequantize()
        if _HIDDEN_COLUMNS.search(name):
            values = values[:, of_hidden]
        elif _HIDDEN_ROWS.search(name):
            values = values[of_hidden]
        if (match := _LAYER.match(name)) is not None:
            layer = int(match[1])
            by_head = of_values[layer] + torch.arange(kv_heads)[:, None] * head_dim
            if "v_proj" in name:
                values = values[by_head.flatten()]
            elif name.endswith("o_proj.weight"):
                shared = heads // kv_heads
                order = of_values[layer].repeat_interleave(shared, 0) + torch.arange(heads)[:, None] * head_dim
                values = values[:, order.flatten()]
            elif "gate_proj" in name or "up_proj" in name:
                values = values[of_inner[layer]]
            elif name.endswith("down_proj.weight"):
                values = values[:, of_inner[layer]]
        tensors[name] = values.bfloat16().contiguous()
    return tensors


def _main(
    model: Annotated[str, typer.Argument(help="A .gguf file, or a model that is one.")],
    root: Annotated[Path | None, typer.Option(help="Where to write it; default: Ropeway's cache.")] = None,
) -> None:
    """Write a checkpoint in bfloat16 and print its folder."""
    typer.echo(unquantised_model(model, root))


if __name__ == "__main__":
    typer.run(_main)
