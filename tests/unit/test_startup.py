"""Parts of a start, and starts of real processes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from pathlib import Path

import pytest

from benchmarks.goals import startup as goal
from ropeway.bench import startup
from ropeway.bench.startup import StartUpFigures, evict, files_of, measure_startup, resident_bytes, start_generate
from ropeway.cli.bench_startup import _given
from ropeway.engine.spawn import SpawnedEngine
from ropeway.engine.startup import StartUp, process_began_s
from ropeway.errors import ConfigError, EngineDead
from tests.support.chat_model import tiny_chat_model

# ---------------------------------------------------------------------- parts


def test_parts_follow_one_another_from_the_beginning_to_now() -> None:
    began = time.monotonic() - 1.0
    start = StartUp(began)
    start.ended("python")
    start.ended("weights")
    assert list(start.parts) == ["python", "weights"]
    assert start.parts["python"] >= 1.0
    assert sum(start.parts.values()) <= time.monotonic() - began


def test_this_process_began_before_now_and_after_the_machine() -> None:
    now = time.monotonic()
    assert process_began_s() < now
    assert now - process_began_s() < time.clock_gettime(time.CLOCK_BOOTTIME)


@pytest.mark.parametrize("text", ["", "1 (x) S 1 2", "1 (x) " + "S " * 30])
def test_a_system_that_does_not_tell_when_a_process_began_is_taken_as_now(tmp_path: Path, text: str) -> None:
    (tmp_path / "stat").write_text(text)
    assert process_began_s(tmp_path / "stat") == pytest.approx(time.monotonic(), abs=1.0)


def test_a_name_with_spaces_and_parentheses_is_no_hindrance(tmp_path: Path) -> None:
    hz = os.sysconf("SC_CLK_TCK")
    ticks = int((time.clock_gettime(time.CLOCK_BOOTTIME) - 5.0) * hz)
    (tmp_path / "stat").write_text("7 (a) b (c) S " + "0 " * 18 + f"{ticks} 0 0\n")
    assert time.monotonic() - process_began_s(tmp_path / "stat") == pytest.approx(5.0, abs=1.0)


# ---------------------------------------------------------------------- an engine process ahead of its parent


def test_a_spawned_engine_that_nobody_needs_is_ended_with_its_folder() -> None:
    with SpawnedEngine() as spawned:
        folder = Path(spawned.address.removeprefix("ipc://")).parent
        assert folder.stat().st_mode & 0o077 == 0
    assert spawned.process.returncode is not None
    assert not folder.exists()
    spawned.close()


def test_a_system_that_lets_no_folder_be_made_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match=r"cannot be started: .*missing.* TMPDIR must be writable"):
        SpawnedEngine()


def test_the_end_of_a_spawned_engine_is_told() -> None:
    async def ended() -> int:
        spawned = SpawnedEngine()
        waiting = asyncio.create_task(spawned.wait())
        await asyncio.sleep(0)
        spawned.process.kill()
        try:
            return await asyncio.wait_for(waiting, 20)
        finally:
            spawned.close()

    assert asyncio.run(ended()) == -9


# ---------------------------------------------------------------------- bench startup


def test_real_starts_are_timed_part_by_part_with_the_memory_of_all_processes() -> None:
    figures = measure_startup([str(tiny_chat_model()), "--threads", "1", "--kv-blocks", "16"], repeat=1)
    assert figures.generate_s > 0.2
    assert figures.serve_s > 0.2
    assert sum(figures.generate_parts_s.values()) == pytest.approx(figures.generate_s)
    assert {"python", "torch", "tokenizer", "weights", "kv_pool", "first_token"} <= figures.generate_parts_s.keys()
    assert {"python", "torch", "parent", "weights", "kv_pool"} <= figures.serve_parts_s.keys()
    assert sum(figures.serve_parts_s.values()) < figures.serve_s
    assert figures.resident_bytes > figures.weight_bytes > 0
    assert figures.kv_pool_bytes > 0
    json.dumps(startup.report(figures))


def test_a_start_that_fails_is_an_error_with_the_words_of_the_process(tmp_path: Path) -> None:
    with pytest.raises(EngineDead, match=r"ended without a token:\n(.*\n)*.*no such"):
        start_generate([str(tmp_path / "missing.gguf")])


def test_memory_of_this_process_is_no_more_than_what_is_resident() -> None:
    import psutil

    assert (
        0
        < resident_bytes(os.getpid())
        <= 1.1 * psutil.Process().memory_info().rss
        + sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))
    )


def test_files_are_those_that_hold_weights_and_stay_readable_when_evicted(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "config.json"):
        (tmp_path / name).write_text("x")
    files = files_of(tmp_path)
    assert [file.name for file in files] == ["a.safetensors", "b.safetensors"]
    evict(files)
    assert files[0].read_text() == "x"
    assert files_of(files[0]) == [files[0]]


def test_flags_are_handed_on_as_they_were_given() -> None:
    flags = {"kv_blocks": 16, "prefix_cache": False, "async_scheduling": True, "dtype": None}
    assert _given(flags) == ["--kv-blocks", "16", "--no-prefix-cache", "--async-scheduling"]


# ---------------------------------------------------------------------- goal 18


FIGURES = StartUpFigures(
    torch_import_s=2.0,
    torch_import_cpu_s=2.0,
    generate_s=4.5,
    generate_cpu_s=5.0,
    generate_beyond_torch_s=1.5,
    serve_s=5.5,
    serve_cpu_s=7.0,
    serve_beyond_torch_s=2.5,
    resident_bytes=1_000_000_000,
    weight_bytes=1_000_000_000,
    kv_pool_bytes=300_000_000,
    generate_parts_s={"python": 1.0, "torch": 2.0},
    serve_parts_s={"python": 1.0, "parent": 0.1},
    runs=[],
)


def test_a_large_model_is_judged_by_its_whole_start_and_a_small_one_beyond_torch() -> None:
    large, small = goal._large(goal.Measured("x", FIGURES)), goal._small(goal.Measured("x", FIGURES))
    assert [(check.figure, check.verdict) for check in large] == [(4.5, "met"), (5.5, "missed")]
    assert [(check.figure, check.verdict) for check in small] == [(1.5, "met"), (2.5, "missed")]


def test_memory_is_judged_by_weights_pool_and_half_a_gigabyte() -> None:
    assert goal._memory(goal.Measured("x", FIGURES)).figure == pytest.approx(0.5)
    heavy = dataclasses.replace(FIGURES, resident_bytes=2_100_000_000)
    assert goal._memory(goal.Measured("x", heavy)).verdict == "missed"
