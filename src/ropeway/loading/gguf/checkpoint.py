"""A GGUF model as a ``Checkpoint``: Hugging Face names and row order, exact values, decoded tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from ropeway.devices.base import DenseTensor, GroupedTensor, HostTensor
from ropeway.errors import LoadError, Unsupported
from ropeway.loading.gguf.blocks import FORMATS, decode
from ropeway.loading.gguf.config import architecture, generation_config, model_config
from ropeway.loading.gguf.names import ROPE_FACTORS, hugging_face_name, rotary_heads
from ropeway.loading.gguf.reader import GGUFFile, TensorEntry, part_paths

DTYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


class GGUFCheckpoint:
    """One ``.gguf`` file, or all parts of a split one given any of them.

    Everything that can be refused is refused here, before a tensor is read: raises ``LoadError`` (missing,
    damaged or truncated files, missing parts) and ``Unsupported`` (version, byte order, architecture, type
    of a tensor), naming the file and the tensor or field. A tensor whose name is not known keeps its GGUF name
    in ``names()``; the model refuses it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files = [GGUFFile(part) for part in part_paths(self.path)]
        self.metadata = self._files[0].metadata
        """Of the first part, for the tokenizer."""
        self._touched: tuple[GGUFFile, int, int] | None = None
        """File and bytes of the pages to be given back."""
        self._arch = architecture(self.metadata)
        self._tensors: dict[str, tuple[GGUFFile, TensorEntry]] = {}
        self._collect()
        check_types(self._tensors)
        entries = {entry.name: entry for _, entry in self._tensors.values()}
        factors = self._rope_factors()
        self.config: dict[str, Any] = model_config(self.metadata, entries, factors)
        self.generation_config: dict[str, Any] = generation_config(self.metadata)

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name)[1].shape

    def get(self, name: str, rows: slice | None = None) -> HostTensor:
        """float32 for vectors; matrices in their own type (mapped where rows need not move), or grouped."""
        self._release()
        file, entry = self._find(name)
        heads = self._permuted_heads(entry)
        order = None if heads is None else rotary_order(entry.shape[0], heads)
        if len(entry.shape) == 1:
            values = read(file.raw(entry).reshape(1, -1), entry).dequantize().reshape(-1)
            return DenseTensor(values if order is None else values[order])
        raw = file.raw(entry).reshape(*entry.shape[:-1], -1)
        start, stop, _ = slice(None).indices(len(raw)) if rows is None else rows.indices(len(raw))
        if order is not None:
            tensor = read(raw[order[start:stop]], entry)
            start, stop = 0, len(raw)  # rows came from anywhere
        else:
            tensor = read(raw[start:stop], entry)
        row_bytes = entry.nbytes // len(raw)
        self._touched = (file, entry.offset + start * row_bytes, entry.offset + stop * row_bytes)
        if isinstance(tensor, GroupedTensor) or order is not None:
            self._release()
        return tensor

    def close(self) -> None:
        """Forget the files; their mappings end with the last tensor over them."""
        self._release()
        self._files = []
        self._tensors = {}

    def _release(self) -> None:
        """Give back the pages of what was read last."""
        if self._touched is not None:
            file, start, stop = self._touched
            file.release(start, stop)
            self._touched = None

    def _collect(self) -> None:
        count = self.metadata.scalar("split.count", int, 1)
        if count > 1 and count != len(self._files):
            raise LoadError(
                f"{self.path}: part of a model in {count} files, {len(self._files)} found; "
                f"their names must end in -00001-of-{count:05d}.gguf and so on"
            )
        for number, file in enumerate(self._files):
            if len(self._files) > 1 and file.metadata.scalar("split.no", int, number) != number:
                raise LoadError(f"{file.path}: calls itself part {file.metadata['split.no'] + 1}, not {number + 1}")
            for entry in file.tensors.values():
                name = hugging_face_name(entry.name)
                if name in self._tensors:
                    raise LoadError(f"{file.path}: tensor '{entry.name}' is also in {self._tensors[name][0].path}")
                self._tensors[name] = (file, entry)
        expected = self.metadata.scalar("split.tensors.count", int, len(self._tensors))
        if expected != len(self._tensors):
            raise LoadError(f"{self.path}: {len(self._tensors)} tensors in all parts, {expected} announced")

    def _rope_factors(self) -> list[float] | None:
        if ROPE_FACTORS not in self._tensors:
            return None
        values = self.get(ROPE_FACTORS).dequantize()
        del self._tensors[ROPE_FACTORS]
        return list(map(float, values.flatten().tolist()))

    def _find(self, name: str) -> tuple[GGUFFile, TensorEntry]:
        try:
            return self._tensors[name]
        except KeyError:
            raise LoadError(f"{self.path}: tensor '{name}' is missing") from None

    def _permuted_heads(self, entry: TensorEntry) -> int | None:
        """Heads of a tensor whose rows the conversion reordered: queries and keys of the llama architecture."""
        role = rotary_heads(entry.name) if self._arch == "llama" else None
        if role is None:
            return None
        heads = int(self.config["num_attention_heads" if role == "query" else "num_key_value_heads"])
        if heads < 1 or entry.shape[0] % (2 * heads):
            raise LoadError(f"{self.path}: tensor '{entry.name}' has {entry.shape[0]} rows for {heads} heads")
        return heads


def rotary_order(rows: int, heads: int) -> NDArray[np.intp]:
    """Where each row of Hugging Face's order lies in a llama GGUF.

    Its converter puts feature i of a head's first half beside feature i of the second half (pairs 2i, 2i + 1),
    because ggml's rotary embedding for this architecture turns neighbours; Hugging Face turns i with i + d / 2.
    """
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def read(rows: NDArray[np.uint8], entry: TensorEntry) -> HostTensor:
    """Bytes [..., bytes of a row] as a tensor: the same memory when it is dense."""
    if (dtype := DTYPES.get(entry.type)) is not None:
        return DenseTensor(torch.from_numpy(rows).view(dtype))
    grouped = decode(rows.reshape(-1, rows.shape[-1]), entry.type)
    return grouped if rows.ndim == 2 else DenseTensor(grouped.dequantize().reshape(*rows.shape[:-1], -1))


def check_types(tensors: dict[str, tuple[GGUFFile, TensorEntry]]) -> None:
    for file, entry in tensors.values():
        if entry.type not in DTYPES and entry.type not in FORMATS:
            known = ", ".join(kind.name for kind in (*DTYPES, *FORMATS))
            raise Unsupported(
                f"{file.path}: tensor '{entry.name}' has the type {entry.type.name}, which is not supported; "
                f"supported: {known}"
            )
