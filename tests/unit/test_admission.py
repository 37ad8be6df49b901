"""Peaks of future block use against a simulation step by step, the reservation, and the three modes."""

from __future__ import annotations

import random
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ropeway.scheduling.admission import (
    FUTURES,
    REDRAWN,
    Admission,
    Candidate,
    Forecasts,
    Reservation,
    RunningColumns,
    fixed_draw,
    peak_blocks,
)
from ropeway.scheduling.lengths import LengthProfiles

Column = NDArray[np.int64]
CONTEXT = 4096


def simulated_peak(length: list[int], remaining: list[int], block_size: int) -> int:
    """The most blocks held, by going through every step."""
    peak = 0
    for step in range(max(remaining, default=0) + 1):
        held = [-(-(now + step) // block_size) for now, left in zip(length, remaining, strict=True) if left >= step]
        peak = max(peak, sum(held))
    return peak


sequences = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 80)), max_size=12)


@settings(max_examples=300, deadline=None)
@given(sequences, st.sampled_from([1, 4, 16, 32]))
def test_the_peak_is_that_of_a_simulation_to_within_half_a_block_per_sequence(
    running: list[tuple[int, int]], block_size: int
) -> None:
    length, remaining = [now for now, _ in running], [left for _, left in running]
    exact = simulated_peak(length, remaining, block_size)
    peaks = peak_blocks(np.array(length, dtype=np.int64), np.array([remaining], dtype=np.int64), block_size)
    assert peaks.shape == (1,)
    assert peaks.dtype == np.int64
    assert abs(int(peaks[0]) - exact) <= len(running) / 2 + 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2000), st.lists(st.integers(1, 900), min_size=3, max_size=3)), min_size=1))
def test_every_future_gets_its_own_peak(running: list[tuple[int, list[int]]]) -> None:
    length = np.array([now for now, _ in running])
    remaining = np.array([left for _, left in running]).T
    together = peak_blocks(length, remaining, 16)
    assert together.tolist() == [int(peak_blocks(length, row[None], 16)[0]) for row in remaining]


def test_nobody_holds_nothing() -> None:
    none = np.empty(0, dtype=np.int64)
    assert peak_blocks(none, np.empty((3, 0), dtype=np.int64), 16).tolist() == [0, 0, 0]


def test_the_peak_may_come_before_the_last_end() -> None:
    # Two end after 10 steps with 20 tokens each, one goes on alone to 35.
    assert peak_blocks(np.array([10, 10, 5]), np.array([[10, 10, 30]]), 1).tolist() == [57]
    assert simulated_peak([10, 10, 5], [10, 10, 30], 1) == 55


# ---------------------------------------------------------------------- reservation


def test_the_reservation_starts_small_widens_with_preemptions_and_has_an_end() -> None:
    reservation = Reservation()
    shares = [reservation.share]
    for _ in range(60):
        reservation.preempted()
        shares.append(reservation.share)
    assert shares[0] == 0.02
    assert shares == sorted(shares)
    assert shares[5] > 0.1
    assert 0.29 < shares[-1] <= 0.3


def test_the_reservation_narrows_slowly_while_nobody_is_preempted() -> None:
    reservation = Reservation()
    for _ in range(10):
        reservation.preempted()
    wide = reservation.share
    for _ in range(100):
        reservation.calm()
    assert 0.75 * wide < reservation.share < wide
    for _ in range(5000):
        reservation.calm()
    assert reservation.share == pytest.approx(0.02, abs=1e-3)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), max_size=300), st.floats(0, 0.5), st.floats(0.5, 1))
def test_the_reservation_never_leaves_its_bounds(calm: list[bool], low: float, high: float) -> None:
    reservation = Reservation(low, high)
    for each in calm:
        reservation.calm() if each else reservation.preempted()
        assert low - 1e-12 <= reservation.share <= high + 1e-12


@pytest.mark.parametrize("bounds", [(-0.1, 0.3), (0.4, 0.3), (0.1, 1.5), (0.1, 0.3, 0.0), (0.1, 0.3, 0.1, 1.0)])
def test_a_reservation_outside_the_pool_is_refused(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="reservation"):
        Reservation(*bounds)


# ---------------------------------------------------------------------- admission


