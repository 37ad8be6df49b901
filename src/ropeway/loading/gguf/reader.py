"""The container: header, metadata and tensor directory of GGUF files, version 2 and 3, little-endian.

Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The ``gguf`` library's own
reader makes several numpy arrays for each string of the vocabulary and needs seconds where this one needs a
tenth of one, and it reads past the end of a truncated file without noticing; its tables of types and block
sizes are used here. Nothing in this module imports torch: a process that only needs the tokenizer reads the
metadata alone.

::

    [magic, version, counts) [key-value pairs) [tensor directory) [padding) [tensor data, each aligned)
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from ropeway.errors import LoadError, Unsupported
from ropeway.loading.gguf.metadata import Metadata

VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
DEFAULT_ALIGNMENT = 32

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
NUMPY_TYPES: dict[int, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("u1"),
    GGUFValueType.INT8: np.dtype("i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}
PART_NAME = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One line of the tensor directory."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    """Slowest dimension first, as numpy and torch count (the file counts the other way round)."""
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


class GGUFFile:
    """One mapped file: ``metadata``, ``tensors`` by name, and their bytes.

    The mapping is private and copy-on-write, so that tensors over it look writable to torch while the file
    stays as it is. Raises ``LoadError`` (missing, damaged, truncated) and ``Unsupported`` (version, byte order).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError:
            raise LoadError(f"{path}: the file is empty, not a GGUF file") from None
        except OSError as error:
            raise LoadError(f"{path}: cannot be read: {error.strerror or error}") from error
        cursor = Cursor(self._map, path)
        tensor_count, pair_count = read_preamble(cursor)
        self.metadata = Metadata(dict(read_pairs(cursor, pair_count)), path)
        self.tensors: dict[str, TensorEntry] = {}
        alignment = self.metadata.scalar("general.alignment", int, DEFAULT_ALIGNMENT)
        if alignment < 8 or alignment & (alignment - 1):
            raise LoadError(f"{path}: field 'general.alignment' is {alignment}, not a power of two of at least 8")
        self._read_directory(cursor, tensor_count, alignment)

    def raw(self, entry: TensorEntry) -> NDArray[np.uint8]:
        """The bytes of a tensor, uint8 [nbytes], mapped."""
        return np.frombuffer(self._map, np.uint8, entry.nbytes, entry.offset)

    def release(self, start: int, stop: int) -> None:
        """Let the system take back the memory of the pages with bytes [start, stop) of the file; they can be read from
        it again."""
        if hasattr(mmap, "MADV_DONTNEED") and stop > start:
            start -= start % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def _read_directory(self, cursor: Cursor, count: int, alignment: int) -> None:
        entries = list(read_tensors(cursor, count))
        data_start = -(-cursor.position // alignment) * alignment
        for name, kind, shape, offset in entries:
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise LoadError(
                    f"{self.path}: tensor '{name}' has rows of {shape[-1]} values, not a multiple of the "
                    f"{block} in a block of {kind.name}"
                )
            entry = TensorEntry(name, kind, shape, data_start + offset, math.prod(shape) // block * block_bytes)
            if offset % alignment:
                raise LoadError(f"{self.path}: tensor '{name}' starts at {offset}, not a multiple of {alignment}")
            if entry.offset + entry.nbytes > len(self._map):
                raise LoadError(
                    f"{self.path}: truncated: tensor '{name}' ends at byte {entry.offset + entry.nbytes}, "
                    f"the file at {len(self._map)}; fetch it again"
                )
            if name in self.tensors:
                raise LoadError(f"{self.path}: tensor '{name}' appears twice")
            self.tensors[name] = entry


class Cursor:
    """Reads little-endian values one after the other, never beyond the end."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer = buffer
        self.path = path
        self.position = 0

    def expect(self, size: int, count: int = 1) -> None:
        """Raise ``LoadError`` unless ``count`` items of ``size`` bytes are left."""
        left = len(self.buffer) - self.position
        if size * count > left:
            raise LoadError(
                f"{self.path}: truncated or damaged: byte {self.position} announces {count} values of at least "
                f"{size} bytes, {left} bytes are left; fetch it again"
            )

    def take(self, size: int, count: int = 1) -> int:
        """Step over ``count`` items of ``size`` bytes; returns where they start."""
        self.expect(size, count)
        start = self.position
        self.position = start + size * count
        return start

    def u32(self) -> int:
        return int(U32.unpack_from(self.buffer, self.take(4))[0])

    def u64(self) -> int:
        return int(U64.unpack_from(self.buffer, self.take(8))[0])

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        """``count`` strings. A vocabulary has hundreds of thousands, so the loop is kept bare."""
        self.expect(8, count)
        buffer, end, unpack = self.buffer, len(self.buffer), U64.unpack_from
        position = self.position
        pieces = []
        for _ in range(count):
            if position + 8 > end:
                break
            start = position + 8
            position = start + unpack(buffer, position)[0]
            pieces.append(buffer[start:position])
        if len(pieces) < count or position > end:
            raise LoadError(f"{self.path}: truncated or damaged: a text ends beyond the file; fetch it again")
        self.position = position
        try:
            return [piece.decode() for piece in pieces]
        except UnicodeDecodeError as error:
            raise LoadError(f"{self.path}: a text before byte {position} is not UTF-8: {error.object!r:.60}") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        """A metadata value of a ``GGUFValueType``."""
        if kind in NUMPY_TYPES:
            return self.array(kind, 1)[0].item()
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY and depth < MAX_ARRAY_DEPTH:
            item_kind, count = self.u32(), self.u64()
            if item_kind in NUMPY_TYPES:
                return self.array(item_kind, count)
            if item_kind == GGUFValueType.STRING:
                return self.texts(count)
            self.expect(12, count)
            return [self.value(item_kind, depth + 1) for _ in range(count)]
        raise LoadError(f"{self.path}: damaged: unknown metadata type {kind} at byte {self.position}")

    def array(self, kind: int, count: int) -> NDArray[Any]:
        dtype = NUMPY_TYPES[kind]
        start = self.take(dtype.itemsize, count)
        return np.frombuffer(self.buffer[start : self.position], dtype)


def read_preamble(cursor: Cursor) -> tuple[int, int]:
    """Check magic, byte order and version; returns the counts of tensors and of key-value pairs."""
    path, magic = cursor.path, cursor.buffer[:4]
    if magic != U32.pack(GGUF_MAGIC):
        hint = " (an older GGML format; convert the model again)" if magic in (b"lmgg", b"fmgg", b"tjgg") else ""
        raise LoadError(f"{path}: not a GGUF file: it starts with {magic!r}, not b'GGUF'{hint}")
    cursor.take(4)
    version = cursor.u32()
    if version and version & 0xFFFF == 0:
        raise Unsupported(f"{path}: big-endian GGUF is not supported; convert the model for little-endian machines")
    if version not in VERSIONS:
        raise Unsupported(f"{path}: GGUF version {version} is not supported, only 2 and 3; convert the model again")
    return cursor.u64(), cursor.u64()


def read_pairs(cursor: Cursor, count: int) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for _ in range(count):
        key = cursor.text()
        if key in seen:
            raise LoadError(f"{cursor.path}: field '{key:.80}' appears twice")
        seen.add(key)
        yield key, cursor.value(cursor.u32())


def read_tensors(cursor: Cursor, count: int) -> Iterator[tuple[str, GGMLQuantizationType, tuple[int, ...], int]]:
    """(name, type, shape, offset from the start of the data) of each tensor."""
    for _ in range(count):
        name, dimensions = cursor.text(), cursor.u32()
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise LoadError(f"{cursor.path}: damaged: tensor '{name:.80}' has {dimensions} dimensions")
        shape = tuple(cursor.u64() for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise LoadError(f"{cursor.path}: damaged: tensor '{name:.80}' has the shape {shape}")
        number = cursor.u32()
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise Unsupported(f"{cursor.path}: tensor '{name:.80}' has the unknown type number {number}") from None
        yield name, kind, shape, cursor.u64()


def part_paths(path: Path) -> list[Path]:
    """All files of a checkpoint, in order, given any of them: names like ``model-00002-of-00003.gguf`` are
    parts of one. Raises ``LoadError`` naming the parts that are not there."""
    match = PART_NAME.fullmatch(path.name)
    if match is None:
        if not path.is_file():
            raise LoadError(f"{path}: no such file")
        return [path]
    count = int(match["count"])
    paths = [path.with_name(f"{match['stem']}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing or not paths:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise LoadError(f"{path}: the model has {count} parts, not found beside it: {shown or path.name}")
    return paths


def read_metadata(path: Path) -> Metadata:
    """The metadata of a checkpoint, given any of its files (only the first part has all of it)."""
    return GGUFFile(part_paths(path)[0]).metadata
