"""Factors of key channels: what they say, and that the same model always gets the same."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from ropeway.devices.base import Device
from ropeway.devices.stream import InlineStream
from ropeway.execution import calibration
from ropeway.execution.calibration import EXPONENT, LARGEST_FACTOR, Calibration, calibrate, warning
from ropeway.loading.open import open_checkpoint
from ropeway.models.model import Model
from ropeway.models.registry import load_model
from ropeway.parallel.communicator import SingleProcess
from tests.support.devices import device
from tests.support.llms import one, tiny_llm
from tests.support.tiny_models import tiny_checkpoint


def load(on: Device, name: str = "qwen2") -> Model:
    return load_model(open_checkpoint(tiny_checkpoint(name)), on, SingleProcess())


def key_factors(model: Model, on: Device, max_model_len: int = 256) -> torch.Tensor:
    found = calibrate(model, on, "int8", max_model_len).key_factors
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["qwen2", "qwen3-tied-biased", "llama-multi-query"])
def test_factors_are_equal_within_a_rotated_pair_and_one_on_the_geometric_mean(name: str) -> None:
    on = device("reference")
    model = load(on, name)
    factors = key_factors(model, on)
    assert factors.shape == (model.num_layers, model.num_kv_heads, model.head_dim)
    first, second = factors.chunk(2, -1)
    assert torch.equal(first, second)
    assert not torch.equal(factors, torch.ones_like(factors))
    torch.testing.assert_close(factors.log().mean(-1), torch.zeros(factors.shape[:2]), atol=1e-5, rtol=0)


def test_factors_are_the_same_bits_every_time_and_for_any_number_of_threads() -> None:
    device("cpu")  # skips where there is none
    from ropeway.devices.cpu.device import CpuDevice

    found = []
    for threads in (1, 3, 1):
        on = CpuDevice(threads=threads, stream=InlineStream())
        found.append(key_factors(load(on), on))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_both_devices_find_nearly_the_same_factors() -> None:
    here, there = (key_factors(load(device(name)), device(name)) for name in ("reference", "cpu"))
    torch.testing.assert_close(here, there, rtol=1e-4, atol=0)


def test_a_channel_of_outliers_gets_a_part_of_its_size_and_no_more_than_the_largest_factor() -> None:
    largest = torch.ones(1, 1, 8)
    largest[..., 1] = 16
    factors = calibration._factors(largest)[0, 0]
    assert factors[1] == factors[5] == pytest.approx(8**EXPONENT)  # 16 over the mean of one in four
    assert factors[0] == factors[4] == pytest.approx(0.5**EXPONENT)
    assert calibration._factors(torch.where(largest > 1, 1e9, 1.0)).max() == LARGEST_FACTOR


@pytest.mark.parametrize("nothing", [0.0, math.nan, math.inf])
def test_heads_of_which_nothing_can_be_learnt_are_left_alone(nothing: float) -> None:
    assert torch.equal(calibration._factors(torch.full((1, 2, 8), nothing)), torch.ones(1, 2, 8))


def test_a_dead_pair_moves_the_others_by_a_bounded_factor() -> None:
    largest = torch.ones(1, 1, 64)
    largest[..., [3, 35]] = 0
    factors = calibration._factors(largest)[0, 0]
    assert factors[3] < 1 / LARGEST_FACTOR * 1.2
    assert factors[0] < 1.5


def test_a_short_context_is_calibrated_with_what_it_has() -> None:
    on = device("reference")
    assert key_factors(load(on), on, 1).isfinite().all()


def test_types_that_are_not_quantised_need_no_calibration() -> None:
    on = device("reference")
    for dtype in ("fp32", "bf16"):
        assert calibrate(load(on), on, dtype, 256) == Calibration(None, 0.0)


def test_coarser_types_cost_more_and_none_is_out_of_bounds() -> None:
    on = device("reference")
    int8, int4, full = (calibrate(load(on), on, dtype, 256) for dtype in ("int8", "int4", "int4-full"))
    assert 0 <= int8.cost < int4.cost < full.cost < 0.1
    assert full.key_factors is None


def test_a_cost_above_two_percent_is_told_with_what_to_do() -> None:
    assert warning("int8", 0.02) is None
    told = warning("int4-full", 0.031)
    assert told is not None
    for words in ("kv_dtype int4-full", "+3.1%", "ropeway bench perplexity", "int8 or bf16"):
        assert words in told
    assert warning("int4", math.nan) is not None


def test_a_costly_type_is_a_warning_at_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(calibration, "WARN_ABOVE", 0.0)
    with tiny_llm(device="reference", kv_dtype="int4") as llm:
        (told,) = llm.info.warnings
    assert told.startswith("kv_dtype int4 may cost this model +")
    assert told in caplog.text
    with tiny_llm(device="reference", kv_dtype="bf16") as llm:
        assert llm.info.warnings == []


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_blocks_on_disk_that_were_divided_by_other_factors_are_foreign(
    kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(3, 103))
    fields = {"device": "reference", "kv_dtype": kv_dtype, "swap_space": 0.01, "disk_cache": str(tmp_path / "kv")}
    with tiny_llm(**fields) as llm:
        want = one(llm, prompt, max_tokens=2)
        while llm.engine.stats().disk_blocks < 6:
            one(llm, [5], max_tokens=1)
    with tiny_llm(**fields) as llm:
        again = one(llm, prompt, max_tokens=2)
        assert (again.token_ids, again.cached_tokens) == (want.token_ids, 96)
    monkeypatch.setattr(calibration, "LARGEST_FACTOR", 1.01)
    with tiny_llm(**fields) as llm:
        assert one(llm, prompt, max_tokens=2).cached_tokens == 0
        assert llm.engine.stats().disk_hits == 0
