"""Service tiers: which one a request means, and files that define them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ropeway.config import SchedulerConfig
from ropeway.errors import ConfigError, InvalidRequest
from ropeway.scheduling.tiers_file import MAX_TIERS, read_tiers, tiers_of
from ropeway.tiers import DEFAULT_TIERS, Tier, find_tier

TOML = """\
[[tier]]
name = "gold"
weight = 4
ttft_s = 0.5
tpot_s = 2.0
max_queue = 10
max_queue_tokens = 4000
queue_limit_s = 3
preemptible = false

[[tier]]
name = "iron"
"""
YAML = """\
tier:
  - {name: gold, weight: 4, ttft_s: 0.5, tpot_s: 2.0, max_queue: 10, max_queue_tokens: 4000, queue_limit_s: 3,
     preemptible: false}
  - {name: iron, ttft_s: null}
"""
GOLD = Tier(
    name="gold",
    weight=4.0,
    ttft_s=0.5,
    tpot_s=2.0,
    max_queue=10,
    max_queue_tokens=4000,
    queue_limit_s=3.0,
    preemptible=False,
)


def written(folder: Path, *tiers: dict[str, Any]) -> Path:
    path = folder / "tiers.json"
    path.write_text(json.dumps({"tier": tiers}))
    return path


def refusal(path: Path) -> str:
    """What is said of a file that is refused; it always names the file."""
    with pytest.raises(ConfigError) as refused:
        read_tiers(path)
    assert refused.value.param == "tiers"
    assert str(path) in refused.value.message
    return refused.value.message


# --------------------------------------------------------------------------- files


@pytest.mark.parametrize(("suffix", "text"), [(".toml", TOML), (".yaml", YAML), (".yml", YAML)])
def test_a_file_gives_its_tiers_in_order(tmp_path: Path, suffix: str, text: str) -> None:
    path = tmp_path / f"tiers{suffix}"
    path.write_text(text)
    assert read_tiers(path) == (GOLD, Tier(name="iron", weight=1.0))


def test_json_is_the_same(tmp_path: Path) -> None:
    assert read_tiers(written(tmp_path, {"name": "a", "weight": 2}, {"name": "b"})) == (
        Tier(name="a", weight=2.0),
        Tier(name="b"),
    )


def test_without_a_file_there_are_the_default_tiers(tmp_path: Path) -> None:
    assert tiers_of(SchedulerConfig()) == DEFAULT_TIERS
    assert tiers_of(SchedulerConfig(tiers=str(written(tmp_path, {"name": "only"})))) == (Tier(name="only"),)


def test_the_default_tiers_pass_their_own_rules(tmp_path: Path) -> None:
    fields = ("name", "weight", "ttft_s", "tpot_s", "max_queue", "max_queue_tokens", "queue_limit_s", "preemptible")
    tables = [{name: getattr(tier, name) for name in fields} for tier in DEFAULT_TIERS]
    assert read_tiers(written(tmp_path, *tables)) == DEFAULT_TIERS


def test_a_missing_file_another_ending_and_broken_syntax_are_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "none.toml")
    assert "must end in" in refusal(tmp_path / "tiers.ini")
    broken = tmp_path / "tiers.toml"
    broken.write_text("[[tier]\n")
    assert "not valid TOML" in refusal(broken)


@pytest.mark.parametrize("text", ["", "tier = []", "# nothing"])
def test_no_tier_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text(text)
    assert "no tier" in refusal(path)


@pytest.mark.parametrize("content", ["[1]", '"text"', '{"tier": {"name": "a"}}', '{"tier": "a"}', '{"tier": ["a"]}'])
def test_what_is_no_list_of_tables_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tiers.json"
    path.write_text(content)
    assert "table" in refusal(path)


def test_more_tiers_than_the_limit_are_refused(tmp_path: Path) -> None:
    tables = [{"name": f"t{place}"} for place in range(MAX_TIERS + 1)]
    assert len(read_tiers(written(tmp_path, *tables[:MAX_TIERS]))) == MAX_TIERS
    message = refusal(written(tmp_path, *tables))
    assert f"{MAX_TIERS + 1} tiers" in message
    assert str(MAX_TIERS) in message


def test_an_unknown_field_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, {"name": "a"}, {"name": "b", "ttft": 3}))
    assert "tier 2 ('b')" in message
    assert "'ttft'" in message
    assert "did you mean 'ttft_s'" in message
    (tmp_path / "tiers.toml").write_text('[[tiers]]\nname = "a"\n')
    assert "'tier'" in refusal(tmp_path / "tiers.toml")


@pytest.mark.parametrize("name", ["", " ", "-1", "3", "a b", "a,b", "ü", "x" * 65, 5, True, ["a"]])
def test_an_empty_or_unfit_name_is_refused(tmp_path: Path, name: object) -> None:
    message = refusal(written(tmp_path, {"name": name}))
    assert "tier 1" in message
    assert "name is" in message


@pytest.mark.parametrize("table", [{}, {"name": None}, {"weight": 1}])
def test_a_missing_name_is_refused(tmp_path: Path, table: dict[str, object]) -> None:
    assert "tier 1: name is missing" in refusal(written(tmp_path, table))


def test_a_name_used_twice_is_refused(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, {"name": "a"}, {"name": "b"}, {"name": "a"}))
    assert "tier 3 ('a')" in message
    assert "twice" in message


@pytest.mark.parametrize("field", ["ttft_s", "tpot_s", "queue_limit_s"])
@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "0", "-1", "0.0", "1e999", "true", '"1"', "[1]"])
def test_a_target_that_is_no_positive_finite_number_is_refused(tmp_path: Path, field: str, value: str) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text(f'[[tier]]\nname = "a"\n{field} = {value}\n')
    assert f"tier 1 ('a'): {field} " in refusal(path)


@pytest.mark.parametrize("value", ["-0.5", "inf", "nan", '"1"', "true", "9" * 400])
def test_a_weight_that_is_no_finite_number_from_zero_on_is_refused(tmp_path: Path, value: str) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text(f'[[tier]]\nname = "a"\nweight = {value}\n')
    message = refusal(path)
    assert "weight" in message or "not valid TOML" in message


@pytest.mark.parametrize("field", ["max_queue", "max_queue_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "1", True, 2**64])
def test_a_queue_bound_that_is_no_positive_whole_number_is_refused(tmp_path: Path, field: str, value: object) -> None:
    assert f"tier 1 ('a'): {field} " in refusal(written(tmp_path, {"name": "a", field: value}))


@pytest.mark.parametrize("value", [1, "yes", 0])
def test_preemptible_must_be_a_truth_value(tmp_path: Path, value: object) -> None:
    assert "preemptible must be true or false" in refusal(written(tmp_path, {"name": "a", "preemptible": value}))


def test_contradictory_targets_are_refused(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, {"name": "a", "ttft_s": 5, "queue_limit_s": 4}))
    for word in ("tier 1 ('a')", "ttft_s 5", "queue_limit_s 4", "contradict"):
        assert word in message
    assert read_tiers(written(tmp_path, {"name": "a", "ttft_s": 4, "queue_limit_s": 4}))[0].ttft_s == 4


def test_a_tier_lighter_than_one_below_it_is_a_contradiction(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, {"name": "a", "weight": 1}, {"name": "b", "weight": 2}))
    for word in ("tier 2 ('b')", "weight 2", "'a'", "only 1"):
        assert word in message
    assert len(read_tiers(written(tmp_path, {"name": "a"}, {"name": "b"}))) == 2


def test_tokens_slower_than_the_first_are_no_contradiction(tmp_path: Path) -> None:
    assert read_tiers(written(tmp_path, {"name": "a", "ttft_s": 0.1, "tpot_s": 1}))[0].tpot_s == 1


# --------------------------------------------------------------------------- a request's


def test_a_request_names_its_tier_or_gets_the_default_one() -> None:
    assert [find_tier(DEFAULT_TIERS, name) for name in ("interactive", "standard", "batch", None)] == [0, 1, 2, 1]


@pytest.mark.parametrize(("priority", "rank"), [(-1, 0), (0, 1), (1, 2), (-100, 0), (2**62, 2)])
def test_a_number_counts_from_the_default_tier_and_lower_is_more_urgent(priority: int, rank: int) -> None:
    assert find_tier(DEFAULT_TIERS, priority) == rank


def test_without_a_tier_named_standard_the_middle_one_is_the_default() -> None:
    for count, rank in ((1, 0), (2, 0), (3, 1), (4, 1), (5, 2)):
        assert find_tier([Tier(name=f"t{place}") for place in range(count)], None) == rank


def test_an_unknown_tier_is_refused_naming_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match=r"'urgent'.*interactive, standard, batch") as refused:
        find_tier(DEFAULT_TIERS, "urgent")
    assert refused.value.param == "priority"
