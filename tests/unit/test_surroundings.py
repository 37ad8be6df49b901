"""What a machine tells about itself, on machines made of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from ropeway.bench.surroundings import Load, _Ticks, chosen_word, look_around

PROCESSORS = frozenset({0, 1})


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def ticks(proc: Path, processors: dict[int, str], own: int = 0, **processes: int) -> _Ticks:
    """A /proc whose process 7 is this one; ``processes`` are named pidN."""
    lines = ["cpu  0 0 0 0 0 0 0 0 0 0", *(f"cpu{number} {times} 0 0" for number, times in processors.items())]
    write(proc / "stat", "\n".join([*lines, "intr 1 2 3"]) + "\n")
    for pid, spent in {"7": own, **{name.removeprefix("pid"): spent for name, spent in processes.items()}}.items():
        write(proc / pid / "stat", f"{pid} (a (b) c) S 1 1 1 0 -1 0 0 0 0 0 {spent} 0 0 0 20 0 1 0 100 0 0\n")
    if not (proc / "self").exists():
        (proc / "self").symlink_to("7")
    return _Ticks(proc, PROCESSORS)


#                         user nice system idle iowait irq softirq steal
IDLE = {0: "0 0 0 0 0 0 0 0", 1: "0 0 0 0 0 0 0 0"}


def test_what_others_compute_is_what_was_busy_but_for_this_process(tmp_path: Path) -> None:
    before = ticks(tmp_path, IDLE)
    later = ticks(tmp_path, {0: "40 0 10 50 0 0 0 0", 1: "0 0 0 100 0 0 0 0", 2: "100 0 0 0 0 0 0 0"}, own=30)
    assert before.until(later) == Load(others=pytest.approx(0.2), busiest=None, stolen_fraction=0.0)


def test_the_busiest_process_is_named(tmp_path: Path) -> None:
    before = ticks(tmp_path, IDLE, pid12=5, pid13=100)
    later = ticks(tmp_path, {0: "100 0 0 0 0 0 0 0", 1: "0 0 0 100 0 0 0 0"}, pid12=85, pid13=120)
    assert before.until(later).busiest == "a (b) c (process 12)"


def test_time_that_the_host_took_is_no_ones_load(tmp_path: Path) -> None:
    before = ticks(tmp_path, IDLE)
    later = ticks(tmp_path, {0: "0 0 0 80 0 0 0 20", 1: "0 0 0 100 0 0 0 0"})
    assert before.until(later) == Load(others=0.0, busiest=None, stolen_fraction=0.1)


def test_without_ticks_nothing_is_said_about_load(tmp_path: Path) -> None:
    assert _Ticks(tmp_path, PROCESSORS).until(_Ticks(tmp_path, PROCESSORS)) == Load(0.0, None, 0.0)


@pytest.mark.parametrize(
    ("text", "word"), [("always [madvise] never\n", "madvise"), ("[never]", "never"), ("", None), ("always", None)]
)
def test_the_chosen_word_is_the_one_in_brackets(text: str, word: str | None) -> None:
    assert chosen_word(text) == word


def test_a_machine_of_files_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    write(proc / "cpuinfo", "processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: none\n")
    write(proc / "meminfo", "MemTotal:       1000 kB\nMemFree:  1 kB\n")
    write(proc / "self/cgroup", "0::/job\n")
    for number in range(4):
        cpu = sys / f"devices/system/cpu/cpu{number}"
        write(cpu / "topology/thread_siblings_list", f"{number % 2},{number % 2 + 2}\n")
        write(cpu / "cpufreq/scaling_governor", "powersave\n" if number else "performance\n")
        (cpu / f"node{number % 2}").mkdir()
    write(sys / "kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    write(sys / "fs/cgroup/job/cpu.max", "150000 100000\n")
    write(sys / "fs/cgroup/job/memory.max", "400000\n")
    write(sys / "fs/cgroup/job/memory.current", "300000\n")
    around = look_around(proc, sys, watch_s=0)
    assert (around.processors, around.cores, around.granted, around.nodes) == (4, 2, 1.5, 2)
    assert (around.large_pages, around.governors) == ("never", ("performance", "powersave"))
    assert around.cpu_flags == {"fpu", "avx2", "fma"}
    assert (around.memory.total, around.memory.available) == (400_000, 100_000)
    assert around.machine_memory == 1000 * 1024


def test_a_machine_that_tells_nothing_is_taken_as_it_is(tmp_path: Path) -> None:
    around = look_around(tmp_path, tmp_path, watch_s=0)
    assert around.cores == around.processors >= 1
    assert (around.granted, around.large_pages, around.governors, around.machine_memory) == (None, None, (), None)


def test_this_machine_can_be_looked_at() -> None:
    around = look_around(watch_s=0.05)
    assert 1 <= around.cores <= around.processors
    assert 0 <= around.load.others <= around.processors
    assert 0 <= around.load.stolen_fraction <= 1
    assert around.memory.available > 0
