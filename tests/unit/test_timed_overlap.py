"""Micro-batches on the timer device: computed times, so every one of them can be told in advance."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ropeway.devices.timer import Interval, TimedStream
from ropeway.parallel.overlap import Overlapping
from ropeway.parallel.timed import TimedLink


@dataclass
class Model:
    """Layers that compute for ``compute_s`` a token, and add up their result over ranks for ``link_s`` a token."""

    layers: int
    compute_s: float
    link_s: float

    def __post_init__(self) -> None:
        # A host that takes no time.
        self.compute, self.communicate = (TimedStream(keep=True, clock=lambda: 0.0) for _ in range(2))
        link = TimedLink(self.compute, self.communicate, lambda nbytes: nbytes // 4 * self.link_s)
        self.communicator = Overlapping(link, link)

    def forward(self, tokens: int) -> Tensor:
        x = torch.zeros(tokens)
        for layer in range(self.layers):
            self.compute.submit(self.compute_s * tokens, f"layer {layer}")
            x = self.communicator.all_reduce(x)
        return x

    def both(self, first: int, second: int) -> None:
        self.communicator.both(lambda: self.forward(first), lambda: self.forward(second))

    @property
    def end_s(self) -> float:
        return max(self.compute.record().end_s, self.communicate.record().end_s)


def test_a_whole_step_waits_for_every_collective() -> None:
    model = Model(layers=4, compute_s=0.25, link_s=0.125)
    model.forward(8)
    assert model.end_s == 4 * (2.0 + 1.0)
    assert model.compute.idle_s == 3.0  # between layers; the last sum comes after all computing


def test_two_micro_batches_hide_all_but_the_last_sum() -> None:
    model = Model(layers=4, compute_s=0.25, link_s=0.125)
    model.both(4, 4)
    assert model.compute.idle_s == 0.0
    assert model.end_s == 4 * 2.0 + 0.5  # everything computed, and the second part's last sum
    assert model.communicate.busy_s == 4.0


def test_a_link_slower_than_the_device_is_what_the_step_takes() -> None:
    model = Model(layers=4, compute_s=0.125, link_s=0.25)
    model.both(4, 4)
    assert model.communicate.idle_s == 0.0
    assert model.end_s == 0.5 + 4 * 2.0  # the first part's first layer, and everything communicated


@settings(deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 40),
    st.integers(1, 40),
    st.floats(0.001, 1.0),
    st.floats(0.001, 1.0),
)
def test_no_two_intervals_of_a_kind_overlap_and_a_cut_never_takes_longer(
    layers: int, first: int, second: int, compute_s: float, link_s: float
) -> None:
    whole, cut = Model(layers, compute_s, link_s), Model(layers, compute_s, link_s)
    whole.forward(first + second)
    cut.both(first, second)
    for stream in (cut.compute, cut.communicate):
        assert len(stream.intervals) == 2 * layers
        for before, after in itertools.pairwise(stream.intervals):
            assert before.end_s <= after.begin_s
    # A sum comes after what it sums, and the part's next layer after that.
    for mine, sums in ((_part(cut.compute, part), _part(cut.communicate, part)) for part in (0, 1)):
        for layer in range(layers):
            assert mine[layer].end_s <= sums[layer].begin_s
            if layer:
                assert sums[layer - 1].end_s <= mine[layer].begin_s
    assert cut.end_s <= whole.end_s * (1 + 1e-9)


def _part(stream: TimedStream, part: int) -> list[Interval]:
    return stream.intervals[part::2]


def test_a_fused_product_hides_all_but_the_last_block() -> None:
    model = Model(layers=1, compute_s=0.0, link_s=0.125)
    model.communicator.fused_blocks = 4

    def product(x: Tensor) -> Tensor:
        model.compute.submit(0.25 * len(x), "product")
        return x

    model.communicator.reduce_product(product, torch.zeros(128, 1), 1)
    assert model.compute.busy_s == 32.0
    assert model.end_s == 32.0 + 32 * 0.125
