"""Native sampling: rules against the reference device and by hand, frequencies against probabilities."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ropeway.devices.base import Sampled, philox_uniform
from ropeway.devices.reference_sampling import sample as reference_sample
from tests.support.native import CONTEXTS, _native
from tests.support.sample_inputs import RowParams, sample_inputs  # isort: split

from ropeway.devices.cpu.sampling import sample

every_isa = pytest.mark.parametrize("isa", CONTEXTS)
GREEDY = RowParams(temperature=0.0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(isa: str, logits: Tensor, *rows: RowParams) -> Sampled:
    """Samples every row; a single row of logits serves all."""
    logits = logits.expand(len(rows), -1) if logits.ndim == 1 else logits
    return sample(CONTEXTS[isa], logits, sample_inputs(rows))


def draws(isa: str, logits: Tensor, row: RowParams, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """How often each token is drawn over ``count`` seeds."""
    sampled = run(isa, logits, *(dataclasses.replace(row, seed=seed) for seed in range(count)))
    return np.bincount(sampled.token_ids.numpy(), minlength=len(logits))


# --------------------------------------------------------------------------- against the reference device


def row_params(vocabulary: int) -> st.SearchStrategy[RowParams]:
    token = st.integers(0, vocabulary - 1)
    history = st.lists(token, max_size=12).map(tuple)
    return st.builds(
        RowParams,
        temperature=st.sampled_from([0.0, 1e-9, 0.3, 1.0, 3.0]),
        top_k=st.sampled_from([0, 1, 2, 5, 40, 10**6]),
        top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
        min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
        presence_penalty=st.sampled_from([0.0, 0.5, -0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.25]),
        seed=st.integers(-(2**63), 2**63 - 1),
        prompt=st.lists(token, min_size=1, max_size=8).map(tuple),
        output=history,
        bias=st.dictionaries(token, st.sampled_from([-100.0, 2.0, -math.inf]), max_size=vocabulary // 2),
        top_logprobs=st.sampled_from([-1, 0, 1, 5, 20]),
        allowed=st.none() | st.none() | st.frozensets(token, max_size=vocabulary),
    )


@every_isa
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_sampling_agrees_with_the_reference_device(isa: str, data: st.DataObject) -> None:
    """Logits on a coarse grid, so that ties abound and no cut falls between two roundings of one value."""
    vocabulary = data.draw(st.sampled_from([1, 2, 15, 16, 17, 100, 1500]), "vocabulary")
    rows = data.draw(st.lists(row_params(vocabulary), max_size=4), "rows")
    logits = (normal(len(rows), vocabulary, seed=data.draw(st.integers(0, 99), "seed")) * 8).round() / 4
    # A mask may be shorter than the vocabulary: what it does not speak of is not allowed.
    inputs = sample_inputs(rows, mask_words=data.draw(st.sampled_from([1, -(-vocabulary // 32)]), "words"))
    got, want = sample(CONTEXTS[isa], logits, inputs), reference_sample(logits, inputs)
    assert torch.equal(got.token_ids, want.token_ids)
    if want.logprobs is None:
        assert got.logprobs is got.top_ids is got.top_logprobs is None
        return
    assert got.logprobs is not None
    assert got.top_logprobs is not None
    assert got.top_ids is not None
    assert want.top_logprobs is not None
    assert want.top_ids is not None
    asked = inputs.top_logprobs >= 0
    close = {"rtol": 1e-5, "atol": 2e-6, "equal_nan": False}
    torch.testing.assert_close(got.logprobs[asked], want.logprobs[asked], **close)
    torch.testing.assert_close(got.top_logprobs[asked], want.top_logprobs[asked], **close)
    assert torch.equal(got.top_ids[asked], want.top_ids[asked])
    assert got.logprobs[~asked].isnan().all()


@every_isa
@pytest.mark.parametrize(
    "row",
    [
        RowParams(temperature=0.9),
        RowParams(temperature=5.0, top_p=0.95),
        RowParams(top_p=0.99, min_p=1e-4),
        RowParams(top_k=40, top_p=0.9),
        RowParams(top_k=5000, temperature=2.0),
        RowParams(min_p=0.05),
        RowParams(repetition_penalty=1.2, prompt=(5, 9, 5), output=(100_000,), top_logprobs=20),
    ],
    ids=lambda row: "-".join(f"{k}={v}" for k, v in vars(row).items() if v != getattr(RowParams(), k)),
)
def test_a_large_vocabulary_is_sampled_like_a_small_one(isa: str, row: RowParams) -> None:
    logits = 3 * normal(151_936)
    rows = [dataclasses.replace(row, seed=seed) for seed in range(12)]
    inputs = sample_inputs(rows)
    wide = logits.expand(len(rows), -1)
    assert torch.equal(sample(CONTEXTS[isa], wide, inputs).token_ids, reference_sample(wide, inputs).token_ids)


@every_isa
def test_a_mask_leaves_the_likeliest_of_what_it_allows(isa: str) -> None:
    logits = torch.arange(100.0)
    rows = [
        dataclasses.replace(GREEDY, allowed=frozenset({3, 40, 7}), top_logprobs=3),
        GREEDY,
        dataclasses.replace(GREEDY, allowed=frozenset({3, 40}), bias={40: -math.inf, 3: -math.inf}),
        dataclasses.replace(GREEDY, allowed=frozenset()),
        RowParams(allowed=frozenset({98})),
    ]
    inputs = sample_inputs(rows, mask_words=4)
    got = sample(CONTEXTS[isa], logits.expand(len(rows), -1), inputs)
    assert got.token_ids.tolist() == [40, 99, 3, 0, 98]
    assert got.top_ids is not None
    assert got.top_logprobs is not None
    assert got.top_ids[0].tolist() == [40, 7, 3]
    torch.testing.assert_close(got.top_logprobs[0], torch.tensor([40.0, 7.0, 3.0]).log_softmax(0))


@every_isa
def test_masks_that_do_not_fit_are_refused(isa: str) -> None:
    inputs = sample_inputs([dataclasses.replace(GREEDY, allowed=frozenset({1}))])
    assert inputs.mask_of is not None
    for wrong in (
        {"mask_of": None},
        {"mask_of": inputs.mask_of + 1},
        {"mask_of": inputs.mask_of.long()},
        {"masks": torch.zeros(1, 2)},
    ):
        with pytest.raises(ValueError, match="mask"):
            sample(CONTEXTS[isa], torch.zeros(1, 64), dataclasses.replace(inputs, **wrong))


# --------------------------------------------------------------------------- the draw


@every_isa
def test_the_draw_uses_the_philox_stream_of_seed_and_position(isa: str) -> None:
    """With equal logits for 2^20 tokens, the chosen id is the top 20 bits of the random word."""
    logits = torch.zeros(1 << 20)
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]
    rows = [RowParams(seed=seed, prompt=(0,) * (7 * i + 1)) for i, seed in enumerate(seeds)]
    words = philox_uniform(
        np.array(seeds, dtype=np.int64).view(np.uint64), np.array([len(row.prompt) for row in rows], dtype=np.uint64)
    )
    want = np.floor(words.astype(np.float64) * 2**20).astype(np.int64).tolist()
    assert run(isa, logits, *rows).token_ids.tolist() == want


@every_isa
@pytest.mark.parametrize(
    ("row", "kept"),
    [
        (RowParams(), range(20)),
        (RowParams(temperature=0.5), range(20)),
        (RowParams(temperature=2.0), range(20)),
        (RowParams(top_k=5), [3, 7, 11, 15, 19]),
        (RowParams(min_p=0.35), [11, 15, 19]),
    ],
)
def test_tokens_are_drawn_as_often_as_their_probabilities_say(isa: str, row: RowParams, kept: list[int]) -> None:
    """Pearson's statistic stays within five standard deviations of its mean, the degrees of freedom."""
    ids = np.arange(20)
    weights = np.exp(np.where(ids % 4 == 3, 0.1 * ids - 1, 0.02 * ids - 1.5))
    logits = torch.from_numpy(np.log(weights)).float()
    allowed = np.isin(ids, kept)
    probabilities = np.where(allowed, weights ** (1 / row.temperature), 0)
    probabilities /= probabilities.sum()
    count = 20_000
    counts = draws(isa, logits, row, count)
    assert set(np.flatnonzero(counts)) == set(kept)
    expected = probabilities[allowed] * count
    statistic = ((counts[allowed] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@every_isa
def test_a_token_without_probability_is_never_drawn(isa: str) -> None:
    logits = torch.full((600,), -math.inf)
    logits[[3, 259, 599]] = torch.tensor([0.0, 1.0, 0.5])
    for row in (RowParams(), RowParams(top_p=0.999), RowParams(top_k=50), RowParams(min_p=1e-9)):
        assert set(np.flatnonzero(draws(isa, logits, row, 400))) == {3, 259, 599}


# --------------------------------------------------------------------------- independence of the rows


@every_isa
@pytest.mark.report("vllm-project/vllm#17524")
@pytest.mark.report("vllm-project/vllm#21310")
@pytest.mark.report("vllm-project/vllm#1595")
@pytest.mark.report("vllm-project/vllm#5639")
def test_a_row_is_the_same_alone_in_any_order_and_on_any_threads(isa: str) -> None:
    rows = [
        RowParams(temperature=0.0, repetition_penalty=1.7, prompt=(4, 5, 6), top_logprobs=3),
        RowParams(seed=8, top_k=1),
        RowParams(seed=42, temperature=0.8, top_logprobs=0),
        RowParams(seed=42, temperature=0.8, top_p=0.7),
        RowParams(seed=3, frequency_penalty=1.0, output=(1, 1, 2), top_logprobs=5),
        RowParams(seed=4, min_p=0.1, bias={7: 3.0}),
        RowParams(seed=5, top_k=100, top_p=0.9),
    ]
    logits = 2 * normal(len(rows), 1234)
    whole = sample(CONTEXTS[isa], logits, sample_inputs(rows))
    assert whole.logprobs is not None
    for order in (range(6, -1, -1), (3, 0, 6, 1, 5, 2, 4), *((i,) for i in range(7))):
        for threads in (1, 5):
            part = sample(_native.Context(threads, isa), logits[list(order)], sample_inputs([rows[i] for i in order]))
            assert torch.equal(part.token_ids, whole.token_ids[list(order)])
            for place, i in enumerate(order):
                if rows[i].top_logprobs >= 0:
                    assert part.logprobs is not None
                    assert torch.equal(part.logprobs[place], whole.logprobs[i])


@every_isa
def test_logits_are_read_where_they_lie_and_left_alone(isa: str) -> None:
    wide = normal(4, 300)
    before = wide.clone()
    rows = [RowParams(seed=i, repetition_penalty=2.0, bias={1: -5.0}, top_logprobs=2) for i in range(4)]
    got = sample(CONTEXTS[isa], wide[:, :100], sample_inputs(rows))
    assert torch.equal(got.token_ids, sample(CONTEXTS[isa], wide[:, :100].contiguous(), sample_inputs(rows)).token_ids)
    assert torch.equal(wide, before)


@every_isa
def test_an_empty_batch_is_an_empty_result(isa: str) -> None:
    sampled = sample(CONTEXTS[isa], torch.empty(0, 10), sample_inputs([]))
    assert sampled.token_ids.shape == (0,)
    assert sampled.logprobs is None


# --------------------------------------------------------------------------- greedy and its neighbours


@every_isa
def test_greedy_takes_the_largest_logit_and_the_lowest_id_of_a_tie(isa: str) -> None:
    for size in (1, 16, 31, 33, 1000):
        logits = normal(size).round()
        first = int((logits == logits.max()).nonzero()[0])
        assert run(isa, logits, GREEDY).token_ids.tolist() == [first]
        assert run(isa, logits - 1e30, GREEDY).token_ids.tolist() == [0]


@every_isa
@pytest.mark.report("vllm-project/vllm#1623")
@pytest.mark.report("vllm-project/vllm#2937")
@pytest.mark.report("vllm-project/vllm#22180")
@pytest.mark.report("microsoft/aici#19")
@pytest.mark.parametrize(
    "extreme",
    [{"temperature": t} for t in (1e-4, 1e-9, 1e-30, 1e-45)]
    + [{"top_p": p} for p in (1e-6, 1e-30, 0.0)]
    + [{"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-9, "top_p": 1e-6, "top_k": 3}],
    ids=str,
)
def test_tiny_temperatures_and_tiny_top_p_are_greedy_with_finite_logprobs(isa: str, extreme: dict[str, float]) -> None:
    logits = 10 * normal(8, 2000)
    rows = [RowParams(seed=i, top_logprobs=1, **extreme) for i in range(8)]  # type: ignore[arg-type]
    sampled = run(isa, logits, *rows)
    assert torch.equal(sampled.token_ids, logits.argmax(-1).int())
    assert sampled.logprobs is not None
    assert sampled.logprobs.isfinite().all()


@every_isa
@pytest.mark.parametrize("size", [40, 4096, 40_000])
@pytest.mark.parametrize("top_p", [0.0, 5e-324, 1e-50, 1e-45, 1e-30], ids=str)
def test_a_vanishing_top_p_keeps_the_likeliest_of_many_nearly_equal_tokens(isa: str, size: int, top_p: float) -> None:
    flat = torch.zeros(1, size)
    almost = 1e-3 * normal(1, size)
    for logits in (flat, almost):
        run(isa, 1e6 * normal(1, size), RowParams(top_k=size // 2))  # leaves its candidates in the scratch memory
        for temperature in (1.0, 100.0):
            ids = run(isa, logits, RowParams(temperature=temperature, top_p=top_p, seed=3)).token_ids
            assert int(ids) == int(logits.argmax())


@every_isa
@pytest.mark.report("ggml-org/llama.cpp#19367")
def test_extreme_parameters_still_choose_a_token(isa: str) -> None:
    """The server refuses them; the kernel stays within the vocabulary all the same."""
    values = (0.0, -1.0, 1e30, -1e30, math.nan, math.inf)
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        rows = [RowParams(seed=i, output=(3, 3), **{name: value}) for i, value in enumerate(values)]  # type: ignore[arg-type]
        ids = run(isa, normal(77), *rows).token_ids
        assert ((ids >= 0) & (ids < 77)).all()
    assert 0 <= int(run(isa, normal(77), RowParams(top_k=-5)).token_ids) < 77


@every_isa
@pytest.mark.parametrize(
    "row", [GREEDY, RowParams(), RowParams(top_k=3), RowParams(top_p=0.5), RowParams(min_p=0.1)], ids=str
)
def test_nan_counts_as_masked_and_nothing_left_is_token_zero(isa: str, row: RowParams) -> None:
    row = dataclasses.replace(row, top_logprobs=2)
    logits = torch.full((40,), math.nan)
    nothing = run(isa, logits, row)
    assert nothing.token_ids.tolist() == [0]
    assert nothing.logprobs is not None
    assert nothing.logprobs.tolist() == [-math.inf]
    assert nothing.top_ids is not None
    assert nothing.top_ids.tolist() == [[0, 1]]
    assert run(isa, torch.full((40,), -math.inf), row).token_ids.tolist() == [0]
    logits[37] = -5.0
    one = run(isa, logits, row)
    assert one.token_ids.tolist() == [37]
    assert one.logprobs is not None
    assert one.logprobs.tolist() == [0.0]
    logits[21] = math.inf
    assert run(isa, logits, row).token_ids.tolist() == [21]


# --------------------------------------------------------------------------- penalties and biases


def penalised(logits: Tensor, row: RowParams) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Keskar et al., "CTRL", 2019, section 4.1, for repetition; the OpenAI API's definition of the other two."""
    values = logits.double().numpy().copy()
    for token in {*row.prompt, *row.output}:
        values[token] *= row.repetition_penalty if values[token] <= 0 else 1 / row.repetition_penalty
    for token in set(row.output):
        values[token] -= row.presence_penalty + row.frequency_penalty * row.output.count(token)
    return values


@every_isa
@pytest.mark.report("sgl-project/sglang#28179")
@pytest.mark.report("sgl-project/sglang#28180")
@pytest.mark.report("vllm-project/vllm-ascend#7785")
def test_penalties_follow_the_formula(isa: str) -> None:
    logits = 3 * normal(50)
    history = {"prompt": (3, 3, 8, 49), "output": (8, 10, 10, 10, 0)}
    for penalties in (
        {"repetition_penalty": 1.8},
        {"presence_penalty": 0.7},
        {"frequency_penalty": -0.4},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    ):
        row = RowParams(temperature=0.0, top_logprobs=50, **history, **penalties)  # type: ignore[arg-type]
        values = penalised(logits, row)
        sampled = run(isa, logits, row)
        assert sampled.top_logprobs is not None
        assert sampled.top_ids is not None
        want = values - np.log(np.exp(values).sum())
        assert sampled.token_ids.tolist() == [int(values.argmax())]
        np.testing.assert_allclose(sampled.top_logprobs[0].numpy(), want[sampled.top_ids[0].numpy()], atol=2e-6)


@every_isa
@pytest.mark.report("NVIDIA/TensorRT-LLM#5623")
@pytest.mark.report("vllm-project/vllm-metal#69")
def test_the_first_token_is_penalised_for_repeating_the_prompt_but_not_for_presence(isa: str) -> None:
    logits = normal(30) + 2
    prompt = (7, 7, 7, 7, 20, 21)

    def logprobs(**penalty: float) -> Tensor:
        row = RowParams(temperature=0.0, prompt=prompt, top_logprobs=30, **penalty)  # type: ignore[arg-type]
        sampled = run(isa, logits, row)
        assert sampled.top_logprobs is not None
        assert sampled.top_ids is not None
        return torch.empty(30).scatter(0, sampled.top_ids[0].long(), sampled.top_logprobs[0])

    plain = logprobs()
    assert torch.equal(logprobs(presence_penalty=2.0), plain)
    assert torch.equal(logprobs(frequency_penalty=2.0), plain)
    repeated = logprobs(repetition_penalty=2.0)
    assert (repeated[list(prompt)] < plain[list(prompt)]).all()


@every_isa
def test_ids_outside_the_vocabulary_in_history_or_biases_touch_nothing(isa: str) -> None:
    logits = normal(20)
    row = RowParams(prompt=(-1, 10**9, 25), output=(20,), bias={10**9: 50.0, -1: 50.0, 20: 50.0}, top_logprobs=20)
    row = dataclasses.replace(row, repetition_penalty=2.0, presence_penalty=1.0)
    got, want = run(isa, logits, row), run(isa, logits, RowParams(prompt=(0,) * 4, top_logprobs=20))
    assert got.top_logprobs is not None
    assert want.top_logprobs is not None
    assert torch.equal(got.top_logprobs, want.top_logprobs)


@every_isa
@pytest.mark.report("ggml-org/llama.cpp#19699")
def test_a_bias_of_minus_100_or_minus_infinity_bans_a_token(isa: str) -> None:
    logits = normal(100)
    best, second = logits.topk(2).indices.tolist()
    for bias in (-100.0, -math.inf):
        row = RowParams(temperature=0.0, bias={best: bias}, top_logprobs=20)
        sampled = run(isa, logits, row)
        assert sampled.token_ids.tolist() == [second]
        assert sampled.top_ids is not None
        assert best not in sampled.top_ids[0].tolist()
        assert draws(isa, logits, RowParams(bias={best: bias}), 300)[best] == 0
    logits[best] = math.inf
    assert run(isa, logits, RowParams(temperature=0.0, bias={best: -math.inf})).token_ids.tolist() == [second]


@every_isa
@pytest.mark.report("vllm-project/vllm#13175")
@pytest.mark.report("vllm-project/vllm#26797")
def test_no_token_outside_the_vocabulary_is_drawn_from_flat_logits(isa: str) -> None:
    """Sizes that fill no vector: lanes past the end must not be drawn, even at a high temperature."""
    for size in (1, 17, 250, 1003):
        assert len(draws(isa, torch.zeros(size), RowParams(temperature=5.0), 500)) == size
        assert len(draws(isa, torch.zeros(size), RowParams(temperature=5.0, top_p=0.99), 500)) == size


# --------------------------------------------------------------------------- log-probabilities


@every_isa
def test_logprobs_are_taken_before_temperature_and_ties_rank_low_ids_first(isa: str) -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, -2.0, 3.0, 1.0])
    row = RowParams(temperature=0.1, top_k=1, top_logprobs=5)
    sampled = run(isa, logits, row)
    assert sampled.top_ids is not None
    assert sampled.top_ids.tolist() == [[1, 2, 4, 0, 5]]
    assert sampled.top_logprobs is not None
    torch.testing.assert_close(sampled.top_logprobs[0].double(), logits.double().log_softmax(-1)[[1, 2, 4, 0, 5]])


@every_isa
@pytest.mark.report("sgl-project/sglang#5984")
def test_tokens_that_are_impossible_come_last_in_id_order(isa: str) -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    sampled = run(isa, logits, RowParams(top_logprobs=20))
    assert sampled.top_ids is not None
    assert sampled.top_logprobs is not None
    assert sampled.top_ids.tolist() == [[1, 3, 0, 2, 4]]
    assert sampled.top_logprobs[0, 2:].tolist() == [-math.inf] * 3
    torch.testing.assert_close(sampled.top_logprobs[0, :2], torch.full((2,), -math.log(2)))


def test_columns_of_the_wrong_length_or_type_are_refused() -> None:
    inputs = sample_inputs([RowParams()])
    context = CONTEXTS["portable"]
    with pytest.raises(ValueError, match="temperature must be contiguous"):
        sample(context, torch.zeros(2, 5), inputs)
    with pytest.raises(ValueError, match="seeds must be contiguous"):
        sample(context, torch.zeros(1, 5), dataclasses.replace(inputs, seeds=inputs.seeds.int()))
    with pytest.raises(ValueError, match="logits must be float32"):
        sample(context, torch.zeros(1, 5, dtype=torch.float64), inputs)
