"""Rates of the native products: every layout at several numbers of rows, beside the machine's read bandwidth.

    python -m benchmarks.linear [--n 6144] [--k 1024] [--rows 1 8 32 256] [--threads N] [--isa auto] [--json FILE]

A column shows microseconds, GB/s of weights read and GFLOP/s (operations on integers count alike). The matrices of a
row take turns until they exceed the caches, as those of a model do.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from ropeway.devices.base import DenseTensor, GroupedTensor, HostTensor, Layout
from ropeway.devices.cpu.device import CpuDevice
from ropeway.devices.stream import InlineStream

_BEYOND_CACHES = 160 << 20
_DENSE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LAYOUTS: tuple[Layout, ...] = ("fp32", "bf16", "fp16", "int8", "int4")


def random_matrix(layout: Layout, n: int, k: int) -> HostTensor:
    """Values do not matter to the time, but denormals would."""
    if layout in _DENSE:
        return DenseTensor(torch.randn(n, k).to(_DENSE[layout]))
    top = 128 if layout == "int8" else 8
    codes = torch.randint(-top, top, (n, k), dtype=torch.int8)
    return GroupedTensor(codes, torch.rand(n, k // 32).half(), None, 32, 8 if layout == "int8" else 4)


def measure(device: CpuDevice, layout: Layout, n: int, k: int, rows: list[int]) -> list[dict[str, Any]]:
    """One entry per number of rows; the fastest of several passes over the matrices."""
    matrix = random_matrix(layout, n, k)
    first = device.pack(matrix)
    weights = [first] + [device.pack(matrix) for _ in range(_BEYOND_CACHES // first.nbytes)]
    entries = []
    for count in rows:
        x = torch.randn(count, k)
        best = float("inf")
        for _ in range(4):
            began = time.perf_counter()
            for weight in weights:
                device.kernels.linear(x, weight)
            best = min(best, (time.perf_counter() - began) / len(weights))
        entries.append(
            {
                "layout": layout,
                "rows": count,
                "time_s": best,
                "weight_bytes_per_s": first.nbytes / best,
                "flops_per_s": 2 * count * n * k / best,
            }
        )
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=6144)
    parser.add_argument("--k", type=int, default=1024)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--layouts", nargs="+", choices=_LAYOUTS, default=list(_LAYOUTS))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = CpuDevice(arguments.threads, arguments.isa, stream=InlineStream())
    bandwidth = device.bandwidth()
    print(f"{device.report()}\nread bandwidth {bandwidth / 1e9:.1f} GB/s; matrix {arguments.n} x {arguments.k}")
    entries = []
    for layout in arguments.layouts:
        measured = measure(device, layout, arguments.n, arguments.k, arguments.rows)
        columns = (
            f"{entry['rows']:4d} rows {entry['time_s'] * 1e6:7.0f} us {entry['weight_bytes_per_s'] / 1e9:5.1f} GB/s "
            f"{entry['flops_per_s'] / 1e9:4.0f} GFLOP/s"
            for entry in measured
        )
        print(layout, *columns, sep=" | ", flush=True)
        entries += measured
    if arguments.json:
        figures = {"device": device.report(), "read_bandwidth_bytes_per_s": bandwidth, "products": entries}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
