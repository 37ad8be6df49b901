"""transformers, the usual way: padded batches, each run to its longest output. Settings: ``model``, ``batch``
(requests in a batch), ``threads``."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from lines import Generate, serve


def start(settings: dict[str, Any]) -> Generate:
    torch.set_num_threads(settings["threads"])
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.bfloat16)
    # Nothing ends early: every engine generates exactly what is asked for.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    size = settings["batch"]

    def generate(requests: list[dict[str, Any]]) -> list[list[int]]:
        batches = [requests[first : first + size] for first in range(0, len(requests), size)]
        return [tokens for batch in batches for tokens in padded(model, batch)]

    return generate


@torch.inference_mode()
def padded(model: Any, batch: list[dict[str, Any]]) -> list[list[int]]:
    """Complete the requests in one batch: padded on the left, greedy, as many tokens for all as the longest asks for.
    Returns the tokens that each asked for."""
    width = max(len(request["prompt"]) for request in batch)
    ids = torch.zeros((len(batch), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(batch):
        prompt = request["prompt"]
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    longest = max(request["output_tokens"] for request in batch)
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest, do_sample=False)
    rows = zip(out[:, width:].tolist(), batch, strict=True)
    return [tokens[: request["output_tokens"]] for tokens, request in rows]


if __name__ == "__main__":
    serve(start)
