"""The device's rows: sampling parameters follow the seats, whatever was sampled before."""

from __future__ import annotations

import numpy as np

from ropeway.devices.base import SampleInputs
from ropeway.execution.rows import Rows
from ropeway.plan import Plan, Seat
from ropeway.request import SamplingParams
from tests.support.devices import device


def seated(rows: Rows, slot: int, params: SamplingParams, end_ids: tuple[int, ...] = ()) -> None:
    none = np.empty(0, dtype=np.int32)
    seat = Seat(slot, np.array([5, 6, 7], dtype=np.int32), 3, params, 9, end_ids, none)
    rows.apply(Plan(1, none.astype(np.int64), none, none, none, none.astype(np.bool_), none, none, (seat,)))


def sampled(rows: Rows, slots: list[int], lengths: list[int]) -> SampleInputs:
    return rows.sample_inputs(np.array(slots, dtype=np.int32), np.array(lengths, dtype=np.int32))


def new_rows() -> Rows:
    return Rows(device("reference"), 3, 16, 4)


def test_the_same_slots_in_the_next_step_differ_in_their_lengths_alone() -> None:
    rows = new_rows()
    seated(rows, 0, SamplingParams(temperature=0.5, logit_bias={4: 2.0}))
    seated(rows, 2, SamplingParams(temperature=0.25))
    first, second = sampled(rows, [2, 0], [3, 3]), sampled(rows, [2, 0], [4, 4])
    assert (first.lengths.tolist(), second.lengths.tolist()) == ([3, 3], [4, 4])
    for inputs in (first, second):
        assert inputs.temperature.tolist() == [0.25, 0.5]
        assert inputs.bias_start.tolist() == [0, 0, 1]
        assert inputs.bias_values.tolist() == [2.0]
    assert sampled(rows, [0, 2], [5, 5]).temperature.tolist() == [0.5, 0.25]
    assert sampled(rows, [0], [6]).temperature.tolist() == [0.5]


def test_who_takes_a_seat_brings_parameters_of_his_own() -> None:
    rows = new_rows()
    seated(rows, 1, SamplingParams(temperature=0.5, logit_bias={4: 2.0}))
    assert sampled(rows, [1], [3]).temperature.tolist() == [0.5]
    seated(rows, 1, SamplingParams(temperature=0.75))
    inputs = sampled(rows, [1], [3])
    assert inputs.temperature.tolist() == [0.75]
    assert inputs.bias_start.tolist() == [0, 0]


def test_end_tokens_are_held_back_only_as_long_as_the_output_is_too_short() -> None:
    rows = new_rows()
    seated(rows, 1, SamplingParams(min_tokens=2), end_ids=(8,))
    masked = [sampled(rows, [1], [length]).bias_ids.tolist() for length in (3, 4, 5, 6)]
    assert masked == [[8], [8], [], []]
