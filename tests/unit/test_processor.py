"""Cores this process may use, on machines made of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from ropeway.devices.processor import available_cores, granted_processors


@pytest.fixture
def four_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 4, 5})
    monkeypatch.setattr("os.cpu_count", lambda: 8)


def cores(root: Path) -> int:
    return available_cores(root, root / "membership")


def machine(root: Path, siblings: dict[int, str], quota: str | None = None) -> Path:
    (root / "membership").write_text("0::/\n")
    for processor, names in siblings.items():
        file = root / f"devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(names + "\n")
    if quota is not None:
        (root / "fs/cgroup").mkdir(parents=True)
        (root / "fs/cgroup/cpu.max").write_text(quota + "\n")
    return root


@pytest.mark.usefixtures("four_processors")
def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    assert cores(machine(tmp_path, {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"})) == 2


@pytest.mark.usefixtures("four_processors")
def test_processors_of_unknown_topology_are_cores_of_their_own(tmp_path: Path) -> None:
    assert cores(tmp_path) == 4


@pytest.mark.usefixtures("four_processors")
@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 4), ("300000 100000", 3), ("150000 100000", 2), ("5000 100000", 1)]
)
def test_a_control_groups_quota_limits_the_cores(tmp_path: Path, quota: str, expected: int) -> None:
    siblings = {0: "0", 1: "1", 4: "4", 5: "5"}
    assert cores(machine(tmp_path, siblings, quota)) == expected


@pytest.mark.usefixtures("four_processors")
def test_the_quota_of_an_inner_group_limits_the_cores(tmp_path: Path) -> None:
    machine(tmp_path, {0: "0", 1: "1", 4: "4", 5: "5"}, "max 100000")
    (tmp_path / "fs/cgroup/service").mkdir()
    (tmp_path / "fs/cgroup/service/cpu.max").write_text("200000 100000\n")
    (tmp_path / "membership").write_text("0::/service\n")
    assert granted_processors(tmp_path, tmp_path / "membership") == 2.0
    assert cores(tmp_path) == 2


@pytest.mark.usefixtures("four_processors")
@pytest.mark.parametrize(("quota", "expected"), [("-1", 4), ("150000", 2)])
def test_version_1_has_quotas_too(tmp_path: Path, quota: str, expected: int) -> None:
    folder = tmp_path / "fs/cgroup/cpu/job"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text(quota + "\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "membership").write_text("3:cpu,cpuacct:/job\n")
    assert cores(tmp_path) == expected
