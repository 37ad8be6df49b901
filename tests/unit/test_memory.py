"""Memory limits of control groups, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ropeway.devices.memory import Memory, control_group_limits, host_memory


def group(path: Path, **files: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / f"memory.{name}").write_text(text)


def limits(tmp_path: Path, membership: str) -> list[tuple[int, int]]:
    (tmp_path / "self").write_text(membership)
    return list(control_group_limits(tmp_path / "self", tmp_path / "cgroup"))


def test_version_2_limits_are_found_in_the_group_and_its_ancestors(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root / "a/b", max="1000\n", current="600\n", stat="anon 300\ninactive_file 200\n")
    group(root / "a", max="max\n", current="900\n", stat="")
    group(root, max="5000\n", current="900\n")
    assert limits(tmp_path, "0::/a/b\n") == [(1000, 400), (5000, 900)]


def test_a_container_sees_its_limit_at_the_mounted_root(tmp_path: Path) -> None:
    group(tmp_path / "cgroup", max="4096\n", current="96\n")
    assert limits(tmp_path, "0::/not/mounted/here\n") == [(4096, 96)]


def test_version_1_limits_are_found_too(tmp_path: Path) -> None:
    group(
        tmp_path / "cgroup/memory/job",
        limit_in_bytes="2000\n",
        usage_in_bytes="1500\n",
        stat="cache 9\ntotal_inactive_file 700\n",
    )
    assert limits(tmp_path, "4:memory,hugetlb:/job\n3:cpu:/job\n0::/\n") == [(2000, 800)]


def test_memory_beyond_the_soft_limit_of_version_2_is_not_free(tmp_path: Path) -> None:
    group(tmp_path / "cgroup/a", max="1000\n", high="800\n", current="600\n", stat="")
    assert limits(tmp_path, "0::/a\n") == [(800, 600)]


def test_half_of_the_page_cache_in_use_counts_as_free(tmp_path: Path) -> None:
    group(tmp_path / "cgroup/a", max="1000\n", current="900\n", stat="inactive_file 100\nactive_file 300\n")
    assert limits(tmp_path, "0::/a\n") == [(1000, 650)]


def test_lines_that_are_no_control_group_are_passed_over(tmp_path: Path) -> None:
    group(tmp_path / "cgroup", max="4096\n", current="96\n", stat="a line of four words\nhalf\n")
    assert limits(tmp_path, "\nnonsense\n0::/../..\n") == [(4096, 96)]


def test_the_smallest_of_machine_and_groups_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimpleNamespace(total=10_000, available=7_000)
    monkeypatch.setattr("psutil.virtual_memory", lambda: machine)
    group(tmp_path / "cgroup/a", max="8000\n", current="5000\n", stat="")
    group(tmp_path / "cgroup", max="9000\n", current="8500\n", stat="")
    (tmp_path / "self").write_text("0::/a\n")
    assert host_memory(tmp_path / "self", tmp_path / "cgroup") == Memory(total=8000, available=500)
    assert host_memory(tmp_path / "absent", tmp_path / "cgroup") == Memory(total=10_000, available=7_000)


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert list(control_group_limits(tmp_path / "absent", tmp_path)) == []


def test_available_memory_is_part_of_the_total() -> None:
    memory = host_memory()
    assert 0 < memory.available <= memory.total
