"""The reference device: every kernel in plain PyTorch. It is the oracle of the other devices' tests and the
fallback on machines without native kernels; it is written to be read, not to be fast.

Sums are taken in float64 and rounded to float32 once. A result is therefore the mathematical one to within
half an ulp, and so, but for one rounding in many millions, independent of the order of additions: a row's
value does not depend on the batch it is computed in.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ropeway.devices import pages
from ropeway.devices.base import (
    ACTIVATION_DIGITS,
    ACTIVATION_GROUP,
    Activations,
    AttentionPlan,
    DenseTensor,
    GroupedTensor,
    HostTensor,
    Kernels,
    KVCache,
    KVDtype,
    Layout,
    Sampled,
    SampleInputs,
    StepShape,
    Stream,
    Weight,
)
from ropeway.devices.memory import Memory, host_memory
from ropeway.devices.reference_quantization import quantize
from ropeway.devices.reference_sampling import sample
from ropeway.devices.stream import ThreadStream
from ropeway.errors import OutOfMemory

_DENSE_LAYOUTS: dict[torch.dtype, Layout] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_KV_DTYPES: dict[KVDtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PRODUCT_SLICE = 1 << 22
"""Weights widened to float64 at a time, so that a large matrix needs little extra memory."""


class ReferenceWeight:
    """A matrix as the file gave it, copied out of the mapped file. ``activation_digits``: of a quantised one's
    inputs."""

    def __init__(self, tensor: HostTensor, activation_digits: int = 2) -> None:
        self.activation_digits = activation_digits
        self.tensor: HostTensor
        if isinstance(tensor, DenseTensor):
            self.layout: Layout = _DENSE_LAYOUTS[tensor.data.dtype]
            self.tensor = DenseTensor(_copy(tensor.data))
            parts = [self.tensor.data]
        else:
            self.layout = "int8" if tensor.bits == 8 else "int4"
            minimums = None if tensor.minimums is None else _copy(tensor.minimums)
            self.tensor = GroupedTensor(_copy(tensor.codes), _copy(tensor.scales), minimums, tensor.group, tensor.bits)
            parts = [self.tensor.codes, self.tensor.scales] + ([] if minimums is None else [minimums])
        self.nbytes = sum(part.nbytes for part in parts)

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.tensor.shape
        return n, k

    def rows(self, index: Tensor | slice) -> HostTensor:
        """The chosen rows, in the file's format."""
        match self.tensor:
            case DenseTensor(data):
                return DenseTensor(data[index])
            case GroupedTensor(codes, scales, minimums, group, bits):
                minimums = None if minimums is None else minimums[index]
                return GroupedTensor(codes[index], scales[index], minimums, group, bits)

    def exact_rows(self, index: slice) -> Tensor:
        """The chosen rows as float64: scale * code + minimum without rounding."""
        match self.rows(index):
            case DenseTensor(data):
                return data.double()
            case GroupedTensor(codes, scales, minimums, group, _):
                n, k = codes.shape
                values = codes.view(n, k // group, group).double().mul_(scales.double()[:, :, None])
                if minimums is not None:
                    values += minimums.double()[:, :, None]
                return values.view(n, k)


@dataclass(frozen=True, slots=True)
class ReferenceKVCache:
    """Keys and values apart, slot after slot: block b holds slots [b * block_size, (b + 1) * block_size)."""

    keys: Tensor
    """float32 or bfloat16 [layers, num_blocks * block_size, kv_heads, head_dim]."""
    values: Tensor
    """Like ``keys``."""
    num_blocks: int
    block_size: int

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def to_host(self, blocks: NDArray[np.int32], host: NDArray[np.uint8], places: NDArray[np.int32]) -> None:
        """See ``devices.base.KVCache``. A host block holds the keys of all layers, then the values."""
        keys, values = self._bytes(self.keys), self._bytes(self.values)
        for block, place in pages.copy_pairs(blocks, self.num_blocks, places, len(host)):
            copy = host[place].reshape(2, *keys[:, block].shape)
            copy[0], copy[1] = keys[:, block], values[:, block]

    def to_device(self, places: NDArray[np.int32], host: NDArray[np.uint8], blocks: NDArray[np.int32]) -> None:
        """See ``devices.base.KVCache``."""
        keys, values = self._bytes(self.keys), self._bytes(self.values)
        for block, place in pages.copy_pairs(blocks, self.num_blocks, places, len(host)):
            keys[:, block], values[:, block] = host[place].reshape(2, *keys[:, block].shape)

    def _bytes(self, stored: Tensor) -> NDArray[np.uint8]:
        """uint8 [layers, num_blocks, bytes of a block's layer], the same memory."""
        return stored.view(torch.uint8).view(stored.shape[0], self.num_blocks, -1).numpy()


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of a step: tokens [first, last) of the batch over the keys at positions [0, len(slots))."""

    first: int
    last: int
    positions: Tensor
    """int64 [last - first]."""
    slots: Tensor
    """int64 [kv_length]: where each position's key and value lie."""


@dataclass(frozen=True, slots=True)
class ReferenceAttentionPlan:
    write_slots: Tensor
    """int64 [tokens]."""
    rows: tuple[_Row, ...]


class ReferenceKernels:
    """See ``devices.base.Kernels``."""

    def gather(self, table: Weight, ids: Tensor) -> Tensor:
        return _own(table).rows(ids.long()).dequantize()

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        weight = _own(weight)
        n, k = weight.shape
        match weight.layout:
            case "fp32" | "fp16":
                inputs = x.double()
            case "bf16":
                inputs = x.bfloat16().double()
            case "int8" | "int4":
                inputs = quantized_inputs(x, weight.activation_digits)
        out = x.new_empty((x.shape[0], n))
        step = max(_PRODUCT_SLICE // k, 1)
        for start in range(0, n, step):
            rows = slice(start, start + step)
            product = inputs @ weight.exact_rows(rows).T
            out[:, rows] = product if bias is None else product + bias[rows].double()
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.double()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight.double()).float()

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rope(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        cos, sin = table[positions.long()].double()[:, :, None].unbind(1)
        half = table.shape[-1]
        a, b = x[..., :half].double(), x[..., half : 2 * half].double()
        rest = x[..., 2 * half :]
        return torch.cat(((a * cos - b * sin).float(), (b * cos + a * sin).float(), rest), dim=-1)

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return (F.silu(gate.double()) * up.double()).float()

    def plan_attention(self, cache: KVCache, shape: StepShape) -> AttentionPlan:
        starts = shape.query_start.tolist()
        positions = shape.positions.long()
        rows = []
        write_slots = torch.empty_like(positions)
        for row, (first, last) in enumerate(itertools.pairwise(starts)):
            keys = torch.arange(int(shape.kv_lengths[row]))
            block = shape.block_tables[row].long()[keys // cache.block_size]
            slots = block * cache.block_size + keys % cache.block_size
            rows.append(_Row(first, last, positions[first:last], slots))
            write_slots[first:last] = slots[positions[first:last]]
        return ReferenceAttentionPlan(write_slots, tuple(rows))

    def write_kv(self, cache: KVCache, layer: int, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        assert isinstance(cache, ReferenceKVCache)
        assert isinstance(plan, ReferenceAttentionPlan)
        cache.keys[layer, plan.write_slots] = k.to(cache.keys.dtype)
        cache.values[layer, plan.write_slots] = v.to(cache.values.dtype)

    def attention(
        self, q: Tensor, cache: KVCache, layer: int, plan: AttentionPlan, scale: float, window: int | None = None
    ) -> Tensor:
        assert isinstance(cache, ReferenceKVCache)
        assert isinstance(plan, ReferenceAttentionPlan)
        out = torch.empty_like(q)
        for row in plan.rows:
            if row.first == row.last:
                continue
            oldest = 0 if window is None else max(int(row.positions.min()) - window + 1, 0)
            slots = row.slots[oldest:]
            distance = row.positions[:, None] - torch.arange(oldest, len(row.slots))
            visible = distance >= 0
            if window is not None:
                visible &= distance < window
            out[row.first : row.last] = _attend(
                q[row.first : row.last].double(),
                cache.keys[layer, slots].double(),
                cache.values[layer, slots].double(),
                visible,
                scale,
            )
        return out

    def sample(self, logits: Tensor, inputs: SampleInputs) -> Sampled:
        return sample(logits, inputs)


def quantized_inputs(x: Tensor, digits: int) -> Tensor:
    """What a quantised product sees of its inputs: codes times float32 scales, exact in float64 [t, k].

    Per row and group of 32: scale = amax / limit, code = round-half-even(x / scale) by way of a reciprocal, bounded
    so that zeros stay zeros when the scale is 0 or almost.
    """
    limit = 127 << 8 * (digits - 1)
    t, k = x.shape
    padding = -k % ACTIVATION_GROUP
    groups = F.pad(x, (0, padding)).view(t, (k + padding) // ACTIVATION_GROUP, ACTIVATION_GROUP)
    scales = groups.abs().amax(-1, keepdim=True) / limit
    inverse = (1 / scales).clamp(max=torch.finfo(torch.float32).max)
    codes = (groups * inverse).round()
    return (codes.double() * scales.double()).view(t, k + padding)[:, :k]


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention of one row: q [t, heads, d], k and v [n, kv_heads, d], visible bool [t, n]; all float64.

    A key that a query does not see has no part in its result even if it holds NaN: zero times NaN is NaN,
    so values that are not finite are taken out of the product and poison those who see them instead.
    """
    t, heads, d = q.shape
    q = q.view(t, k.shape[1], heads // k.shape[1], d)
    scores = torch.einsum("thgd,nhd->thgn", q, k) * scale
    weights = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
    out = torch.einsum("thgn,nhd->thgd", weights, v.where(v.isfinite(), 0.0))
    poisoned = torch.einsum("tn,nhd->thd", visible.double(), (~v.isfinite()).double()) > 0
    return out.masked_fill(poisoned[:, :, None], torch.nan).view(t, heads, d)


class ReferenceDevice:
    """See ``devices.base.Device``."""

    name = "reference"

    def __init__(
        self, *, threads: int | None = None, stream: Stream | None = None, activations: Activations = "int16"
    ) -> None:
        """``threads``: PyTorch's compute threads, unchanged by default. ``stream``: a thread of its own by
        default; an ``InlineStream`` makes the device synchronous. ``activations``: what inputs of products with
        quantised weights are quantised to."""
        if threads is not None:
            torch.set_num_threads(threads)
        self._activations = activations
        self.kernels: Kernels = ReferenceKernels()
        self.stream: Stream = ThreadStream("reference-stream") if stream is None else stream

    def memory(self) -> Memory:
        return host_memory()

    def upload(self, array: NDArray[Any]) -> Tensor:
        array = np.ascontiguousarray(array)
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def download(self, tensor: Tensor) -> NDArray[Any]:
        array: NDArray[Any] = tensor.numpy()
        return array

    def pack(self, tensor: HostTensor) -> Weight:
        return ReferenceWeight(tensor, ACTIVATION_DIGITS[self._activations])

    def pack_slices(self, n: int, slices: Iterable[HostTensor]) -> Weight:
        return self.pack(_joined([_owned(tensor) for tensor in slices]))

    def quantize(self, tensor: DenseTensor, layout: Literal["int8", "int4"]) -> GroupedTensor:
        return quantize(tensor, layout)

    def vector(self, tensor: HostTensor) -> Tensor:
        return _copy(tensor.dequantize())

    def kv_block_bytes(self, layers: int, kv_heads: int, head_dim: int, block_size: int, dtype: KVDtype) -> int:
        return 2 * layers * kv_heads * head_dim * block_size * _KV_DTYPES[dtype].itemsize

    def kv_cache(
        self, layers: int, num_blocks: int, kv_heads: int, head_dim: int, block_size: int, dtype: KVDtype
    ) -> KVCache:
        block_bytes = self.kv_block_bytes(layers, kv_heads, head_dim, block_size, dtype)
        available = self.memory().available
        if num_blocks * block_bytes > available:
            raise OutOfMemory(
                f"a KV pool of {num_blocks} blocks needs {num_blocks * block_bytes / 2**20:.0f} MiB, but only "
                f"{available / 2**20:.0f} MiB are available; the largest that fits is {available // block_bytes} blocks"
            )
        # calloc'ed pages take no memory until they are written
        keys, values = (
            torch.zeros((layers, num_blocks * block_size, kv_heads, head_dim), dtype=_KV_DTYPES[dtype])
            for _ in range(2)
        )
        return ReferenceKVCache(keys, values, num_blocks, block_size)

    def host_blocks(self, count: int, block_bytes: int) -> NDArray[np.uint8]:
        return pages.host_blocks(count, block_bytes)

    def report(self) -> dict[str, str]:
        return {
            "kernels": f"PyTorch {torch.__version__}, float64 sums",
            "processor": platform.machine(),
            "threads": str(torch.get_num_threads()),
            "activations": f"{self._activations} in products with quantised weights",
        }

    def close(self) -> None:
        self.stream.close()


def _joined(slices: list[HostTensor]) -> HostTensor:
    """Slices of the rows of one matrix, put together."""
    dense = [tensor.data for tensor in slices if isinstance(tensor, DenseTensor)]
    if dense:
        return DenseTensor(torch.cat(dense))
    grouped = [tensor for tensor in slices if isinstance(tensor, GroupedTensor)]
    first = grouped[0]
    return GroupedTensor(
        torch.cat([tensor.codes for tensor in grouped]),
        torch.cat([tensor.scales for tensor in grouped]),
        None if first.minimums is None else torch.cat([t.minimums for t in grouped if t.minimums is not None]),
        first.group,
        first.bits,
    )


def _owned(tensor: HostTensor) -> HostTensor:
    """A slice that outlives the mapped file's next one."""
    return DenseTensor(_copy(tensor.data)) if isinstance(tensor, DenseTensor) else tensor


def _own(weight: Weight) -> ReferenceWeight:
    assert isinstance(weight, ReferenceWeight), "a weight packed by another device"
    return weight


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
