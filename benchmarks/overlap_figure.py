"""Draw a step over two ranks whole, in two micro-batches, and with fused collectives, as the timer device computes it.

python -m benchmarks.overlap_figure           # docs/images/overlap.svg; the same every time
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor

from ropeway.devices.timer import Interval, TimedStream
from ropeway.parallel.overlap import Overlapping
from ropeway.parallel.timed import TimedLink

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "overlap"
from matplotlib import pyplot as plt  # noqa: E402

FIGURE = Path(__file__).parents[1] / "docs" / "images" / "overlap.svg"
LAYERS, TOKENS = 3, 512
ATTENTION_MS, MLP_MS = 4.0, 6.0
"""Of a layer, for all tokens."""
LINK_MS = 4.0
"""Of a sum, for all tokens."""
_COLOURS = ("#3b6fb6", "#e08a3c")


@dataclass
class Drawn:
    title: str
    compute: list[Interval]
    communicate: list[Interval]


def drawn(title: str, *, cut: bool = False, fused: bool = False) -> Drawn:
    """What the two streams do in a step of so many tokens."""
    compute, communicate = (TimedStream(keep=True, clock=lambda: 0.0) for _ in range(2))
    link = TimedLink(compute, communicate, lambda nbytes: LINK_MS * nbytes / 4 / TOKENS)
    communicator = Overlapping(link, link)
    communicator.fused_blocks = 4 if fused else 0

    def part(name: str, tokens: int) -> Callable[[], Tensor]:
        def product(x: Tensor) -> Tensor:
            compute.submit(last_ms * len(x) / TOKENS, name)
            return x

        def forward() -> Tensor:
            nonlocal last_ms
            x = torch.zeros(tokens, 1)
            for whole_ms in (ATTENTION_MS, MLP_MS) * LAYERS:
                # A quarter of a block's work is the product whose parts are added up.
                compute.submit(0.75 * whole_ms * tokens / TOKENS, name)
                last_ms = 0.25 * whole_ms
                x = communicator.reduce_product(product, x, 1)
            return x

        last_ms = 0.0
        return forward

    if cut:
        communicator.both(part("A", TOKENS // 2), part("B", TOKENS // 2))
    else:
        part("A", TOKENS)()
    return Drawn(title, compute.intervals, communicate.intervals)


def main() -> None:
    steps = [drawn("whole"), drawn("two micro-batches", cut=True), drawn("fused collectives", fused=True)]
    figure, axes = plt.subplots(len(steps), 1, sharex=True, figsize=(10, 5.2))
    for step, axis in zip(steps, axes, strict=True):
        start = min(interval.begin_s for interval in step.compute)
        for row, intervals in enumerate((step.communicate, step.compute)):
            turns = 2 if step.title == "two micro-batches" else 1
            for number, each in enumerate(intervals):
                colour = _COLOURS[number % turns if row == 0 else each.name == "B"]
                axis.barh(row, each.end_s - each.begin_s, left=each.begin_s - start, color=colour, edgecolor="white")
        end = max(interval.end_s for interval in (*step.compute, *step.communicate)) - start
        axis.set_yticks([0, 1], ["communication", "compute"])
        axis.set_title(f"{step.title}: {end:.1f} ms", loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(f"ms; {TOKENS} tokens, {LAYERS} layers, two sums each")
    figure.tight_layout()
    figure.savefig(FIGURE, metadata={"Date": None})
    print(FIGURE)


if __name__ == "__main__":
    main()
