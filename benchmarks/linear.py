"""Rates of the native products: every layout at several numbers of rows, beside the machine's read bandwidth.

    python -m benchmarks.linear [--n 6144] [--k 1024] [--rows 1 8 32 256] [--threads N] [--isa auto] [--json FILE]

A column shows microseconds, GB/s of weights read and GFLOP/s (operations on integers count alike). The matrices of a
row take turns until they exceed the caches, as those of a model do. Quantised layouts are measured with both kinds of
inputs, in turns, because the rates of a shared machine drift.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch

from ropeway.devices.base import Activations, DenseTensor, GroupedTensor, HostTensor, Layout
from ropeway.devices.cpu.device import CpuDevice
from ropeway.devices.stream import InlineStream

_BEYOND_CACHES = 160 << 20
_PASSES = 5
_DENSE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_KINDS: tuple[Activations, ...] = ("int16", "int8")
_LAYOUTS: tuple[Layout, ...] = ("fp32", "bf16", "fp16", "int8", "int4")


def random_matrix(layout: Layout, n: int, k: int) -> HostTensor:
    """Values do not matter to the time, but denormals would."""
    if layout in _DENSE:
        return DenseTensor(torch.randn(n, k).to(_DENSE[layout]))
    top = 128 if layout == "int8" else 8
    codes = torch.randint(-top, top, (n, k), dtype=torch.int8)
    return GroupedTensor(codes, torch.rand(n, k // 32).half(), None, 32, 8 if layout == "int8" else 4)


def measure(
    devices: dict[Activations, CpuDevice], layout: Layout, n: int, k: int, rows: list[int]
) -> list[dict[str, Any]]:
    """An entry per kind of inputs and number of rows; the fastest of several passes over the matrices."""
    matrix = random_matrix(layout, n, k)
    kinds = [kind for kind in devices if layout not in _DENSE or kind == "int16"]
    first = devices["int16"].pack(matrix)
    copies = 1 + _BEYOND_CACHES // first.nbytes
    weights = {kind: [devices[kind].pack(matrix) for _ in range(copies)] for kind in kinds}
    entries = []
    for count in rows:
        x = torch.randn(count, k)
        best = dict.fromkeys(kinds, float("inf"))
        for kind in kinds * _PASSES:
            began = time.perf_counter()
            for weight in weights[kind]:
                devices[kind].kernels.linear(x, weight)
            best[kind] = min(best[kind], (time.perf_counter() - began) / copies)
        entries += [
            {
                "layout": layout,
                "activations": None if layout in _DENSE else kind,
                "rows": count,
                "time_s": best[kind],
                "weight_bytes_per_s": first.nbytes / best[kind],
                "flops_per_s": 2 * count * n * k / best[kind],
            }
            for kind in kinds
        ]
    return sorted(entries, key=lambda entry: kinds.index(entry["activations"] or "int16"))


def label(entry: dict[str, Any]) -> str:
    return entry["layout"] if entry["activations"] is None else f"{entry['layout']}, {entry['activations']}"


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
    devices = {
        kind: CpuDevice(arguments.threads, arguments.isa, stream=InlineStream(), activations=kind) for kind in _KINDS
    }
    device = devices["int16"]
    bandwidth = device.bandwidth()
    print(f"{device.report()}\nread bandwidth {bandwidth / 1e9:.1f} GB/s; matrix {arguments.n} x {arguments.k}")
    entries = []
    for layout in arguments.layouts:
        measured = measure(devices, layout, arguments.n, arguments.k, arguments.rows)
        for name, line in itertools.groupby(measured, label):
            columns = (
                f"{entry['rows']:4d} rows {entry['time_s'] * 1e6:7.0f} us "
                f"{entry['weight_bytes_per_s'] / 1e9:5.1f} GB/s {entry['flops_per_s'] / 1e9:4.0f} GFLOP/s"
                for entry in line
            )
            print(f"{name:12}", *columns, sep=" | ", flush=True)
        entries += measured
    if arguments.json:
        figures = {"device": device.report(), "read_bandwidth_bytes_per_s": bandwidth, "products": entries}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