def known_lengths(low: int = 90, high: int = 110) -> LengthProfiles:
    """Answers of some 100 tokens."""
    lengths = LengthProfiles()
    rng = random.Random(1)
    for _ in range(3000):
        lengths.observe("standard", "", rng.randint(low, high))
    return lengths


def admission(
    mode: Literal["greedy", "watermark", "profile"] = "profile",
    blocks: int = 100,
    lengths: LengthProfiles | None = None,
    **kwargs: Any,
) -> Admission:
    return Admission(
        mode,
        num_blocks=blocks,
        block_size=kwargs.pop("block_size", 16),
        watermark=kwargs.pop("watermark", 0.05),
        quantile=kwargs.pop("quantile", 0.9),
        lengths=known_lengths() if lengths is None else lengths,
        context=kwargs.pop("context", CONTEXT),
    )


def running(count: int, prompt: int = 60, generated: int = 0, cap: int = 4000, handle: int = 0) -> RunningColumns:
    def column(value: int) -> Column:
        return np.full(count, value, dtype=np.int64)

    return RunningColumns(
        length=column(prompt + generated),
        generated=column(generated),
        cap=column(cap),
        handle=column(handle),
        u=np.array([fixed_draw(order) for order in range(count)], dtype=np.float64),
    )


def candidate(prompt: int = 60, cap: int = 4000, order: int = 1000, shared: int = 0) -> Candidate:
    return Candidate(length=prompt, generated=0, cap=cap, handle=0, u=fixed_draw(order), shared=shared)


def admitted(decides: Admission, seated: RunningColumns, ask: Any = candidate, most: int = 10_000) -> int:
    """How many candidates are let in one after the other, when their prompts always fit."""
    for count in range(most):
        each = ask(order=count)
        if not decides.admits(1, 1, seated, each):
            return count
        seated.add(each)
    return most


def test_greedy_admits_what_fits_now() -> None:
    decides = admission("greedy")
    assert decides.admits(5, 5, running(90), candidate())
    assert not decides.admits(6, 5, running(1), candidate())


def test_watermark_leaves_its_share_of_the_pool_free() -> None:
    decides = admission("watermark", watermark=0.05)
    assert decides.admits(5, 10, running(3), candidate())
    assert not decides.admits(6, 10, running(3), candidate())


@pytest.mark.parametrize("mode", ["greedy", "watermark", "profile"])
def test_with_nobody_running_whoever_fits_now_is_admitted(mode: Literal["greedy", "watermark", "profile"]) -> None:
    decides = admission(mode, blocks=10)
    for _ in range(100):
        decides.reservation.preempted()
    assert decides.admits(10, 10, running(0), candidate(prompt=159, cap=1))
    assert decides.admits(10, 10, running(0), candidate(prompt=159, cap=4000))
    assert not decides.admits(11, 10, running(0), candidate())


def test_profile_never_admits_what_does_not_fit_now() -> None:
    assert not admission(blocks=1000).admits(6, 5, running(2), candidate())


def test_profile_admits_as_many_as_fit_to_their_ends() -> None:
    # 60 tokens now and 90 to 110 to come: when the first ones end, each holds a bit less than 10 blocks.
    assert admitted(admission(blocks=1000), running(0)) == pytest.approx(980 / 9.9, abs=4)


def test_profile_counts_on_blocks_that_are_freed_before_others_need_them() -> None:
    # Fifty are about to end: what they hold is there again before the new ones grow.
    ending, beginning = (admitted(admission(blocks=1000), running(50, generated=generated)) for generated in (89, 0))
    assert ending > beginning + 10


def test_profile_goes_by_the_caps_where_they_are_lower_than_the_predictions() -> None:
    short = admitted(admission(blocks=1000), running(0), lambda order: candidate(cap=4, order=order))
    assert short == pytest.approx(980 / 4.5, abs=4)


def test_profile_goes_by_the_context_where_that_is_lower_than_the_predictions() -> None:
    assert admitted(admission(blocks=1000, context=64), running(0)) == pytest.approx(980 / 4.5, abs=4)


def test_a_wider_reservation_admits_fewer() -> None:
    decides = admission(blocks=1000)
    wide = admission(blocks=1000)
    for _ in range(10):
        wide.reservation.preempted()
    assert admitted(wide, running(0)) < 0.9 * admitted(decides, running(0))


