"""The benchmarks' figures: present, plausible, and consistent with each other."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
import transformers
import typer
from typer.testing import CliRunner

from benchmarks import async_figure, overlap_profile
from ropeway.bench.bubbles import decoding_of, measure_bubbles, step_begins
from ropeway.bench.driver import Driver, Run
from ropeway.bench.latency import Latency, measure_latency, prefill_flops, step_weight_bytes
from ropeway.bench.machine import PeakMemory, StolenTime, machine_facts
from ropeway.bench.overhead import measure_overhead
from ropeway.bench.overlap import Sample
from ropeway.bench.preemption import KINDS, ResumeCost, measure_preemption, report
from ropeway.bench.prefix import measure_prefix, measure_zero_hits
from ropeway.bench.profile import HOST, profile_step
from ropeway.bench.random_model import random_model
from ropeway.bench.report import readable, reported_to
from ropeway.bench.shapes import SHAPES
from ropeway.bench.throughput import Throughput, measure_throughput
from ropeway.bench.workload import WorkloadRequest, mixed_workload, totals, write_workload
from ropeway.cli import bench_memory
from ropeway.cli.bench import app
from ropeway.config import Config
from ropeway.errors import ConfigError, ContextLengthExceeded
from ropeway.scheduling.scheduler import MAX_PREEMPTIONS
from ropeway.settings import resolve
from ropeway.trace import COMPUTE, Trace
from tests.support.tiny_models import SMALL, tiny_checkpoint, tiny_oracle

BLOCK = 8
SEATS = 4
WORKLOAD = mixed_workload(10, prompt_tokens=(3, 40), output_tokens=(2, 12), seed=1)


def tiny_config(**fields: Any) -> Config:
    defaults = {
        "model": str(tiny_checkpoint("llama")),
        "device": "reference",
        "max_num_seqs": SEATS,
        "max_batched_tokens": 32,
        "block_size": BLOCK,
        "kv_blocks": 64,
    }
    return resolve({**defaults, **fields}, environ={}, given_as="argument").config


@pytest.fixture(scope="module")
def throughput() -> Throughput:
    return measure_throughput(tiny_config(), WORKLOAD)


@pytest.fixture(scope="module")
def latency() -> Latency:
    return measure_latency(tiny_config(), prompt_tokens=20, output_tokens=6, batch=2, repeat=2)


# ---------------------------------------------------------------------- throughput


def test_throughput_counts_every_token_of_the_workload(throughput):
    prompt_tokens, output_tokens = totals(WORKLOAD)
    assert throughput.requests == len(WORKLOAD)
    assert throughput.prompt_tokens == prompt_tokens
    assert throughput.output_tokens == output_tokens
    assert throughput.output_tokens_per_s * throughput.wall_s == pytest.approx(output_tokens)
    assert throughput.total_tokens_per_s * throughput.wall_s == pytest.approx(prompt_tokens + output_tokens)


def test_the_mean_batch_lies_between_one_and_the_seats(throughput):
    assert 1 <= throughput.mean_batch <= SEATS
    # Each output token needs a row, and so does each chunk before the one that gives the first token.
    assert throughput.mean_batch * throughput.steps >= throughput.output_tokens


def test_memory_and_times_are_those_of_a_real_process(throughput):
    assert throughput.peak_rss_bytes > 50e6
    assert 0 < throughput.load_s < 60
    assert 0 < throughput.ttft_s_p50 <= throughput.ttft_s_p99 <= throughput.wall_s


@pytest.fixture(scope="module")
def one_request() -> Run:
    with Driver(tiny_config()) as driver:
        return driver.run([WorkloadRequest(prompt_tokens=10, output_tokens=4)])


def test_kv_waste_is_the_share_of_allocated_slots_without_keys_and_values(one_request):
    # 10 tokens of prompt, then 11, 12 and 13 in the cache: always two blocks of eight.
    assert one_request.steps.live_slots.tolist() == [10, 11, 12, 13]
    assert one_request.steps.allocated_slots.tolist() == [16] * 4
    figures = Throughput.of(one_request, [WorkloadRequest(10, 4)], max_num_seqs=SEATS, peak_rss_bytes=1, load_s=1.0)
    assert figures.kv_waste == pytest.approx(1 - 46 / 64)


def test_a_run_knows_when_each_token_came(one_request):
    (times,) = one_request.requests
    assert 0 < times.first_token_s < times.finished_s <= one_request.wall_s
    assert times.output_tokens == 4
    assert one_request.tokens_after(times.first_token_s) == 3
    assert one_request.steps.tokens.tolist() == [10, 1, 1, 1]


def test_kv_waste_lies_in_its_range_under_load(throughput):
    assert 0 <= throughput.kv_waste < 1


def test_preemptions_are_counted_when_blocks_are_short():
    workload = [WorkloadRequest(prompt_tokens=24, output_tokens=16)] * 4
    figures = measure_throughput(tiny_config(kv_blocks=8, max_model_len=48, admission="greedy"), workload)
    assert figures.preemptions > 0
    assert figures.output_tokens == 64


def test_no_request_runs_before_it_arrives():
    workload = [WorkloadRequest(4, 2, arrival_s=0.2), WorkloadRequest(4, 2), WorkloadRequest(4, 2, arrival_s=0.4)]
    with Driver(tiny_config()) as driver:
        run = driver.run(workload)
    assert all(times.first_token_s > times.arrival_s for times in run.requests)
    assert run.requests[1].finished_s < 0.4 < run.wall_s


def test_a_request_that_names_no_tier_is_of_the_lowest_and_so_never_shed():
    workload = [WorkloadRequest(4, 2), WorkloadRequest(4, 2, tier="interactive", tenant="a")]
    with Driver(tiny_config()) as driver:
        run = driver.run(workload)
    assert [times.timeline.tier for times in run.requests] == ["batch", "interactive"]


def test_a_run_keeps_the_tokens_and_where_the_time_went(one_request):
    (times,) = one_request.requests
    assert len(times.token_ids) == times.output_tokens == 4
    assert times.timeline.output_tokens == 4
    assert 0 < times.timeline.total_s <= one_request.wall_s


def test_what_the_device_took_for_each_step_is_noted(one_request):
    assert len(one_request.steps.elapsed_s) == len(one_request.steps.rows)
    assert (one_request.steps.elapsed_s > 0).all()
    assert one_request.steps.elapsed_s.sum() <= one_request.wall_s
    assert one_request.steps.copy_s.max() < 1e-3


def test_late_planning_waits_for_an_arrival_that_can_still_be_in_the_next_step():
    workload = [WorkloadRequest(4, 60), WorkloadRequest(4, 2, arrival_s=0.05)]
    with Driver(tiny_config(late_planning=True)) as driver:
        run = driver.run(workload)
    assert [times.output_tokens for times in run.requests] == [60, 2]


# ---------------------------------------------------------------------- batching


@pytest.mark.parametrize("padded", [False, True])
def test_padded_rows_are_computed_and_are_nobodys(padded):
    workload = [WorkloadRequest(4, 2), WorkloadRequest(4, 10), WorkloadRequest(4, 6), WorkloadRequest(4, 4)]
    with Driver(tiny_config(batching="static", padded_rows=padded, async_scheduling=False)) as driver:
        steps = driver.run(workload).steps
    assert (steps.rows - steps.padding).sum() == 22
    assert bool(steps.padding.any()) == padded
    if padded:  # all four rows up to the end of the longest
        assert (steps.rows[:10] == 4).all()


def test_slot_use_counts_the_steps_in_which_somebody_waits():
    workload = [WorkloadRequest(4, 2), WorkloadRequest(4, 6), WorkloadRequest(4, 2)]
    with Driver(tiny_config(max_num_seqs=2, batching="static", async_scheduling=False)) as driver:
        steps = driver.run(workload).steps
    # Six steps of the first batch, with two rows in two of them; then nobody waits.
    assert steps.waiting.tolist() == [1] * 6 + [0] * 2
    assert steps.slot_use(2) == pytest.approx(8 / 12)


def test_a_batch_that_waits_for_its_window_does_not_spin():
    with Driver(tiny_config(batching="dynamic", batch_window_s=0.2)) as driver:
        run = driver.run([WorkloadRequest(4, 2)])
    assert run.requests[0].first_token_s > 0.2
    assert len(run.steps.rows) == 2


def test_a_second_run_of_a_driver_starts_its_counts_anew():
    with Driver(tiny_config()) as driver:
        first, second = (driver.run([WorkloadRequest(10, 4)], seed=seed) for seed in (0, 1))
    assert second.steps.live_slots.tolist() == first.steps.live_slots.tolist()
    assert second.requests[0].output_tokens == 4


def test_a_request_beyond_the_context_is_refused_by_its_place_before_anything_runs():
    with Driver(tiny_config()) as driver, pytest.raises(ContextLengthExceeded, match="request 2 of the workload"):
        driver.run([WorkloadRequest(4, 2), WorkloadRequest(300, 2)])


# ---------------------------------------------------------------------- preemption


@pytest.fixture(scope="module", params=[False, True], ids=["lost", "kept"])
def resume_costs(request) -> list[ResumeCost]:
    return measure_preemption(tiny_config(), [9, 40], kept=request.param, repeat=1)


def test_every_kind_of_preemption_is_measured_at_every_length_as_often_as_requests_can_be_preempted(resume_costs):
    assert [(cost.kind, cost.context_tokens) for cost in resume_costs] == [(k, n) for n in (9, 40) for k in KINDS]
    for cost in resume_costs:
        assert len(cost.samples_s) == cost.done.total() == MAX_PREEMPTIONS
        assert cost.kind == "auto" or set(cost.done) == {cost.kind}


def test_preempted_requests_give_the_tokens_of_those_left_alone(resume_costs):
    assert all(cost.identical for cost in resume_costs)


def test_recomputing_costs_time_where_nothing_is_kept():
    costs = measure_preemption(tiny_config(), [40], repeat=1)
    assert all(cost.median_s > 0 for cost in costs)


def test_auto_is_compared_with_the_better_of_the_other_two():
    costs = [ResumeCost("swap", 8, [2.0]), ResumeCost("recompute", 8, [3.0, 1.0, 9.0]), ResumeCost("auto", 8, [2.2])]
    assert report(costs)["auto_over_better"] == {"8": pytest.approx(1.1)}


@pytest.mark.parametrize("lengths", [[], [0]])
def test_a_context_of_no_tokens_can_not_be_preempted(lengths):
    with pytest.raises(ConfigError, match="at least one, of 1 token or more"):
        measure_preemption(tiny_config(), lengths)


# ---------------------------------------------------------------------- prefix


def test_the_second_of_two_prompts_finds_the_full_blocks_they_share():
    gain = measure_prefix(tiny_config(), prompt_tokens=100, shared=0.95, repeat=1)
    assert (gain.shared_tokens, gain.cached_tokens) == (95, 88)
    assert gain.cut_fraction == pytest.approx(1 - gain.warm_s / gain.cold_s)


@pytest.mark.parametrize("shared", [0.0, 1.0, 1.5])
def test_a_share_that_leaves_nothing_to_share_or_to_compute_is_refused(shared):
    with pytest.raises(ConfigError, match="one token must be shared"):
        measure_prefix(tiny_config(), prompt_tokens=20, shared=shared)


def test_the_cost_without_hits_is_measured_with_and_without_the_cache():
    cost = measure_zero_hits(tiny_config(), workload=WORKLOAD, repeat=1, sequences=4)
    assert len(cost.throughput_ratios) == 1
    assert cost.host_us_on > 0
    assert cost.host_us_off > 0
    assert cost.host_cost_fraction == pytest.approx((cost.host_us_on - cost.host_us_off) / cost.step_us)
    assert cost.throughput_cost_fraction == pytest.approx(cost.device_cost_fraction + cost.host_cost_fraction)


# ---------------------------------------------------------------------- overhead


def test_only_when_contested_do_requests_give_way():
    contested, full, plain = (
        measure_overhead(16, async_scheduling=True, step_ms=0.0, steps=300, features=features)
        for features in ("contested", "all", "plain")
    )
    assert contested.preemptions > 0
    assert contested.swapped_blocks > 0
    assert 0 < contested.running <= 16
    for run in (full, plain):
        assert run.preemptions == run.swapped_blocks == run.refused == 0
        assert run.running == pytest.approx(16, abs=0.5)


# ---------------------------------------------------------------------- bubbles


def traced(steps: int, *, forward_s: float, sample_s: float, pause_s: float) -> Trace:
    """Of a device that does nothing but steps, which is busy for ``forward_s + sample_s`` and then pauses."""
    trace = Trace()
    for step in range(steps):
        begin = step * (forward_s + sample_s + pause_s)
        trace.add(COMPUTE, "forward", begin, begin + forward_s, step=step)
        trace.add(COMPUTE, "sample", begin + forward_s, begin + forward_s + sample_s, step=step)
    return trace


def test_a_bubble_is_what_is_left_of_a_step_when_the_device_is_done():
    run = decoding_of(traced(20, forward_s=0.006, sample_s=0.001, pause_s=0.003), 8, False)
    assert (run.sequences, run.async_scheduling, run.steps) == (8, False, 13)
    assert run.bubble == pytest.approx(0.3)
    assert run.step_ms == pytest.approx(10)


def test_the_timer_s_bubble_is_gone_with_asynchronous_scheduling_and_its_trace_tells_it():
    bubbles = []
    for mode in (False, True):
        trace = Trace()
        run = measure_overhead(32, async_scheduling=mode, step_ms=5.0, steps=60, trace=trace)
        told = decoding_of(trace, 32, mode)
        assert told.bubble == pytest.approx(run.bubble, abs=0.05)
        bubbles.append(told.bubble)
    assert bubbles[1] < bubbles[0]


def test_bubbles_are_compared_over_the_same_tokens():
    compared = measure_bubbles(tiny_config(device="cpu", threads=1), sequences=3, steps=12, turns=3)
    assert [(run.async_scheduling, run.steps) for run in compared.runs] == [(False, 12), (True, 12)]
    assert all(0 <= run.bubble < 1 and run.step_ms > 0 for run in compared.runs)
    assert compared.same_tokens == 1
    for trace in compared.traces:
        assert {name for name, *_ in trace.intervals(COMPUTE)} == {"forward", "sample"}
        assert len(step_begins(trace)) == 12 + 7


# ---------------------------------------------------------------------- latency


def test_the_fractions_of_one_repeat_are_its_rates_over_the_limits():
    latency = measure_latency(tiny_config(), prompt_tokens=20, output_tokens=6, batch=2, repeat=1)
    assert latency.bandwidth_fraction == pytest.approx(
        latency.decode_tokens_per_s * latency.weight_bytes_per_token / latency.read_bandwidth_bytes_per_s
    )
    assert latency.matmul_fraction == pytest.approx(
        latency.prefill_tokens_per_s * latency.prefill_flops_per_token / latency.matmul_flops_per_s
    )
    assert 0 < latency.bandwidth_fraction < 1
    assert 0 < latency.matmul_fraction < 1


def test_a_batch_shares_the_weights_that_a_step_reads(latency):
    checkpoint_bytes = sum(file.stat().st_size for file in tiny_checkpoint("llama").glob("*.safetensors"))
    table_bytes = SMALL["vocab_size"] * SMALL["hidden_size"] * 4
    assert latency.weight_bytes_per_token * 2 == pytest.approx(checkpoint_bytes - table_bytes, rel=0.02)


def test_a_tied_table_is_read_in_every_step():
    with Driver(tiny_config(model=str(tiny_checkpoint("llama-tied")))) as driver:
        model = driver.worker.model
        assert step_weight_bytes(model) == model.weight_bytes


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2-sliding"])
def test_prefill_arithmetic_is_that_of_every_product_and_every_visible_position(name):
    """Counted the slow way: every matrix of the oracle, and every pair of positions of a mask."""
    tokens = 24
    with Driver(tiny_config(model=str(tiny_checkpoint(name)))) as driver:
        spec = driver.worker.model.spec
    layers = tiny_oracle(name).model.layers
    weights = sum(p.numel() for p in layers.parameters() if p.dim() == 2)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    pairs = sum(int(((distance >= 0) & (distance < (window or tokens))).sum()) for window in spec.windows)
    attention = 2 * 2 * pairs * spec.num_heads * spec.head_dim
    head = 2 * spec.vocab_size * spec.hidden_size
    assert prefill_flops(spec, tokens) == 2 * tokens * weights + attention + head


def test_a_batch_beyond_the_seats_and_an_output_without_decoding_are_refused():
    with pytest.raises(ConfigError, match="max_num_seqs 4"):
        measure_latency(tiny_config(), prompt_tokens=4, output_tokens=2, batch=5)
    with pytest.raises(ConfigError, match="at least 2"):
        measure_latency(tiny_config(), prompt_tokens=4, output_tokens=1)


# ---------------------------------------------------------------------- profile


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_the_parts_of_a_profile_add_up_to_the_step(device):
    config = tiny_config(model=str(tiny_checkpoint("qwen3")), device=device)
    profile = profile_step(config, batch=3, context=40, steps=6)
    assert profile.steps == 6
    assert sum(part.us for part in profile.parts) == pytest.approx(profile.step_us)
    assert math.fsum(part.share for part in profile.parts) == pytest.approx(1)
    calls = {part.kind: part.calls for part in profile.parts}
    layers = SMALL["num_hidden_layers"]
    captured = device == "cpu"
    assert calls["attention"] == calls["write kv"] == layers
    assert calls["linear + residual layers.mlp.down" if captured else "linear layers.mlp.down"] == layers
    assert calls["rms_norm + linear head" if captured else "linear head"] == calls["sample"] == calls["embedding"] == 1
    assert calls["rope"] == 2 * layers
    assert calls["norm"] == 2 * layers + (0 if captured else 2)  # the first and the last one; queries and keys
    assert 0 < profile.host_share < 1
    assert HOST in calls


def test_a_profile_knows_the_bytes_of_every_kind_of_weight():
    profile = profile_step(tiny_config(device="reference"), batch=1, context=20, steps=4)
    sizes = {part.kind: part.weight_bytes for part in profile.parts}
    layers, hidden, inner = SMALL["num_hidden_layers"], SMALL["hidden_size"], SMALL["intermediate_size"]
    assert sizes["linear layers.mlp.up"] == 4 * layers * hidden * inner
    assert sizes["linear head"] == 4 * SMALL["vocab_size"] * hidden
    assert sizes["attention"] == 0


def test_a_profile_knows_the_weights_of_products_that_are_computed_as_one():
    profile = profile_step(tiny_config(device="cpu"), batch=1, context=20, steps=4)
    sizes = {part.kind: part.weight_bytes for part in profile.parts}
    layers, hidden, inner = SMALL["num_hidden_layers"], SMALL["hidden_size"], SMALL["intermediate_size"]
    heads = SMALL["num_attention_heads"] + 2 * SMALL["num_key_value_heads"]
    assert sizes["rms_norm + linear + silu_and_mul layers.mlp.gate, up"] == 2 * 4 * layers * hidden * inner
    assert sizes["rms_norm + linear layers.attention.q, k, v"] == 4 * layers * hidden * heads * hidden // 4
    assert sizes["embedding"] == 0


# ---------------------------------------------------------------------- machine and report


def test_memory_of_a_measurement_leaves_no_trace_in_the_peak():
    memory = PeakMemory()
    before = memory.bytes
    with memory.not_counting():
        ballast = bytearray(300_000_000)
        del ballast
    assert memory.bytes < before + 200_000_000


def test_machine_facts_and_stolen_time_are_plain_data():
    assert json.loads(json.dumps(machine_facts()))["cores"] >= 1
    assert 0 <= StolenTime().fraction <= 1


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("peak_rss_bytes", 2**30, "1.07 GB"),
        ("read_bandwidth_bytes_per_s", 52e9, "52.00 GB/s"),
        ("matmul_flops_per_s", 4.46e11, "446.00 GFLOP/s"),
        ("bandwidth_fraction", 0.853, "85.3%"),
        ("output_tokens_per_s", 1234.56, "1,234.6"),
        ("load_s", 0.5, "500.0 ms"),
        ("wall_s", 12.345, "12.35 s"),
        ("steps", 1234, "1,234"),
        ("mean_batch", 7.125, "7.12"),
    ],
)
def test_figures_are_written_with_their_units(name, value, text):
    assert readable(name, value) == text


def test_a_report_that_cannot_be_written_is_refused_before_the_measurement(tmp_path):
    with pytest.raises(ConfigError, match="cannot write"), reported_to(tmp_path / "missing" / "r.json"):
        pytest.fail("the measurement ran")


# ---------------------------------------------------------------------- the command line


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


TINY_FLAGS = ("--device", "reference", "--max-num-seqs", "4", "--kv-blocks", "64")


def test_bench_throughput_writes_every_promised_figure(tmp_path):
    write_workload(tmp_path / "w.jsonl", WORKLOAD)
    files = ("--workload", tmp_path / "w.jsonl", "--json", tmp_path / "r.json")
    result = run("throughput", tiny_checkpoint("llama"), *files, *TINY_FLAGS)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report.keys() >= {
        *("output_tokens_per_s", "total_tokens_per_s", "wall_s", "requests", "steps", "mean_batch", "kv_waste"),
        *("preemptions", "peak_rss_bytes", "machine", "settings"),
    }
    assert report["settings"]["max_num_seqs"] == 4
    assert "api_key" not in report["settings"]
    assert "output_tokens_per_s" in result.output


def test_bench_latency_writes_every_promised_figure(tmp_path):
    sizes = ("--prompt-tokens", "8", "--output-tokens", "3", "--batch", "2", "--repeat", "1")
    result = run("latency", tiny_checkpoint("llama"), *sizes, "--json", tmp_path / "r.json", *TINY_FLAGS)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report.keys() >= {field.name for field in dataclasses.fields(Latency)}
    assert report["batch"] == 2


@pytest.mark.parametrize("counts", [("--sequences", "4", "8"), ("--sequences", "4", "--sequences", "8")])
def test_bench_overhead_takes_several_numbers_of_sequences(tmp_path, counts):
    result = run("overhead", *counts, "--step-ms", "0.2", "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    runs = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert [(each["sequences"], each["async_scheduling"]) for each in runs] == [
        *((4, False), (4, True)),
        *((8, False), (8, True)),
    ]
    assert all(0 <= each["bubble"] < 1 and each["host_us_per_step"]["p50"] > 0 for each in runs)


def test_bench_overhead_writes_a_timeline_of_the_steps_that_it_measured(tmp_path):
    result = run("overhead", "--sequences", "4", "--step-ms", "0.2", "--trace", tmp_path / "t.json")
    assert result.exit_code == 0, result.output
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X" and event["pid"] == 0]
    assert names.count("plan") == names.count("submit") == names.count("forward") == 2 * 400
    assert {round(event["dur"]) for event in events if event["name"] == "forward"} == {200}


def test_bench_overlap_takes_a_shape_in_place_of_a_model(tmp_path, monkeypatch):
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    monkeypatch.setitem(SHAPES, "tiny", {**SHAPES["qwen3-0.6b"], **sizes, **heads})
    monkeypatch.setenv("ROPEWAY_CACHE", str(tmp_path))
    steps = ("--prompt-tokens", "64", "--repeat", "2", "--kv-blocks", "64", "--threads", "1")
    result = run("overlap", "--shape", "tiny", *steps, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert [(each["mode"], each["what"]) for each in report["runs"]] == [
        (mode, kind)
        for overlapped in ("micro_batch", "fused")
        for kind in ("one prompt", "many prompts")
        for mode in ("serial", overlapped)
    ]
    assert all(each["wall_s"] > each["exposed_comm_s"] > 0 for each in report["runs"])
    assert [case["what"] for case in report["crossover"]] == ["many prompts", "one prompt"]
    assert report["settings"]["model"] == "tiny (random weights)"
    assert (tmp_path / "benchmarks" / "tiny-random-0" / "model.safetensors").stat().st_size > 2 * 320 * 64


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--shape", "gpt-2"), f"there is no shape 'gpt-2'; known are {', '.join(SHAPES)}"),
        (("smollm2-135m", "--shape", "qwen3-0.6b"), "MODEL smollm2-135m and --shape qwen3-0.6b exclude each other"),
    ],
)
def test_bench_overlap_refuses_a_strange_shape_and_a_model_beside_one(given, said):
    result = run("overlap", *given)
    assert result.exit_code == 1
    assert said in result.output


@pytest.fixture(scope="module")
def memory_app() -> typer.Typer:
    app = typer.Typer()
    for command in (bench_memory.preemption, bench_memory.prefix):
        app.command()(command)
    return app


def test_bench_preemption_writes_every_cost(tmp_path, memory_app):
    arguments = ["preemption", str(tiny_checkpoint("llama")), "--length", "12", "--length", "20", "--repeat", "1"]
    files = ["--json", str(tmp_path / "r.json"), "--device", "reference", "--block-size", "8"]
    result = CliRunner().invoke(memory_app, [*arguments, *files])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert [(cost["kind"], cost["context_tokens"]) for cost in report["costs"]] == [
        (kind, length) for length in (12, 20) for kind in KINDS
    ]
    assert report["identical"] is True
    assert report["auto_over_better"].keys() == {"12", "20"}
    assert "NO" not in result.output


def test_bench_prefix_writes_what_was_saved_and_what_no_hits_cost(tmp_path, memory_app):
    arguments = ["prefix", str(tiny_checkpoint("llama")), "--prompt-tokens", "60", "--repeat", "1"]
    files = ["--json", str(tmp_path / "r.json"), "--device", "reference", "--block-size", "8"]
    result = CliRunner().invoke(memory_app, [*arguments, *files])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["shared_tokens"], report["cached_tokens"]) == (57, 56)
    assert "cut_fraction" in result.output


def test_a_bad_share_is_told_in_one_line(memory_app):
    result = CliRunner().invoke(memory_app, ["prefix", str(tiny_checkpoint("llama")), "--shared", "2"])
    assert result.exit_code == 1
    assert "at least one token must be shared" in result.output


def test_a_bad_workload_is_told_in_one_line(tmp_path):
    (tmp_path / "w.jsonl").write_text('{"prompt_tokens": 4}')
    result = run("throughput", tiny_checkpoint("llama"), "--workload", tmp_path / "w.jsonl")
    assert result.exit_code == 1
    assert "line 1: output_tokens is missing" in result.output


def test_a_prompt_of_no_tokens_is_refused():
    assert run("latency", tiny_checkpoint("llama"), "--prompt-tokens", "0").exit_code == 2


# ---------------------------------------------------------------------- the scripts under benchmarks/


def test_a_random_checkpoint_is_whole_for_transformers_and_for_ropeway(tmp_path, monkeypatch):
    tiny = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    for name in ("qwen3-0.6b", "smollm2-135m"):
        monkeypatch.setitem(SHAPES, "tiny", {**SHAPES[name], **tiny, **heads})
        folder = random_model("tiny", tmp_path / name)
        _, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not loading["missing_keys"]
        assert not loading["unexpected_keys"]
        with Driver(tiny_config(model=str(folder))) as driver:
            assert driver.worker.model.dtype == "bf16"
            assert driver.run([WorkloadRequest(5, 3)]).requests[0].output_tokens == 3


def test_a_random_checkpoint_is_written_once(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", {**SHAPES["qwen3-0.6b"], "vocab_size": 8, "num_hidden_layers": 1})
    weights = random_model("tiny", tmp_path) / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert random_model("tiny", tmp_path) == weights.parent
    assert weights.stat().st_mtime_ns == written


def test_the_steps_that_are_drawn_take_as_long_as_the_median():
    trace = Trace()
    at = 0.0
    for pause in (1, 1, 9, 2, 2, 2, 1, 8, 1):
        trace.add(COMPUTE, "forward", at, at + 1)
        at += 1 + pause
    assert async_figure.typical_steps(trace, 2) == (17, 23)  # two take 4, 5, 6, 6, 11, 12, 13


def test_a_picture_of_steps_has_a_track_for_the_host_and_one_for_the_device():
    trace = traced(12, forward_s=0.006, sample_s=0.001, pause_s=0.003)
    for step in range(12):
        trace.add("host", "settle", 0.01 * step - 0.003, 0.01 * step - 0.002, step=step)
        trace.add("host", "plan", 0.01 * step - 0.002, 0.01 * step, step=step)
    panel = async_figure.Panel("here", decoding_of(trace, 8, False), trace)
    (axis,) = async_figure.draw([panel]).axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["device", "host"]
    assert axis.get_title(loc="left") == "here, synchronous: the device has nothing to do for 30.0 % of the time"
    assert len(axis.patches) > 4 * async_figure.SHOWN


LOOKS = """swapper     0    10.000500:
\tffffffff821f4dab pv_native_safe_halt ([kernel.kallsyms])
\tffffffff821f68b5 default_idle ([kernel.kallsyms])

