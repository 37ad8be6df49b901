"""Which words of advice a machine gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ropeway.bench.advice import Advice, advise
from ropeway.bench.surroundings import Load, Surroundings, look_around
from ropeway.devices.memory import Memory

GIB = 1 << 30
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16")
AVX2 = ("sse2", "avx", "avx2", "fma", "f16c")
ALL = ("portable", "avx2", "avx512")
GOOD = Surroundings(
    processors=8,
    cores=8,
    granted=None,
    nodes=1,
    large_pages="madvise",
    governors=(),
    cpu_flags=frozenset((*AVX2, *AVX512)),
    memory=Memory(total=32 * GIB, available=30 * GIB),
    machine_memory=32 * GIB,
    load=Load(others=0.0, busiest=None, stolen_fraction=0.0),
)


def given(around: Surroundings = GOOD, threads: int = 8, isa: str | None = "avx512", **changes: object) -> list[Advice]:
    return advise(replace(around, **changes), threads=threads, isa=isa, built=ALL)  # type: ignore[arg-type]


def only(advice: list[Advice], topic: str) -> Advice:
    assert [each.topic for each in advice] == [topic]
    return advice[0]


def test_a_quiet_machine_used_as_it_is_needs_no_advice() -> None:
    assert given() == []


def test_more_threads_than_processors_are_too_many() -> None:
    advice = only(given(threads=12), "threads")
    assert "12 threads take turns on 8 processors" in advice.found
    assert "--threads 8" in advice.change
    assert "taskset" in advice.change


def test_hardware_threads_of_one_core_are_no_cores() -> None:
    advice = only(given(threads=8, cores=4), "threads")
    assert "8 threads on 4 cores" in advice.found
    assert advice.change == "--threads 4"


def test_more_threads_than_a_quota_grants_stand_still_together() -> None:
    advice = given(threads=8, granted=2.0)
    assert [each.topic for each in advice] == ["threads", "quota"]
    assert "quota of 2 processors" in advice[0].found
    assert "--threads 2" in advice[0].change
    assert "grant 2 of 8 cores" in advice[1].found


def test_a_quota_that_is_no_whole_number_makes_the_last_thread_wait() -> None:
    advice = only(given(threads=2, granted=1.5), "quota")
    assert "1.5 of 8" in advice.found
    assert "whole number" in advice.change


def test_a_quota_beyond_the_cores_is_none() -> None:
    assert given(granted=16.0) == []


def test_idle_cores_are_told() -> None:
    advice = only(given(threads=2), "threads")
    assert "leave 6 of 8 cores idle" in advice.found
    assert advice.change == "--threads 8"


def test_several_memory_nodes_want_an_engine_each() -> None:
    assert "numactl" in only(given(nodes=2), "memory nodes").change


@pytest.mark.parametrize(("mode", "topics"), [("never", ["large pages"]), ("always", []), (None, [])])
def test_large_pages_that_are_switched_off_are_told(mode: str | None, topics: list[str]) -> None:
    assert [each.topic for each in given(large_pages=mode)] == topics


def test_other_processes_are_told_with_the_busiest() -> None:
    load = Load(others=1.04, busiest="stress (process 12)", stolen_fraction=0.0)
    advice = only(given(load=load), "other processes")
    assert advice.found == "they take 1.0 of 8 processors, most of all stress (process 12)"
    assert given(load=replace(load, others=0.1)) == []
    assert "most of all" not in only(given(load=replace(load, busiest=None)), "other processes").found


def test_stolen_time_is_told() -> None:
    advice = only(given(load=Load(others=0.0, busiest=None, stolen_fraction=0.12)), "stolen time")
    assert "12%" in advice.found


@pytest.mark.parametrize(("total", "change"), [(4 * GIB, "memory.max"), (32 * GIB, "smaller model")])
def test_little_memory_is_told_with_what_limits_it(total: int, change: str) -> None:
    advice = only(given(memory=Memory(total=total, available=GIB)), "memory")
    assert "1.0 GiB are available" in advice.found
    assert change in advice.change


def test_a_governor_that_saves_power_is_told() -> None:
    advice = only(given(governors=("performance", "powersave")), "clock rate")
    assert "powersave" in advice.found
    assert "performance" in advice.change
    assert given(governors=("performance",)) == []


def test_instructions_that_the_kernels_were_built_without_are_told() -> None:
    advice = only(advise(GOOD, threads=8, isa="avx2", built=("portable", "avx2")), "instruction sets")
    assert "has avx512, but the kernels were compiled without it" in advice.found
    assert "compiler" in advice.change


def test_instructions_that_the_processor_lacks_are_told() -> None:
    half = frozenset((*AVX2, *AVX512[:4]))
    advice = only(given(cpu_flags=half, isa="avx2"), "instruction sets")
    assert "without avx512_vnni, avx512_bf16" in advice.found
    advice = only(given(cpu_flags=frozenset({"sse2"}), isa="portable"), "instruction sets")
    assert "no avx2, fma, f16c" in advice.found
    assert given(cpu_flags=frozenset(AVX2), isa="avx2") == []


def test_another_architecture_gets_no_advice_about_x86() -> None:
    assert given(cpu_flags=frozenset({"asimd", "bf16"}), isa="portable") == []
    assert given(isa=None) == []


def test_this_machine_gets_advice_about_twice_its_threads() -> None:
    around = look_around(watch_s=0.05)
    topics = [each.topic for each in advise(around, threads=2 * around.processors, isa=None)]
    assert "threads" in topics
