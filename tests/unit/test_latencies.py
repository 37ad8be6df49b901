"""Latencies, goodput and attainment by their definitions."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropeway.bench.latencies import PooledGaps, Recorder, Status, Targets, figures, summary

PERCENTS = [0, 1, 25, 50, 90, 99, 99.9, 100]


def pooled(values) -> PooledGaps:
    gaps = PooledGaps()
    gaps.add(values)
    return gaps


# ---------------------------------------------------------------------- pooled gaps


@given(st.lists(st.floats(1e-6, 86_000.0), min_size=1, max_size=300))
def test_percentiles_of_pooled_gaps_are_within_a_fifth_of_a_percent_and_the_mean_is_exact(values):
    gaps = pooled(values)
    assert gaps.percentiles(PERCENTS) == pytest.approx(np.percentile(values, PERCENTS), rel=0.0021)
    assert gaps.mean_s == pytest.approx(np.mean(values), rel=1e-12)
    assert (gaps.count, gaps.largest_s) == (len(values), max(values))


def test_a_million_gaps_keep_that_precision_in_constant_memory():
    rng = np.random.default_rng(0)
    parts = [rng.lognormal(-4, 1, 10_000) for _ in range(100)]
    gaps = PooledGaps()
    for part in parts:
        gaps.add(part)
    everything = np.concatenate(parts)
    assert gaps.percentiles(PERCENTS) == pytest.approx(np.percentile(everything, PERCENTS), rel=0.0021)
    assert sum(part.nbytes for part in gaps._pending) < 1 << 20


def test_gaps_of_zero_stay_zero():
    gaps = pooled([0.0, 0.0, 0.0, 0.5])
    assert gaps.percentiles([50, 100]).tolist() == [0.0, 0.5]


def test_a_gap_longer_than_a_day_is_still_the_largest():
    gaps = pooled([1.0, 1e6])
    assert gaps.percentiles([100]).tolist() == [1e6]


@given(st.lists(st.floats(0, 100.0), max_size=50), st.lists(st.floats(0, 100.0), max_size=50))
def test_merged_pools_are_the_pool_of_both(first, second):
    merged, both = pooled(first), pooled(first + second)
    merged.merge(pooled(second))
    assert merged.percentiles(PERCENTS) == pytest.approx(both.percentiles(PERCENTS), nan_ok=True)
    assert (merged.count, merged.largest_s) == (both.count, both.largest_s)
    assert merged.mean_s == pytest.approx(both.mean_s, nan_ok=True)


def test_an_empty_pool_has_no_figures():
    gaps = pooled([])
    assert np.isnan(gaps.percentiles([50])).all()
    assert np.isnan(gaps.mean_s)


def test_a_million_tokens_are_recorded_in_seconds():
    recorder = Recorder(50_000)
    recorder.arrived(np.arange(50_000), 0.0)
    began = time.process_time()
    for step in range(10_000):
        first = (step * 37) % 49_900
        recorder.step(np.arange(first, first + 100), step * 0.01)
    figures(recorder, Targets(1.0, 0.1))
    assert recorder.output_tokens.sum() == 1_000_000
    assert time.process_time() - began < 5


# ---------------------------------------------------------------------- definitions


@pytest.fixture
def run() -> Recorder:
    """Two answers, one shed, one that broke off after its first token."""
    recorder = Recorder(4)
    recorder.arrived([0, 1, 2, 3], [1.0, 2.0, 3.0, 4.0])
    recorder.stream(0, [1.5, 1.6, 1.8, 2.4])
    recorder.stream(1, [4.0])
    recorder.stream(3, [6.0])
    recorder.ended(0, Status.OK, 2.5)
    recorder.ended(1, Status.OK, 4.0)
    recorder.ended(2, Status.SHED, 3.1)
    recorder.ended(3, Status.FAILED, 11.0)
    return recorder


def test_ttft_runs_from_sending_to_the_first_token(run):
    assert run.ttft_s[:2].tolist() == [0.5, 2.0]
    assert figures(run)["ttft_s"]["mean"] == pytest.approx(1.25)


def test_tpot_is_the_mean_gap_of_a_request_and_one_token_has_none(run):
    assert run.tpot_s[0] == pytest.approx(0.3)
    assert np.isnan(run.tpot_s[1])
    assert figures(run)["tpot_s"] == pytest.approx(dict.fromkeys(("mean", "p50", "p90", "p99"), 0.3))


def test_itl_is_pooled_over_all_gaps(run):
    itl = figures(run)["itl_s"]
    assert itl["mean"] == pytest.approx((0.1 + 0.2 + 0.6) / 3)
    assert itl["p50"] == pytest.approx(0.2, rel=0.003)
    assert itl["max"] == pytest.approx(0.6)


def test_e2e_runs_to_the_last_token(run):
    assert run.e2e_s[:2] == pytest.approx([1.4, 2.0])


def test_latencies_are_those_of_requests_served_to_their_end(run):
    # Request 3 had a TTFT of 2 s, too, before it broke off.
    assert figures(run)["ttft_s"]["p99"] == pytest.approx(np.percentile([0.5, 2.0], 99))


def test_shed_and_failed_requests_stay_in_the_denominator_of_attainment(run):
    result = figures(run)
    assert (result["requests"], result["completed"], result["shed"], result["failed"]) == (4, 2, 1, 1)
    assert (result["met"], result["attainment"]) == (2, 0.5)


def test_goodput_is_what_met_all_targets_per_second_from_the_first_arrival_to_the_last_end(run):
    assert figures(run)["duration_s"] == 10.0
    assert figures(run, Targets(ttft_s=1.0))["goodput_per_s"] == pytest.approx(0.1)
    assert figures(run, Targets(ttft_s=1.0), duration_s=4.0)["goodput_per_s"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("targets", "met", "by_largest_gap"),
    [
        (Targets(), 2, 2),
        (Targets(ttft_s=0.5), 1, 1),
        (Targets(ttft_s=0.4), 0, 0),
        (Targets(tpot_s=0.7), 2, 2),
        (Targets(tpot_s=0.4), 2, 1),  # the mean gap is 0.3 s, the largest 0.6 s
        (Targets(tpot_s=0.2), 1, 1),  # a single token has no gap to be too long
        (Targets(ttft_s=1.0, tpot_s=0.2), 0, 0),
    ],
)
def test_a_request_is_good_when_it_meets_all_its_targets(run, targets, met, by_largest_gap):
    result = figures(run, targets)
    assert (result["met"], result["met_by_largest_gap"]) == (met, by_largest_gap)


def test_a_request_that_never_ended_failed():
    recorder = Recorder(2)
    recorder.arrived([0, 1], 0.0)
    recorder.stream(0, [1.0])
    recorder.ended(0, Status.OK, 1.0)
    assert figures(recorder)["failed"] == 1


def test_without_an_answer_figures_are_none_and_no_nan_that_json_lacks():
    recorder = Recorder(1)
    recorder.arrived(0, 0.0)
    result = figures(recorder)
    assert result["duration_s"] is None
    assert result["goodput_per_s"] is None
    assert result["ttft_s"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert result["itl_s"]["p99"] is None
    assert result["attainment"] == 0.0
    assert figures(Recorder(0))["attainment"] is None


# ---------------------------------------------------------------------- tiers


def test_tiers_have_figures_and_targets_of_their_own():
    recorder = Recorder(3, ["batch", "interactive", "batch"])
    recorder.arrived([0, 1, 2], 0.0)
    for request, ttft in ((0, 5.0), (1, 0.5), (2, 50.0)):
        recorder.stream(request, [ttft, ttft + 1.0 + request])
        recorder.ended(request, Status.OK, ttft + 1.0 + request)
    result = figures(recorder, {"interactive": Targets(ttft_s=0.1), "batch": Targets(ttft_s=10.0)})
    assert list(result["tiers"]) == ["batch", "interactive"]
    batch, interactive = result["tiers"].values()
    assert (batch["requests"], batch["met"], batch["attainment"]) == (2, 1, 0.5)
    assert (interactive["requests"], interactive["met"]) == (1, 0)
    assert result["met"] == 1
    assert batch["itl_s"]["mean"] == pytest.approx(2.0)
    assert interactive["itl_s"]["mean"] == pytest.approx(2.0)
    assert result["itl_s"]["max"] == pytest.approx(3.0)
    assert batch["goodput_per_s"] == pytest.approx(1 / 53.0)


def test_a_tier_without_targets_takes_whatever_comes():
    recorder = Recorder(1, ["batch"])
    recorder.arrived(0, 0.0)
    recorder.stream(0, [1000.0])
    recorder.ended(0, Status.OK, 1000.0)
    assert figures(recorder, {"interactive": Targets(ttft_s=0.1)})["met"] == 1


def test_without_tiers_there_is_no_split(run):
    assert "tiers" not in figures(run)


# ---------------------------------------------------------------------- recording


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), max_size=6), st.floats(0, 2.0)),
        max_size=20,
    )
)
def test_recording_by_steps_and_by_streams_is_the_same(steps):
    tiers = ["a", "b", "a", "b"]
    by_step, by_stream = Recorder(4, tiers), Recorder(4, tiers)
    streams: list[list[float]] = [[] for _ in tiers]
    now = 0.0
    for rows, later in steps:
        now += later
        by_step.step(rows, now)
        for row in rows:
            streams[row].append(now)
    for recorder in (by_step, by_stream):
        recorder.arrived(np.arange(4), 0.0)
    for row, times in enumerate(streams):
        by_stream.stream(row, times)
    for recorder in (by_step, by_stream):
        recorder.ended(np.arange(4), Status.OK, now)
    for name in ("first_token_s", "last_token_s", "output_tokens", "largest_gap_s"):
        assert np.array_equal(getattr(by_step, name), getattr(by_stream, name), equal_nan=True)
    for mine, other in zip(by_step.gaps, by_stream.gaps, strict=True):
        assert (mine.count, mine.largest_s) == (other.count, other.largest_s)
        assert mine.percentiles(PERCENTS) == pytest.approx(other.percentiles(PERCENTS), nan_ok=True)


def test_tokens_that_come_together_have_gaps_of_zero():
    recorder = Recorder(1)
    recorder.step([0, 0], 1.0)
    recorder.step([0, 0], 3.0)
    assert recorder.output_tokens.tolist() == [4]
    assert (recorder.gaps[0].count, recorder.gaps[0].mean_s, recorder.gaps[0].largest_s) == (3, 2 / 3, 2.0)


def test_a_stream_of_pieces_counts_the_tokens_it_is_told():
    recorder = Recorder(1)
    recorder.arrived(0, 0.0)
    recorder.stream(0, [1.0, 3.0], output_tokens=5)
    assert recorder.output_tokens.tolist() == [5]
    assert recorder.tpot_s.tolist() == [0.5]


def test_a_summary_leaves_out_what_is_no_number():
    assert summary([1.0, float("nan"), 3.0])["mean"] == 2.0


@pytest.mark.parametrize("module", ["latencies", "traces"])
def test_statistics_and_traces_do_without_torch(module):
    code = f"import sys, ropeway.bench.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