def test_blocks_held_together_count_once() -> None:
    decides = admission(blocks=500)
    alone, together = running(40), running(40)
    together.shared = 3 * 39
    more = admitted(decides, together, lambda order: candidate(shared=3, order=order))
    assert more > admitted(decides, alone) + 10


def test_a_lower_quantile_admits_at_least_as_many() -> None:
    lengths = known_lengths(1, 1500)
    counts = [
        admitted(admission(blocks=2000, lengths=lengths, quantile=quantile), running(0))
        for quantile in (1.0, 0.9, 0.5, 0.1)
    ]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 500), st.integers(0, 400), st.integers(1, 800), st.integers(0, 1), st.floats(0, 0.999)
        ),
        max_size=12,
    ),
    st.integers(1, 400),
    st.sampled_from([0.5, 0.9, 1.0]),
    st.integers(0, 20),
)
def test_profile_decides_by_the_share_of_futures_whose_peak_fits(
    seated: list[tuple[int, int, int, int, float]], blocks: int, quantile: float, shared: int
) -> None:
    """Whatever shortcut answers, and whatever was cached of earlier questions, the answer is that of the definition."""
    lengths = LengthProfiles()
    rng = random.Random(2)
    for _ in range(500):
        lengths.observe("standard", "", int(rng.expovariate(1 / 200)) + 1)
    decides = admission(blocks=blocks, quantile=quantile, lengths=lengths)
    columns = running(0)
    columns.shared = shared
    limit = int(blocks * 0.98) + shared
    shifts = np.arange(FUTURES)[:, None] / FUTURES
    for prompt, generated, room, handle, u in seated:
        new = Candidate(prompt + generated, generated, generated + room, handle, u)
        answer = decides.admits(1, 1, columns, new)
        everybody = RunningColumns(
            *(
                np.append(old, value)
                for old, value in zip(
                    (columns.length, columns.generated, columns.cap, columns.handle, columns.u),
                    (new.length, new.generated, new.cap, new.handle, new.u),
                    strict=True,
                )
            )
        )
        cap = np.minimum(everybody.cap, CONTEXT - everybody.length + everybody.generated)
        drawn = lengths.draw(everybody.handle, everybody.generated, cap, (everybody.u + shifts) % 1.0)
        fitting = np.count_nonzero(peak_blocks(everybody.length, drawn, 16) <= limit)
        assert answer == (len(columns.length) == 0 or fitting >= quantile * FUTURES)
        columns.add(new)


def test_a_candidate_that_was_not_seated_leaves_no_trace() -> None:
    decides = admission(blocks=1000)
    plain, asked = running(50), running(50)
    for prompt in (10, 2000, 700, 60):
        decides.admits(1, 1, asked, candidate(prompt=prompt))
    assert admitted(decides, asked) == admitted(decides, plain)


def test_one_may_be_seated_without_having_been_asked_about() -> None:
    decides = admission(blocks=1000)
    asked, unasked = running(0), running(0)
    for order in range(80):
        each = candidate(order=order)
        decides.admits(1, 1, asked, each)
        asked.add(each)
        unasked.add(each)
    assert admitted(decides, asked) == admitted(decides, unasked)


