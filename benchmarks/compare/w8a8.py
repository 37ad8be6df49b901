"""8-bit checkpoints for vLLM: products of 8-bit weights, one scale per output channel, with inputs that are rounded to
8 bits token by token as they come. Nothing has to be calibrated for it. Format: "int-quantized" of
https://github.com/vllm-project/compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from ropeway.loading.open import open_checkpoint

_TOP = 127.0
_QUANTISATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def write_w8a8(folder: Path, target: Path) -> None:
    """Write the model in ``folder`` into the new folder ``target``; embedding, head and norms stay bfloat16."""
    checkpoint = open_checkpoint(folder)
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(checkpoint.names()):
        values = checkpoint.get(name).dequantize().float()
        if name.endswith("_proj.weight"):
            scales = (values.abs().amax(dim=1, keepdim=True) / _TOP).clamp(min=torch.finfo(torch.bfloat16).tiny)
            # Rounded to the stored type first: codes belong to the scales that will be read.
            scales = scales.bfloat16()
            tensors[name] = (values / scales.float()).round().clamp(-_TOP, _TOP).to(torch.int8)
            tensors[f"{name}_scale"] = scales
        else:
            tensors[name] = values.bfloat16()
    checkpoint.close()
    target.mkdir(parents=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": _QUANTISATION}, indent=2))
