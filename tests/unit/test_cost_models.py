"""What steps take: as files, fitted from timed steps, and looked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from ropeway.bench.fit import fit_steps, measure_fit
from ropeway.bench.workload import mixed_workload
from ropeway.cli.bench_fit import fit
from ropeway.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from ropeway.errors import ConfigError, RopewayError
from ropeway.simulation.cost_model import DEFAULT_COST_MODEL, CostModel, read_cost_model, shipped_cost_models
from ropeway.simulation.search import nelder_mead
from tests.support.tiny_models import tiny_checkpoint

FIELDS: dict[str, Any] = {
    "name": "a device",
    "a_s": 0.01,
    "b_s_per_token": 1e-4,
    "c_s_per_kv_token": 1e-7,
    "kv_tokens": 4096,
}


def written(tmp_path: Path, **fields: Any) -> str:
    file = tmp_path / "model.json"
    file.write_bytes(msgspec.json.encode({**FIELDS, **fields}))
    return str(file)


# ---------------------------------------------------------------------- files


def test_a_step_takes_a_constant_and_so_much_per_token_and_per_cached_token():
    model = CostModel(**FIELDS)
    assert model.step_s(0, 0) == pytest.approx(0.01)
    assert model.step_s(200, 10_000) == pytest.approx(0.01 + 0.02 + 0.001)


def test_copies_take_their_bytes_over_the_bandwidth():
    model = CostModel(**FIELDS, kv_bytes_per_token=1000, copy_bytes_per_s=1e6)
    assert model.copy_s(3, block_size=16) == pytest.approx(0.048)


@pytest.mark.parametrize("name", shipped_cost_models())
def test_a_shipped_cost_model_is_found_by_its_name_and_says_where_it_comes_from(name: str):
    model = read_cost_model(name)
    assert model.name == name
    assert model.measured in model.provenance
    assert model.step_s(1, 1) > 1e-3


def test_the_default_and_one_for_each_measured_run_are_shipped():
    traces = Path(__file__).resolve().parents[2] / "benchmarks" / "traces"
    measured = {file.name for file in traces.glob("measured_*.csv") if not file.stem.endswith("_timeseries")}
    assert len(measured) == 4
    assert {read_cost_model(name).measured for name in shipped_cost_models()} == measured
    assert read_cost_model(DEFAULT_COST_MODEL).kv_tokens == 41_408


def test_a_written_cost_model_reads_back_the_same(tmp_path: Path):
    model = CostModel(**FIELDS, provenance="made up")
    (tmp_path / "model.json").write_bytes(model.to_json())
    assert read_cost_model(str(tmp_path / "model.json")) == model


def test_an_unknown_name_is_refused_with_the_names_there_are():
    with pytest.raises(ConfigError, match=f"no cost model 'h100'.*{DEFAULT_COST_MODEL}"):
        read_cost_model("h100")


def test_a_folder_is_no_cost_model(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_cost_model(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"a_s": -0.1}, r"`float` >= 0.0 - at `\$.a_s`"),
        ({"b_s_per_token": "fast"}, r"at `\$.b_s_per_token`"),
        ({"kv_tokens": 0}, r"`int` >= 1 - at `\$.kv_tokens`"),
        ({"ahead": 2}, r"at `\$.ahead`"),
        ({"d_s": 1.0}, "unknown field `d_s`"),
        ({"a_s": 0.0, "b_s_per_token": 0.0, "c_s_per_kv_token": 0.0}, "steps take no time"),
        ({"block_size": 24}, "block_size 24 must be a power of two"),
    ],
)
def test_a_file_with_a_wrong_field_is_refused_by_its_name(tmp_path: Path, fields: dict[str, Any], complaint: str):
    file = written(tmp_path, **fields)
    with pytest.raises(ConfigError, match=complaint) as refused:
        read_cost_model(file)
    assert file in refused.value.message


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"name": "x"}', b'{"name": "\xff"}', b'{"a_s": 1e999}'])
def test_a_file_that_is_no_cost_model_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "model.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.json"):
        read_cost_model(str(tmp_path / "model.json"))


# ---------------------------------------------------------------------- fitting timed steps


def steps(seed: int = 0, count: int = 400) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, 64, count)
    tokens = (rows + np.where(rng.random(count) < 0.2, rng.integers(16, 512, count), 0)).astype(np.float64)
    return tokens, rows * rng.integers(100, 2000, count).astype(np.float64)


def test_the_coefficients_behind_exact_times_are_found():
    tokens, kv_tokens = steps()
    found = fit_steps(tokens, kv_tokens, 0.004 + 2e-5 * tokens + 3e-8 * kv_tokens)
    assert (found.a_s, found.b_s_per_token, found.c_s_per_kv_token) == pytest.approx((0.004, 2e-5, 3e-8), rel=1e-6)
    assert found.p99_error_fraction < 1e-9


def test_stalled_steps_and_noise_move_them_little():
    rng = np.random.default_rng(1)
    tokens, kv_tokens = steps()
    seconds = (0.004 + 2e-5 * tokens + 3e-8 * kv_tokens) * rng.normal(1, 0.02, len(tokens))
    seconds[::50] += 0.5
    found = fit_steps(tokens, kv_tokens, seconds)
    assert (found.a_s, found.b_s_per_token, found.c_s_per_kv_token) == pytest.approx((0.004, 2e-5, 3e-8), rel=0.1)


def test_a_coefficient_that_would_be_negative_is_0_and_the_others_fit():
    tokens, kv_tokens = steps()
    found = fit_steps(tokens, kv_tokens, 0.004 + 2e-5 * tokens - 1e-8 * kv_tokens + 0.002)
    assert found.c_s_per_kv_token == 0.0
    assert found.a_s > 0
    assert abs(found.total_error_fraction) < 0.02


def test_steps_that_were_not_timed_are_left_out():
    tokens, kv_tokens = steps()
    seconds = 0.004 + 2e-5 * tokens + 3e-8 * kv_tokens
    seconds[:100] = 0.0
    assert fit_steps(tokens, kv_tokens, seconds).steps == 300


def test_steps_of_one_size_tell_nothing_and_are_refused():
    ones = np.ones(100)
    with pytest.raises(RopewayError, match="too few sizes"):
        fit_steps(ones, ones, ones)


def test_a_real_engine_s_steps_make_a_cost_model_that_can_be_read_back(tmp_path: Path):
    config = Config(
        model=ModelConfig(model=str(tiny_checkpoint("llama"))),
        cache=CacheConfig(kv_blocks=128, block_size=8),
        scheduler=SchedulerConfig(max_num_seqs=8, max_batched_tokens=64),
    )
    done: list[tuple[int, int]] = []
    model, how_well = measure_fit(config, requests=12, progress=lambda *counts: done.append(counts))
    assert how_well.steps >= 30
    assert model.step_s(8, 500) > 0
    assert (model.kv_tokens, model.block_size, model.max_num_seqs, model.max_batched_tokens) == (1024, 8, 8, 64)
    # Two layers of keys and values, as the pool of 1,024 tokens holds them.
    assert model.kv_bytes_per_token % 2 == 0
    assert done[-1][0] == done[-1][1]
    (tmp_path / "model.json").write_bytes(model.to_json())
    assert read_cost_model(str(tmp_path / "model.json")) == model


def test_too_few_requests_to_fit_are_refused():
    config = Config(
        model=ModelConfig(model=str(tiny_checkpoint("llama"))),
        cache=CacheConfig(kv_blocks=128, block_size=8),
        scheduler=SchedulerConfig(max_num_seqs=8, max_batched_tokens=64),
    )
    seed = next(
        seed for seed in range(100) if mixed_workload(1, output_tokens=(16, 64), seed=seed)[0].output_tokens < 25
    )
    with pytest.raises(RopewayError, match="run more requests"):
        measure_fit(config, requests=1, seed=seed)


# ---------------------------------------------------------------------- searching


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=4))
def test_the_search_finds_the_bottom_of_a_bowl(bottom: list[float]):
    found, height = nelder_mead(
        lambda point: float(((point - bottom) ** 2 * np.arange(1, len(bottom) + 1)).sum()),
        [0.0] * len(bottom),
        step=0.5,
        tolerance=1e-4,
        most_evaluations=2000,
    )
    assert found == pytest.approx(bottom, abs=0.01)
    assert height < 1e-3


def test_the_search_follows_a_bent_valley():
    def rosenbrock(point: Any) -> float:
        return float((1 - point[0]) ** 2 + 100 * (point[1] - point[0] ** 2) ** 2)

    found, _ = nelder_mead(rosenbrock, [-1.0, 1.0], step=0.3, tolerance=1e-6, most_evaluations=1000)
    assert found == pytest.approx([1.0, 1.0], abs=1e-3)


@pytest.mark.parametrize("most", [4, 10, 37])
def test_the_search_ends_with_the_iteration_that_used_its_evaluations_up(most: int):
    calls = 0

    def value(point: Any) -> float:
        nonlocal calls
        calls += 1
        return float(np.sin(37 * point).sum())

    nelder_mead(value, [0.0, 0.0, 0.0], step=1.0, tolerance=0.0, most_evaluations=most)
    assert most <= calls <= most + 5


def test_a_search_without_a_coordinate_is_refused():
    with pytest.raises(ValueError, match="at least one coordinate"):
        nelder_mead(lambda point: 0.0, [], step=1.0, tolerance=1.0, most_evaluations=1)


# ---------------------------------------------------------------------- the command


def fitted(*arguments: str) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(fit)
    flags = ("--kv-blocks", "128", "--block-size", "8", "--max-num-seqs", "8", "--max-batched-tokens", "64")
    return CliRunner().invoke(app, [str(tiny_checkpoint("llama")), *flags, *arguments], env={"COLUMNS": "200"})


def test_the_command_writes_a_file_that_the_simulator_takes(tmp_path: Path):
    result = fitted("--requests", "10", "--json", str(tmp_path / "mine.json"))
    assert result.exit_code == 0, result.output
    assert read_cost_model(str(tmp_path / "mine.json")).max_num_seqs == 8
    assert "b_s_per_token" in result.stdout


def test_the_command_refuses_a_file_that_cannot_be_written_before_it_runs(tmp_path: Path):
    result = fitted("--json", str(tmp_path / "nowhere" / "mine.json"))
    assert result.exit_code == 1
    assert "cannot write to" in result.stderr
