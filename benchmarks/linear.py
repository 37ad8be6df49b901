"""Rates of the native products in the shapes of real models, as shares of what the machine can do.

    python -m benchmarks.linear [--models ...] [--layouts ...] [--rows 1 8 32 256 2048] [--threads N] [--isa auto]
                                [--products ...] [--json FILE]

A product's *limit* is the longer of two times: its weights' bytes over the read bandwidth (the best of several loops),
and its operations over the best rate that any product of its kind reached in the run, ours or oneDNN's through PyTorch,
in any shape. The share is that limit over the time it took. Operations on integers count like floating-point ones.

Products are fused as the engine fuses them: q, k and v as one; gate and up as one, gated. Ours, with both kinds of
inputs where weights are quantised, and PyTorch's take turns, because the rates of a shared machine drift. Matrices take
turns until they exceed the caches, as those of a model do.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ropeway.bench.limits import Limits, measure_limits
from ropeway.devices.base import ACTIVATION_DIGITS, Activations, DenseTensor, GroupedTensor, HostTensor, Layout, Weight
from ropeway.devices.cpu import _native
from ropeway.devices.cpu.device import CpuDevice
from ropeway.devices.cpu.linear import fused_linear
from ropeway.devices.cpu.weights import pack
from ropeway.devices.processor import available_cores
from ropeway.devices.stream import InlineStream

_BEYOND_CACHES = 128 << 20
_MANY_ROWS = 128
"""From here on a product is bound by arithmetic, and two matrices in turn will do."""
_HEAD_ROWS = 32
"""Most rows that a head sees: one for each request."""
_DENSE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LAYOUTS: tuple[Layout, ...] = ("fp32", "bf16", "fp16", "int8", "int4")
_ARITHMETIC = {"fp32": "fp32", "fp16": "fp32", "bf16": "bf16", "int8": "int8", "int4": "int8"}


@dataclass(frozen=True)
class Shape:
    """Matrices [n, k] that share their inputs."""

    name: str
    k: int
    outputs: tuple[int, ...]
    gated: bool = False


def model_shapes(hidden: int, queries: int, keys: int, intermediate: int, vocabulary: int) -> list[Shape]:
    """The products of a model; ``queries`` and ``keys`` are features of all heads."""
    return [
        Shape("q, k, v", hidden, (queries, keys, keys)),
        Shape("o", queries, (hidden,)),
        Shape("gate, up", hidden, (intermediate, intermediate), gated=True),
        Shape("down", intermediate, (hidden,)),
        Shape("head", hidden, (vocabulary,)),
    ]


MODELS = {
    "qwen3-0.6b": model_shapes(1024, 2048, 1024, 3072, 151_936),
    "smollm2-135m": model_shapes(576, 576, 192, 1536, 49_152),
    "qwen2.5-coder-0.5b": model_shapes(896, 896, 128, 4864, 151_936),
}


@dataclass
class Entry:
    """One product, measured."""

    model: str
    product: str
    layout: Layout
    engine: str
    """"ropeway" or "torch"."""
    activations: Activations | None
    rows: int
    time_s: float
    weight_bytes: int
    operations: int

    @property
    def rate(self) -> float:
        return self.operations / self.time_s


def random_matrix(layout: Layout, n: int, k: int) -> HostTensor:
    """Values do not matter to the time, but denormals would."""
    if layout in _DENSE:
        return DenseTensor(torch.randn(n, k).to(_DENSE[layout]))
    top = 128 if layout == "int8" else 8
    codes = torch.randint(-top, top, (n, k), dtype=torch.int8)
    return GroupedTensor(codes, torch.rand(n, k // 32).half(), None, 32, 8 if layout == "int8" else 4)


def torch_product(layout: Layout, shape: Shape, x: Tensor) -> Callable[[], Any]:
    """PyTorch's product of that precision with one matrix of all outputs; of 8-bit integers for quantised layouts."""
    n = sum(shape.outputs)
    if layout not in _DENSE:
        codes, inputs = (torch.randint(-127, 128, (size, shape.k), dtype=torch.int8) for size in (n, len(x)))
        return lambda: torch._int_mm(inputs, codes.T)
    dtype = torch.float32 if layout == "fp32" else torch.bfloat16
    inputs, weight = x.to(dtype), torch.randn(n, shape.k).to(dtype)
    return lambda: torch.nn.functional.linear(inputs, weight)