def test_admission_by_profile_fills_the_pool_without_running_out_of_blocks_where_greedy_does() -> None:
    """Requests with answers of unknown length get a token per step; those that must give way come back later."""
    blocks = 600

    def life(mode: Literal["greedy", "watermark", "profile"]) -> tuple[int, float]:
        """(preemptions, share of the pool in use)."""
        rng = random.Random(3)
        decides = admission(mode, blocks, known_lengths(1, 600))
        alive: list[list[int]] = []  # [length, generated, end, order]
        waiting: list[list[int]] = []
        preemptions = order = used = 0
        for _ in range(1500):
            columns = RunningColumns(
                length=np.array([each[0] for each in alive], dtype=np.int64),
                generated=np.array([each[1] for each in alive], dtype=np.int64),
                cap=np.full(len(alive), 2000),
                handle=np.zeros(len(alive), dtype=np.int64),
                u=np.array([fixed_draw(each[3]) for each in alive], dtype=np.float64),
            )
            held = sum(-(-each[0] // 16) for each in alive)
            for _ in range(3):
                if not waiting:
                    waiting.append([100, 0, rng.randint(1, 600), order])
                    order += 1
                length, generated, _, number = waiting[0]
                new = Candidate(length, generated, 2000, 0, fixed_draw(number))
                need = length // 16 + 1
                if not decides.admits(need, blocks - held, columns, new):
                    break
                columns.add(new)
                alive.append(waiting.pop(0))
                held += need
            used += held
            for each in alive:
                each[0] += 1
                each[1] += 1
            alive = [each for each in alive if each[1] < each[2]]
            decides.reservation.calm()
            while sum(-(-each[0] // 16) for each in alive) > blocks:
                waiting.insert(0, alive.pop())
                decides.reservation.preempted()
                preemptions += 1
        return preemptions, used / 1500 / blocks

    greedy, greedy_use = life("greedy")
    profile, profile_use = life("profile")
    assert greedy > 100
    assert profile < greedy / 10
    assert greedy_use > profile_use > 0.85


@pytest.mark.parametrize(("watermark", "quantile"), [(-0.1, 0.9), (1.0, 0.9), (0.1, 0.0), (0.1, 1.1)])
def test_a_watermark_or_quantile_out_of_range_is_refused(watermark: float, quantile: float) -> None:
    with pytest.raises(ValueError, match="watermark"):
        admission(watermark=watermark, quantile=quantile)


def test_fixed_draws_of_consecutive_requests_cover_the_interval_evenly() -> None:
    for start in (0, 17, 123_456_789):
        drawn = np.sort([fixed_draw(start + i) for i in range(100)])
        assert drawn[0] >= 0
        assert drawn[-1] < 1
        assert np.diff(drawn, prepend=0.0, append=1.0).max() < 0.025


# ---------------------------------------------------------------------- forecasts


def drawn(forecasts: Forecasts, owner: list[int], generated: int, handle: int = 0) -> Column:
    count = len(owner)
    return forecasts.of(
        np.arange(count),
        np.array(owner),
        np.full(count, generated),
        np.full(count, 4000),
        np.full(count, handle),
        np.array([fixed_draw(number) for number in owner]),
    )


def test_what_was_drawn_for_a_seat_is_kept_while_its_request_goes_on() -> None:
    forecasts = Forecasts(4, known_lengths(200, 900))
    first = drawn(forecasts, [1, 2, 3], 50)
    later = drawn(forecasts, [1, 2, 3], 50 + REDRAWN - 1)
    assert (first - later == REDRAWN - 1).all()
    assert (first >= 1).all()


def test_a_seat_with_another_request_is_drawn_anew() -> None:
    lengths = known_lengths(200, 900)
    forecasts = Forecasts(4, lengths)
    drawn(forecasts, [1, 2, 3], 50)
    mixed = drawn(forecasts, [1, 7, 3], 60)
    assert mixed[:, 1].tolist() == drawn(Forecasts(4, lengths), [1, 7, 3], 60)[:, 1].tolist()
    assert mixed[:, 0].tolist() == (drawn(Forecasts(4, lengths), [1, 2, 3], 50)[:, 0] - 10).tolist()


def test_one_that_outlives_what_was_drawn_for_it_still_has_something_to_come() -> None:
    forecasts = Forecasts(2, known_lengths(90, 110))
    for generated in range(0, 400, 3):
        assert (drawn(forecasts, [1, 2], generated) >= 1).all()


def test_the_same_is_admitted_with_forecasts_as_without_when_they_are_fresh() -> None:
    decides = admission(blocks=1000)
    plain, told = running(60), running(60)
    told.forecast = lambda: Forecasts(60, known_lengths()).of(
        np.arange(60), np.arange(60), plain.generated[:60], plain.cap[:60], plain.handle[:60], plain.u[:60]
    )
    assert admitted(decides, told) == admitted(decides, plain) > 0


def test_where_even_the_longest_lives_fit_together_nothing_needs_to_be_drawn() -> None:
    assert admission(blocks=100).ample(4, 1500)
    assert not admission(blocks=100).ample(4, 1550)  # beyond 98 blocks, with half a block for each
    assert admission("greedy", blocks=1).ample(100, 100_000)
    assert not admission("watermark", blocks=100).ample(1, 1)
