"""Static and dynamic batching, as a baseline: whole batches, and rows computed for nobody."""

from __future__ import annotations

import pytest

from tests.support.line import TOKEN, Line


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_nobody_boards_before_all_seats_are_empty(batching: str) -> None:
    line = Line(seats=2, batching=batching, batch_window_s=0.0)
    first, second = line.add(4, 2), line.add(4, 9)
    line.step()
    late = line.add(4, 3)
    while second.finish is None:
        assert late.slot < 0
        line.step()
    assert first.finish is not None
    line.step()
    assert late.slot >= 0
    line.run()
    assert {i: len(output) for i, output in line.outputs.items()} == {1: 2, 2: 9, 3: 3}


def test_static_takes_whoever_waits_up_to_the_number_of_seats() -> None:
    line = Line(seats=3, batching="static")
    for _ in range(5):
        line.add(4, 3)
    boarded = []
    while line.scheduler.has_work:
        plan = line.step()
        if plan.seats:
            boarded.append(len(plan.seats))
    assert boarded == [3, 2]


def test_a_static_batch_is_seated_whole_even_if_its_prompts_take_several_steps() -> None:
    line = Line(seats=3, batching="static", budget=16)
    for _ in range(3):
        line.add(20, 2)
    assert len(line.step().seats) == 3
    late = line.add(4, 2)
    while line.scheduler.seats.taken:
        assert late.slot < 0
        line.step()
    line.run()
    assert {i: len(output) for i, output in line.outputs.items()} == {1: 2, 2: 2, 3: 2, 4: 2}


def test_a_static_batch_boards_the_higher_tiers_first() -> None:
    line = Line(seats=2, batching="static")
    batch, standard, urgent = (line.add(4, 2, tier=tier) for tier in ("batch", "standard", "interactive"))
    assert set(line.order(line.step())) == {standard.id, urgent.id}
    late = line.add(4, 2, tier="interactive")
    line.step()
    assert (standard.finish is not None, urgent.finish is not None, late.slot) == (True, True, -1)
    assert standard.preemptions == 0, "a batch that runs is left alone"
    line.run()
    assert len(line.outputs[batch.id]) == 2


def test_a_dynamic_batch_that_is_not_full_waits_for_the_window() -> None:
    line = Line(seats=4, batching="dynamic", batch_window_s=0.5)
    line.add(4, 2)
    line.now = 0.3
    line.add(4, 2)
    assert line.scheduler.plan(line.now) is None
    assert line.scheduler.stuck
    assert line.scheduler.next_change_s() == pytest.approx(0.5)
    line.now = 0.49
    assert line.scheduler.plan(line.now) is None
    line.now = 0.5
    assert len(line.step().seats) == 2


def test_a_full_dynamic_batch_goes_at_once() -> None:
    line = Line(seats=2, batching="dynamic", batch_window_s=100.0)
    line.add(4, 2)
    assert line.scheduler.plan(line.now) is None
    line.add(4, 2)
    assert len(line.step().seats) == 2


def test_the_window_of_the_next_batch_counts_from_the_arrival_of_its_first() -> None:
    line = Line(seats=4, batching="dynamic", batch_window_s=0.5)
    line.add(4, 3)
    line.now = 0.6
    line.step()
    line.add(4, 2)
    line.now = 2.0
    line.add(4, 2)
    line.step(), line.step()
    assert len(line.step().seats) == 2, "its window was over when the seats became empty"


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_padded_rows_are_computed_until_their_batch_ends_and_are_counted(batching: str) -> None:
    line = Line(seats=3, batching=batching, padded_rows=True)
    requests = [line.add(4, output) for output in (2, 5, 9)]
    line.now = 1.0
    rows = [len(line.step().slot) for _ in range(9)]
    assert rows == [3] * 9
    assert all(request.finish is not None for request in requests)
    assert line.scheduler.wasted_rows == {"padding": 7 + 4}
    assert line.outputs == {1: [TOKEN] * 2, 2: [TOKEN] * 5, 3: [TOKEN] * 9}
    line.run()
    assert line.pool.live == 0


