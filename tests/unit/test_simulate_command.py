"""``ropeway simulate``: what it writes, and how it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from ropeway.bench.traces import Trace
from ropeway.cli.simulate import simulate
from ropeway.simulation.cost_model import CostModel, read_cost_model
from ropeway.simulation.validate import simulate as simulated_times

FAST = CostModel(
    name="fast",
    a_s=0.005,
    b_s_per_token=5e-5,
    c_s_per_kv_token=1e-7,
    kv_tokens=8000,
    max_num_seqs=16,
    max_batched_tokens=128,
    block_size=16,
)
TRACE = "arrival_s,input_tokens,output_tokens\n" + "".join(f"{n * 0.05:.3f},{20 + n},{5 + n % 7}\n" for n in range(40))
TIERS = '[[tier]]\nname = "now"\nweight = 2.0\nttft_s = 0.5\ntpot_s = 0.1\n\n[[tier]]\nname = "later"\n'

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(simulate)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fast.json").write_bytes(FAST.to_json())
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "tiers.toml").write_text(TIERS)
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def ran(*arguments: str) -> dict[str, Any]:
    """What a run on the trace with the fast cost model wrote."""
    result = call("--trace", "trace.csv", "--cost-model", "fast.json", "--json", "out.json", *arguments)
    assert result.exit_code == 0, result.output
    written: dict[str, Any] = json.loads(Path("out.json").read_text())
    return written


def refused(*arguments: str, using: tuple[str, ...] = ("--trace", "trace.csv", "--cost-model", "fast.json")) -> str:
    """The one line with which it fails."""
    result = call(*using, *arguments)
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    return re.sub(r"\s+", " ", result.stderr)


# ---------------------------------------------------------------------- what it writes


@pytest.mark.usefixtures("folder")
def test_every_promised_figure_is_written_for_all_and_for_each_tier():
    report = ran()
    statistics = {"mean", "p50", "p90", "p99"}
    for figures in (report, report["tiers"]["standard"]):
        assert figures["requests"] == figures["completed"] == 40
        assert figures["goodput_per_s"] > 0
        assert figures["attainment"] == 1.0
        assert (figures["shed"], figures["evictions_per_request"]) == (0, 0.0)
        for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
            assert statistics <= figures[name].keys()
            assert 0 < figures[name]["p50"] <= figures[name]["p99"]
    assert 0 < report["kv_waste"] < 1
    assert 0 < report["slot_use"] <= 1
    assert report["prefix_hit_fraction"] == 0.0
    assert 0 < report["scheduler_us_per_step"]["p50"] <= report["scheduler_us_per_step"]["p99"]
    assert report["sim_wall_s"] > 0
    assert report["trace"] == ["trace.csv"]


@pytest.mark.usefixtures("folder")
def test_what_nobody_gave_is_the_cost_model_s_and_flags_come_first():
    settings = ran()["settings"]
    given = {
        name: settings[name] for name in ("kv_tokens", "max_num_seqs", "max_batched_tokens", "block_size", "engines")
    }
    assert given == {"kv_tokens": 8000, "max_num_seqs": 16, "max_batched_tokens": 128, "block_size": 16, "engines": 1}
    flags = ("--kv-tokens", "3200", "--max-num-seqs", "7", "--max-batched-tokens", "99", "--block-size", "32")
    settings = ran(*flags, "--engines", "3", "--policy", "fcfs", "--no-shed", "--admission", "watermark")["settings"]
    given = {
        name: settings[name] for name in ("kv_tokens", "max_num_seqs", "max_batched_tokens", "block_size", "engines")
    }
    assert given == {"kv_tokens": 3200, "max_num_seqs": 7, "max_batched_tokens": 99, "block_size": 32, "engines": 3}
    assert (settings["policy"], settings["shed"], settings["admission"]) == ("fcfs", False, "watermark")


@pytest.mark.usefixtures("folder")
def test_one_limit_given_moves_the_cost_model_s_other_one():
    settings = ran("--max-num-seqs", "500")["settings"]
    assert (settings["max_num_seqs"], settings["max_batched_tokens"]) == (500, 500)
    settings = ran("--max-batched-tokens", "8")["settings"]
    assert (settings["max_num_seqs"], settings["max_batched_tokens"]) == (8, 8)


@pytest.mark.usefixtures("folder")
def test_settings_of_a_file_and_the_environment_count_here_too(monkeypatch: pytest.MonkeyPatch):
    Path("config.yaml").write_text("scheduler: {max_num_seqs: 5}\ncache: {prefix_cache: false}\n")
    monkeypatch.setenv("ROPEWAY_POLICY", "shortest")
    settings = ran("--config", "config.yaml")["settings"]
    assert (settings["max_num_seqs"], settings["prefix_cache"], settings["policy"]) == (5, False, "shortest")


def test_a_simulated_engine_keeps_nothing_over_restarts_and_says_so(folder: Path, caplog: pytest.LogCaptureFixture):
    ran("--length-profile", "lengths.json")
    assert "length_profile is left out" in caplog.text
    assert not (folder / "lengths.json").exists()


@pytest.mark.usefixtures("folder")
def test_the_trace_is_repeated_and_sped_up():
    report = ran("--requests", "100", "--rate-scale", "2")
    assert report["requests"] == 100
    assert report["duration_s"] == pytest.approx(99 * 0.025, rel=0.1)


def test_parts_of_a_trace_follow_each_other(folder: Path):
    lines = TRACE.splitlines(keepends=True)
    (folder / "first.csv").write_text("".join(lines[:21]))
    (folder / "second.csv").write_text("".join(lines[:1] + lines[21:]))
    flags = ("--cost-model", "fast.json", "--json", "parts.json")
    assert call("--trace", "first.csv", "--trace", "second.csv", *flags).exit_code == 0
    parts, whole = json.loads(Path("parts.json").read_text()), ran()
    assert parts["e2e_s"] == whole["e2e_s"]


def test_lengths_without_times_come_at_a_rate_or_in_a_closed_loop(folder: Path):
    (folder / "trace.csv").write_text("input_tokens,output_tokens\n" + "30,5\n" * 50)
    assert ran("--rate", "10")["duration_s"] == pytest.approx(5, rel=0.5)
    assert ran("--concurrency", "4")["completed"] == 50
    assert "give a rate" in refused()


def test_arrivals_on_a_grid_can_be_spread(folder: Path):
    rows = "".join(f"{n // 10 * 3},30,5\n" for n in range(50))
    (folder / "trace.csv").write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    assert ran("--spread")["ttft_s"]["p99"] < ran()["ttft_s"]["p99"]


@pytest.mark.usefixtures("folder")
def test_tiers_come_from_a_file_and_a_mix():
    report = ran("--tiers", "tiers.toml", "--tier-mix", "now=0.5,later=0.5", "--slo-itl", "0.2")
    assert report["tiers"].keys() == {"now", "later"}
    assert [tier["tpot_s"] for tier in report["settings"]["tiers"]] == [0.2, 0.2]
    assert [tier["ttft_s"] for tier in report["settings"]["tiers"]] == [0.5, None]


@pytest.mark.usefixtures("folder")
def test_a_sweep_gives_the_main_figures_at_each_rate():
    rows = ran("--sweep", "0.5,1,4")["sweep"]
    assert [row["rate_scale"] for row in rows] == [0.5, 1, 4]
    assert [row["rate_per_s"] for row in rows] == pytest.approx([10, 20, 80])
    assert all(row["ttft_s"]["p99"] > 0 and row["goodput_per_s"] > 0 for row in rows)


@pytest.mark.usefixtures("folder")
def test_the_report_shows_queue_batch_kv_use_latencies_and_goodput_against_rate():
    ran("--html", "out.html", "--sweep", "1,2")
    page = Path("out.html").read_text()
    for title in ("Queue and batch", "KV use", "TTFT", "ITL", "E2E", "Goodput against rate"):
        assert title in page
    assert "goodput_per_s" in page


@pytest.mark.usefixtures("folder")
def test_the_terminal_shows_the_latencies_and_what_was_refused():
    result = call("--trace", "trace.csv", "--cost-model", "fast.json", "--kv-tokens", "48")
    assert result.exit_code == 0, result.output
    assert "40 requests on 1 x fast" in result.stdout
    assert "TTFT" in result.stdout
    assert re.search(r"\d+ refused: ContextLengthExceeded", result.stderr)


# ---------------------------------------------------------------------- validation


def measured_file(folder: Path, name: str = "run.csv") -> None:
    """A run of 44 requests as a somewhat slower engine than that of the cost model would have served it."""
    rng = np.random.default_rng(3)
    trace = Trace(
        rng.integers(5, 300, 44), rng.integers(2, 25, 44), np.round(np.cumsum(rng.exponential(0.2, 44)), 4)
    ).from_zero()
    times = simulated_times(trace, msgspec.structs.replace(FAST, a_s=0.03, ahead=1))[0]
    columns = (trace.times, trace.times, times.seated_s, times.first_token_s, times.last_token_s)
    lines = [
        ",".join([str(prompt), str(output), *(f"{column[n]:.6f}" for column in columns)])
        for n, (prompt, output) in enumerate(zip(trace.input_tokens, trace.output_tokens, strict=True))
    ]
    header = "input_tokens,output_tokens,arrival_s,queued_s,scheduled_s,first_token_s,last_token_s"
    (folder / name).write_text("\n".join([header, *lines]) + "\n")


def test_validation_fits_the_first_half_and_tells_the_errors_of_the_second(folder: Path):
    measured_file(folder)
    flags = ("--kv-tokens", "8000", "--max-num-seqs", "16", "--max-batched-tokens", "128")
    result = call("--validate", "run.csv", "--json", "out.json", *flags)
    assert result.exit_code == 0, result.output
    report = json.loads(Path("out.json").read_text())
    for name in ("ttft_error", "tpot_error", "e2e_error"):
        assert report[name].keys() == {"mean", "p99"}
        assert max(map(abs, report[name].values())) < 0.5  # of so few requests little can be told
    assert report["cost_model"]["max_num_seqs"] == 16
    assert "second half" in result.stdout
    # What was fitted can be simulated with.
    (folder / "fitted.json").write_text(json.dumps(report["cost_model"]))
    assert read_cost_model("fitted.json").measured == "run.csv"


def test_a_run_of_which_nothing_was_measured_cannot_be_validated(folder: Path):
    assert "no measured times" in refused(using=("--validate", "trace.csv"))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--policy", "fcfs"), "policy can't be chosen with --validate"),
        (("--rate-scale", "2"), "replays the measured run as it was"),
        (("--html", "x.html"), "replays the measured run as it was"),
        (("--block-size", "24"), "block_size 24 .* must be a power of two"),
    ],
)
def test_validation_takes_only_what_describes_the_measured_engine(flags: tuple[str, ...], complaint: str):
    assert re.search(complaint, refused(*flags, using=("--validate", "trace.csv")))


# ---------------------------------------------------------------------- bad input


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--cost-model", "h100"), "no cost model 'h100'"),
        (("--tier-mix", "gold=1"), "no tier 'gold'; the tiers are interactive, standard, batch"),
        (("--tier-mix", "batch=0.4"), "sum to 0.4"),
        (("--tiers", "nix.toml"), "nix.toml cannot be read"),
        (("--rate", "2", "--concurrency", "3"), "--rate and --concurrency contradict"),
        (("--rate", "2", "--rate-scale", "3"), "--rate and --rate-scale contradict"),
        (("--rate-scale", "0"), "rate scale is 0.0; it must be above 0"),
        (("--rate", "-1"), "must be above 0 requests per second"),
        (("--sweep", "1,fast"), "--sweep is '1,fast'; give multiples of the rate above 0"),
        (("--sweep", "1,0"), "give multiples of the rate above 0"),
        (("--sweep", "1", "--concurrency", "2"), "--sweep varies a rate"),
        (("--slo-ttft", "0"), "--slo-ttft must be above 0"),
        (("--slo-itl", "nan"), "--slo-itl must be above 0"),
        (("--kv-tokens", "4"), "4 tokens holds no block of 16"),
        (("--max-model-len", "9000"), "max_model_len 9000 is beyond the KV pool"),
        (("--block-size", "24"), "block_size 24 .* must be a power of two"),
        (("--swap-space", "-1"), "swap_space -1.0 .* must be at least 0"),
        (("--preemption", "swap"), "preemption swap .* swap_space"),
        (("--max-num-seqs", "9", "--max-batched-tokens", "4"), "max_num_seqs 9 .* max_batched_tokens 4 .* contradict"),
        (("--router", "random"), "Invalid value for '--router'"),
        (("--engines", "0"), "Invalid value for '--engines'"),
        (("--validate", "trace.csv"), "give either --trace .* or --validate"),
        (("--json", "no/such/folder/out.json"), "cannot write to"),
        (("--html", "no/such/folder/out.html"), "cannot write to"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(flags: tuple[str, ...], complaint: str):
    assert re.search(complaint, refused(*flags))


@pytest.mark.usefixtures("folder")
def test_nothing_to_simulate_is_refused():
    assert "give either --trace" in refused(using=())


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("arrival_s,input_tokens\n0,5\n", "output_tokens is missing"),
        ("arrival_s,input_tokens,output_tokens\n1,5,5\n0.5,5,5\n", "line 3 arrives at 0.5 s, earlier than"),
        ("arrival_s,input_tokens,output_tokens\n-1,5,5\n", "arrival_s is -1"),
        ("arrival_s,input_tokens,output_tokens,tier\n0,5,5,gold\n", "no tier 'gold'"),
    ],
    ids=["missing column", "out of order", "negative time", "unknown tier"],
)
def test_a_trace_that_makes_no_sense_is_refused(folder: Path, content: str, complaint: str):
    (folder / "trace.csv").write_text(content)
    assert complaint in refused()


def test_tiers_that_contradict_each_other_are_refused(folder: Path):
    (folder / "tiers.toml").write_text('[[tier]]\nname = "a"\nttft_s = 10.0\nqueue_limit_s = 5.0\n')
    assert "contradict" in refused("--tiers", "tiers.toml")
