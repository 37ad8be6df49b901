"""Sampling on the reference device: each rule by itself, then the distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ropeway.devices.base import philox_uniform
from ropeway.devices.reference import ReferenceKernels
from tests.support.sample_inputs import RowParams, sample_inputs

KERNELS = ReferenceKernels()
LOGITS = torch.tensor([0.5, 2.0, -1.0, 2.0, 0.0, 1.0])


def draw(*rows: RowParams, logits: Tensor = LOGITS) -> list[int]:
    """The token of each row, all rows with the same logits."""
    sampled = KERNELS.sample(logits.expand(len(rows), -1), sample_inputs(rows))
    assert sampled.token_ids.dtype == torch.int32
    return sampled.token_ids.tolist()


def support(row: RowParams, logits: Tensor = LOGITS, draws: int = 300) -> set[int]:
    """All tokens seen over many seeds."""
    return set(draw(*(RowParams(**{**row.__dict__, "seed": seed}) for seed in range(draws)), logits=logits))


def test_temperature_zero_takes_the_likeliest_and_the_lowest_id_of_a_tie() -> None:
    assert draw(RowParams(temperature=0.0)) == [1]
    assert draw(RowParams(temperature=0.0, bias={3: 0.25})) == [3]


@pytest.mark.report("vllm-project/vllm#1623")
@pytest.mark.report("vllm-project/vllm#2937")
@pytest.mark.report("vllm-project/vllm#22180")
@pytest.mark.parametrize("extreme", [{"temperature": 1e-9}, {"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0}])
def test_extreme_parameters_are_greedy_and_finite(extreme: dict[str, float]) -> None:
    logits = torch.tensor([1.0, -3.0, 4.0, 3.99])
    assert support(RowParams(**extreme), logits, draws=50) == {2}


def test_top_k_keeps_the_k_likeliest_and_low_ids_of_a_tie() -> None:
    assert support(RowParams(top_k=1)) == {1}
    assert support(RowParams(top_k=3)) == {1, 3, 5}
    assert support(RowParams(top_k=99, temperature=5.0)) == set(range(6))


def test_top_p_keeps_tokens_until_their_sum_reaches_p() -> None:
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
    assert support(RowParams(top_p=0.39), logits) == {1}
    assert support(RowParams(top_p=0.41), logits) == {1, 2}
    assert support(RowParams(top_p=0.75), logits) == {1, 2, 3}


def test_top_p_counts_what_top_k_has_left() -> None:
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
    assert support(RowParams(top_k=2, top_p=0.5), logits) == {1}  # 0.4 of 0.7 is above one half


def test_min_p_is_a_fraction_of_the_likeliest() -> None:
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
    assert support(RowParams(min_p=0.45), logits) == {1, 2, 3}
    assert support(RowParams(min_p=0.7), logits) == {1, 2}


def test_the_token_is_the_first_in_id_order_whose_cumulated_probability_passes_u() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    rows = [RowParams(seed=seed, prompt=(0,) * (1 + seed % 7)) for seed in range(200)]
    cumulated = logits.double().softmax(0).cumsum(0).numpy()
    u = philox_uniform(np.arange(200, dtype=np.uint64), np.array([len(r.prompt) for r in rows], dtype=np.uint64))
    assert draw(*rows, logits=logits) == [int(np.searchsorted(cumulated, x, side="right")) for x in u]


def test_seeds_beyond_63_bits_are_the_same_bits() -> None:
    logits = torch.zeros(1000)
    [token] = draw(RowParams(seed=-1, prompt=(0,) * 3), logits=logits)
    u = philox_uniform(np.array([2**64 - 1], dtype=np.uint64), np.array([3], dtype=np.uint64))[0]
    assert token == math.floor(float(u) * 1000)


def test_draws_follow_the_probabilities() -> None:
    tokens = draw(*(RowParams(seed=seed, temperature=0.7) for seed in range(4000)))
    frequency = np.bincount(tokens, minlength=6) / len(tokens)
    want = (LOGITS.double() / 0.7).softmax(0).numpy()
    assert np.abs(frequency - want).max() < 0.03  # over four standard deviations of 4000 draws


# --------------------------------------------------------------------------- penalties, biases, log-probabilities


def logprobs(row: RowParams, logits: Tensor = LOGITS) -> Tensor:
    """Log-probabilities of all tokens in id order."""
    size = logits.shape[0]
    sampled = KERNELS.sample(logits[None], sample_inputs([RowParams(**{**row.__dict__, "top_logprobs": size})]))
    assert sampled.top_ids is not None
    assert sampled.top_logprobs is not None
    return torch.empty(size).scatter_(0, sampled.top_ids[0].long(), sampled.top_logprobs[0])


@pytest.mark.report("NVIDIA/TensorRT-LLM#5623")
@pytest.mark.report("vllm-project/vllm-metal#69")
def test_presence_and_frequency_count_output_repetition_counts_prompt_too() -> None:
    history = {"prompt": (3, 3, 2), "output": (5, 5)}
    plain = LOGITS.log_softmax(0)
    torch.testing.assert_close(logprobs(RowParams(**history)), plain)
    presence = LOGITS - torch.tensor([0, 0, 0, 0, 0, 1.5])
    torch.testing.assert_close(logprobs(RowParams(**history, presence_penalty=1.5)), presence.log_softmax(0))
    frequency = LOGITS - torch.tensor([0, 0, 0, 0, 0, 2 * 0.7])
    torch.testing.assert_close(logprobs(RowParams(**history, frequency_penalty=0.7)), frequency.log_softmax(0))
    repetition = LOGITS * torch.tensor([1, 1, 2, 0.5, 1, 0.5])
    torch.testing.assert_close(logprobs(RowParams(**history, repetition_penalty=2.0)), repetition.log_softmax(0))
    first = RowParams(prompt=(3, 3, 2), presence_penalty=2.0, frequency_penalty=2.0)
    torch.testing.assert_close(logprobs(first), plain)


@pytest.mark.report("ggml-org/llama.cpp#19699")
def test_a_bias_of_minus_infinity_masks_and_reports_no_probability() -> None:
    row = RowParams(temperature=0.0, bias={1: -math.inf, 4: 3.0})
    assert draw(row) == [4]
    assert logprobs(row)[1] == -math.inf
    want = (LOGITS + torch.tensor([0, -math.inf, 0, 0, 3.0, 0])).log_softmax(0)
    torch.testing.assert_close(logprobs(row), want)


def test_log_probabilities_are_taken_before_temperature_and_truncation() -> None:
    torch.testing.assert_close(logprobs(RowParams(temperature=0.1, top_k=2, top_p=0.5)), LOGITS.log_softmax(0))


def test_rows_report_as_many_tokens_as_the_one_that_asked_for_most() -> None:
    rows = [RowParams(), RowParams(top_logprobs=0), RowParams(top_logprobs=3, temperature=0.0)]
    sampled = KERNELS.sample(LOGITS.expand(3, -1), sample_inputs(rows))
    assert sampled.logprobs is not None
    assert sampled.top_ids is not None
    assert sampled.top_logprobs is not None
    assert sampled.top_ids.shape == sampled.top_logprobs.shape == (3, 3)
    assert sampled.top_ids[2].tolist() == [1, 3, 5]
    assert sampled.logprobs[2] == sampled.top_logprobs[2, 0]


def test_nothing_is_reported_when_nobody_asked() -> None:
    sampled = KERNELS.sample(LOGITS[None], sample_inputs([RowParams()]))
    assert (sampled.logprobs, sampled.top_ids, sampled.top_logprobs) == (None, None, None)


@pytest.mark.report("vllm-project/vllm#5639")
@pytest.mark.report("vllm-project/vllm#5607")
def test_a_row_does_not_depend_on_its_place_in_the_batch() -> None:
    rows = [
        RowParams(temperature=0.0, repetition_penalty=1.7, prompt=(1, 3)),
        RowParams(seed=8, top_k=1),
        RowParams(seed=3, temperature=0.8, presence_penalty=1.0, output=(1, 1), bias={0: 1.0}),
        RowParams(seed=4, bias={2: 2.0, 5: -1.0}, min_p=0.1),
    ]
    alone = [draw(row)[0] for row in rows]
    assert draw(*rows) == alone
    assert draw(*reversed(rows)) == alone[::-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_logits_without_sense_still_give_a_token_of_the_vocabulary(value: float, temperature: float) -> None:
    [token] = draw(RowParams(temperature=temperature), logits=torch.full((9,), value))
    assert 0 <= token < 9


def test_logits_are_left_as_they_were_and_no_rows_are_no_tokens() -> None:
    logits = LOGITS.clone()[None]
    KERNELS.sample(logits, sample_inputs([RowParams(bias={0: 5.0}, repetition_penalty=3.0)]))
    assert torch.equal(logits[0], LOGITS)
    assert KERNELS.sample(torch.empty(0, 6), sample_inputs([])).token_ids.shape == (0,)
