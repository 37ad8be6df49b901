"""Two micro-batches: whose turn it is, what overlaps, and where a step is cut."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ropeway.devices.stream import ThreadStream
from ropeway.execution.batch import cut_plan
from ropeway.execution.ranks.cutting import CutTable, Cutter, half, measure, position_cost
from ropeway.models.spec import DecoderSpec
from ropeway.parallel.overlap import Overlapping
from ropeway.plan import Plan

LAYERS = 4


class Link:
    """A communicator whose collectives take time, and note when and where they ran."""

    rank, size = 0, 2

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.seen: list[tuple[float, float, float]] = []
        """(first element, begin, end)."""
        self.threads: set[int] = set()

    def all_reduce(self, x: Tensor) -> Tensor:
        began = time.perf_counter()
        time.sleep(self.seconds)
        self.threads.add(threading.get_ident())
        self.seen.append((float(x.flatten()[0]), began, time.perf_counter()))
        return x + 100

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x, x], dim)

    def broadcast(self, x: Tensor) -> None:
        x.fill_(7)

    def fail(self) -> None:
        raise AssertionError


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def overlapping(link: Link) -> Iterator[Overlapping]:
    made = Overlapping(link, ThreadStream("communication"))
    yield made
    made.close()


def layers(communicator: Overlapping, name: float, computed: list[Any], seconds: float = 0.0) -> float:
    """A model: computes, and sums over ranks, layer by layer; the tensors are (name, layer, sums so far)."""
    x = torch.tensor([name, 0.0, 0.0])
    for layer in range(LAYERS):
        began = time.perf_counter()
        time.sleep(seconds)
        computed.append((name, layer, began, time.perf_counter()))
        summed = communicator.all_reduce(torch.tensor([name, float(layer), float(x[2])]))
        assert summed[0] == name + 100
        x[2] = summed[2] - 100 + 1
    return float(x[2])


def test_they_take_turns_and_each_gets_its_own_results(overlapping: Overlapping, link: Link) -> None:
    computed: list[Any] = []
    results = overlapping.both(lambda: layers(overlapping, 1.0, computed), lambda: layers(overlapping, 2.0, computed))
    assert results == (LAYERS, LAYERS)
    expected = [(name, layer) for layer in range(LAYERS) for name in (1.0, 2.0)]
    assert [(name, layer) for name, layer, *_ in computed] == expected
    assert [name for name, *_ in link.seen] == [1.0, 2.0] * LAYERS
    assert threading.get_ident() not in link.threads


def test_one_alone_communicates_where_it_computes(overlapping: Overlapping, link: Link) -> None:
    assert layers(overlapping, 1.0, []) == LAYERS
    assert link.threads == {threading.get_ident()}
    x = torch.zeros(2)
    overlapping.broadcast(x)
    assert x.tolist() == [7, 7]
    assert overlapping.all_gather(torch.ones(1, 2), 1).shape == (1, 4)
    spent = overlapping.take()
    assert spent.busy_s == spent.exposed_s > 0


def test_computing_overlaps_communicating_and_nothing_overlaps_its_own_kind(
    overlapping: Overlapping, link: Link
) -> None:
    link.seconds = 0.02
    computed: list[Any] = []
    began = time.perf_counter()
    overlapping.both(lambda: layers(overlapping, 1.0, computed, 0.02), lambda: layers(overlapping, 2.0, computed, 0.02))
    took = time.perf_counter() - began
    for intervals in ([(a, b) for *_, a, b in computed], [(a, b) for _, a, b in link.seen]):
        ordered = sorted(intervals)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(ordered))
    spent = overlapping.take()
    assert spent.busy_s >= 2 * LAYERS * 0.02
    # One after the other, it would be 16 times 20 ms. Together: all computing, and the last communication.
    assert took < 14 * 0.02
    assert spent.exposed_s < 0.5 * spent.busy_s


@pytest.mark.parametrize("who", [1, 2])
def test_an_exception_in_one_ends_both_and_the_next_step_works(overlapping: Overlapping, who: int) -> None:
    ended: list[int] = []

    def part(name: int) -> int:
        try:
            for layer in range(LAYERS):
                overlapping.all_reduce(torch.zeros(1))
                if layer == 1 and name == who:
                    raise ValueError(f"part {name}")
            return name
        finally:
            ended.append(name)

    with pytest.raises(ValueError, match=f"part {who}"):
        overlapping.both(lambda: part(1), lambda: part(2))
    assert sorted(ended) == [1, 2]
    assert overlapping.both(lambda: 3, lambda: 4) == (3, 4)


def test_what_a_collective_raises_reaches_its_micro_batch(overlapping: Overlapping, link: Link) -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("the link is down")

    link.all_reduce = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the link is down"):
        overlapping.both(lambda: layers(overlapping, 1.0, []), lambda: layers(overlapping, 2.0, []))


def test_inference_mode_holds_for_both(overlapping: Overlapping) -> None:
    def part() -> list[bool]:
        seen = []
        for _ in range(LAYERS):
            overlapping.all_reduce(torch.zeros(1))
            seen.append(torch.is_inference_mode_enabled())
        return seen

    with torch.inference_mode():
        assert overlapping.both(part, part) == ([True] * LAYERS, [True] * LAYERS)


# --------------------------------------------------------------------------- where a step is cut


def plan(rows: list[tuple[int, int, bool]]) -> Plan:
    """Rows are (start, count, samples), on slots 0, 1, ..."""
    start, count, samples = zip(*rows, strict=True)
    ints = np.int32
    return Plan(
        seq=1,
        request=np.arange(len(rows), dtype=np.int64),
        slot=np.arange(len(rows), dtype=ints),
        start=np.array(start, dtype=ints),
        count=np.array(count, dtype=ints),
        samples=np.array(samples, dtype=np.bool_),
        new_blocks=np.empty(0, dtype=ints),
        new_block_count=np.zeros(len(rows), dtype=ints),
    )


def tokens(part: Plan) -> list[tuple[int, int]]:
    """(slot, position) of every token."""
    return [
        (int(slot), position)
        for slot, start, count in zip(part.slot, part.start, part.count, strict=True)
        for position in range(start, start + count)
    ]


ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.booleans()), min_size=1, max_size=6)


@settings(deadline=None)
@given(ROWS, st.data())
def test_the_parts_have_the_steps_tokens_in_their_order(rows: list[tuple[int, int, bool]], data: st.DataObject) -> None:
    whole = plan(rows)
    if whole.num_tokens < 2:
        return
    cut = data.draw(st.integers(1, whole.num_tokens - 1))
    first, second = cut_plan(whole, cut)
    assert first.num_tokens == cut
    assert tokens(first) + tokens(second) == tokens(whole)
    sampled = [(int(s), int(e)) for part in (first, second) for s, e in _sampled(part)]
    assert sampled == list(_sampled(whole))
    assert (first.count > 0).all()
    assert (second.count > 0).all()


def _sampled(part: Plan) -> Iterator[tuple[int, int]]:
    """(slot, length) of what is sampled."""
    return (
        (int(s), int(e)) for s, e in zip(part.slot[part.samples], (part.start + part.count)[part.samples], strict=True)
    )


@settings(deadline=None)
@given(ROWS, st.floats(0, 0.1))
def test_the_cut_is_at_half_of_the_cost(rows: list[tuple[int, int, bool]], cost: float) -> None:
    whole = plan(rows)
    if whole.num_tokens < 2:
        return
    cut = half(whole, cost)
    costs = [1 + cost * position for _, position in tokens(whole)]
    largest = max(costs)
    assert 0 < cut < len(costs)
    if len(costs) > 2:
        assert abs(sum(costs[:cut]) - sum(costs[cut:])) <= 2 * largest + 1e-6


SPEC = cast(
    DecoderSpec,
    SimpleNamespace(num_heads=16, head_dim=128, hidden_size=1024, num_kv_heads=8, intermediate_size=3072),
)


def test_attention_to_a_position_costs_a_small_part_of_a_tokens_products() -> None:
    assert position_cost(SPEC) == pytest.approx(4096 / 15_728_640)


def test_a_changed_table_changes_the_cut() -> None:
    step = plan([(0, 64, True), (100, 1, True)])
    slow = CutTable((32, 64), (1.0, 2.0), (1.2, 2.2))
    fast = CutTable((32, 64), (1.0, 2.0), (1.2, 1.5))
    assert Cutter("auto", SPEC, slow).cut(step).cut == 0
    assert Cutter("auto", SPEC, fast).cut(step).cut == half(step, position_cost(SPEC)) > 0
    assert Cutter("auto", SPEC, fast).cut(plan([(0, 63, True)])).cut == 0
    assert Cutter("auto", SPEC).cut(step).cut == 0  # nothing was measured
    assert Cutter("on", SPEC).cut(step).cut > 0
    assert Cutter("on", SPEC).cut(plan([(5, 1, True)])).cut == 0  # one token


def test_what_is_hardly_faster_is_not_cut() -> None:
    assert not CutTable((64,), (1.0,), (0.985,)).pays(64)
    assert CutTable((64,), (1.0,), (0.975,)).pays(1000)


@pytest.mark.parametrize(("limit", "sizes"), [(200, (32, 64, 128)), (31, ()), (32, (32,))])
def test_the_table_is_measured_from_steps_that_fit(limit: int, sizes: tuple[int, ...]) -> None:
    ran: list[Plan] = []

    def run(step: Plan) -> float:
        ran.append(step)
        return step.num_tokens * (0.8 if step.cut else 1.0) * 1e-3

    table = measure(run, max_tokens=limit, max_model_len=50, max_num_seqs=4, num_blocks=100, block_size=4)
    assert table.tokens == sizes
    assert table.whole_s == pytest.approx([size * 1e-3 for size in sizes])
    assert table.cut_s == pytest.approx([size * 0.8e-3 for size in sizes])
    for step in ran:
        assert step.cut in (0, step.num_tokens // 2)
        assert (step.count <= 50).all()
        assert step.num_tokens in sizes
        assert (step.new_block_count * 4 >= step.count).all()
        assert len(np.unique(step.new_blocks)) == step.new_block_count.sum() <= 100


def test_no_more_blocks_are_taken_than_there_are() -> None:
    most = []

    def run(step: Plan) -> float:
        most.append(int(step.new_blocks.max()) + 1)
        return 1e-3

    measure(run, max_tokens=512, max_model_len=50, max_num_seqs=64, num_blocks=32, block_size=4)
    assert 8 < max(most) <= 32  # a prompt of 50 takes 13 blocks, of which the last is not full


def test_steps_that_take_long_are_measured_once() -> None:
    ran = []

    def run(step: Plan) -> float:
        ran.append(step.cut)
        return 3.0

    measure(run, max_tokens=32, max_model_len=64, max_num_seqs=1, num_blocks=64, block_size=4)
    assert sorted(ran) == [0, 16]


# --------------------------------------------------------------------------- products added up block by block


@pytest.mark.parametrize(("rows", "blocks"), [(31, 1), (63, 1), (64, 2), (200, 4), (1000, 4)])
def test_a_fused_product_is_the_products_sum_in_blocks_of_rows(
    overlapping: Overlapping, link: Link, rows: int, blocks: int
) -> None:
    overlapping.fused_blocks = 4
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))
    sizes: list[int] = []

    def product(part: Tensor) -> Tensor:
        sizes.append(len(part))
        return part @ torch.arange(6.0).view(3, 2)

    got = overlapping.reduce_product(product, x, 2)
    assert torch.equal(
        got, torch.cat([x[begin:end] @ torch.arange(6.0).view(3, 2) for begin, end in _spans(sizes)]) + 100
    )
    assert len(sizes) == blocks
    assert sum(sizes) == rows
    assert (threading.get_ident() in link.threads) == (blocks == 1)


def _spans(sizes: list[int]) -> list[tuple[int, int]]:
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def test_a_fused_product_is_computed_while_the_part_before_is_added_up(overlapping: Overlapping, link: Link) -> None:
    overlapping.fused_blocks = 4
    link.seconds = 0.03

    def product(part: Tensor) -> Tensor:
        time.sleep(0.03)
        return part

    began = time.perf_counter()
    overlapping.reduce_product(product, torch.zeros(128, 2), 2)
    assert time.perf_counter() - began < 0.21  # one after the other it is 0.24, together 0.15
    spent = overlapping.take()
    assert spent.busy_s >= 0.12
    assert spent.exposed_s < 0.6 * spent.busy_s
