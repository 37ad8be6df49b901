"""A property test that fails says with which command it fails again."""

from __future__ import annotations

import random
from collections.abc import Generator
from pathlib import Path

import hypothesis.core
import pytest

pytest.register_assert_rewrite("tests.support.world", "tests.support.fake_device", "tests.support.fake_store")

_DRAWN = random.SystemRandom().getrandbits(32)


def _seed(config: pytest.Config) -> str:
    given = config.getoption("--hypothesis-seed")
    return str(_DRAWN) if given is None else str(given)


@pytest.fixture(autouse=True)
def hypothesis_seed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples follow from a seed that is known, where none was given."""
    if request.config.getoption("--hypothesis-seed") is None:
        monkeypatch.setattr(hypothesis.core, "global_force_seed", _DRAWN)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        path = Path(str(item.path)).relative_to(item.config.rootpath)
        command = f"python -m pytest {path} --hypothesis-seed={_seed(item.config)}"
        report.sections.append(("to run this again", command))
    return report
