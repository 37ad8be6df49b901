"""Checkpoints as Hugging Face keeps them: a folder with ``config.json`` and one or several safetensors files.

A safetensors file is a little-endian 64-bit length, a JSON header of that length and the tensors' bytes
without gaps (https://github.com/huggingface/safetensors#format). It is read here rather than by the library
so that a damaged file is an error that says what is wrong where, and so that pages of the mapped file that
have been packed can be given back.
"""

from __future__ import annotations

import json
import logging
import mmap
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from ropeway.devices.base import DenseTensor, HostTensor
from ropeway.errors import LoadError, Unsupported

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_HEADER = 100_000_000
"""Bytes; the format's own limit."""


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset in the file."""
    stop: int


class SafetensorsFile:
    """One mapped file. Tensors are views of it, which stay valid after ``close``."""

    def __init__(self, path: Path) -> None:
        """Read and check the header; raises ``LoadError`` naming the file."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise LoadError(f"{path}: the file is missing") from None
        except (OSError, ValueError) as error:  # mmap refuses an empty file with ValueError
            raise LoadError(f"{path}: cannot be read: {error}") from error
        self.entries = _read_header(path, self._map)
        self._last: tuple[int, int] | None = None

    def get(self, name: str, rows: slice | None = None) -> DenseTensor:
        """A view of the file, or of rows [start, stop) of a matrix. The pages of the view before it are given back."""
        entry = self.entries[name]
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise Unsupported(
                f"{self.path}: tensor {name} is {entry.dtype}; weights in {', '.join(_DTYPES)} are supported"
            )
        shape, start, stop = entry.shape, entry.start, entry.stop
        if rows is not None:
            first, last, _ = rows.indices(shape[0])
            row_bytes = prod(shape[1:]) * dtype.itemsize
            shape, start, stop = (last - first, *shape[1:]), start + first * row_bytes, start + last * row_bytes
        self._release()
        self._last = (start, stop)
        if start == stop:
            return DenseTensor(torch.empty(shape, dtype=dtype))
        if start % dtype.itemsize:
            flat = torch.frombuffer(bytearray(self._map[start:stop]), dtype=dtype)
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                flat = torch.frombuffer(self._map, dtype=dtype, count=prod(shape), offset=start)
        return DenseTensor(flat.view(shape))

    def close(self) -> None:
        """Give the pages back. The mapping itself ends with the last view of it."""
        self._release()

    def _release(self) -> None:
        if self._last is None:
            return
        start, stop = self._last
        start -= start % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)
        self._last = None


def _read_header(path: Path, data: mmap.mmap) -> dict[str, _Entry]:
    if len(data) < 8:
        raise LoadError(f"{path}: truncated: {len(data)} bytes are no safetensors file")
    length = int.from_bytes(data[:8], "little")
    if length > _MAX_HEADER or 8 + length > len(data):
        raise LoadError(f"{path}: damaged or truncated: a header of {length} bytes in a file of {len(data)}")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path}: damaged: the header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise LoadError(f"{path}: damaged: the header is not a JSON object")
    header.pop("__metadata__", None)
    entries = {name: _read_entry(path, name, fields, 8 + length) for name, fields in header.items()}
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise LoadError(f"{path}: damaged: tensor {name} begins at byte {entry.start}; expected {end}")
        end = entry.stop
    if end > len(data):
        raise LoadError(f"{path}: truncated: the tensors need {end} bytes, the file has {len(data)}")
    if end < len(data):
        raise LoadError(f"{path}: damaged: {len(data) - end} bytes follow the last tensor")
    return entries


def _read_entry(path: Path, name: str, fields: Any, base: int) -> _Entry:
    try:
        dtype, shape, (start, stop) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, start, stop))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole or not isinstance(dtype, str) or start > stop:
        raise LoadError(f"{path}: damaged: the header's entry of tensor {name} is {fields!r}")
    known = _DTYPES.get(dtype)
    if known is not None and stop - start != prod(shape) * known.itemsize:
        raise LoadError(f"{path}: damaged: tensor {name} of {dtype} {list(shape)} has {stop - start} bytes")
    return _Entry(dtype, shape, base + start, base + stop)


class SafetensorsCheckpoint:
    """A folder; see ``loading.checkpoint.Checkpoint``."""

    def __init__(self, folder: Path) -> None:
        """Raises ``LoadError`` naming the file at fault and ``Unsupported`` for quantised checkpoints."""
        self.path = folder
        self.config = _read_object(folder / "config.json")
        generation_config = folder / "generation_config.json"
        self.generation_config = _read_object(generation_config) if generation_config.exists() else {}
        _refuse_quantized(self.config)
        self._home = _open_files(folder)

    def names(self) -> Iterable[str]:
        return self._home.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._home[name].entries[name].shape

    def get(self, name: str, rows: slice | None = None) -> HostTensor:
        return self._home[name].get(name, rows)

    def close(self) -> None:
        for file in set(self._home.values()):
            file.close()


def _open_files(folder: Path) -> dict[str, SafetensorsFile]:
    """Which file each tensor is in."""
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise LoadError(_nothing_found(folder))
        _warn_of_strays(folder, {SINGLE})
        file = SafetensorsFile(folder / SINGLE)
        return dict.fromkeys(file.entries, file)
    path = folder / INDEX
    shards = _read_object(path).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise LoadError(f"{path}: weight_map must be an object that gives each tensor's file")
    for shard in set(shards.values()):
        if Path(shard).name != shard:
            raise LoadError(f"{path}: weight_map names {shard!r}, which is not a file of this folder")
    _warn_of_strays(folder, set(shards.values()))
    files = {shard: SafetensorsFile(folder / shard) for shard in sorted(set(shards.values()))}
    for name, shard in shards.items():
        if name not in files[shard].entries:
            raise LoadError(f"{path}: tensor {name} is said to be in {shard}, but is not")
    for shard, file in files.items():
        for name in file.entries:
            if shards.get(name) != shard:
                raise LoadError(f"{path}: tensor {name} of {shard} is not in weight_map")
    return {name: files[shard] for name, shard in shards.items()}


def _warn_of_strays(folder: Path, used: set[str]) -> None:
    strays = sorted(file.name for file in folder.glob("*.safetensors") if file.name not in used)
    if strays:
        log.warning("%s: not part of the checkpoint, ignored: %s", folder, ", ".join(strays))


def _nothing_found(folder: Path) -> str:
    others = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".safetensors"))
    message = f"{folder}: neither {SINGLE} nor {INDEX} is there"
    return f"{message}, only {', '.join(others)}" if others else message


def _refuse_quantized(config: dict[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise Unsupported(
            f"config.json: quantization_config: method {method!r} is not supported in safetensors folders"
        )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{path}: the file is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path}: must be a JSON object, not {type(value).__name__}")
    return value
