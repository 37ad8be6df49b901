"""Rates of attention over the paged cache, and of writing to it, beside what the machine can do.

    python -m benchmarks.attention [--dtypes bf16 int8] [--heads 16] [--kv-heads 8] [--head-dim 128] [--json FILE]

Decode: one token for each of a batch of rows, GB/s of keys and values read, and its share of the best read loop.
Prefill: a prompt in one step, GFLOP/s (of the products of keys and values that are visible), and its share of the best
product. Every case is measured with blocks in random places and with blocks in a row ("contiguous"), in turns; what it
costs that they are scattered is the median ratio of neighbouring measurements. Layers take turns until they exceed the
caches, as those of a model do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropeway.devices.base import KEY_GROUP, DenseTensor, KVDtype, StepShape
from ropeway.devices.cpu.device import CpuDevice
from ropeway.devices.stream import InlineStream

_BEYOND_CACHES = 192 << 20
_DTYPES: tuple[KVDtype, ...] = ("fp32", "bf16", "int8", "int4", "int4-full")


def step_of(counts: list[int], lengths: list[int], tables: Tensor) -> StepShape:
    positions = np.concatenate([np.arange(n - c, n) for c, n in zip(counts, lengths, strict=True)])
    return StepShape(
        torch.from_numpy(positions.astype(np.int32)),
        torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        tables,
    )


class Case:
    """``batch`` rows of ``context`` tokens, the last ``count`` of which a step computes."""

    def __init__(self, device: CpuDevice, shape: argparse.Namespace, dtype: KVDtype, batch: int, context: int) -> None:
        block_size = max(shape.block_size, KEY_GROUP) if dtype == "int4-full" else shape.block_size
        self.device, self.dtype, self.batch, self.context = device, dtype, batch, context
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        blocks = -(-context // block_size)
        layer_bytes = batch * blocks * device.kv_block_bytes(1, self.kv_heads, self.head_dim, block_size, dtype)
        self.layers = 1 + _BEYOND_CACHES // layer_bytes
        self.read_bytes = layer_bytes / (blocks * block_size) * context
        count = batch * blocks
        self.cache = device.kv_cache(self.layers, count, self.kv_heads, self.head_dim, block_size, dtype)
        in_a_row = torch.arange(count, dtype=torch.int32).view(batch, blocks)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).int()
        self.tables = {"contiguous": in_a_row, "scattered": order.view(batch, blocks).contiguous()}
        self._fill(block_size)

    def _fill(self, block_size: int) -> None:
        """One random block everywhere: what values are does not matter to the time."""
        plan = self.device.kernels.plan_attention(
            self.cache, step_of([block_size], [block_size], torch.zeros(1, 1, dtype=torch.int32))
        )
        for layer in range(self.layers):
            k, v = (torch.randn(block_size, self.kv_heads, self.head_dim) for _ in range(2))
            self.device.kernels.write_kv(self.cache, layer, k, v, plan)
        data = self.cache.data  # type: ignore[attr-defined]
        data[1:] = data[0]

    def passes(self, count: int, repeats: int, *, write: bool = False) -> dict[str, list[float]]:
        """Seconds of a layer's attention, or of its writing; both places in turns."""
        kernels = self.device.kernels
        counts, lengths = [count] * self.batch, [self.context] * self.batch
        plans = {
            name: kernels.plan_attention(self.cache, step_of(counts, lengths, table))
            for name, table in self.tables.items()
        }
        q = torch.randn(count * self.batch, self.heads, self.head_dim)
        k = torch.randn(count * self.batch, self.kv_heads, self.head_dim)
        times: dict[str, list[float]] = {name: [] for name in plans}
        for _ in range(repeats):
            for name, plan in plans.items():
                began = time.perf_counter()
                for layer in range(self.layers):
                    if write:
                        kernels.write_kv(self.cache, layer, k, k, plan)
                    else:
                        kernels.attention(q, self.cache, layer, plan, self.head_dim**-0.5)
                times[name].append((time.perf_counter() - began) / self.layers)
        return times


