"""A property test that fails says with which command it fails again."""

from __future__ import annotations

import random
from collections.abc import Generator

import hypothesis.core
import pytest
from hypothesis.internal.conjecture import providers

for _module in ("world", "watchdog", "verdicts", "fake_device", "fake_store"):
    pytest.register_assert_rewrite(f"tests.support.{_module}")

_DRAWN = random.SystemRandom().getrandbits(32)


@pytest.fixture(autouse=True)
def same_examples_for_a_seed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples follow from a seed that is known, where none was given, and from nothing else.

    Hypothesis also tries constants that it finds in the modules that happen to be loaded; not here."""
    if request.config.getoption("--hypothesis-seed") is None:
        monkeypatch.setattr(hypothesis.core, "global_force_seed", _DRAWN)
    if hasattr(providers, "_get_local_constants"):
        providers.CONSTANTS_CACHE.cache.clear()
        monkeypatch.setattr(providers, "_get_local_constants", providers.Constants)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        given = item.config.getoption("--hypothesis-seed")
        path = item.nodeid.partition("::")[0]
        command = f"python -m pytest {path} --hypothesis-seed={_DRAWN if given is None else given}"
        report.sections.append(("to run this again", command))
    return report
