"""transformers on a workload, the usual way: padded batches, each run to its longest output.

python -m benchmarks.transformers_static MODEL --workload FILE.jsonl --json FILE
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

from ropeway.bench.machine import PeakMemory, StolenTime
from ropeway.bench.workload import WorkloadRequest, read_workload
from ropeway.devices.processor import available_cores


@torch.inference_mode()
def generate(model: Any, batch: Sequence[tuple[int, WorkloadRequest]], seed: int) -> list[list[int]]:
    """Complete the requests (with their indices in the workload) in one batch: padded on the left, greedy, as many
    tokens for all as the longest asks for. Returns the tokens that each asked for."""
    prompts = [
        torch.from_numpy(request.prompt(index, model.config.vocab_size, seed)).long() for index, request in batch
    ]
    width = max(map(len, prompts))
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    longest = max(request.output_tokens for _, request in batch)
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest, do_sample=False)
    if out.shape[1] != width + longest:
        raise RuntimeError(f"{out.shape[1] - width} tokens were generated instead of {longest}")
    rows = zip(out[:, width:].tolist(), batch, strict=True)
    return [tokens[: request.output_tokens] for tokens, (_, request) in rows]


def _main(
    model: Annotated[str, typer.Argument(help="A model folder.")],
    workload: Annotated[Path, typer.Option(metavar="FILE.jsonl")],
    json_file: Annotated[Path, typer.Option("--json", metavar="FILE")],
    batch: Annotated[int, typer.Option(min=1, help="Requests per batch, in the file's order.")] = 8,
    seed: Annotated[int, typer.Option(help="As of ropeway bench throughput.")] = 0,
) -> None:
    """Run a workload and write its figures; only the tokens asked for count."""
    torch.set_num_threads(available_cores())
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    requests = read_workload(workload)
    memory = PeakMemory()
    began = time.perf_counter()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    load_s = time.perf_counter() - began
    # Nothing ends early: every engine generates exactly what the workload asks for.
    loaded.generation_config.eos_token_id = None
    loaded.generation_config.pad_token_id = 0
    generate(loaded, [(0, WorkloadRequest(prompt_tokens=16, output_tokens=4))], seed + 1)
    stolen = StolenTime()
    began = time.perf_counter()
    numbered = list(enumerate(requests))
    for first in range(0, len(numbered), batch):
        generate(loaded, numbered[first : first + batch], seed)
    wall_s = time.perf_counter() - began
    output_tokens = sum(request.output_tokens for request in requests)
    figures = {
        "output_tokens_per_s": output_tokens / wall_s,
        "total_tokens_per_s": (output_tokens + sum(request.prompt_tokens for request in requests)) / wall_s,
        "wall_s": wall_s,
        "requests": len(requests),
        "output_tokens": output_tokens,
        "batch": batch,
        "peak_rss_bytes": memory.bytes,
        "load_s": load_s,
        "machine": {"stolen_time_fraction": stolen.fraction, "transformers": transformers.__version__},
    }
    json_file.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(_main)
