"""Whether large pages pay: the same work over memory in pages of 4 KiB and of 2 MiB, in alternation. Times are CPU
times of one thread, so that other processes on the machine matter less.

python -m benchmarks.huge_pages --json benchmarks/results/huge_pages.json
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.goals.verdict import table_of
from ropeway.bench.report import reported_to
from ropeway.cli.failures import told_plainly
from ropeway.devices.base import DenseTensor, StepShape
from ropeway.devices.cpu import linear
from ropeway.devices.cpu.device import CpuDevice
from ropeway.devices.cpu.weights import PackedWeight, pack
from ropeway.devices.pages import Arena, zeroed_pages
from ropeway.devices.stream import InlineStream

SIZES = ("small", "large")
"""Of pages."""
_MATRIX = (3072, 1024)
_MATRICES = 32
"""200 MB in bfloat16: far beyond the caches."""
_SEQUENCES, _CONTEXT = 32, 384
_LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK = 8, 16, 8, 128, 16
_PROMPT = 512


class SmallPages(Arena):
    """The same with pages of 4 KiB."""

    def take(self, size: int) -> NDArray[np.uint8]:
        piece = super().take(size)
        advise_small(piece)
        return piece


def advise_small(memory: NDArray[Any]) -> None:
    """Whole pages of memory that has not been written yet."""
    begin = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    length = memory.ctypes.data + memory.nbytes - begin
    if length > 0 and ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_NOHUGEPAGE):
        raise OSError("the system does not take advice about pages")


class Works:
    """Each returns work over memory of one kind."""

    def __init__(self) -> None:
        self.device = CpuDevice(threads=1, stream=InlineStream())
        self.values = [torch.randn(_MATRIX).bfloat16() for _ in range(2)]
        self.weights = {size: self.packed(size) for size in SIZES}

    def packed(self, size: str) -> list[PackedWeight]:
        arena = SmallPages() if size == "small" else Arena()
        context = self.device._context
        return [pack(context, DenseTensor(self.values[i % 2]), arena=arena) for i in range(_MATRICES)]

    def packing(self, size: str) -> Callable[[], Any]:
        """As at start-up: pages are taken from the system meanwhile."""
        return lambda: self.packed(size)

    def product(self, size: str, rows: int) -> Callable[[], Any]:
        x = torch.randn(rows, _MATRIX[1])
        return lambda: [self.device.kernels.linear(x, weight) for weight in self.weights[size]]

    def activations(self, size: str) -> Callable[[], Any]:
        """A prompt's inputs and outputs; weights in large pages."""
        rows, (n, k) = _PROMPT, _MATRIX

        def tensor(width: int) -> torch.Tensor:
            memory = zeroed_pages(rows * width * 4, "activations")
            if size == "small":
                advise_small(memory)
            return torch.from_numpy(memory).view(torch.float32).view(rows, width).normal_()

        x, gate, up, out = tensor(k), tensor(n), tensor(n), tensor(n)
        weight, native, context = self.weights["large"][0], linear._native, self.device._context

        def run() -> None:
            for result in (gate, up):
                native.linear(context, weight.native, x.data_ptr(), 0, result.data_ptr(), rows)
            native.silu_and_mul(context, gate.data_ptr(), up.data_ptr(), out.data_ptr(), out.numel())

        return run

    def attention(self, size: str) -> Callable[[], Any]:
        """A decode step of all sequences, their blocks scattered over the pool."""
        kernels, each = self.device.kernels, _CONTEXT // _BLOCK
        blocks = _SEQUENCES * each
        cache = self.device.kv_cache(_LAYERS, blocks, _KV_HEADS, _HEAD_DIM, _BLOCK, "bf16")
        if size == "small":
            advise_small(cache.data)  # type: ignore[attr-defined]
        tables = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).int().view(_SEQUENCES, each)
        prompt = StepShape(
            positions=torch.arange(_CONTEXT, dtype=torch.int32).repeat(_SEQUENCES),
            query_start=torch.arange(_SEQUENCES + 1, dtype=torch.int32) * _CONTEXT,
            kv_lengths=torch.full((_SEQUENCES,), _CONTEXT, dtype=torch.int32),
            block_tables=tables,
        )
        k = torch.randn(_SEQUENCES * _CONTEXT, _KV_HEADS, _HEAD_DIM)
        plan = kernels.plan_attention(cache, prompt)
        for layer in range(_LAYERS):
            kernels.write_kv(cache, layer, k, k, plan)
        step = StepShape(
            positions=torch.full((_SEQUENCES,), _CONTEXT - 1, dtype=torch.int32),
            query_start=torch.arange(_SEQUENCES + 1, dtype=torch.int32),
            kv_lengths=prompt.kv_lengths,
            block_tables=tables,
        )
        q = torch.randn(_SEQUENCES, _HEADS, _HEAD_DIM)

        def run() -> None:
            plan = kernels.plan_attention(cache, step)
            for layer in range(_LAYERS):
                kernels.attention(q, cache, layer, plan, _HEAD_DIM**-0.5)

        return run


def compare(works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    """CPU seconds of each, in alternation, and by what factor large pages are faster: the median over pairs."""
    taken: dict[str, list[float]] = {size: [] for size in SIZES}
    for work in works.values():
        work()
    for number in range(rounds):
        for size in SIZES if number % 2 else reversed(SIZES):
            began = time.process_time()
            works[size]()
            taken[size].append(time.process_time() - began)
    ratios = sorted(small / large for small, large in zip(taken["small"], taken["large"], strict=True))
    return {
        **{f"{size}_s": statistics.median(taken[size]) for size in SIZES},
        "gain": statistics.median(ratios),
        "gain_quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
    }


@torch.inference_mode()
def measure(rounds: int) -> dict[str, Any]:
    """By what was measured."""
    works = Works()
    asked: dict[str, Callable[[str], Callable[[], Any]]] = {
        "weights, product with 1 row": lambda size: works.product(size, 1),
        "weights, product with 32 rows": lambda size: works.product(size, 32),
        "KV pool, decode of 32 sequences": works.attention,
        "activations, prompt of 512 tokens": works.activations,
        "weights, packing": works.packing,
    }
    return {name: compare({size: make(size) for size in SIZES}, rounds) for name, make in asked.items()}


@told_plainly
def _main(
    rounds: Annotated[int, typer.Option(min=4, help="Pairs of each kind.")] = 20,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every figure here, too.")] = None,
) -> None:
    """Compare pages of 4 KiB and of 2 MiB."""
    with reported_to(json) as report:
        results = measure(rounds)
        report.update({"rounds": rounds, "results": results})
    rows = [
        [name, *(f"{row[f'{size}_s'] * 1e3:.1f}" for size in SIZES), f"{row['gain']:.3f}x", shown(row)]
        for name, row in results.items()
    ]
    Console().print(table_of("pages", ["", "small, ms", "large, ms", "gain", "quartiles"], rows))


def shown(row: dict[str, Any]) -> str:
    low, high = row["gain_quartiles"]
    return f"{low:.3f} to {high:.3f}"


if __name__ == "__main__":
    typer.run(_main)
