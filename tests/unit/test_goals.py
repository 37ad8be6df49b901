"""The goals' measurements at sizes that take seconds: what they count, and how they judge."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.goals import __main__ as goals
from benchmarks.goals import (
    admission,
    batching,
    chunked,
    determinism,
    kv_types,
    overhead,
    preemption,
    prefix,
    simulator,
    tiers,
)
from benchmarks.goals.simulated import CONVERSATION, at_once, at_rate, engine_of, joined, pause_s, recorded, run
from benchmarks.goals.verdict import Check, Outcome
from ropeway.bench.kv import KVFigures, TypeFigures
from ropeway.bench.traces import Trace, read_trace
from tests.support.tiny_models import tiny_checkpoint

# ---------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("figure", "sense", "verdict"),
    [
        (2.0, "at least", "met"),
        (1.99, "at least", "missed"),
        (2.0, "at most", "met"),
        (2.01, "at most", "missed"),
        (None, "at most", "skipped"),
        (math.nan, "at least", "missed"),
    ],
)
def test_a_figure_meets_its_target_up_to_equality(figure, sense, verdict):
    assert Check("x", figure, 2.0, sense).verdict == verdict


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [([1.0, 1.0], "met"), ([1.0, 0.0], "missed"), ([1.0, None], "met"), ([None, None], "skipped"), ([], "skipped")],
)
def test_a_goal_is_missed_with_one_of_its_figures(figures, verdict):
    assert Outcome([Check("x", figure, 1.0) for figure in figures]).verdict == verdict


def measure() -> Outcome:
    """A goal of its own, for the command."""
    return Outcome([Check("share", 0.9, 0.8, unit="%"), Check("speed", 1.5, 2.0, unit="x")], {"raw": [1, 2]})


def test_the_command_prints_figures_targets_and_verdicts_and_writes_them_down(tmp_path, monkeypatch):
    monkeypatch.setitem(goals.GOALS, 99, goals.Goal("testing", __name__))
    outcome = goals.measure(99, tmp_path / "new")
    assert outcome.verdict == "missed"
    report = json.loads((tmp_path / "new" / "goal_99.json").read_text())
    assert report["goal"] == 99
    assert report["verdict"] == "missed"
    assert report["raw"] == [1, 2]
    assert [(check["name"], check["figure"], check["verdict"]) for check in report["checks"]] == [
        ("share", 0.9, "met"),
        ("speed", 1.5, "missed"),
    ]
    assert 0 <= report["machine"]["stolen_time_fraction"] <= 1


def test_a_missed_goal_ends_the_command_with_1_and_an_unknown_one_with_2(tmp_path, monkeypatch):
    import typer

    app = typer.Typer()
    app.command()(goals._main)
    monkeypatch.setitem(goals.GOALS, 99, goals.Goal("testing", __name__))
    missed = CliRunner().invoke(app, ["99", "--json-dir", str(tmp_path)])
    assert missed.exit_code == 1
    assert "1.50x" in missed.output
    assert "at least 80.00%" in missed.output
    unknown = CliRunner().invoke(app, ["99", "98"])
    assert unknown.exit_code == 2


def test_every_goal_has_its_measurement():
    import importlib

    for goal in goals.GOALS.values():
        assert callable(importlib.import_module(goal.module).measure)


# ---------------------------------------------------------------------- 1: batching


def test_continuous_batching_saves_steps_and_every_kind_gives_every_token():
    lengths = batching.exponential_lengths(96, mean=16)
    runs = {kind: batching.run_on_timer(lengths, 0.0, **fields) for kind, fields in batching.KINDS.items()}
    assert {run.output_tokens for run in runs.values()} == {sum(lengths)}
    assert batching._gain(runs, "steps") > 1.4
    assert runs["continuous"].slot_use > 0.9
    assert runs["static, finished rows dropped"].slot_use < 0.5


def test_a_static_batch_takes_as_many_steps_as_its_longest_answer():
    lengths = [3, 9] * (batching.SLOTS // 2)
    assert batching.run_on_timer(lengths, 0.0, batching="static").steps == 9


# ---------------------------------------------------------------------- 6: chunked prefill


def test_capacity_is_the_highest_rate_that_keeps_its_target():
    trace, cost = recorded(CONVERSATION, 40), engine_of()
    rate, tried = chunked.capacity(trace, cost, 6.0, 0.04, chunked_prefill=False)
    assert 0.2 <= rate < 6.0
    kept = [row["rate_per_s"] for row in tried if row["itl_s_p99"] <= 0.04 and row["ttft_s_p99"] <= 10]
    assert rate == max(kept)
    assert chunked.capacity(trace, cost, 6.0, 1e-3)[0] == 0.0
    assert chunked.capacity(trace, cost, 1.0, 10.0)[0] == 1.0


# ---------------------------------------------------------------------- 8: admission


def test_rates_are_reached_by_scaling_the_recorded_gaps():
    trace = at_rate(recorded(CONVERSATION, 50), 4.0)
    assert (len(trace) - 1) / trace.duration_s == pytest.approx(4.0)
    assert not at_once(trace).times.any()


def test_a_pause_is_what_a_stream_stood_still_beyond_the_longest_step():
    trace, cost = at_once(recorded(CONVERSATION, 60)), engine_of()
    calm = run(trace, cost, admission="profile", shed=False)
    hasty = run(trace, cost, admission="greedy", shed=False)
    assert hasty.figures()["evictions_per_request"] > 0
    assert pause_s(hasty).max() > 0.2
    assert pause_s(calm).max() <= pause_s(hasty).max()
    assert (pause_s(calm) >= 0).all()


def test_goodput_beyond_capacity_is_compared_with_greedy_and_the_best_watermark():
    def row(goodput: float, evictions: float, pause: float) -> dict[str, float]:
        return {"goodput_per_s": goodput, "evictions_per_request": evictions, "pause_s_p99": pause}

    beyond = {
        admission.OURS: row(3.0, 0.01, 0.0),
        "greedy": row(0.5, 0.2, 1.0),
        "watermark 2%, shedding": row(2.0, 0.1, 0.5),
        "watermark 5%, shedding": row(4.0, 0.0, 0.0),
    }
    figures = [check.figure for check in admission._beyond_checks(beyond)]
    assert figures == [pytest.approx(6.0), pytest.approx(0.75), pytest.approx(0.05), 0.0]


def test_a_sweep_with_a_cliff_is_told():
    def sweep(*goodputs: float) -> list[float | None]:
        scales = (0.5, 1.0, 2.0, 3.0)
        rows = [{"scale": scale, "goodput_per_s": good} for scale, good in zip(scales, goodputs, strict=True)]
        return [check.figure for check in admission._sweep_checks(rows)]

    assert sweep(1.0, 2.0, 2.2, 2.5) == [1.0, 1.0]
    assert sweep(1.0, 2.0, 1.8, 1.0) == [pytest.approx(0.9), pytest.approx(0.5)]


def test_a_small_run_of_goal_8_has_every_figure():
    outcome = admission.measure(requests=60, sweep_requests=30)
    assert len(outcome.checks) == 6
    sweep = outcome.figures["sweep"]
    for kind in admission.BATCHING:
        assert [row["scale"] for row in sweep[kind]] == list(admission.SCALES)
    json.dumps(outcome.report())


# ---------------------------------------------------------------------- 9: tiers


def test_joined_traces_keep_their_requests_in_the_order_of_arrival():
    one = Trace(np.array([1, 2]), np.array([5, 6]), arrival_s=np.array([0.0, 3.0])).with_tier("batch")
    other = Trace(np.array([9]), np.array([8]), arrival_s=np.array([1.0])).with_tier("interactive")
    both = joined(one, other)
    assert both.input_tokens.tolist() == [1, 9, 2]
    assert both.times.tolist() == [0.0, 1.0, 3.0]
    assert both.tier == ["batch", "interactive", "batch"]
    assert both.tenant is None


def test_interactive_requests_over_a_small_batch_load_are_measured_on_the_simulated_engine():
    outcome = tiers._interference(80, engine_of())
    steps, lost, missing = (check.figure for check in outcome.checks)
    assert 0 <= steps < 10
    assert lost < 0.5
    assert missing == 0


def test_the_service_of_two_tenants_is_counted_in_weighted_tokens():
    outcome = tiers._shares(60, engine_of())
    tenants = outcome.figures["tenants"]
    assert tenants["gap_tokens"] <= tenants["bound_tokens"]
    assert tenants["service_tokens"]["talk"] > 0
    assert tenants["service_tokens"]["code"] > 0


def test_a_large_batch_request_in_a_short_flood_is_timed():
    outcome = tiers._starvation(engine_of(), 65.0)
    figures = outcome.figures["starvation"]
    assert len(figures["batch_ttft_s"]) == 1
    assert figures["bound_s"] > 70
    assert outcome.checks[0].figure == max(figures["batch_ttft_s"])


# ---------------------------------------------------------------------- 10: prefix cache


@pytest.mark.parametrize("name", list(prefix.MOONCAKE))
def test_the_cache_hits_exactly_what_a_straight_count_gives(name):
    trace = read_trace([prefix.TRACES / part for part in prefix.MOONCAKE[name]]).take(150)
    counted = prefix.counted_hits(trace)
    assert counted > 0
    assert prefix.engine_hits(trace) == counted


def test_partial_blocks_and_a_prompts_last_token_are_never_hits():
    trace = Trace(
        np.array([1100, 1024, 1536, 1100]),
        np.ones(4, dtype=np.int64),
        hash_ids=[(0, 1, 2), (0, 1), (0, 1, 3), (0, 1, 2)],
    )
    # 0 and 1 are there from the second prompt on; of the second one the last block must be computed.
    assert prefix.counted_hits(trace) == 512 + 1024 + 1024
    assert prefix.engine_hits(trace) == 512 + 1024 + 1024


# ---------------------------------------------------------------------- 11: host cost of a step


def test_asynchronous_scheduling_is_compared_with_synchronous_on_the_cpu():
    model = str(tiny_checkpoint("llama"))
    outcome = overhead.measure(sequences=(16,), steps=20, steps_ms=(0.5, 0.0), rounds=1, model=model)
    bubble, tokens = outcome.checks[-2:]
    off, on = outcome.figures["cpu"]["runs"]
    assert (off["async_scheduling"], on["async_scheduling"]) == (False, True)
    assert bubble.figure == on["bubble"]
    assert f"{off['bubble']:.2%} synchronously" in bubble.note
    assert (tokens.figure, tokens.target) == (1.0, 1.0)


# ---------------------------------------------------------------------- 14: determinism


@pytest.fixture
def _short_requests(monkeypatch):
    monkeypatch.setattr(determinism, "_PROMPT", (8, 60))
    monkeypatch.setattr(determinism, "_OUTPUT", (8, 30))


@pytest.mark.usefixtures("_short_requests")
def test_every_setting_is_compared_with_requests_alone_and_does_what_it_is_for():
    outcome = determinism.measure(requests=12, kv_dtypes=("bf16",), model=str(tiny_checkpoint("llama")))
    assert [check.name for check in outcome.checks if check.verdict != "met"] == []
    assert sum(check.target == 1.0 and check.unit == "%" for check in outcome.checks) == 9


@pytest.mark.usefixtures("_short_requests")
def test_answers_that_differ_miss_the_goal(monkeypatch):
    monkeypatch.setattr(
        determinism, "_settings", lambda blocks: {"other weights": {"weights": "int4", "max_num_seqs": 8}}
    )
    outcome = determinism.measure(requests=4, kv_dtypes=("bf16",), model=str(tiny_checkpoint("llama")))
    assert outcome.verdict == "missed"


# ---------------------------------------------------------------------- 15: simulator


def test_a_small_fleet_serves_every_request():
    row = simulator.fleet(120, 4, "least-tokens")
    assert row["completed"] == 120
    assert row["minutes"] > 0


def test_every_measured_run_has_a_shipped_engine_of_its_sizes():
    from ropeway.simulation.cost_model import read_cost_model, shipped_cost_models

    measured = {read_cost_model(name).measured for name in shipped_cost_models()}
    assert measured == set(simulator.FILES)


# ---------------------------------------------------------------------- 7: preemption


@pytest.mark.parametrize(("bandwidth", "better"), [(2e8, "recompute"), (2e10, "swap")])
def test_on_the_simulated_engine_the_cost_of_a_preemption_is_what_it_adds(bandwidth, better):
    row = preemption.simulated_costs(1024, bandwidth, kept=False)
    costs = row["cost_s"]
    assert costs[better] == min(costs["swap"], costs["recompute"]) > 0
    assert row["ratio"] == pytest.approx(costs["auto"] / costs[better])
    if better == "swap":  # 64 blocks of 2 MiB, there and back
        assert costs["swap"] == pytest.approx(2 * 1024 * 131072 / 2e10, rel=0.1)


# ---------------------------------------------------------------------- 13: KV types


def test_types_of_keys_and_values_are_judged_by_room_speed_and_perplexity():
    types = [
        TypeFigures("bf16", 16, 1000, 1.0, 50.0, 1.0),
        TypeFigures("int8", 16, 515, 1.94, 60.0, 1.2),
        TypeFigures("int4", 16, 400, 2.5, 45.0, 0.9),
        TypeFigures("int4-full", 32, 297, 3.37, 55.0, 1.1),
    ]
    costs = {
        "int8": {"change_percent": 0.1, "change_error_percent": 0.05},
        "int4": {"failed": "no such command"},
        "int4-full": {"change_percent": 0.6, "change_error_percent": 0.4},
    }
    checks = kv_types._checks("m", KVFigures(4096, 4, types), costs)
    assert [(check.name, check.verdict) for check in checks] == [
        ("m, int8: room / bf16", "met"),
        ("m, int8: decode / bf16", "met"),
        ("m, int8: perplexity", "met"),
        ("m, int4: room / bf16", "met"),
        ("m, int4: decode / bf16", "missed"),
        ("m, int4: perplexity", "skipped"),
        ("m, int4-full: room / bf16", "met"),
        ("m, int4-full: decode / bf16", "met"),
        ("m, int4-full: perplexity", "met"),
    ]
    assert [checks[i].note for i in (5, 8)] == ["no such command", "standard error 0.40%"]
    types[-1] = TypeFigures("int4-full", 32, note="no kernels")
    told = kv_types._checks("m", KVFigures(4096, 4, types), costs)[-1]
    assert (told.name, told.verdict, told.note) == ("m, int4-full: room / bf16", "skipped", "no kernels")
