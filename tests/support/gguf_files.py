"""GGUF files for tests: written by the ``gguf`` library from small transformers models, with its own table of
names; and where the real ones are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from gguf import GGMLQuantizationType

from ropeway.errors import RopewayError
from ropeway.loading.sources import resolve

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
CACHE = Path(os.environ.get("ROPEWAY_CACHE") or Path.home() / ".cache" / "ropeway")

CHATML_END = 2
"""``<|im_end|>`` in the vocabularies of ``tests.support.tokenizers``."""

Extra = Callable[[gguf.GGUFWriter], None]


def smollm2() -> Path:
    """The embedded model, fetched when it is not there yet."""
    if named := os.environ.get("ROPEWAY_TEST_SMOLLM2"):
        return Path(named)
    try:
        return resolve("smollm2-135m")
    except RopewayError as error:
        pytest.skip(f"smollm2-135m cannot be fetched: {error.message}")


def qwen_coder() -> Path:
    """Optional, since it is large and its packaging states no licence: only where somebody has pulled it."""
    if named := os.environ.get("ROPEWAY_TEST_QWEN_CODER"):
        return Path(named)
    for found in sorted(CACHE.rglob("qwen2.5-coder-0.5b*.gguf")):
        return found
    pytest.skip(f"no qwen2.5-coder-0.5b*.gguf in {CACHE}; ropeway pull qwen2.5-coder-0.5b, or ROPEWAY_TEST_QWEN_CODER")


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    tokenizer: tokenizers.Tokenizer | None = None,
    extra: Extra | None = None,
    without: tuple[str, ...] = (),
    max_tensors: int = 0,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """Write ``model`` as a converter does: matrices as ``kind``, vectors as float32, the llama architecture's
    queries and keys in ggml's order. ``max_tensors`` cuts the file into parts (the first one's path is returned),
    ``without`` leaves out tensors by GGUF name, ``extra`` adds fields or tensors."""
    config = model.config
    family = config.model_type
    writer = gguf.GGUFWriter(path, family, split_max_tensors=max_tensors, endianess=endianess)
    write_config(writer, config)
    if tokenizer is not None:
        write_tokenizer(writer, tokenizer)
    if extra is not None:
        extra(writer)
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if there in without:
            continue
        values = to_ggml_order(name, tensor.float(), config).numpy()
        own = kind if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(there, gguf.quants.quantize(values, own), raw_dtype=own)
    finish(writer)
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def write_config(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if (head_dim := getattr(config, "head_dim", None)) is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)


def to_ggml_order(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """ggml turns neighbouring features of llama's queries and keys: a head's halves are interleaved."""
    if config.model_type != "llama" or not ("q_proj" in name or "k_proj" in name):
        return tensor
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return torch.stack((halves[:, 0], halves[:, 1]), dim=2).reshape(tensor.shape)


def write_tokenizer(
    writer: gguf.GGUFWriter,
    tokenizer: tokenizers.Tokenizer,
    *,
    pre: str | None = "gpt-2",
    eos: int | None = 2,
    chat_template: Any = None,
) -> None:
    """A byte-level tokenizer's vocabulary, merges and added tokens."""
    state = json.loads(tokenizer.to_str())
    pieces = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    kinds = [gguf.TokenType.NORMAL] * len(pieces)
    for token in state["added_tokens"]:
        kinds[token["id"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(pieces)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    if eos is not None:
        writer.add_eos_token_id(eos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(
    rng: np.random.Generator, kind: GGMLQuantizationType, rows: int, columns: int
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random bytes of quantised rows [rows, bytes] whose float16 scales are finite."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    halves = {  # byte offsets of float16 fields in a block
        GGMLQuantizationType.Q4_1: (0, 2),
        GGMLQuantizationType.Q5_1: (0, 2),
        GGMLQuantizationType.Q4_K: (0, 2),
        GGMLQuantizationType.Q5_K: (0, 2),
        GGMLQuantizationType.Q6_K: (block_bytes - 2,),
    }.get(kind, (0,))
    blocks = rng.integers(0, 256, (rows * columns // block, block_bytes), dtype=np.uint8)
    for offset in halves:
        values = blocks[:, offset : offset + 2].copy().view(np.uint16)
        values[values & 0x7C00 == 0x7C00] ^= 0x4000  # infinities and NaN become ordinary numbers
        blocks[:, offset : offset + 2] = values.view(np.uint8)
    return blocks.reshape(rows, -1)
