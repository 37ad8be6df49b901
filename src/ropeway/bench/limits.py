"""What this machine can do at best, measured in the same run as what is compared with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from ropeway.devices.base import DenseTensor, Device, GroupedTensor, HostTensor, Layout

Shape = tuple[int, int, int]
Figures = TypeVar("Figures")

_READ_BYTES = 256 << 20
"""Far beyond the caches."""
_SHAPES = ((384, 4096, 1024), (1024, 3072, 1024), (512, 1024, 3072))
"""(rows, n, k) of products with enough rows to be bound by arithmetic; the best of them counts."""
_GROUP = 32
_AT_LEAST_S = 0.1
_AT_LEAST_TIMES = 3


@dataclass(frozen=True)
class Limits:
    read_bandwidth_bytes_per_s: float
    """The best of several loops that read memory on all threads."""
    matmul_flops_per_s: float
    """The best rate of any matrix product at hand: the device's in the model's layout, or oneDNN's. Integer
    operations count like floating-point ones."""

    def better(self, other: Limits) -> Limits:
        """The higher of each figure: whatever else the machine does only makes it slower."""
        return Limits(
            max(self.read_bandwidth_bytes_per_s, other.read_bandwidth_bytes_per_s),
            max(self.matmul_flops_per_s, other.matmul_flops_per_s),
        )


RATED_LAYOUTS: tuple[Layout, ...] = ("bf16", "int8", "int4")


@dataclass(frozen=True)
class Rates:
    """What so many threads reach together."""

    threads: int
    read_bytes_per_s: float
    """The best of several loops that read memory."""
    products_per_s: dict[str, float]
    """Operations of the device's own products, by the layout of the weights."""
    onednn_per_s: dict[str, float]
    """And of PyTorch's, in bfloat16 and 8-bit integers."""


@runtime_checkable
class _MeasuresBandwidth(Protocol):
    def bandwidth(self) -> float: ...


def measure_limits(device: Device, layout: Layout, *, threads: int) -> Limits:
    """Measure now, on the device's own stream, with nothing else running; takes about a second and ``256 MiB``.

    ``layout`` is that of the model's weights, ``threads`` those that PyTorch's loops may use."""

    def measure() -> Limits:
        best = max(max(_product_rate(device, layout, shape), _onednn_rate(layout, shape)) for shape in _SHAPES)
        return Limits(_read_bandwidth(device), best)

    return _measured(device, threads, measure)


def measure_rates(device: Device, *, threads: int) -> Rates:
    """The same of every layout, on a device of so many threads; takes about two seconds."""

    def measure() -> Rates:
        return Rates(
            threads=threads,
            read_bytes_per_s=_read_bandwidth(device),
            products_per_s={layout: _product_rate(device, layout, _SHAPES[0]) for layout in RATED_LAYOUTS},
            onednn_per_s={layout: _onednn_rate(layout, _SHAPES[0]) for layout in ("bf16", "int8")},
        )

    return _measured(device, threads, measure)


def thread_counts(threads: int) -> list[int]:
    """1, 2, 4, ... and ``threads``."""
    counts = [1]
    while counts[-1] * 2 < threads:
        counts.append(counts[-1] * 2)
    return counts if threads == 1 else [*counts, threads]


def _measured(device: Device, threads: int, measure: Callable[[], Figures]) -> Figures:
    """On the device's stream, with so many threads for PyTorch."""
    measured: list[Figures] = []

    def run() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            measured.append(measure())
        finally:
            torch.set_num_threads(before)

    device.stream.submit(run).wait()
    return measured[0]


@torch.inference_mode()
def _read_bandwidth(device: Device) -> float:
    rates = [device.bandwidth()] if isinstance(device, _MeasuresBandwidth) else []
    memory = torch.ones(_READ_BYTES // 4)
    vector = torch.ones(4096)
    loops: list[Callable[[], Any]] = [memory.sum, lambda: memory.view(-1, 4096) @ vector]
    return max(rates + [_READ_BYTES / _best_time(loop) for loop in loops])


@torch.inference_mode()
def _product_rate(device: Device, layout: Layout, shape: Shape) -> float:
    """Of the device's own product."""
    rows, n, k = shape
    x = torch.randn(rows, k)
    weight = device.pack(_random_matrix(layout, n, k))
    return 2 * rows * n * k / _best_time(lambda: device.kernels.linear(x, weight))


@torch.inference_mode()
def _onednn_rate(layout: Layout, shape: Shape) -> float:
    """Of PyTorch's product of that precision; of 8-bit integers for the quantised layouts, whose codes it
    multiplies."""
    rows, n, k = shape
    product: Callable[[], Any]
    if layout in ("int8", "int4"):
        codes, inputs = (torch.randint(-127, 128, (count, k), dtype=torch.int8) for count in (n, rows))
        product = lambda: torch._int_mm(inputs, codes.T)  # noqa: E731
    else:
        dtype = torch.float32 if layout == "fp32" else torch.bfloat16
        a, b = (torch.randn(count, k).to(dtype) for count in (rows, n))
        product = lambda: a @ b.T  # noqa: E731
    return 2 * rows * n * k / _best_time(product)


def _random_matrix(layout: Layout, n: int, k: int) -> HostTensor:
    match layout:
        case "fp32" | "bf16" | "fp16":
            dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
            return DenseTensor(torch.randn(n, k).to(dtypes[layout]))
        case "int8" | "int4":
            top = 128 if layout == "int8" else 8
            codes = torch.randint(-top, top, (n, k), dtype=torch.int8)
            scales = torch.rand(n, k // _GROUP).half()
            return GroupedTensor(codes, scales, None, _GROUP, 8 if layout == "int8" else 4)


def _best_time(work: Callable[[], Any]) -> float:
    """Seconds of the fastest of several runs."""
    work()
    best, spent, times = float("inf"), 0.0, 0
    while spent < _AT_LEAST_S or times < _AT_LEAST_TIMES:
        began = time.perf_counter()
        work()
        took = time.perf_counter() - began
        best, spent, times = min(best, took), spent + took, times + 1
    return best
