"""What this machine can do at best, measured in the same run as what is compared with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from ropeway.devices.base import DenseTensor, Device, GroupedTensor, HostTensor, Layout

_READ_BYTES = 256 << 20
"""Far beyond the caches."""
_ROWS, _N, _K = 384, 4096, 1024
"""Of the product: enough rows to be bound by arithmetic."""
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


@runtime_checkable
class _MeasuresBandwidth(Protocol):
    def bandwidth(self) -> float: ...


def measure_limits(device: Device, layout: Layout, *, threads: int) -> Limits:
    """Measure now, on the device's own stream, with nothing else running; takes about a second and ``256 MiB``.

    ``layout`` is that of the model's weights, ``threads`` those that PyTorch's loops may use."""
    measured: list[Limits] = []

    def measure() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            measured.append(Limits(_read_bandwidth(device), _matmul_rate(device, layout)))
        finally:
            torch.set_num_threads(before)

    device.stream.submit(measure).wait()
    return measured[0]


@torch.inference_mode()
def _read_bandwidth(device: Device) -> float:
    rates = [device.bandwidth()] if isinstance(device, _MeasuresBandwidth) else []
    memory = torch.ones(_READ_BYTES // 4)
    vector = torch.ones(4096)
    loops: list[Callable[[], Any]] = [memory.sum, lambda: memory.view(-1, 4096) @ vector]
    return max(rates + [_READ_BYTES / _best_time(loop) for loop in loops])


@torch.inference_mode()
def _matmul_rate(device: Device, layout: Layout) -> float:
    operations = 2 * _ROWS * _N * _K
    x = torch.randn(_ROWS, _K)
    weight = device.pack(_random_matrix(layout))
    products: list[Callable[[], Any]] = [lambda: device.kernels.linear(x, weight), _onednn_product(layout)]
    return max(operations / _best_time(product) for product in products)


def _onednn_product(layout: Layout) -> Callable[[], Any]:
    """PyTorch's product of that precision; of 8-bit integers for the quantised layouts, whose codes it multiplies."""
    if layout in ("int8", "int4"):
        codes, inputs = (torch.randint(-127, 128, (n, _K), dtype=torch.int8) for n in (_N, _ROWS))
        return lambda: torch._int_mm(inputs, codes.T)
    dtype = torch.float32 if layout == "fp32" else torch.bfloat16
    a, b = (torch.randn(n, _K).to(dtype) for n in (_ROWS, _N))
    return lambda: a @ b.T


def _random_matrix(layout: Layout) -> HostTensor:
    match layout:
        case "fp32" | "bf16" | "fp16":
            dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
            return DenseTensor(torch.randn(_N, _K).to(dtypes[layout]))
        case "int8" | "int4":
            top = 128 if layout == "int8" else 8
            codes = torch.randint(-top, top, (_N, _K), dtype=torch.int8)
            scales = torch.rand(_N, _K // _GROUP).half()
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