def best_product(device: CpuDevice) -> float:
    """FLOP/s of the fastest of the kernels' and torch's bfloat16 products."""
    n, k, rows = 4096, 1024, 512
    w = torch.randn(n, k).bfloat16()
    weight, x = device.pack(DenseTensor(w)), torch.randn(rows, k)
    narrow = x.bfloat16()
    runs: tuple[Callable[[], Tensor], ...] = (lambda: device.kernels.linear(x, weight), lambda: narrow @ w.T)
    best = float("inf")
    for run in runs * 5:
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return 2 * n * k * rows / best


def measured(case: Case, kind: str, repeats: int, bandwidth: float, product: float) -> dict[str, Any]:
    count = case.context if kind == "prefill" else 1
    times = case.passes(count, repeats)
    best = min(times["scattered"])
    ratios = [a / b for a, b in zip(times["scattered"], times["contiguous"], strict=True)]
    entry: dict[str, Any] = {
        "kind": kind,
        "dtype": case.dtype,
        "batch": case.batch,
        "context": case.context,
        "time_s": best,
        "scattered_over_contiguous": statistics.median(ratios),
        "write_time_s": min(case.passes(count, repeats, write=True)["scattered"]),
    }
    if kind == "prefill":
        visible = case.context * (case.context + 1) // 2
        entry["flops_per_s"] = 4 * visible * case.heads * case.head_dim * case.batch / best
        entry["share_of_best_product"] = entry["flops_per_s"] / product
    else:
        entry["read_bytes_per_s"] = case.read_bytes / best
        entry["tokens_per_s"] = case.batch * case.context / best
        entry["share_of_best_read"] = entry["read_bytes_per_s"] / bandwidth
    return entry


def told(entry: dict[str, Any]) -> str:
    rate = (
        f"{entry['flops_per_s'] / 1e9:5.0f} GFLOP/s {entry['share_of_best_product']:4.0%}"
        if entry["kind"] == "prefill"
        else f"{entry['read_bytes_per_s'] / 1e9:5.1f} GB/s {entry['share_of_best_read']:4.0%}, "
        f"{entry['tokens_per_s'] / 1e6:5.1f} M tokens/s"
    )
    return (
        f"{entry['kind']:8} {entry['dtype']:9} batch {entry['batch']:2} context {entry['context']:5}: "
        f"{entry['time_s'] * 1e6:9.0f} us {rate}; scattered / contiguous "
        f"{entry['scattered_over_contiguous']:.3f}; writing {entry['write_time_s'] * 1e6:6.0f} us"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=_DTYPES, default=list(_DTYPES))
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="*", default=[384, 2048, 8192])
    parser.add_argument("--prefill", type=int, nargs="*", default=[2048], help="lengths of prompts")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = CpuDevice(arguments.threads, arguments.isa, stream=InlineStream())
    bandwidth, product = device.bandwidth(), best_product(device)
    print(f"{device.report()}\nread {bandwidth / 1e9:.1f} GB/s; product {product / 1e9:.0f} GFLOP/s")
    cases = [("decode", batch, context) for context in arguments.contexts for batch in arguments.batches]
    entries = []
    for kind, batch, context in cases + [("prefill", 1, context) for context in arguments.prefill]:
        for dtype in arguments.dtypes:
            repeats = arguments.repeats if kind == "decode" else max(arguments.repeats // 3, 1)
            tokens = context
            if kind == "decode" and dtype == "int4-full":  # a group that has begun is only there once it was written
                tokens = context // KEY_GROUP * KEY_GROUP + 1
            case = Case(device, arguments, dtype, batch, tokens)
            entries.append(measured(case, kind, repeats, bandwidth, product))
            print(told(entries[-1]), flush=True)
    if arguments.json:
        figures = {
            "device": device.report(),
            "read_bytes_per_s": bandwidth,
            "product_flops_per_s": product,
            "attention": entries,
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
