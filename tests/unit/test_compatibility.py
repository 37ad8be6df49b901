"""Options that work together: the table, the validator and the page say the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from ropeway.compatibility import CONFLICTS, NEEDS, OPTIONS, Option, conflict_of
from ropeway.errors import ConfigError
from ropeway.settings import resolve, settings
from tools.features import FILE, written

PAIRS = list(itertools.combinations(OPTIONS, 2))


def values(option: Option, *others: Option) -> dict[str, Any]:
    """What makes a user of these options, the last one's word last."""
    return {name: value for each in (option, *others) for name, value in each.example.items()}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.label)
def test_every_option_is_a_setting_that_its_example_puts_to_use(option: Option) -> None:
    assert option.setting in settings()
    resolved = resolve(dict(option.example), environ={})
    flat = {name: getattr(getattr(resolved.config, s.section), name) for name, s in settings().items()}
    assert option.is_used(flat)
    assert not option.is_used({option.setting: option.off})


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda option: option.label)
def test_the_validator_takes_and_refuses_the_pairs_that_the_table_does(one: Option, other: Option) -> None:
    why = conflict_of(one, other)
    assert why == conflict_of(other, one)
    if one.setting == other.setting:
        return
    if why is not None:
        with pytest.raises(ConfigError) as refused:
            resolve(values(one, other), environ={})
        assert why in refused.value.message
        return
    resolved = resolve(values(one, other), environ={})
    flat = {name: getattr(getattr(resolved.config, s.section), name) for name, s in settings().items()}
    assert one.is_used(flat)
    assert other.is_used(flat)


def test_every_rule_is_of_options_that_the_table_knows() -> None:
    assert {need.option for need in NEEDS} | {need.needed for need in NEEDS} <= set(OPTIONS)
    assert {each for conflict in CONFLICTS for each in (conflict.option, conflict.other)} <= set(OPTIONS)


def test_the_page_of_features_has_the_table_as_it_is() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert written(text) == text, "run python -m tools.features"