def measure(
    context: _native.Context, model: str, layout: Layout, shape: Shape, rows: Sequence[int], passes: int
) -> list[Entry]:
    """What nine of ten calls took longer than, for every number of rows and kind of inputs, and of PyTorch's for many
    rows: other work on the machine only makes a call slower."""
    kinds: tuple[Activations, ...] = ("int16",) if layout in _DENSE else ("int16", "int8")
    matrices = [random_matrix(layout, n, shape.k) for n in shape.outputs]

    def packed(kind: Activations) -> list[Weight]:
        return [pack(context, matrix, ACTIVATION_DIGITS[kind]) for matrix in matrices]

    weights = {kind: [packed(kind)] for kind in kinds}
    size = sum(weight.nbytes for weight in weights["int16"][0])
    for kind in kinds:
        weights[kind] += [packed(kind) for _ in range(_BEYOND_CACHES // size)]
    entries = []
    for count in rows:
        x = torch.randn(count, shape.k)
        candidates: dict[Activations | None, Callable[[], list[float]]] = {
            kind: lambda kind=kind, x=x: _pass(context, shape, x, weights[kind])  # type: ignore[misc]
            for kind in kinds
        }
        if count >= _MANY_ROWS:
            product = torch_product(layout, shape, x)
            candidates[None] = lambda product=product: [_timed(product), _timed(product)]  # type: ignore[misc]
        times: dict[Activations | None, list[float]] = {name: [] for name in candidates}
        for _ in range(passes):
            for name, run in candidates.items():
                times[name] += run()
        for name, taken in times.items():
            took = sorted(taken)[len(taken) // 10]
            engine, shown = ("torch", None) if name is None else ("ropeway", None if layout in _DENSE else name)
            operations = 2 * count * sum(shape.outputs) * shape.k
            entries.append(Entry(model, shape.name, layout, engine, shown, count, took, size, operations))
    return entries


def _pass(context: _native.Context, shape: Shape, x: Tensor, copies: list[list[Weight]]) -> list[float]:
    """Seconds of one product with each of the matrices that take turns."""
    copies = copies[:2] if len(x) >= _MANY_ROWS else copies
    parts = [[(weight, None) for weight in weights] for weights in copies]
    return [_timed(lambda part=part: fused_linear(context, x, part, gated=shape.gated)) for part in parts]  # type: ignore[misc]


def _timed(product: Callable[[], Any]) -> float:
    began = time.perf_counter()
    product()
    return time.perf_counter() - began


def limit_s(entry: Entry, bandwidth: float, best_rates: dict[str, float]) -> float:
    """The shortest time that the machine leaves to a product."""
    return max(entry.weight_bytes / bandwidth, entry.operations / best_rates[_ARITHMETIC[entry.layout]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--layouts", nargs="+", choices=_LAYOUTS, default=list(_LAYOUTS))
    parser.add_argument("--products", nargs="+", help="by name; all of them by default")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256, 2048])
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    threads = arguments.threads or available_cores()
    device = CpuDevice(threads, arguments.isa, stream=InlineStream())
    context = _native.Context(threads, arguments.isa)
    torch.set_num_threads(threads)
    print(device.report(), flush=True)
    limits: Limits | None = None
    best_rates = dict.fromkeys(_ARITHMETIC.values(), 0.0)
    entries: list[Entry] = []
    for layout in arguments.layouts:
        for model in arguments.models:
            now = measure_limits(device, layout, threads=threads)
            limits = now if limits is None else limits.better(now)
            best_rates[_ARITHMETIC[layout]] = max(best_rates[_ARITHMETIC[layout]], now.matmul_flops_per_s)
            for shape in MODELS[model]:
                if arguments.products and shape.name not in arguments.products:
                    continue
                rows = [count for count in arguments.rows if shape.name != "head" or count <= _HEAD_ROWS]
                entries += measure(context, model, layout, shape, rows, arguments.passes)
    for entry in entries:
        kind = _ARITHMETIC[entry.layout]
        best_rates[kind] = max(best_rates[kind], entry.rate)
    assert limits is not None
    bandwidth = limits.read_bandwidth_bytes_per_s
    print_shares(entries, bandwidth, best_rates)
    if arguments.json:
        figures = {
            "device": device.report(),
            "read_bandwidth_bytes_per_s": bandwidth,
            "best_flops_per_s": best_rates,
            "products": [
                asdict(entry)
                | {
                    "weight_bytes_per_s": entry.weight_bytes / entry.time_s,
                    "flops_per_s": entry.rate,
                    "share_of_limit": limit_s(entry, bandwidth, best_rates) / entry.time_s,
                }
                for entry in entries
            ],
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def print_shares(entries: list[Entry], bandwidth: float, best_rates: dict[str, float]) -> None:
    """A line per product and one for all of a model's; a column per number of rows."""
    rates = ", ".join(f"{kind} {rate / 1e9:.0f}" for kind, rate in best_rates.items() if rate)
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s; best products, GFLOP/s: {rates}")
    ours = [entry for entry in entries if entry.engine == "ropeway"]
    columns = sorted({entry.rows for entry in ours})
    print(f"{'':44}", *(f"{count:5d} rows" for count in columns), sep=" | ")
    for key in dict.fromkeys((entry.model, entry.layout, entry.activations) for entry in ours):
        group = [entry for entry in ours if (entry.model, entry.layout, entry.activations) == key]
        names = list(dict.fromkeys(entry.product for entry in group))
        for name in [*names, "all"]:
            cells = []
            for count in columns:
                chosen = [entry for entry in group if entry.rows == count and name in (entry.product, "all")]
                limit = sum(limit_s(entry, bandwidth, best_rates) for entry in chosen)
                cells.append(f"{limit / sum(entry.time_s for entry in chosen):10.0%}" if chosen else f"{'':10}")
            label = " ".join(str(part) for part in (*key[:2], key[2] or "", name))
            print(f"{label:44}", *cells, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
