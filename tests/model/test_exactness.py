"""Real models, teacher-forced over 512 positions, against transformers in float32 on the dequantised weights.

Where the two choose different tokens, the oracle's two best logits must nearly tie, and at most one position in
a hundred may be excused so. The positions are the oracle's own greedy answer to a question (the tokens a user
would get), and, for perplexity, a page of prose.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ropeway.devices.base import DenseTensor, GroupedTensor, HostTensor, KVDtype
from ropeway.loading.checkpoint import Checkpoint
from ropeway.loading.gguf.checkpoint import GGUFCheckpoint
from ropeway.models.registry import load_model
from ropeway.parallel.communicator import SingleProcess
from ropeway.text.tokenizer import Tokenizer
from tests.support.devices import device
from tests.support.gguf_files import qwen_coder, smollm2
from tests.support.greedy_answers import FILE, POSITIONS
from tests.support.stepper import Stepper

EXCUSED = POSITIONS // 100
PASSAGE = Path(__file__).parent.parent / "data" / "passage.txt"


class Converted:
    """A checkpoint whose matrices are held in another format."""

    def __init__(self, base: Checkpoint, convert: Callable[[torch.Tensor], HostTensor]) -> None:
        self.path, self.config, self.generation_config = base.path, base.config, base.generation_config
        self._base = base
        self._convert = convert

    def names(self) -> Iterable[str]:
        return self._base.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(name)

    def get(self, name: str, rows: slice | None = None) -> HostTensor:
        tensor = self._base.get(name, rows)
        return self._convert(tensor.dequantize()) if len(tensor.shape) == 2 else tensor

    def close(self) -> None:
        self._base.close()


def dense(dtype: torch.dtype) -> Callable[[torch.Tensor], HostTensor]:
    return lambda values: DenseTensor(values.to(dtype))


def grouped(bits: int, *, minimum: bool, group: int = 32) -> Callable[[torch.Tensor], HostTensor]:
    """Round-to-nearest quantisation in groups along the rows."""

    def convert(values: torch.Tensor) -> HostTensor:
        x = values.view(len(values), -1, group)
        half = 2 ** (bits - 1)
        low, high = (0, 2 * half - 1) if minimum and bits == 4 else (-half, half - 1)
        if minimum:
            smallest, largest = x.amin(-1), x.amax(-1)
            scales = ((largest - smallest) / (high - low)).half()
            minimums = (smallest - low * scales.float()).half()
        else:
            scales, minimums = (x.abs().amax(-1) / (half - 1)).half(), None
        shifted = x if minimums is None else x - minimums.float()[:, :, None]
        codes = (shifted / scales.float().clamp(min=1e-12)[:, :, None]).round().clamp(low, high)
        return GroupedTensor(codes.to(torch.int8).view(values.shape), scales, minimums, group, bits)  # type: ignore[arg-type]

    return convert


LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], HostTensor], KVDtype, float]] = {
    "fp32": (dense(torch.float32), "fp32", 1e-3),
    "bf16": (dense(torch.bfloat16), "bf16", 0.1),
    "fp16": (dense(torch.float16), "bf16", 0.1),
    "int8": (grouped(8, minimum=False), "bf16", 0.1),
    "int8 in groups of 16": (grouped(8, minimum=False, group=16), "bf16", 0.1),
    "int8 with minimum": (grouped(8, minimum=True), "bf16", 0.1),
    "int4": (grouped(4, minimum=False), "bf16", 0.1),
    "int4 with minimum": (grouped(4, minimum=True), "bf16", 0.1),
}


@functools.cache
def answer(name: str) -> list[int]:
    ids: list[int] = json.loads(FILE.read_text())[name]
    assert len(ids) == POSITIONS
    return ids


def passage(path: Path) -> list[int]:
    tokenizer = Tokenizer.from_path(path)
    assert tokenizer is not None
    ids = tokenizer.encode(PASSAGE.read_text())[:POSITIONS]
    assert len(ids) == POSITIONS
    return ids


def oracle(checkpoint: Checkpoint) -> transformers.PreTrainedModel:
    """transformers with exactly the values of the checkpoint, in float32."""
    config = checkpoint.config
    family = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}[config["architectures"][0]]
    fields: dict[str, Any] = {
        name: config[name]
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "rms_norm_eps",
            "tie_word_embeddings",
            "max_position_embeddings",
        )
    }
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **fields))
    values = {name: checkpoint.get(name).dequantize() for name in checkpoint.names()}
    if config["tie_word_embeddings"]:
        values["lm_head.weight"] = values["model.embed_tokens.weight"]
    model.to_empty(device="cpu")
    model.load_state_dict(values, strict=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffers are not in the file
    return model.eval()


@torch.inference_mode()
def compare(checkpoint: Checkpoint, kv: KVDtype, gap: float, name: str, path: Path, label: str) -> None:
    texts = [answer(name), passage(path)]
    want = oracle(checkpoint)(torch.tensor(texts)).logits
    model = load_model(checkpoint, device("cpu"), SingleProcess(), max_model_len=POSITIONS)
    stepper = Stepper(model, device("cpu"), sequences=2, max_len=POSITIONS, kv_dtype=kv)
    got = [stepper.prefill(ids, chunk=200, sequence=i) for i, ids in enumerate(texts)]
    best = want[0].topk(2).values
    gaps = best[:, 0] - best[:, 1]
    different, elsewhere = (got[i].argmax(-1) != want[i].argmax(-1) for i in range(2))
    count = int(different.sum())
    worst = float(gaps[different].max()) if count else 0.0
    change = perplexity(got[1], texts[1]) / perplexity(want[1], texts[1]) - 1
    print(
        f"\n{label}: {count} of {POSITIONS} positions excused (largest top-2 gap {worst:.4f}), "
        f"perplexity of the prose {100 * change:+.3f} %, of whose positions {int(elsewhere.sum())} differ"
    )
    assert worst < gap
    assert count <= EXCUSED
    assert abs(change) < 0.005


def perplexity(logits: torch.Tensor, ids: list[int]) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:])).exp())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_smollm2_in_every_layout_chooses_the_tokens_of_transformers(layout: str) -> None:
    convert, kv, gap = LAYOUTS[layout]
    path = smollm2()
    compare(Converted(GGUFCheckpoint(path), convert), kv, gap, "smollm2", path, f"SmolLM2, {layout}")


@pytest.mark.parametrize(("name", "find"), [("smollm2", smollm2), ("qwen-coder", qwen_coder)])
def test_a_gguf_file_chooses_the_tokens_of_transformers(name: str, find: Callable[[], Path]) -> None:
    path = find()
    compare(GGUFCheckpoint(path), "bf16", 0.1, name, path, path.name)
