"""Output-length profiles: what is drawn from them, how they fade, and their file."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ropeway.scheduling.lengths import LONGEST, MAX_TENANTS, MAX_TIERS, OWN, LengthProfiles

Column = NDArray[np.int64]
MODEL = "smollm2-135m"


def lognormal(rng: np.random.Generator, count: int) -> Column:
    return np.maximum(rng.lognormal(5.0, 0.9, count), 1).astype(np.int64)


def bimodal(rng: np.random.Generator, count: int) -> Column:
    return np.where(rng.random(count) < 0.6, rng.integers(5, 30, count), rng.integers(700, 1100, count))


def exponential(rng: np.random.Generator, count: int) -> Column:
    return 1 + rng.exponential(200, count).astype(np.int64)


def constant(rng: np.random.Generator, count: int) -> Column:
    return np.full(count, 256)


def profiles(lengths: Column, **kwargs: Any) -> LengthProfiles:
    result = LengthProfiles(**kwargs)
    for length in lengths.tolist():
        result.observe("standard", "someone", length)
    return result


def draws(found: LengthProfiles, generated: int, count: int, cap: int = LONGEST) -> Column:
    """Remaining lengths of so many requests, evenly over the distribution."""
    handle = found.handle("standard", "someone")
    u = (np.arange(count) + 0.5) / count
    return found.draw(np.full(count, handle), np.full(count, generated), np.full(count, cap), u)


def distance(drawn: Column, sample: Column) -> float:
    """Largest difference of the two distribution functions (Kolmogorov and Smirnov)."""
    points = np.unique(np.concatenate([drawn, sample]))
    below = [np.searchsorted(np.sort(each), points, side="right") / len(each) for each in (drawn, sample)]
    return float(np.abs(below[0] - below[1]).max())


# ---------------------------------------------------------------------- draws


@pytest.mark.parametrize("distribution", [lognormal, exponential, bimodal])
@pytest.mark.parametrize("generated", [0, 3, 20, 100, 300, 800])
def test_what_is_drawn_is_distributed_like_the_lengths_beyond_what_is_generated(
    distribution: Any, generated: int
) -> None:
    rng = np.random.default_rng(generated)
    found = profiles(distribution(rng, 20_000), half_life=20_000)
    sample = distribution(rng, 400_000)
    sample = sample[sample > generated] - generated
    # In one bin, and where only few have come, the shape is a guess.
    tolerance = 0.04 if generated < 300 else 0.08
    assert distance(draws(found, generated, 4000), sample) < tolerance


@pytest.mark.parametrize("distribution", [lognormal, exponential, bimodal])
def test_mean_and_quantiles_are_those_of_the_observed_lengths(distribution: Any) -> None:
    rng = np.random.default_rng(1)
    found = profiles(distribution(rng, 20_000), half_life=20_000)
    handle = found.handle("standard", "someone")
    sample = distribution(rng, 400_000)
    assert found.mean(handle) == pytest.approx(sample.mean(), rel=0.04)
    assert found.mean(handle, 150) == pytest.approx(np.minimum(sample, 150).mean(), rel=0.04)
    assert found.mean(handle, 1) == 1
    for q in (0.1, 0.5, 0.9, 0.99):
        length = found.quantile(handle, q)
        assert np.mean(sample < length) - 0.02 < q < np.mean(sample <= length) + 0.02


def test_answers_of_one_length_are_predicted_to_within_a_bin() -> None:
    found = profiles(constant(np.random.default_rng(0), 5000))
    assert np.quantile(np.abs(draws(found, 0, 1000) - 256), 0.95) < 256 * 0.07
    assert np.quantile(draws(found, 200, 1000), 0.95) <= 256 * 1.07 - 200


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, LONGEST), max_size=30),
    st.lists(
        st.tuples(st.integers(0, LONGEST), st.integers(1, LONGEST), st.floats(0, 1, exclude_max=True)),
        min_size=1,
        max_size=8,
    ),
)
def test_draws_stay_between_one_token_and_the_cap(observed: list[int], asked: list[tuple[int, int, float]]) -> None:
    found = profiles(np.array(observed, dtype=np.int64))
    handle = found.handle("standard", "someone")
    generated, room, u = (np.array(column) for column in zip(*asked, strict=True))
    for shape in ((len(asked),), (3, len(asked)), (2, 1, len(asked))):
        drawn = found.draw(np.full(len(asked), handle), generated, generated + room, np.broadcast_to(u, shape))
        assert drawn.shape == shape
        assert drawn.dtype == np.int64
        assert (drawn >= 1).all()
        assert (drawn <= room).all()


def test_a_request_past_its_cap_is_taken_to_end_with_the_next_token() -> None:
    found = LengthProfiles()
    assert found.quantile(0, 0.99, generated=10, cap=10) == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 5000), max_size=50), st.integers(0, 6000))
def test_a_larger_number_draws_a_longer_rest(observed: list[int], generated: int) -> None:
    found = profiles(np.array(observed, dtype=np.int64))
    assert (np.diff(draws(found, generated, 500)) >= 0).all()


def test_the_predicted_end_of_a_running_request_never_comes_nearer_by_its_going_on() -> None:
    found = profiles(lognormal(np.random.default_rng(2), 5000))
    handle = found.handle("standard", "someone")
    ends = [generated + found.quantile(handle, 0.5, generated) for generated in range(0, 3000, 7)]
    assert (np.diff(ends) >= 0).all()


@pytest.mark.parametrize("generated", [3_000, 20_000, 200_000])
def test_a_request_that_outlives_everything_observed_is_expected_to_go_on_as_long_again(generated: int) -> None:
    found = profiles(exponential(np.random.default_rng(3), 5000))
    handle = found.handle("standard", "someone")
    half = found.quantile(handle, 0.5, generated)
    assert 0.6 * generated < half < 1.5 * generated
    assert found.quantile(handle, 0.5, generated, cap=generated + 50) == 50


def test_draws_of_many_classes_at_once_are_those_of_each_alone() -> None:
    rng = np.random.default_rng(4)
    found = LengthProfiles()
    for number in range(40):
        for length in rng.integers(1, 50 * (number + 1), 30).tolist():
            found.observe(f"tier-{number % 3}", f"tenant-{number}", length)
    handles = rng.integers(0, 40, 200)
    generated, u = rng.integers(0, 2000, 200), rng.random((2, 200))
    cap = generated + rng.integers(1, 3000, 200)
    together = found.draw(handles, generated, cap, u)
    columns = handles.tolist(), generated.tolist(), cap.tolist()
    alone = [
        [found.quantile(handle, q, so_far, most) for handle, so_far, most, q in zip(*columns, row, strict=True)]
        for row in u.tolist()
    ]
    assert together.tolist() == alone


# ---------------------------------------------------------------------- classes


def test_before_anything_is_observed_answers_are_some_256_tokens_long() -> None:
    found = LengthProfiles()
    handle = found.handle("standard", "")
    assert found.mean(handle) == pytest.approx(256, rel=0.02)
    assert 120 < found.quantile(handle, 0.5) < 200
    assert found.mean(handle, 50) < 50


def test_the_prior_fades_with_observations() -> None:
    errors = []
    found = LengthProfiles()
    handle = found.handle("standard", "someone")
    for _ in range(4):
        for _ in range(100):
            found.observe("standard", "someone", 20)
        errors.append(found.mean(handle) - 20)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 5


def test_a_new_tenant_goes_by_its_tier_and_a_new_tier_by_everybody() -> None:
    found = LengthProfiles()
    waiting = found.handle("standard", "waiting")
    for _ in range(500):
        found.observe("standard", "someone", 40)
        found.observe("batch", "someone", 2000)
    assert found.quantile(waiting, 0.5) == found.quantile(found.handle("standard", "new"), 0.5)
    assert found.quantile(waiting, 0.5) == pytest.approx(40, rel=0.07)
    new = found.handle("interactive", "new")
    assert found.quantile(new, 0.25) == pytest.approx(40, rel=0.07)
    assert found.quantile(new, 0.75) == pytest.approx(2000, rel=0.07)


def test_a_tenant_with_answers_of_its_own_kind_parts_from_its_tier() -> None:
    found = LengthProfiles()
    for _ in range(1000):
        found.observe("standard", "many", 40)
    for seen in range(200):
        found.observe("standard", "other", 900)
        if seen + 1 < OWN:
            assert found.quantile(found.handle("standard", "other"), 0.5) < 50
    assert found.quantile(found.handle("standard", "other"), 0.5) == pytest.approx(900, rel=0.07)
    assert found.quantile(found.handle("standard", "many"), 0.5) == pytest.approx(40, rel=0.07)


def test_a_handle_stays_the_same_and_small() -> None:
    found = LengthProfiles()
    handles = [found.handle(f"tier-{number % 3}", f"tenant-{number}") for number in range(100)]
    assert handles == [found.handle(f"tier-{number % 3}", f"tenant-{number}") for number in range(100)]
    assert len(set(handles)) == 100
    assert max(handles) < 104


def test_tenants_beyond_the_limit_share_the_class_of_their_tier() -> None:
    found = LengthProfiles()
    own = {found.handle("standard", f"tenant-{number}") for number in range(MAX_TENANTS)}
    late = {found.handle("standard", f"late-{number}") for number in range(1000)}
    assert len(own) == MAX_TENANTS
    assert len(late) == 1
    assert not late & own
    for _ in range(100):
        found.observe("standard", "late-5", 77)
    assert found.quantile(late.pop(), 0.5) == pytest.approx(77, rel=0.07)


def test_tiers_beyond_the_limit_share_the_class_of_everybody() -> None:
    found = LengthProfiles()
    for number in range(MAX_TIERS):
        found.handle(f"tier-{number}", "someone")
    assert found.handle("one-more", "someone") == 0
    found.observe("one-more", "someone", 10)
    assert found.mean(0) < 256


def test_old_observations_fade() -> None:
    rng = np.random.default_rng(6)
    found = profiles(rng.integers(900, 1100, 20_000))
    for length in rng.integers(40, 60, 6000).tolist():
        found.observe("standard", "someone", length)
    assert np.mean(draws(found, 0, 1000) > 500) == pytest.approx(0.125, abs=0.03)  # three half-lives
    for length in rng.integers(40, 60, 8000).tolist():
        found.observe("standard", "someone", length)
    assert np.mean(draws(found, 0, 1000) > 500) < 0.03


def test_every_new_observation_counts_while_there_are_few() -> None:
    found = LengthProfiles()
    handle = found.handle("standard", "someone")
    means = [found.mean(handle)]
    for _ in range(30):
        found.observe("standard", "someone", 5)
        means.append(found.mean(handle))
    assert (np.diff(means) < 0).all()


def test_an_answer_without_a_token_is_passed_over_and_an_endless_one_counts_as_the_longest() -> None:
    found = LengthProfiles()
    found.observe("standard", "someone", 0)
    assert found.mean(0) == pytest.approx(256, rel=0.02)
    for _ in range(100):
        found.observe("standard", "someone", 1 << 40)
    assert found.quantile(0, 0.9) <= LONGEST
    assert found.quantile(0, 0.9) > LONGEST / 1.1


@pytest.mark.parametrize("half_life", [0.0, -5.0, float("nan")])
def test_a_half_life_that_is_not_positive_is_refused(half_life: float) -> None:
    with pytest.raises(ValueError, match="half-life"):
        LengthProfiles(half_life)


# ---------------------------------------------------------------------- the file


def busy(seed: int = 8) -> LengthProfiles:
    rng = np.random.default_rng(seed)
    found = LengthProfiles()
    for _ in range(3000):
        tenant = int(rng.integers(0, 6))
        found.observe(f"tier-{tenant % 2}", f"tenant-{tenant}", int(rng.exponential(30 + 100 * tenant)) + 1)
    return found


def test_a_profile_that_was_saved_and_loaded_predicts_the_same(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "profile.json"
    saved, loaded = busy(), LengthProfiles()
    early = loaded.handle("tier-1", "tenant-5")
    assert saved.save(path, MODEL) is None
    assert loaded.load(path, MODEL) is None
    assert [each.name for each in path.parent.iterdir()] == ["profile.json"]
    for number in range(6):
        names = f"tier-{number % 2}", f"tenant-{number}"
        old, new = saved.handle(*names), loaded.handle(*names)
        assert loaded.mean(new) == pytest.approx(saved.mean(old), rel=0.02)
        assert loaded.quantile(new, 0.9) == pytest.approx(saved.quantile(old, 0.9), rel=0.03)
    assert loaded.handle("tier-1", "tenant-5") == early
    assert loaded.mean(0) == pytest.approx(saved.mean(0), rel=0.02)


def test_loading_adds_to_what_was_observed_without_outgrowing_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    found = profiles(np.full(20_000, 50))
    assert found.save(path, MODEL) is None
    other = profiles(np.full(20_000, 1000))
    assert other.load(path, MODEL) is None
    assert np.mean(draws(other, 0, 1000) > 500) == pytest.approx(0.5, abs=0.03)
    for _ in range(2000):  # a half-life
        other.observe("standard", "someone", 50)
    assert np.mean(draws(other, 0, 1000) > 500) == pytest.approx(0.25, abs=0.03)


def test_a_missing_file_is_an_empty_profile(tmp_path: Path) -> None:
    found = LengthProfiles()
    assert found.load(tmp_path / "none.json", MODEL) is None
    assert found.mean(0) == pytest.approx(256, rel=0.02)


def test_a_profile_of_another_model_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    busy().save(path, "another/model")
    found = LengthProfiles()
    assert found.load(path, MODEL) == (
        f"the length profile {path} is of the model 'another/model', not 'smollm2-135m'; it is ignored"
    )
    assert found.mean(0) == pytest.approx(256, rel=0.02)


@pytest.mark.parametrize(("field", "value"), [("version", 99), ("format", "something else")])
def test_a_profile_of_another_version_or_kind_is_ignored(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "profile.json"
    busy().save(path, MODEL)
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value, "unheard_of": 1}))
    reason = LengthProfiles().load(path, MODEL)
    assert reason is not None
    assert str(value) in reason
    assert reason.endswith("it is ignored")


def damage_by_cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def damage_by_zeros(content: bytes) -> bytes:
    return bytes(len(content))


def damage_by_length(content: bytes) -> bytes:
    fields = json.loads(content)
    fields["classes"][0]["counts"][0][0] = 0
    return json.dumps(fields).encode()


def damage_by_weight(content: bytes) -> bytes:
    fields = json.loads(content)
    fields["classes"][0]["counts"][0][1] = -1.0
    return json.dumps(fields).encode()


def damage_by_type(content: bytes) -> bytes:
    fields = json.loads(content)
    fields["classes"][0]["counts"] = {"1": 2}
    return json.dumps(fields).encode()


def empty(content: bytes) -> bytes:
    return b""


def latin(content: bytes) -> bytes:
    return content.replace(b"tenant-1", b"tenant-\xe9")


@pytest.mark.parametrize(
    "damage",
    [damage_by_cut, damage_by_zeros, damage_by_length, damage_by_weight, damage_by_type, empty, latin],
)
def test_a_damaged_profile_is_ignored_with_a_reason(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "profile.json"
    busy().save(path, MODEL)
    path.write_bytes(damage(path.read_bytes()))
    found = LengthProfiles()
    reason = found.load(path, MODEL)
    assert reason is not None
    assert str(path) in reason
    assert "damaged" in reason
    assert found.mean(0) == pytest.approx(256, rel=0.02)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_no_content_whatever_breaks_loading(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(content)
    assert LengthProfiles().load(path, MODEL) is not None


def test_a_profile_that_cannot_be_read_is_ignored_with_a_reason(tmp_path: Path) -> None:
    reason = LengthProfiles().load(tmp_path, MODEL)
    assert reason == f"the length profile {tmp_path} could not be read: {os.strerror(errno.EISDIR)}"


def test_a_profile_that_cannot_be_written_says_why_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    reason = busy().save(tmp_path / "taken", MODEL)
    assert reason is not None
    assert str(tmp_path / "taken") in reason
    assert [each.name for each in tmp_path.iterdir()] == ["taken"]
    (tmp_path / "file").write_text("")
    assert busy().save(tmp_path / "file" / "profile.json", MODEL) is not None


def test_a_save_that_dies_midway_leaves_the_old_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    busy().save(path, MODEL)
    before = path.read_bytes()

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    reason = busy(9).save(path, MODEL)
    assert reason is not None
    assert os.strerror(errno.ENOSPC) in reason
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["profile.json"]


def test_of_many_saved_tenants_the_busier_half_is_loaded_so_that_new_ones_find_room(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    found = LengthProfiles()
    for number in range(MAX_TENANTS):
        for _ in range(1 + number % 2):
            found.observe("standard", f"tenant-{number}", 10)
    found.save(path, MODEL)
    loaded = LengthProfiles()
    assert loaded.load(path, MODEL) is None
    tier = loaded.handle("standard", "")
    news = {loaded.handle("standard", f"new-{number}") for number in range(MAX_TENANTS // 2 - 1)}
    assert len(news) == MAX_TENANTS // 2 - 1
    assert loaded.handle("standard", "late") not in news | {tier}
    loaded.save(path, MODEL)
    kept = {each["tenant"] for each in json.loads(path.read_text())["classes"]}
    assert kept - {None} == {f"tenant-{number}" for number in range(1, MAX_TENANTS, 2)}
