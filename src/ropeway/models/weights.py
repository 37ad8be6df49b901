"""Where layers take their tensors from: each is checked, cut to this rank's part, converted and packed, a slice of its
rows at a time, so that memory peaks near the packed size. What was taken is kept count of, so that a checkpoint and
a model that do not match are an error that says where."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from ropeway.devices.base import (
    QUANTIZED_GROUP,
    ROW_UNIT,
    DenseTensor,
    Device,
    GroupedTensor,
    HostTensor,
    Kernels,
    Layout,
    Weight,
)
from ropeway.errors import ConfigError, LoadError, Unsupported
from ropeway.loading.checkpoint import Checkpoint
from ropeway.parallel.communicator import Collectives, Recordable

log = logging.getLogger(__name__)

Dtype = Literal["auto", "fp32", "bf16", "fp16"]
OnLoad = Literal["auto", "bf16", "int8", "int4"]
"""What unquantised matrices become when they are loaded; auto: what ``Dtype`` says."""
Progress = Callable[[int, int], None]
"""Called with (parameters loaded so far, parameters in all)."""

_TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DERIVED = ("rotary_emb.inv_freq",)
"""Ends of names of buffers that old checkpoints carry although they follow from the config."""
_FINE = ("embed_tokens.weight", "lm_head.weight", "v_proj.weight", "down_proj.weight")
"""Ends of names of matrices that are int8 where others are int4, because they cost the most in perplexity for their
size (docs/kernels.md); GGUF files make about the same exceptions."""
_SLICE_VALUES = 1 << 22
"""Read, converted and packed at a time."""
_NAMES_SHOWN = 8
"""An error lists at most this many tensors."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``index`` of ``count`` equal ones along ``dim`` of a tensor."""

    dim: int
    index: int
    count: int


class Weights:
    """A checkpoint's tensors, packed for one device and one rank as layers ask for them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: Device,
        communicator: Collectives,
        *,
        dtype: Dtype = "auto",
        on_load: OnLoad = "auto",
        fused: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """``dtype``: what unquantised matrices are converted to; auto leaves each as the file has it. ``on_load``,
        unless it is auto, goes before ``dtype``. ``fused``: products and their sums over ranks are one operation."""
        self.device = device
        self.communicator: Collectives = Recordable(communicator, fused=fused)
        self.nbytes = 0
        """Packed size of everything taken so far."""
        self._layouts: Counter[Layout] = Counter()
        self._checkpoint = checkpoint
        self._dtype: Dtype = "bf16" if on_load == "bf16" else dtype
        self._on_load = on_load
        self._progress = progress
        self._sizes = {name: prod(checkpoint.shape(name)) for name in checkpoint.names()}
        self._unused = set(self._sizes)
        self._loaded = 0

    @property
    def kernels(self) -> Kernels:
        return self.device.kernels

    @property
    def layout(self) -> Layout:
        """The layout that holds most of the matrices' bytes so far."""
        return self._layouts.most_common(1)[0][0]

    def rows(self) -> Shard:
        """This rank's share of a matrix's output features."""
        return Shard(0, self.communicator.rank, self.communicator.size)

    def columns(self) -> Shard:
        """This rank's share of a matrix's input features."""
        return Shard(1, self.communicator.rank, self.communicator.size)

    def matrix(self, name: str, n: int, k: int, shard: Shard | None = None) -> Weight:
        """The matrix [n, k], or the part of it that ``shard`` names, packed.

        Raises ``LoadError`` when it is missing or has another shape, ``ConfigError`` when it cannot be cut or held as
        asked.
        """
        self._check(name, (n, k))
        rows = range(n) if shard is None or shard.dim else _part(n, shard, name)
        columns = shard if shard is not None and shard.dim else None
        weight = self.device.pack_slices(len(rows), self._slices(name, rows, k, columns))
        self._layouts[weight.layout] += weight.nbytes
        self._count(name, weight.nbytes)
        return weight

    def vector(self, name: str, n: int, shard: Shard | None = None) -> Tensor:
        """The vector [n], or a part of it, in float32; raises like ``matrix``."""
        self._check(name, (n,))
        vector = self.device.vector(_cut(self._checkpoint.get(name), shard, name))
        self._count(name, vector.nbytes)
        return vector

    def is_copy(self, name: str, of: str) -> bool:
        """Whether tensor ``name`` is missing or equal to ``of``, so that the other can stand for it."""
        if name not in self._sizes:
            return True
        if self._are_equal(name, of):
            self._count(name, 0)
            return True
        log.warning("%s: %s differs from %s although the config ties them", self._checkpoint.path, name, of)
        return False

    def finish(self) -> None:
        """Raise ``LoadError`` naming tensors that no layer asked for."""
        strangers = sorted(name for name in self._unused if not name.endswith(_DERIVED))
        if strangers:
            raise LoadError(
                f"{self._checkpoint.path}: {len(strangers)} tensors do not belong to this architecture: "
                f"{', '.join(strangers[:_NAMES_SHOWN])}{', ...' if len(strangers) > _NAMES_SHOWN else ''}"
            )
        for name in tuple(self._unused):
            self._count(name, 0)

    def _slices(self, name: str, rows: range, k: int, columns: Shard | None) -> Iterator[HostTensor]:
        """Rows of a matrix as they are to be packed, some at a time, so that beside the packed matrix only a slice of
        it is in memory."""
        for part in _row_slices(rows, k):
            tensor = _cut(self._checkpoint.get(name, part), columns, name, self._dense_unit())
            yield self._convert(tensor, name)

    def _are_equal(self, name: str, other: str) -> bool:
        shape = self._checkpoint.shape(name)
        if shape != self._checkpoint.shape(other):
            return False
        get = self._checkpoint.get
        return all(_equal(get(name, part), get(other, part)) for part in _row_slices(range(shape[0]), shape[1]))

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._sizes:
            raise LoadError(f"{self._checkpoint.path}: tensor {name} is missing")
        found = self._checkpoint.shape(name)
        if found != shape:
            raise LoadError(
                f"{self._checkpoint.path}: tensor {name} has shape {list(found)}; config.json asks for {list(shape)}"
            )

    def _convert(self, tensor: HostTensor, name: str) -> HostTensor:
        if isinstance(tensor, GroupedTensor):
            if self._on_load != "auto":
                raise ConfigError(
                    f"{self._checkpoint.path} is quantised already (tensor {name}), and weights {self._on_load} would "
                    "round it a second time; leave weights at auto, or take the model's unquantised files",
                    param="weights",
                )
            return tensor
        if self._on_load in ("int8", "int4"):
            return self._quantize(tensor, name)
        if self._dtype == "auto":
            return tensor
        converted = tensor.data.to(_TORCH_DTYPES[self._dtype])
        if self._dtype == "fp16" and converted.isinf().any() and not tensor.data.isinf().any():
            raise ConfigError(f"tensor {name} has values that fp16 cannot hold; use dtype bf16 or fp32", param="dtype")
        return DenseTensor(converted)

    def _quantize(self, tensor: DenseTensor, name: str) -> GroupedTensor:
        fine = self._on_load == "int8" or name.endswith(_FINE)
        try:
            return self.device.quantize(tensor, "int8" if fine else "int4")
        except Unsupported as error:
            raise ConfigError(
                f"tensor {name} cannot be held as weights {self._on_load}: {error.message}; use weights bf16",
                param="weights",
            ) from error

    def _dense_unit(self) -> int:
        """Neighbouring features of a dense row that must stay together."""
        return QUANTIZED_GROUP if self._on_load in ("int8", "int4") else 1

    def _count(self, name: str, nbytes: int) -> None:
        self.nbytes += nbytes
        if name in self._unused:
            self._unused.remove(name)
            self._loaded += self._sizes[name]
        if self._progress is not None:
            self._progress(self._loaded, sum(self._sizes.values()))


