"""Checks on the way to the engine, and the n siblings of a request."""

from __future__ import annotations

import numpy as np
import pytest

from ropeway.engine.messages import EngineInfo
from ropeway.engine.submission import MAX_TENANT, Submitter
from ropeway.errors import ContextLengthExceeded, InvalidRequest
from ropeway.request import SamplingParams
from ropeway.tiers import DEFAULT_TIERS

INFO = EngineInfo(
    model="m",
    vocab_size=400,
    max_model_len=64,
    num_blocks=4,
    block_size=16,
    max_num_seqs=8,
    tiers=list(DEFAULT_TIERS),
)


def prepare(prompt: list[int], **params: object) -> list[int]:
    return [new.id for new in Submitter(INFO).prepare(prompt, SamplingParams(**params))]


def test_n_completions_are_one_group_behind_its_first() -> None:
    first, *others = Submitter(INFO).prepare([5, 6], SamplingParams(n=3, seed=9), salt="grüße")
    assert (first.id, first.leader, first.group) == (1, None, True)
    assert [(new.id, new.leader, new.group) for new in others] == [(2, 1, True), (3, 1, True)]
    assert len({new.seed for new in (first, *others)}) == 3
    for new in (first, *others):
        assert new.prompt.dtype == np.int32
        assert new.prompt.tolist() == [5, 6]
        assert new.salt == "grüße".encode()


def test_one_completion_is_no_group_and_ids_are_never_used_again() -> None:
    submitter = Submitter(INFO)
    groups = [submitter.prepare([5], SamplingParams(n=n)) for n in (1, 2, 1)]
    assert [new.id for group in groups for new in group] == [1, 2, 3, 4]
    assert [group[0].group for group in groups] == [False, True, False]


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1])
def test_the_same_seed_gives_the_same_streams(seed: int) -> None:
    seeds = [[new.seed for new in Submitter(INFO).prepare([5], SamplingParams(n=4, seed=seed))] for _ in range(2)]
    assert seeds[0] == seeds[1]
    assert seeds[0][0] == seed % 2**64
    assert all(0 <= each < 2**64 for each in seeds[0])


def test_without_a_seed_one_is_drawn() -> None:
    assert len({Submitter(INFO).prepare([5], SamplingParams())[0].seed for _ in range(5)}) == 5


@pytest.mark.parametrize(
    ("length", "max_tokens", "param"), [(64, 1, "prompt"), (80, None, "prompt"), (12, 60, "max_tokens")]
)
def test_longer_than_the_context_names_all_numbers(length: int, max_tokens: int | None, param: str) -> None:
    with pytest.raises(ContextLengthExceeded) as refused:
        prepare([5] * length, max_tokens=max_tokens)
    assert refused.value.param == param
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    words = ["64 tokens", "4 blocks of 16", f"prompt has {length}"]
    for word in [*words, *([f"{max_tokens} output tokens"] if max_tokens else [])]:
        assert word in refused.value.message


@pytest.mark.parametrize(("length", "max_tokens"), [(63, 1), (63, None), (4, 60)])
def test_what_just_fits_the_context_is_taken(length: int, max_tokens: int | None) -> None:
    assert prepare([5] * length, max_tokens=max_tokens) == [1]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        prepare([])


@pytest.mark.parametrize("bad", [-1, 400, 2**40])
def test_a_token_id_outside_the_vocabulary_is_named(bad: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"token id {bad} .*\(0 to 399\)"):
        prepare([5, bad, 6])
    assert prepare([0, 399]) == [1]


@pytest.mark.parametrize("params", [{"logit_bias": {400: 1.0}}, {"stop_token_ids": (3, 400)}])
def test_an_id_outside_the_vocabulary_in_the_parameters_is_named(params: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=f"{next(iter(params))} names token id 400.* 0 to 399"):
        prepare([5], **params)


def test_tier_tenant_arrival_and_deadline_go_to_every_sibling() -> None:
    group = Submitter(INFO).prepare([5], SamplingParams(n=3), tier=2, tenant="grüße", arrival_s=5.0, deadline_s=7.5)
    assert {(new.tier, new.tenant, new.arrival_s, new.deadline_s) for new in group} == {(2, "grüße", 5.0, 7.5)}


def test_without_a_tier_it_is_the_default_one_and_nobody_in_particular() -> None:
    (new,) = Submitter(INFO).prepare([5], SamplingParams())
    assert (new.tier, new.tenant, new.arrival_s, new.deadline_s) == (1, "", None, None)


@pytest.mark.parametrize("tier", [-1, 3, 100])
def test_a_tier_that_is_none_is_refused(tier: int) -> None:
    with pytest.raises(InvalidRequest, match=f"no tier of rank {tier}; there are 3") as refused:
        Submitter(INFO).prepare([5], SamplingParams(), tier=tier)
    assert refused.value.param == "priority"


def test_a_tenant_has_a_longest_name() -> None:
    assert Submitter(INFO).prepare([5], SamplingParams(), tenant="x" * MAX_TENANT)
    with pytest.raises(InvalidRequest, match="257 characters; the limit is 256") as refused:
        Submitter(INFO).prepare([5], SamplingParams(), tenant="x" * 257)
    assert refused.value.param == "user"


@pytest.mark.parametrize(("field", "param"), [("salt", "cache_salt"), ("tenant", "user")])
def test_a_lone_surrogate_in_a_name_is_refused(field: str, param: str) -> None:
    with pytest.raises(InvalidRequest, match="surrogates") as refused:
        Submitter(INFO).prepare([5], SamplingParams(), **{field: "\ud83e"})
    assert refused.value.param == param
