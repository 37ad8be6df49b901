"""One model in the file format that each engine reads: the same weights in all, rounded the same way for all that read
the same precision.

================  ===============================================================================================
``folder``        Hugging Face: config.json and bfloat16 safetensors. A GGUF model is dequantised for it.
``gguf("BF16")``  the values of ``folder`` for llama.cpp
``gguf("Q8_0")``  8 bits in groups of 32, a scale each; Ropeway and llama.cpp run this very file
``gguf("Q4_0")``  4 bits likewise, in every matrix: the embedding and the head, too
``exported(...)`` what an engine makes of ``folder`` for itself
``shipped``       the GGUF file that the model comes as, if it does
================  ===============================================================================================
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from safetensors.torch import save_file

from ropeway.errors import Unsupported
from ropeway.loading.checkpoint import Checkpoint
from ropeway.loading.open import open_checkpoint

Kind = Literal["BF16", "Q8_0", "Q4_0"]

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
_ONE_BYTE = 256


class ModelFiles:
    """The formats of one model; each is written under ``cache`` when it is first asked for."""

    def __init__(self, source: Path, cache: Path, *, name: str | None = None) -> None:
        """``source``: a folder with safetensors, or a ``.gguf`` file. Raises what opening it raises, and
        ``Unsupported`` for an architecture that this module cannot write."""
        self.source = source
        checkpoint = open_checkpoint(source)
        self.config: dict[str, Any] = dict(checkpoint.config)
        checkpoint.close()
        self.model_type = str(self.config["model_type"])
        if self.model_type not in _ARCHITECTURES:
            raise Unsupported(
                f"{source}: a model of the type '{self.model_type}' cannot be raced; "
                f"possible are {', '.join(_ARCHITECTURES)}"
            )
        self.name = name or source.stem
        self.digest = _digest(source)
        """Changes with the files."""
        self._own = cache / f"{self.name}-{self.digest[:12]}"

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of a token in a 16-bit type."""
        heads = int(self.config["num_attention_heads"])
        head_dim = int(self.config.get("head_dim") or self.config["hidden_size"] // heads)
        return 4 * int(self.config["num_hidden_layers"]) * int(self.config.get("num_key_value_heads", heads)) * head_dim

    @property
    def shipped(self) -> Path | None:
        return self.source if self.source.suffix == ".gguf" else None

    @functools.cached_property
    def folder(self) -> Path:
        if self.shipped is None:
            return self.source
        folder = self._own / "huggingface"
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            _write_folder(self.source, folder)
        return folder

    def gguf(self, kind: Kind) -> Path:
        path = self._own / f"{self.name}-{kind}.gguf"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # The writer holds the mapped file open until it is whole; another process may be at the same.
            part = path.with_suffix(f".{os.getpid()}.part")
            write_gguf(self.folder, part, kind)
            part.rename(path)
        return path

    def exported(self, form: str, write: Callable[[Path], None]) -> Path:
        """The folder of an engine's own format: ``write`` makes it, unless it is there."""
        target = self._own / form
        if not target.exists():
            self._own.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f"{form}.{os.getpid()}.part")
            try:
                write(part)
                part.rename(target)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        return target


def write_gguf(folder: Path, path: Path, kind: Kind) -> None:
    """Write the safetensors model in ``folder`` as a GGUF file: matrices as ``kind``, vectors as float32.

    Queries and keys of the llama architecture lie in ggml's order (``convert_hf_to_gguf.py`` of llama.cpp, "permute").
    The vocabulary is made up: a race hands in token ids, and llama.cpp demands some text for each."""
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    model_type = str(config["model_type"])
    writer = gguf.GGUFWriter(path, model_type)
    _write_config(writer, config)
    _write_vocabulary(writer, config)
    names = gguf.get_tensor_name_map(_ARCHITECTURES[model_type], int(config["num_hidden_layers"]))
    for name, values in _tensors(checkpoint):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if there is None:
            raise Unsupported(f"{folder}: tensor '{name}' has no name in GGUF")
        own = GGMLQuantizationType[kind] if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(there, gguf.quants.quantize(_in_ggml_order(name, values, config), own), raw_dtype=own)
    checkpoint.close()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for name in sorted(checkpoint.names()):
        yield name, checkpoint.get(name).dequantize().float().numpy()


def _write_folder(source: Path, folder: Path) -> None:
    checkpoint = open_checkpoint(source)
    tensors = {name: torch.from_numpy(values).bfloat16().contiguous() for name, values in _tensors(checkpoint)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {name: value for name, value in checkpoint.config.items() if value is not None} | {"dtype": "bfloat16"}
    config.pop("torch_dtype", None)
    checkpoint.close()
    # Written last: with it, the folder is whole.
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    if config.get("rope_scaling"):
        raise Unsupported(f"rotary scaling {config['rope_scaling']} cannot be written as GGUF here")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    # transformers 5 moved the field.
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)


def _write_vocabulary(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """A unigram vocabulary: three special tokens, the bytes, and numbered words."""
    special = [("<unk>", gguf.TokenType.UNKNOWN), ("<s>", gguf.TokenType.CONTROL), ("</s>", gguf.TokenType.CONTROL)]
    in_bytes = [(f"<0x{byte:02X}>", gguf.TokenType.BYTE) for byte in range(_ONE_BYTE)]
    size = int(config["vocab_size"])
    words = [(f"w{number}", gguf.TokenType.NORMAL) for number in range(size)]
    tokens = (special + in_bytes + words)[:size]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)


def _in_ggml_order(name: str, values: NDArray[np.float32], config: dict[str, Any]) -> NDArray[np.float32]:
    """ggml turns neighbouring features of llama's queries and keys: a head's halves are interleaved."""
    if config["model_type"] != "llama" or not ("q_proj" in name or "k_proj" in name):
        return values
    heads = int(config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
    return np.ascontiguousarray(values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2)).reshape(values.shape)


def _digest(source: Path) -> str:
    """Of names, sizes and times: gigabytes are not read for it."""
    files = [source] if source.is_file() else sorted(file for file in source.iterdir() if file.is_file())
    told = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()
