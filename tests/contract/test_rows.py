"""Rows and token ids picked by index, on every device."""

from __future__ import annotations

import pytest
import torch

from ropeway.devices.base import DenseTensor
from tests.support.devices import DEVICES, device

every_device = pytest.mark.parametrize("name", DEVICES)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@every_device
def test_take_gives_rows_in_the_order_asked_for(name: str) -> None:
    x = torch.randn(5, 7)
    take = device(name).kernels.take
    assert torch.equal(take(x, ints(4, 0, 4)), x[[4, 0, 4]])
    assert take(x, ints()).shape == (0, 7)


@every_device
def test_tokens_are_read_and_written_by_slot_and_position(name: str) -> None:
    kernels = device(name).kernels
    tokens = torch.arange(12, dtype=torch.int32).view(3, 4)
    assert kernels.read_tokens(tokens, ints(2, 0, 2), ints(3, 0, 3)).tolist() == [11, 0, 11]
    kernels.write_tokens(tokens, ints(1, 2), ints(3, 0), ints(70, 80))
    assert tokens.tolist() == [[0, 1, 2, 3], [4, 5, 6, 70], [80, 9, 10, 11]]
    kernels.write_tokens(tokens, ints(), ints(), ints())
    assert kernels.read_tokens(tokens, ints(), ints()).tolist() == []


@every_device
def test_a_part_of_a_table_gives_zeros_for_rows_of_other_parts(name: str) -> None:
    dev = device(name)
    whole = torch.randn(12, 8)
    ids = ints(3, 4, 7, 8, 0, 11)
    parts = [dev.kernels.gather(dev.pack(DenseTensor(whole[at : at + 4])), ids, at) for at in (0, 4, 8)]
    assert torch.equal(sum(parts), whole[ids.long()])
    assert torch.equal(parts[1][[0, 3, 4, 5]], torch.zeros(4, 8))


@pytest.mark.parametrize(("slots", "positions"), [([3], [0]), ([-1], [0]), ([0], [4]), ([0], [-1]), ([0, 9], [0, 0])])
def test_a_place_outside_the_table_of_tokens_is_refused_and_nothing_written(
    slots: list[int], positions: list[int]
) -> None:
    kernels = device("cpu").kernels
    tokens = torch.zeros(3, 4, dtype=torch.int32)
    with pytest.raises(IndexError, match="is not in the table of 3 slots with 4 positions"):
        kernels.read_tokens(tokens, ints(*slots), ints(*positions))
    with pytest.raises(IndexError, match="is not in the table"):
        kernels.write_tokens(tokens, ints(*slots), ints(*positions), ints(*[5] * len(slots)))
    assert not tokens.any()


def test_a_row_that_is_not_there_is_refused() -> None:
    for row in (-1, 5):
        with pytest.raises(IndexError, match=f"row {row} of 5"):
            device("cpu").kernels.take(torch.zeros(5, 3), ints(row))


def test_columns_of_another_type_or_length_are_refused() -> None:
    kernels = device("cpu").kernels
    tokens = torch.zeros(3, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"slots must be contiguous int32 \[2\]"):
        kernels.read_tokens(tokens, ints(0, 1).long(), ints(0, 1))
    with pytest.raises(ValueError, match=r"positions must be contiguous int32 \[2\]"):
        kernels.read_tokens(tokens, ints(0, 1), ints(0))
    with pytest.raises(ValueError, match=r"ids must be contiguous int32 \[1\]"):
        kernels.write_tokens(tokens, ints(0), ints(0), ints(1, 2))
    with pytest.raises(ValueError, match="tokens must be int32"):
        kernels.read_tokens(tokens.long(), ints(0), ints(0))
    with pytest.raises(ValueError, match="x must be contiguous float32"):
        kernels.take(torch.zeros(3, 4)[:, ::2], ints(0))