def _part(whole: int, shard: Shard, name: str) -> range:
    """Which of ``whole`` features ``shard`` names."""
    if whole % shard.count:
        raise ConfigError(f"tensor {name}: {whole} features cannot be split evenly over {shard.count} ranks")
    length = whole // shard.count
    return range(shard.index * length, (shard.index + 1) * length)


def _row_slices(rows: range, k: int) -> Iterator[slice]:
    """``rows`` of k values in slices of about ``_SLICE_VALUES``, each a multiple of ``ROW_UNIT`` but the last."""
    step = max(_SLICE_VALUES // max(k, 1) // ROW_UNIT, 1) * ROW_UNIT
    for start in range(rows.start, max(rows.stop, rows.start + 1), step):
        yield slice(start, min(start + step, rows.stop))


def _cut(tensor: HostTensor, shard: Shard | None, name: str, dense_unit: int = 1) -> HostTensor:
    """The part of a tensor that ``shard`` names; quantised rows are cut between groups only, dense ones between
    multiples of ``dense_unit``."""
    if shard is None or shard.count == 1:
        return tensor
    whole = tensor.shape[shard.dim]
    mine = _part(whole, shard, name)
    start, length = mine.start, len(mine)
    group = dense_unit if isinstance(tensor, DenseTensor) else tensor.group
    if shard.dim == 1 and length % group:
        raise ConfigError(
            f"tensor {name}: {whole} features in quantised groups of {group} cannot be split over {shard.count} ranks"
        )
    if isinstance(tensor, DenseTensor):
        return DenseTensor(tensor.data.narrow(shard.dim, start, length))
    unit = group if shard.dim == 1 else 1

    def part(values: Tensor) -> Tensor:
        return values.narrow(shard.dim, start // unit, length // unit)

    return GroupedTensor(
        tensor.codes.narrow(shard.dim, start, length),
        part(tensor.scales),
        None if tensor.minimums is None else part(tensor.minimums),
        tensor.group,
        tensor.bits,
    )


def _equal(a: HostTensor, b: HostTensor) -> bool:
    if isinstance(a, DenseTensor) and isinstance(b, DenseTensor):
        return torch.equal(a.data, b.data)
    return a.shape == b.shape and torch.equal(a.dequantize(), b.dequantize())
