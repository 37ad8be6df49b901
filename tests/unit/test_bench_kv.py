"""``ropeway bench kv``: what it says of room, speed, blocks and unused slots."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from ropeway.bench.kv import TYPES, KVFigures, measure_kv, measure_waste
from ropeway.bench.traces import Trace
from ropeway.cli.bench_kv import kv
from ropeway.config import Config
from ropeway.devices.stored import block_bytes
from ropeway.errors import ConfigError
from ropeway.settings import resolve
from ropeway.simulation.cost_model import DEFAULT_COST_MODEL, read_cost_model
from tests.support.tiny_models import tiny_checkpoint


def tiny_config(**fields: Any) -> Config:
    model = {"model": str(tiny_checkpoint("qwen3")), "device": "reference", "max_num_seqs": 2}
    return resolve({**model, **fields}, environ={}, given_as="argument").config


@pytest.fixture(scope="module")
def figures() -> KVFigures:
    return measure_kv(tiny_config(), context=40, batch=2, steps=1, repeat=1)


def test_every_type_has_its_room_and_a_rate_relative_to_bfloat16(figures: KVFigures) -> None:
    assert [each.dtype for each in figures.types] == list(TYPES)
    assert [each.block_size for each in figures.types] == [16, 16, 16, 32]
    base = figures.types[0].bytes_per_token
    for each in figures.types:
        size = each.block_size
        assert base is not None
        assert each.bytes_per_token is not None
        assert each.bytes_per_token * size == block_bytes(3, 2, 32, size, each.dtype)
        assert each.capacity == pytest.approx(base / each.bytes_per_token)
        assert each.decode_tokens_per_s is not None
        assert each.decode_tokens_per_s > 0
    assert figures.types[0].decode_over_base == 1.0


def test_blocks_are_compared_with_one_piece_of_memory_in_decode_and_prefill(figures: KVFigures) -> None:
    assert figures.paged_over_contiguous.keys() == {"decode", "prefill"}
    assert all(0 < ratio < math.inf for ratio in figures.paged_over_contiguous.values())


def test_a_type_that_the_device_cannot_store_has_the_reason_instead_of_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(dtype: str, block_size: int) -> None:
        if dtype == "int4-full":
            raise ConfigError("not here")

    monkeypatch.setattr("ropeway.devices.reference.check_kv_dtype", check)
    base, full = measure_kv(tiny_config(), context=8, batch=1, steps=1, repeat=1, types=("int4-full",)).types
    assert base.decode_over_base == 1.0
    assert (full.note, full.capacity, full.decode_tokens_per_s) == ("not here", None, None)


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a context of 300 tokens and 6 more is beyond the model's 256"):
        measure_kv(tiny_config(), context=300, steps=2, repeat=2)


def test_waste_is_what_the_last_blocks_of_saturated_seats_leave_unused() -> None:
    cost = read_cost_model(DEFAULT_COST_MODEL)
    trace = Trace(np.full(50, 100), np.full(50, 30), np.arange(50.0))
    small, large = (measure_waste(trace, cost, size) for size in (4, 64))
    assert 0 < small < 0.03 < large < 0.4


def test_bench_kv_writes_and_shows_everything(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(kv)
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0.0,100,30\n1.0,50,9\n")
    sizes = ["--context", "20", "--batch", "1", "--steps", "1", "--repeat", "1", "--device", "reference"]
    files = ["--trace", str(trace), "--json", str(tmp_path / "r.json")]
    result = CliRunner().invoke(app, [str(tiny_checkpoint("qwen3")), *sizes, *files])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert [each["dtype"] for each in report["types"]] == list(TYPES)
    assert 0 < report["kv_waste"] < 0.2
    for words in ("room / bf16", "int4-full", "over one piece of memory, prefill", "held and not used, blocks of 16"):
        assert words in result.output
