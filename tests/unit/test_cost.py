"""The step-time model and the copy-time mean, on steps with known costs."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropeway.scheduling.cost import CopyCost, StepCost

A, B, C = 5e-3, 1.2e-4, 2e-8
"""Of a machine whose decode steps take some 10 to 40 ms."""


def truth(tokens: int, kv_tokens: int) -> float:
    return A + B * tokens + C * kv_tokens


def step(rng: random.Random) -> tuple[int, int]:
    """(tokens, kv tokens): nine of ten are decodes of up to 64 requests, one is a chunk of a prompt."""
    if rng.random() < 0.1:
        tokens = rng.randint(65, 512)
        return tokens, tokens + rng.randint(0, 100_000)
    tokens = rng.randint(1, 64)
    return tokens, tokens * rng.randint(100, 4_000)


def watch(cost: StepCost, steps: int, rng: random.Random, noise: float = 0.05, factor: float = 1.0) -> None:
    for _ in range(steps):
        tokens, kv_tokens = step(rng)
        cost.observe(tokens, kv_tokens, factor * truth(tokens, kv_tokens) * max(rng.gauss(1, noise), 0.1))


def error(cost: StepCost, tokens: int, kv_tokens: int, factor: float = 1.0) -> float:
    return cost.predict(tokens, kv_tokens) / (factor * truth(tokens, kv_tokens)) - 1


PLACES = [(1, 500), (32, 40_000), (64, 200_000), (512, 60_000)]


# ---------------------------------------------------------------------- step time


def test_before_any_step_nothing_is_known_and_everything_fits() -> None:
    cost = StepCost()
    assert not cost.known
    assert cost.predict(100, 1000) == 0
    assert cost.tokens_within(0.01, 1000) > 1 << 20
    assert cost.token_s > 0


@settings(max_examples=15, deadline=None)
@given(
    st.floats(1e-5, 0.3),
    st.floats(0.3, 3),
    st.floats(0.3, 3),
    st.integers(0, 1 << 32),
)
def test_the_three_parameters_are_recovered_from_noisy_steps(a: float, b: float, c: float, seed: int) -> None:
    rng = random.Random(seed)
    b, c = a * b / 64, a * c / 65_536
    cost = StepCost()
    for _ in range(2000):
        tokens, kv_tokens = rng.randint(1, 512), rng.randint(0, 200_000)
        cost.observe(tokens, kv_tokens, (a + b * tokens + c * kv_tokens) * rng.gauss(1, 0.02))
    found = cost.coefficients
    # The constant is the smallest part of most steps here, and known the least.
    assert found == (pytest.approx(a, rel=0.2), pytest.approx(b, rel=0.05), pytest.approx(c, rel=0.05))


@pytest.mark.parametrize("seed", range(5))
def test_parameters_of_a_usual_load_are_recovered_within_five_percent(seed: int) -> None:
    cost = StepCost()
    watch(cost, 3000, random.Random(seed), noise=0.02)
    assert cost.coefficients == pytest.approx((A, B, C), rel=0.05)
    assert cost.token_s == pytest.approx(B, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_fifty_steps_give_a_usable_model(seed: int) -> None:
    cost = StepCost()
    watch(cost, 50, random.Random(seed))
    assert cost.known
    assert max(abs(error(cost, *place)) for place in PLACES) < 0.12


@pytest.mark.parametrize("seed", range(5))
def test_slow_first_steps_are_forgotten_at_once(seed: int) -> None:
    rng = random.Random(seed)
    cost = StepCost()
    watch(cost, 3, rng, factor=200)
    watch(cost, 60, rng)
    assert max(abs(error(cost, *place)) for place in PLACES) < 0.15


@pytest.mark.parametrize("seed", range(5))
def test_stalls_of_the_machine_do_not_ruin_the_model(seed: int) -> None:
    rng = random.Random(seed)
    cost = StepCost()
    for _ in range(2000):
        tokens, kv_tokens = step(rng)
        stall = rng.choice([10, 100, 1000]) if rng.random() < 0.03 else 1
        cost.observe(tokens, kv_tokens, truth(tokens, kv_tokens) * rng.gauss(1, 0.05) * stall)
        if cost.observations > 100:
            assert max(abs(error(cost, *place)) for place in PLACES) < 0.2
    assert max(abs(error(cost, *place)) for place in PLACES) < 0.06


@pytest.mark.parametrize("factor", [0.2, 0.5, 2.0, 10.0])
def test_a_machine_that_has_changed_for_good_is_believed_after_a_few_tens_of_steps(factor: float) -> None:
    rng = random.Random(7)
    cost = StepCost()
    watch(cost, 3000, rng)
    watch(cost, 60, rng, factor=factor)
    assert max(abs(error(cost, *place, factor)) for place in PLACES) < 0.15


def test_hours_of_one_and_the_same_step_neither_blow_up_nor_drift() -> None:
    rng = random.Random(3)
    cost = StepCost()
    for _ in range(60_000):
        cost.observe(64, 50_000, 0.02 * rng.gauss(1, 0.03))
    assert cost.predict(64, 50_000) == pytest.approx(0.02, rel=0.01)
    assert all(0 <= each < 0.1 for each in cost.coefficients)
    cost.observe(512, 50_000, 0.1)
    assert cost.predict(512, 50_000) == pytest.approx(0.1, rel=0.02)
    assert cost.predict(64, 50_000) == pytest.approx(0.02, rel=0.02)


def test_hours_of_decodes_do_not_wash_out_what_prompts_cost() -> None:
    rng = random.Random(4)
    cost = StepCost()
    watch(cost, 500, rng, noise=0.02)
    before = cost.predict(512, 60_000)
    for _ in range(60_000):
        cost.observe(16, 16_000, truth(16, 16_000) * rng.gauss(1, 0.02))
    assert cost.predict(512, 60_000) == pytest.approx(before, rel=0.05)


def test_the_time_of_small_steps_is_put_down_to_the_constant_until_more_is_seen() -> None:
    cost = StepCost()
    for _ in range(20):
        cost.observe(1, 100, 0.02)
    assert cost.predict(8, 800) == pytest.approx(0.02, rel=0.05)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1 << 16),
            st.integers(0, 1 << 22),
            st.floats(1e-7, 1e3) | st.sampled_from([0.0, -1.0, math.nan, math.inf]),
        ),
        max_size=60,
    ),
    st.sampled_from([(None, None, None), (1e-3, 1e-5, 1e-9), (0.0, 0.0, 0.0), (None, 1e-4, None)]),
)
def test_whatever_was_observed_predictions_are_finite_and_grow_with_the_work(
    steps: list[tuple[int, int, float]], prior: tuple[float | None, float | None, float | None]
) -> None:
    cost = StepCost(*prior)
    for observed in steps:
        cost.observe(*observed)
        assert all(0 <= each < math.inf for each in cost.coefficients)
    assert 0 <= cost.predict(0, 0) <= cost.predict(10, 0) <= cost.predict(10, 1000) < math.inf
    assert cost.token_s > 0
    assert cost.tokens_within(0.0, 0) == 0
    assert 0 <= cost.tokens_within(0.05, 1000) <= cost.tokens_within(0.1, 1000)


def test_a_step_without_a_positive_finite_time_is_passed_over() -> None:
    cost = StepCost()
    for seconds in (0.0, -1.0, math.nan, math.inf):
        cost.observe(10, 10, seconds)
    assert cost.observations == 0


def test_no_coefficient_is_negative_where_more_work_seemed_to_take_less_time() -> None:
    cost = StepCost()
    for tokens in list(range(1, 65)) * 5:
        cost.observe(tokens, 1000, 0.02 - 1e-4 * tokens)
    assert cost.coefficients[1] == 0
    assert cost.predict(1, 1000) == cost.predict(500, 1000) == pytest.approx(0.0165, rel=0.1)


@settings(max_examples=50, deadline=None)
@given(st.floats(0.006, 1.0), st.integers(0, 300_000))
def test_as_many_tokens_fit_into_a_step_as_are_predicted_to_be_over_in_time(seconds: float, kv_tokens: int) -> None:
    cost = StepCost(A, B, C)
    tokens = cost.tokens_within(seconds, kv_tokens)
    assert cost.predict(tokens + 1, kv_tokens) > seconds - 1e-12
    assert tokens == 0 or cost.predict(tokens, kv_tokens) <= seconds + 1e-12


def test_given_coefficients_are_used_before_the_first_step() -> None:
    cost = StepCost(A, B, C)
    assert cost.known
    assert cost.predict(100, 1000) == pytest.approx(truth(100, 1000))


@pytest.mark.parametrize("factor", [0.01, 0.1, 3, 100])
def test_wrong_coefficients_are_unlearnt(factor: float) -> None:
    cost = StepCost(A * factor, B * factor, C * factor)
    watch(cost, 200, random.Random(5))
    assert max(abs(error(cost, *place)) for place in PLACES) < 0.12


def test_one_coefficient_given_is_a_start_for_the_others() -> None:
    cost = StepCost(b=B)
    assert not cost.known
    for _ in range(10):
        cost.observe(16, 1000, truth(16, 1000))
    assert cost.known
    assert cost.predict(256, 1000) == pytest.approx(truth(256, 1000), rel=0.1)


@pytest.mark.parametrize("given_", [(-1e-3, 0.0, 0.0), (0.0, math.nan, 0.0), (0.0, 0.0, math.inf)])
def test_a_negative_or_endless_coefficient_is_refused(given_: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="seconds from 0 on"):
        StepCost(*given_)


# ---------------------------------------------------------------------- copies


def test_copies_are_first_taken_to_run_at_four_gigabytes_per_second() -> None:
    assert CopyCost(4_000_000).seconds(10) == pytest.approx(0.01)


def test_copy_time_follows_what_was_measured_by_blocks() -> None:
    cost = CopyCost(1_000_000)
    for blocks in [4, 100, 30] * 20:
        cost.observe(blocks, blocks * 2e-3)
    assert cost.seconds(50) == pytest.approx(0.1, rel=0.02)


def test_one_stalled_copy_moves_the_mean_little() -> None:
    cost = CopyCost(1_000_000)
    for _ in range(100):
        cost.observe(8, cost.seconds(8))
    before = cost.seconds(1)
    cost.observe(8, 10.0)
    assert cost.seconds(1) < 1.5 * before


def test_the_first_guess_is_forgotten_within_a_few_hundred_blocks() -> None:
    cost = CopyCost(1_000_000)
    for _ in range(20):
        cost.observe(16, 16 * 1e-6)  # 250 times as fast as guessed
    assert cost.seconds(1) < 0.1 * CopyCost(1_000_000).seconds(1)


def test_copies_without_blocks_or_time_are_passed_over() -> None:
    cost = CopyCost(1_000_000)
    before = cost.seconds(1)
    for blocks, seconds in [(0, 1.0), (-1, 1.0), (5, 0.0), (5, -1.0), (5, math.nan), (5, math.inf)]:
        cost.observe(blocks, seconds)
    assert cost.seconds(1) == before


@pytest.mark.parametrize(("block_bytes", "rate"), [(0, 4e9), (-1, 4e9), (100, 0.0), (100, math.nan)])
def test_copies_need_bytes_and_a_rate(block_bytes: int, rate: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        CopyCost(block_bytes, rate)