python 28515    11.250000:
\tffffffff81b6c5e0 _copy_from_iter ([kernel.kallsyms])
\tffffffff82010783 tcp_sendmsg_locked ([kernel.kallsyms])
\t          10aba4 __send (/usr/lib/x86_64-linux-gnu/libc.so.6)

my worker 28514    11.500000:
\tffffffff81ef7384 tbf_dequeue ([kernel.kallsyms])
\tffffffff82010783 tcp_sendmsg_locked ([kernel.kallsyms])

swapper     0    12.000000:
\tffffffff81ed9fc7 eth_type_trans ([kernel.kallsyms])
\tffffffff81e31462 net_rx_action ([kernel.kallsyms])

python 28514    13.000000:
\t    7f61a48e9d70 [unknown] (/somewhere/_native.cpython-311-x86_64-linux-gnu.so)

python 28514    99.000000:
\t    7f61a48e9d70 [unknown] (/somewhere/_native.cpython-311-x86_64-linux-gnu.so)
"""


def test_what_a_core_does_is_told_by_the_chain_of_calls():
    seen = [(look.time_s, look.part) for look in overlap_profile.looks(LOOKS)]
    assert seen == [
        (10.0005, "idle"),
        (11.25, "Linux: copying"),
        (11.5, "Linux: limiting the rate"),
        (12.0, "Linux: network"),
        (13.0, "Ropeway's kernels"),
        (99.0, "Ropeway's kernels"),
    ]


def test_looks_at_a_core_count_for_the_step_that_ran_then():
    runs = overlap_profile.Runs(intervals=[(10.0, 11.0, "whole"), (11.0, 12.5, "micro-batches"), (12.6, 14.0, "whole")])
    for way, steps in (("whole", 2), ("micro-batches", 1)):
        runs.samples[way] = [Sample(1.0, 0.5, 0.5)] * steps
    look_ms = 1e3 / overlap_profile.LOOKS_PER_S
    got = overlap_profile.milliseconds(overlap_profile.looks(LOOKS), runs)
    assert got == {
        "whole": {"idle": pytest.approx(look_ms / 2), "Ropeway's kernels": pytest.approx(look_ms / 2)},
        "micro-batches": {
            "Linux: copying": pytest.approx(look_ms),
            "Linux: limiting the rate": pytest.approx(look_ms),
            "Linux: network": pytest.approx(look_ms),
        },
        "two halves": {},
    }
