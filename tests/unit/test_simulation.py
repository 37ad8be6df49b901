"""Simulated engines: when things happen, what is counted, and how near that is to a real run."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropeway.bench.latencies import Status
from ropeway.bench.traces import Measured, Trace, read_trace
from ropeway.config import SchedulerConfig
from ropeway.errors import ConfigError
from ropeway.simulation.clock import VirtualClock
from ropeway.simulation.cost_model import CostModel, read_cost_model, shipped_cost_models
from ropeway.simulation.load import ClosedLoad
from ropeway.simulation.replay import Replayed, default_max_tokens, replay
from ropeway.simulation.setup import parse_tier_mix, replay_settings
from ropeway.simulation.validate import Times, measured_times, simulate, validate
from ropeway.tiers import Tier

TRACES = Path(__file__).resolve().parents[2] / "benchmarks" / "traces"
A, B, C = 0.01, 1e-4, 1e-7
COST = CostModel(
    name="exact",
    a_s=A,
    b_s_per_token=B,
    c_s_per_kv_token=C,
    kv_tokens=16_000,
    max_num_seqs=32,
    max_batched_tokens=256,
)


def trace_of(*requests: tuple[float, int, int], **columns: Any) -> Trace:
    """(arrival, input tokens, output tokens) of each."""
    arrival, prompts, outputs = zip(*requests, strict=True)
    return Trace(np.array(prompts), np.array(outputs), np.array(arrival, dtype=np.float64), **columns)


def random_trace(n: int, rate: float, *, seed: int = 0, prompts: int = 400, outputs: int = 60) -> Trace:
    rng = np.random.default_rng(seed)
    return Trace(
        rng.integers(1, prompts, n), rng.integers(1, outputs, n), np.cumsum(rng.exponential(1 / rate, n))
    ).from_zero()


def run(trace: Trace, *, cost: CostModel = COST, scheduler: dict[str, Any] | None = None, **how: Any) -> Replayed:
    config = SchedulerConfig(
        **{"max_num_seqs": cost.max_num_seqs, "max_batched_tokens": cost.max_batched_tokens, "shed": False}
        | (scheduler or {})
    )
    return replay(trace, replay_settings(trace, cost, config, **how))


# ---------------------------------------------------------------------- time


def test_a_virtual_clock_never_goes_back():
    clock = VirtualClock(5.0)
    clock.advance_to(7.5)
    clock.advance_to(6.0)
    assert clock() == 7.5


def test_a_request_alone_takes_what_the_cost_model_says():
    recorder = run(trace_of((3.0, 100, 4))).recording.recorder
    steps = [(100, 100), (1, 101), (1, 102), (1, 103)]
    times = [A + B * tokens + C * kv for tokens, kv in steps]
    assert recorder.arrival_s[0] == 3.0
    assert recorder.ttft_s[0] == pytest.approx(times[0], rel=1e-9)
    assert recorder.e2e_s[0] == pytest.approx(sum(times), rel=1e-9)
    assert recorder.output_tokens[0] == 4


def test_a_prompt_longer_than_the_budget_takes_several_steps():
    recorder = run(trace_of((0.0, 600, 1))).recording.recorder
    kv = 256 + 512 + 600
    assert recorder.ttft_s[0] == pytest.approx(3 * A + 600 * B + kv * C, rel=1e-9)


def test_an_arrival_during_a_step_joins_the_next_one():
    first = A + B * 100 + C * 100
    recorder = run(trace_of((0.0, 100, 3), (first / 2, 50, 1))).recording.recorder
    second = A + B * 51 + C * (101 + 50)
    assert recorder.first_token_s[1] == pytest.approx(first + second, rel=1e-9)


def test_time_of_the_host_comes_before_each_step():
    cost = CostModel(**{**_fields(COST), "host_s": 0.003})
    with_host, without = (run(trace_of((0.0, 100, 5)), cost=each).recording.recorder for each in (cost, COST))
    assert with_host.e2e_s[0] - without.e2e_s[0] == pytest.approx(5 * 0.003, rel=1e-9)


def test_planned_ahead_an_end_token_is_found_a_step_late_and_costs_a_row():
    trace = trace_of((0.0, 100, 5))
    settings = _ahead(replay_settings(trace, COST, SchedulerConfig(shed=False)), 1)
    ahead = replay(trace, settings)
    assert ahead.recording.recorder.e2e_s[0] == pytest.approx(run(trace).recording.recorder.e2e_s[0], rel=1e-9)
    assert ahead.stats[0].wasted_rows == {"eos": 1}
    assert ahead.usage.steps == 6


def test_planned_ahead_an_arrival_waits_for_the_step_that_runs_and_the_one_after():
    trace = trace_of((0.0, 100, 40), (0.035, 50, 1))
    settings = replay_settings(trace, COST, SchedulerConfig(shed=False))
    late, soon = (replay(trace, _ahead(settings, ahead)).recording.recorder.ttft_s[1] for ahead in (1, 0))
    assert late - soon == pytest.approx(A + B + 100 * C, rel=0.01)


def test_engines_in_lockstep_take_as_long_as_the_longest_of_them():
    cost = CostModel(**{**_fields(COST), "engines": 2, "lockstep": True})
    recorder = run(trace_of((0.0, 200, 3), (0.0, 10, 3)), cost=cost).recording.recorder
    first, second, third = (A + B * n + C * kv for n, kv in ((200, 200), (1, 201), (1, 202)))
    assert recorder.ttft_s.tolist() == pytest.approx([first, first], rel=1e-9)
    assert recorder.e2e_s.tolist() == pytest.approx([first + second + third] * 2, rel=1e-9)


def test_swapping_out_and_in_takes_the_time_of_the_copies():
    requests = [(0.0, 150, 60), (0.0, 150, 60), (0.0, 150, 60)]
    cost = CostModel(**{**_fields(COST), "kv_tokens": 560, "kv_bytes_per_token": 1 << 20, "copy_bytes_per_s": 1e9})
    how = {"scheduler": {"admission": "greedy", "preemption": "swap"}, "swap_space": 1.0, "prefix_cache": False}
    slow = run(trace_of(*requests), cost=cost, **how)
    fast = run(trace_of(*requests), cost=CostModel(**{**_fields(cost), "copy_bytes_per_s": 1e15}), **how)
    swaps = slow.stats[0].swaps_out
    assert swaps == slow.stats[0].swaps_in == fast.stats[0].swaps_out > 0
    assert slow.usage.step_s - fast.usage.step_s == pytest.approx(2 * swaps * 16 * (1 << 20) / 1e9, rel=1e-5)


# ---------------------------------------------------------------------- loads


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3]), st.sampled_from(["round-robin", "least-tokens", "prefix"]))
@settings(max_examples=25, deadline=None)
def test_every_answer_ends_where_the_trace_says(seed: int, engines: int, router: Any):
    trace = random_trace(30, 40.0, seed=seed)
    replayed = run(trace, engines=engines, router=router, seed=seed % 7)
    recorder = replayed.recording.recorder
    assert recorder.output_tokens.tolist() == trace.output_tokens.tolist()
    assert (recorder.status == Status.OK).all()
    assert recorder.arrival_s.tolist() == trace.times.tolist()
    assert (recorder.first_token_s > recorder.arrival_s).all()
    for stats in replayed.stats:
        assert stats.blocks_live == stats.running == stats.waiting == 0


def test_the_same_seed_gives_the_same_run():
    trace = random_trace(80, 60.0)
    both = [run(trace, engines=3, router="least-tokens", tier_mix={"batch": 0.5, "interactive": 0.5}) for _ in range(2)]
    first, second = (each.figures() | {"sim_wall_s": None, "scheduler_us_per_step": None} for each in both)
    assert first == second


def test_nobody_but_the_device_knows_how_long_an_answer_will_be():
    trace = trace_of((0.0, 20, 5), (0.0, 20, 1500), (0.0, 20, 60))
    replayed = run(trace)
    asked = replayed.settings.max_tokens
    assert asked == default_max_tokens(trace) == 2048
    # All three were expected to take as long: what the scheduler predicted is one number.
    tier = replayed.stats[0].tiers["standard"]
    assert tier.predicted_tokens % 3 == 0
    assert tier.output_tokens == 1565


def test_what_clients_ask_for_suffices_for_the_longest_answer():
    assert default_max_tokens(trace_of((0.0, 1, 2049))) == 4096
    assert default_max_tokens(trace_of((0.0, 1, 4096))) == 4096


def test_an_answer_is_cut_at_what_was_asked_for():
    recorder = run(trace_of((0.0, 20, 50)), max_tokens=7).recording.recorder
    assert recorder.output_tokens.tolist() == [7]
    assert recorder.status.tolist() == [Status.OK]


def test_a_closed_loop_never_has_more_under_way_than_users_and_keeps_them_busy():
    trace = random_trace(60, 1.0)
    recorder = run(trace, engines=2, concurrency=3).recording.recorder
    moments = np.unique(np.concatenate([recorder.arrival_s, recorder.last_token_s]))
    under_way = [int(((recorder.arrival_s <= t) & (recorder.last_token_s > t)).sum()) for t in moments]
    assert max(under_way) == 6
    last_sent = recorder.arrival_s.max()
    assert all(n == 6 for t, n in zip(moments, under_way, strict=True) if t <= last_sent)


def test_a_closed_loop_of_one_sends_a_request_when_the_last_one_has_ended():
    recorder = run(random_trace(10, 1.0), concurrency=1).recording.recorder
    assert recorder.arrival_s[1:].tolist() == recorder.last_token_s[:-1].tolist()


def test_a_user_who_was_refused_waits_as_long_as_asked():
    load = ClosedLoad(3, users=1)
    assert (load.next_s, load.pop()) == (0.0, 0)
    assert load.next_s == math.inf
    load.ended(2.0, 5.0)
    assert (load.next_s, load.pop()) == (7.0, 1)
    load.ended(8.0, 0.0)
    assert (load.pop(), load.next_s) == (2, math.inf)
    load.ended(9.0, 0.0)
    assert load.next_s == math.inf


def test_more_users_than_requests_are_no_harm():
    assert run(random_trace(3, 1.0), concurrency=50).figures()["completed"] == 3


def test_idle_engines_cost_nothing_and_wake_with_the_next_arrival():
    replayed = run(trace_of((0.0, 10, 2), (1e6, 10, 2)))
    assert replayed.usage.steps == 4
    assert replayed.recording.recorder.ttft_s[1] == pytest.approx(A + 10 * B + 10 * C, rel=1e-6)


# ---------------------------------------------------------------------- what is counted


def test_tiers_come_from_the_trace_from_a_mix_or_are_the_default_one():
    trace = random_trace(200, 50.0)
    named = dataclasses.replace(trace, tier=["interactive"] * 150 + ["batch"] * 50)
    counts = {name: each["requests"] for name, each in run(named).figures()["tiers"].items()}
    assert counts == {"interactive": 150, "batch": 50}
    mixed = run(trace, tier_mix={"interactive": 0.25, "batch": 0.75}, seed=3).figures()["tiers"]
    assert 25 < mixed["interactive"]["requests"] < 75
    assert list(run(trace).figures()["tiers"]) == ["standard"]


def test_tenants_of_the_trace_reach_the_scheduler():
    # One tenant sends forty requests, then another one sends one, which need not wait for all of them.
    requests = [(0.0, 50, 20)] * 40 + [(0.01, 50, 20)]
    trace = trace_of(*requests, tenant=["many"] * 40 + ["one"])
    alone = run(dataclasses.replace(trace, tenant=None), scheduler={"max_num_seqs": 4}).recording.recorder.ttft_s[-1]
    shared = run(trace, scheduler={"max_num_seqs": 4}).recording.recorder.ttft_s[-1]
    assert shared < alone / 2


def test_goodput_goes_by_the_targets_given_and_shedding_by_them_too():
    trace = random_trace(300, 60.0, outputs=200)
    patient = run(trace, scheduler={"shed": True}, slo_ttft=1e6, slo_itl=1e6).figures()
    strict = run(trace, scheduler={"shed": True}, slo_ttft=1.0, slo_itl=1.0).figures()
    assert (patient["shed"], patient["attainment"]) == (0, 1.0)
    assert strict["shed"] > 0
    assert strict["refused"] == {"Shed": strict["shed"]}
    assert strict["attainment"] < 1.0
    assert strict["attainment"] == strict["met"] / 300
    assert strict["ttft_s"]["p99"] < patient["ttft_s"]["p99"]


def test_what_can_never_be_served_has_failed_and_the_rest_goes_on():
    trace = trace_of((0.0, 100, 5), (0.0, 5000, 5), (0.0, 100, 5))
    figures = run(trace, kv_tokens=2048).figures()
    assert (figures["completed"], figures["failed"], figures["shed"]) == (2, 1, 0)
    assert figures["refused"] == {"ContextLengthExceeded": 1}


def test_evictions_are_counted_per_request_that_was_taken_in():
    trace = random_trace(60, 200.0, prompts=150, outputs=150)
    replayed = run(trace, kv_tokens=1600, scheduler={"admission": "greedy"})
    figures = replayed.figures()
    assert figures["preemptions"]["recompute"] == replayed.stats[0].preemptions > 0
    assert figures["evictions_per_request"] == replayed.stats[0].preemptions / 60
    assert figures["tiers"]["standard"]["evictions_per_request"] == figures["evictions_per_request"]
    assert figures["tiers"]["standard"]["pause_s"] == figures["pause_s"]
    assert figures["pause_s"]["p99"] > figures["itl_s"]["p50"]


def test_where_the_time_of_the_served_went_sums_to_their_latency():
    figures = run(random_trace(80, 200.0, outputs=150), kv_tokens=2400).figures()
    assert sum(figures["phases_s"].values()) == pytest.approx(figures["e2e_s"]["mean"], rel=1e-6)
    unseated = sum(figures["phases_s"][phase] for phase in ("queued", "preempted", "swapped"))
    assert sum(figures["waits_s"].values()) == pytest.approx(unseated, rel=0.01)
    assert figures["waits_s"]["blocks"] > 0


def test_kv_waste_is_what_the_last_blocks_of_sequences_have_free():
    # 17 to 32 tokens in two blocks of 16 over the steps, the prompt's included.
    figures = run(trace_of((0.0, 17, 16)), prefix_cache=False).figures()
    times = np.array([A + B * (17 if n == 17 else 1) + C * n for n in range(17, 33)])
    live = np.arange(17, 33)
    assert figures["kv_waste"] == pytest.approx(1 - (live * times).sum() / (32 * times).sum(), rel=1e-9)


def test_slot_use_looks_at_the_steps_that_leave_somebody_waiting():
    assert run(trace_of((0.0, 10, 5))).figures()["slot_use"] == 1.0
    requests = [(0.0, 10, n) for n in (2, 50, 2, 50, 2, 50, 2, 50)]
    static, continuous = (
        run(trace_of(*requests), scheduler={"batching": batching, "max_num_seqs": 2}).figures()["slot_use"]
        for batching in ("static", "continuous")
    )
    assert static == pytest.approx((2 * 2 + 48) / (2 * 50))
    assert continuous > 0.97


def test_padded_rows_are_no_use_of_a_slot():
    requests = [(0.0, 10, n) for n in (2, 50, 2, 50)]
    scheduler = {"batching": "static", "max_num_seqs": 2, "padded_rows": True}
    padded = run(trace_of(*requests), scheduler=scheduler).figures()
    assert padded["slot_use"] == pytest.approx((2 * 2 + 48) / (2 * 50))
    dropped = run(trace_of(*requests), scheduler=scheduler | {"padded_rows": False}).figures()
    assert padded["duration_s"] > dropped["duration_s"] + 90 * B


def test_shared_prefixes_of_a_trace_hit_as_often_as_a_count_says():
    shared = tuple(range(3))
    requests = [(float(n), 512 * 3 + 100, 4) for n in range(5)]
    trace = trace_of(*requests, hash_ids=[(*shared, 100 + n) for n in range(5)])
    cost = CostModel(**{**_fields(COST), "block_size": 512})
    hits = run(trace, cost=cost).figures()["prefix_hit_fraction"]
    assert hits == pytest.approx(4 * 512 * 3 / (5 * (512 * 3 + 100)))
    assert run(trace, cost=cost, prefix_cache=False).figures()["prefix_hit_fraction"] is None


@pytest.mark.parametrize("router", ["prefix", "round-robin"])
def test_a_prefix_router_finds_what_a_blind_one_misses(router: Any):
    families = [n % 4 for n in range(80)]
    requests = [(0.5 * n, 512 * 2 + 40, 10) for n in range(80)]
    trace = trace_of(*requests, hash_ids=[(10 * f, 10 * f + 1, 1000 + n) for n, f in enumerate(families)])
    hits = run(trace, engines=3, router=router).figures()["prefix_hit_fraction"]
    best = (80 - 4) * 1024 / (80 * 1064)
    assert (hits == pytest.approx(best)) == (router == "prefix")


def test_the_fleet_over_time_is_sampled_evenly_however_long_it_takes():
    replayed = run(random_trace(400, 5.0))
    columns = replayed.series.columns()
    assert {len(column) for column in columns.values()} == {len(columns["t_s"])}
    assert len(columns["t_s"]) <= 2000
    assert max(columns["running"]) <= 32
    assert 0.0 <= min(columns["kv_used"]) <= max(columns["kv_used"]) <= 1.0
    assert columns["t_s"][-1] > 0.95 * replayed.recording.recorder.last_token_s.max()


def test_a_long_run_keeps_a_bounded_number_of_samples():
    replayed = run(random_trace(120, 0.2))
    assert 500 < len(replayed.series.t_s) <= 2000


def test_the_cpu_time_of_planning_and_settling_is_told():
    figures = run(random_trace(60, 50.0)).figures()
    assert 1.0 < figures["scheduler_us_per_step"]["p50"] <= figures["scheduler_us_per_step"]["p99"]
    assert figures["sim_wall_s"] > 0


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ({"kv_tokens": 15}, "15 tokens holds no block of 16"),
        ({"max_model_len": 20_000}, "max_model_len 20000 is beyond the KV pool of 16000"),
        ({"swap_space": 1e-9}, "holds no KV block"),
        ({"tier_mix": {"urgent": 1.0}}, "no tier 'urgent'; the tiers are interactive, standard, batch"),
    ],
)
def test_settings_that_cannot_be_are_refused(how: dict[str, Any], complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        run(random_trace(3, 1.0), **how)


def test_an_unknown_tier_in_the_trace_is_refused():
    trace = trace_of((0.0, 5, 5), (0.0, 5, 5), tier=["batch", "gold"])
    with pytest.raises(ConfigError, match="no tier 'gold'"):
        run(trace)


def test_engines_that_step_together_come_in_whole_groups():
    cost = CostModel(**{**_fields(COST), "engines": 2, "lockstep": True})
    with pytest.raises(ConfigError, match="2 engines step together; 3 is no multiple"):
        run(random_trace(3, 1.0), cost=cost, engines=3)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("interactive", "no share from 0 to 1"),
        ("interactive=2", "no share from 0 to 1"),
        ("interactive=nan", "no share from 0 to 1"),
        ("interactive=0.5,batch=0.6", "sum to 1.1"),
        ("batch=0.5,batch=0.5", "batch is named twice"),
        ("", "no share"),
    ],
)
def test_a_tier_mix_that_makes_no_sense_is_refused(text: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        parse_tier_mix(text)


def test_a_tier_mix_is_shares_by_tier():
    assert parse_tier_mix("interactive=0.2, batch=0.8") == {"interactive": 0.2, "batch": 0.8}


def test_other_tiers_than_the_default_ones_can_be_had():
    tiers = (Tier(name="now", ttft_s=0.5, weight=2.0), Tier(name="later"))
    figures = run(random_trace(50, 20.0), tiers=tiers, tier_mix={"now": 0.5, "later": 0.5}).figures()
    assert set(figures["tiers"]) == {"now", "later"}


# ---------------------------------------------------------------------- against measured runs


@pytest.mark.parametrize("name", shipped_cost_models())
def test_shipped_cost_models_give_the_half_they_were_not_fitted_to(name: str):
    """Within 5 % on means and 10 % on P99 of a real run's second half."""
    cost = read_cost_model(name)
    trace = read_trace([TRACES / cost.measured])
    half = slice(len(trace) // 2, None)
    simulated, real = simulate(trace, cost)[0].of(half), measured_times(trace).of(half)
    for figure in ("ttft", "tpot", "e2e"):
        ours, theirs = getattr(simulated, figure), getattr(real, figure)
        assert ours.mean() == pytest.approx(theirs.mean(), rel=0.05), figure
        assert np.percentile(ours, 99) == pytest.approx(np.percentile(theirs, 99), rel=0.10), figure


def measured(trace: Trace, cost: CostModel) -> Trace:
    """The trace as an engine with these step times would have served it."""
    times = simulate(trace, cost)[0]
    return dataclasses.replace(
        trace, measured=Measured(trace.times, times.seated_s, times.first_token_s, times.last_token_s)
    )


def test_a_fit_on_the_first_half_of_a_simulated_run_predicts_the_second():
    truth = CostModel(**{**_fields(COST), "a_s": 0.008, "b_s_per_token": 1.5e-4, "c_s_per_kv_token": 8e-7, "ahead": 1})
    trace = measured(random_trace(50, 12.0, prompts=600, outputs=25), truth)
    calls: list[tuple[int, int]] = []
    validation = validate(trace, truth, progress=lambda *counts: calls.append(counts))
    for errors in validation.errors.values():
        assert abs(errors["mean"]) < 0.03
        assert abs(errors["p99"]) < 0.06
    fitted = validation.cost
    for tokens, kv_tokens in ((1, 500), (20, 8000), (256, 4000)):
        assert fitted.step_s(tokens, kv_tokens) == pytest.approx(truth.step_s(tokens, kv_tokens), rel=0.15)
    assert calls[-1][0] <= calls[-1][1]
    assert validation.to_json()["ttft_error"] == validation.errors["ttft"]


def test_a_trace_without_measured_times_cannot_be_validated_with():
    with pytest.raises(ConfigError, match="holds no measured times"):
        validate(random_trace(100, 1.0), COST)


def test_a_measured_run_too_short_to_halve_is_refused():
    with pytest.raises(ConfigError, match=r"holds 10 requests; .* at least 40"):
        validate(measured(random_trace(10, 1.0), COST), COST)


def test_measured_answers_that_took_no_time_are_refused():
    trace = measured(random_trace(50, 1.0), COST)
    assert trace.measured is not None
    broken = dataclasses.replace(trace.measured, last_token_s=trace.measured.first_token_s)
    with pytest.raises(ConfigError, match="took no time"):
        validate(dataclasses.replace(trace, measured=broken), COST)


def test_a_pool_too_small_for_what_the_measured_engine_served_is_refused():
    trace = measured(random_trace(50, 1.0), COST)
    with pytest.raises(ConfigError, match=r"refuses request \d+ of the trace"):
        validate(trace, CostModel(**{**_fields(COST), "kv_tokens": 256}))


def test_times_of_requests_with_one_token_have_no_tpot():
    ones = np.ones(2)
    times = Times(ones, ones, ones + 1, ones + np.array([1, 4]), np.array([1, 4]))
    assert times.tpot.tolist() == [1.0]


# ---------------------------------------------------------------------- the tools of these tests


def _fields(cost: CostModel) -> dict[str, Any]:
    return {name: getattr(cost, name) for name in cost.__struct_fields__}


def _ahead(settings: Any, ahead: int) -> Any:
    return dataclasses.replace(settings, engine=dataclasses.replace(settings.engine, ahead=ahead))
