"""The reference device: every kernel in plain PyTorch. It is the oracle of the other devices' tests and the
fallback on machines without native kernels; it is written to be read, not to be fast.

Sums are taken in float64 and rounded to float32 once. A result is therefore the mathematical one to within
half an ulp, and so, but for one rounding in many millions, independent of the order of additions: a row's
value does not depend on the batch it is computed in.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Iterable, Sequence
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
from ropeway.devices.programs import PreparedStep, Program, ProgramInput
from ropeway.devices.reference_kv import Begun, ReferenceKVCache, Row
from ropeway.devices.reference_quantization import quantize
from ropeway.devices.reference_sampling import sample
from ropeway.devices.stored import block_bytes, check_kv_dtype
from ropeway.devices.stream import ThreadStream
from ropeway.errors import OutOfMemory

_DENSE_LAYOUTS: dict[torch.dtype, Layout] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
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
class ReferenceAttentionPlan:
    rows: tuple[Row, ...]
    begun: tuple[Begun, ...]
    """By row."""


class ReferenceKernels:
    """See ``devices.base.Kernels``."""

    def gather(self, table: Weight, ids: Tensor, first: int | None = None) -> Tensor:
        if first is None:
            return _own(table).rows(ids.long()).dequantize()
        local = ids.long() - first
        mine = (local >= 0) & (local < table.shape[0])
        return self.gather(table, torch.where(mine, local, 0)).masked_fill(~mine[:, None], 0.0)

    def take(self, x: Tensor, rows: Tensor) -> Tensor:
        return x[rows.long()]

    def read_tokens(self, tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        return tokens[slots, positions]

    def write_tokens(self, tokens: Tensor, slots: Tensor, positions: Tensor, ids: Tensor) -> None:
        tokens[slots, positions] = ids

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
        assert isinstance(cache, ReferenceKVCache)
        starts = shape.query_start.tolist()
        positions = shape.positions.long()
        rows = []
        for row, (first, last) in enumerate(itertools.pairwise(starts)):
            keys = torch.arange(int(shape.kv_lengths[row]))
            block = shape.block_tables[row].long()[keys // cache.block_size]
            slots = block * cache.block_size + keys % cache.block_size
            rows.append(Row(first, last, positions[first:last], slots))
        return ReferenceAttentionPlan(tuple(rows), tuple(cache.begin(rows)))

    def write_kv(self, cache: KVCache, layer: int, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        assert isinstance(cache, ReferenceKVCache)
        assert isinstance(plan, ReferenceAttentionPlan)
        cache.write(layer, k, v, plan.rows, plan.begun)

    def attention(
        self, q: Tensor, cache: KVCache, layer: int, plan: AttentionPlan, scale: float, window: int | None = None
    ) -> Tensor:
        assert isinstance(cache, ReferenceKVCache)
        assert isinstance(plan, ReferenceAttentionPlan)
        out = torch.empty_like(q)
        if cache.key_factors is not None:
            q = q * cache.key_factors[layer].repeat_interleave(q.shape[1] // cache.key_factors.shape[1], dim=0)
        for row in plan.rows:
            if row.first == row.last:
                continue
            oldest = 0 if window is None else max(int(row.positions.min()) - window + 1, 0)
            values = cache.values(layer, row.slots[oldest:]).double()
            for tokens, keys in cache.key_views(layer, row, oldest):
                positions = row.positions[tokens.start - row.first : tokens.stop - row.first]
                distance = positions[:, None] - torch.arange(oldest, oldest + len(keys))
                visible = distance >= 0
                if window is not None:
                    visible &= distance < window
                out[tokens] = _attend(q[tokens].double(), keys.double(), values[: len(keys)], visible, scale)
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
        check_kv_dtype(dtype, block_size)
        return block_bytes(layers, kv_heads, head_dim, block_size, dtype)

    def kv_cache(
        self,
        layers: int,
        num_blocks: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: KVDtype,
        key_factors: Tensor | None = None,
    ) -> KVCache:
        bytes_each = self.kv_block_bytes(layers, kv_heads, head_dim, block_size, dtype)
        available = self.memory().available
        if num_blocks * bytes_each > available:
            raise OutOfMemory(
                f"a KV pool of {num_blocks} blocks needs {num_blocks * bytes_each / 2**20:.0f} MiB, but only "
                f"{available / 2**20:.0f} MiB are available; the largest that fits is {available // bytes_each} blocks"
            )
        return ReferenceKVCache(layers, num_blocks, kv_heads, head_dim, block_size, dtype, key_factors)

    def capture(self, function: Callable[..., Tensor], inputs: Sequence[ProgramInput], max_rows: int) -> Program | None:
        return None

    def prepare_step(
        self,
        forward: Program,
        logits: Program,
        cache: KVCache,
        tokens: Tensor,
        slots: Tensor,
        shape: StepShape,
        sampled: Tensor,
    ) -> PreparedStep | None:
        return None

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