def test_without_padding_finished_rows_are_dropped() -> None:
    line = Line(seats=3, batching="static")
    for output in (2, 5, 9):
        line.add(4, output)
    assert [len(line.step().slot) for _ in range(9)] == [3] * 2 + [2] * 3 + [1] * 4
    assert not line.scheduler.wasted_rows


def test_padding_ends_with_an_end_token_as_with_a_length_limit() -> None:
    line = Line(seats=2, batching="static", padded_rows=True)
    short, _ = line.add(4, 20, end_ids=(3,)), line.add(4, 6)
    line.step({short.id: 3})
    assert short.finish is not None
    line.run()
    assert line.scheduler.wasted_rows == {"padding": 5}
    assert line.outputs[short.id] == [3]


def test_padding_stops_at_the_end_of_the_context() -> None:
    line = Line(seats=2, batching="static", padded_rows=True, max_len=16, blocks=64)
    line.add(14, 2), line.add(2, 14)
    line.run()
    assert {i: len(output) for i, output in line.outputs.items()} == {1: 2, 2: 14}
    assert line.pool.live == 0


@pytest.mark.parametrize("order", [(3, 20), (20, 3)])
def test_padding_is_the_first_to_give_way_and_takes_blocks_from_nobody(order: tuple[int, int]) -> None:
    line = Line(blocks=8, seats=2, batching="static", padded_rows=True)
    requests = [line.add(4, output) for output in order]
    line.run()
    assert {i: len(output) for i, output in line.outputs.items()} == {
        r.id: o for r, o in zip(requests, order, strict=True)
    }
    assert line.scheduler.preemptions == 0
    assert 0 < line.scheduler.wasted_rows["padding"] < 17


def test_a_padded_row_of_a_higher_tier_gives_its_blocks_to_a_lower_one() -> None:
    line = Line(blocks=6, seats=2, batching="static", padded_rows=True)
    urgent, batch = line.add(4, 2, tier="interactive"), line.add(4, 18, tier="batch")
    line.run()
    assert (len(line.outputs[urgent.id]), len(line.outputs[batch.id])) == (2, 18)
    assert batch.preemptions == 0


def test_the_last_block_goes_to_a_running_row_not_to_padding() -> None:
    line = Line(blocks=9, seats=2, batching="static", padded_rows=True)
    line.add(4, 3), line.add(4, 20)
    assert len(line.run()) == 20, "the second one has a row in every step"


def test_padding_preempts_no_prompt_for_its_next_block() -> None:
    line = Line(blocks=9, seats=2, budget=4, batching="static", padded_rows=True)
    line.add(3, 1)
    long = line.add(28, 4)
    line.run()
    assert line.scheduler.wasted_rows["padding"] > 0
    assert long.preemptions == 0
    assert len(line.outputs[long.id]) == 4


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_nothing_is_lost_when_blocks_run_out_within_a_batch(batching: str, padded: bool) -> None:
    line = Line(blocks=10, seats=4, batching=batching, padded_rows=padded, step_s=0.1)
    requests = [line.add(6, output) for output in (30, 3, 25, 9, 14, 30)]
    for _ in range(600):
        if not line.scheduler.has_work:
            break
        line.now += line.step_s
        plan = line.scheduler.plan(line.now)
        if plan is not None:
            line.settle(plan)
    assert [len(line.outputs[request.id]) for request in requests] == [30, 3, 25, 9, 14, 30]
    assert line.scheduler.preemptions > 0
    assert line.pool.live == 0


def test_an_aborted_request_of_a_padded_batch_is_no_padding() -> None:
    line = Line(seats=2, batching="static", padded_rows=True)
    gone, stays = line.add(4, 9), line.add(4, 4)
    line.step()
    line.scheduler.abort(gone.id, "cancel", line.now)
    assert [len(line.step().slot) for _ in range(3)] == [1, 1, 1]
    assert stays.finish is not None
    line.run()
    assert not line.scheduler.wasted_rows


def test_continuous_batching_knows_no_padding() -> None:
    line = Line(seats=2, padded_rows=True)
    line.add(4, 2), line.add(4, 6)
    line.run()
    assert not line.scheduler.wasted_rows
