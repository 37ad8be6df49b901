"""Which engine of a fleet a request goes to."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropeway.engine.messages import NewRequest
from ropeway.request import SamplingParams
from ropeway.simulation.router import LeastTokens, Prefix, RoundRobin, Router, RouterName, make_router

_ids = iter(range(1, 1_000_000))


def request(tokens: int, *, shared: int = 0, family: int = 0, salt: bytes = b"", **params: Any) -> NewRequest:
    """A prompt whose first ``shared`` tokens are its family's, the others its own."""
    number = next(_ids)
    prompt = np.random.default_rng(number).integers(1000, 30_000, tokens, dtype=np.int32)
    prompt[:shared] = family
    return NewRequest(id=number, prompt=prompt, params=SamplingParams(**params), seed=0, salt=salt)


def test_round_robin_takes_the_engines_in_turn_whatever_comes():
    router = RoundRobin(3)
    assert [router.route(request(n)) for n in (5000, 1, 70, 2, 9)] == [0, 1, 2, 0, 1]


# ---------------------------------------------------------------------- least tokens


def test_least_tokens_goes_where_the_fewest_tokens_are_outstanding():
    router = LeastTokens(3)
    long, *_ = (request(n, max_tokens=1) for n in (1000, 10, 20))
    assert router.route(long) == 0
    assert router.route(request(400, max_tokens=1)) == 1
    assert router.route(request(500, max_tokens=1)) == 2
    assert router.route(request(300, max_tokens=1)) == 1
    assert router.route(request(10, max_tokens=1)) == 2
    router.ended(long.id, 1)
    assert router.route(request(10, max_tokens=1)) == 0


def test_outputs_count_as_predicted_from_those_seen_and_at_most_as_asked_for():
    router = LeastTokens(2)
    for _ in range(2000):
        seen = request(1, max_tokens=4096)
        router.route(seen)
        router.ended(seen.id, 40)
    router.route(request(100, max_tokens=4096))
    assert router.tokens.max() == pytest.approx(140, abs=1)
    router.route(request(100, max_tokens=10))
    assert sorted(router.tokens) == pytest.approx([110, 140], abs=1)


def test_a_refused_request_teaches_nothing_about_lengths():
    router = LeastTokens(1)
    router.route(request(100, max_tokens=4096))
    before = float(router.tokens[0])
    refused = request(100, max_tokens=4096)
    router.route(refused)
    router.ended(refused.id, 0)
    assert router.tokens[0] == before
    another = request(100, max_tokens=4096)
    router.route(another)
    assert router.tokens[0] == 2 * before


@given(st.lists(st.tuples(st.integers(1, 500), st.booleans()), max_size=60), st.integers(1, 5))
def test_what_has_ended_is_outstanding_nowhere(calls: list[tuple[int, bool]], engines: int):
    router = LeastTokens(engines)
    running: list[NewRequest] = []
    for tokens, ends in calls:
        running.append(request(tokens))
        assert 0 <= router.route(running[-1]) < engines
        if ends:
            router.ended(running.pop(0).id, 7)
    for each in running:
        router.ended(each.id, 7)
    assert router.tokens == pytest.approx(np.zeros(engines), abs=1e-6)


# ---------------------------------------------------------------------- prefixes


def prefix_router(engines: int, blocks: int = 1000) -> Prefix:
    return Prefix(engines, block_size=16, blocks=blocks)


def finished(router: Router, *, tokens: int, **shape: Any) -> int:
    """Where a request goes that ends before the next one."""
    sent = request(tokens, **shape)
    engine = router.route(sent)
    router.ended(sent.id, 8)
    return engine


def test_prompts_that_begin_alike_go_to_the_same_engine():
    router = prefix_router(4)
    busy = request(40)
    assert router.route(busy) == 0  # so that the least loaded one is another
    home = finished(router, tokens=200, shared=160, family=1)
    assert home != 0
    router.route(request(40))
    assert [finished(router, tokens=200, shared=160, family=1) for _ in range(5)] == [home] * 5


def test_the_longest_prefix_decides():
    router = prefix_router(2)
    both = [request(48, shared=32, family=1) for _ in range(2)]
    assert [router.route(each) for each in both] == [0, 1]
    for each in both:
        router.ended(each.id, 1)
    router.route(busy := request(1))
    assert finished(router, tokens=200, shared=160, family=1) == 1
    router.ended(busy.id, 1)
    # The first engine, equally idle, knows two blocks of it, the other ten.
    assert finished(router, tokens=200, shared=160, family=1) == 1


def test_less_than_a_block_in_common_is_no_prefix():
    router = prefix_router(2)
    assert router.route(request(40, shared=15, family=1)) == 0
    assert router.route(request(40, shared=15, family=1)) == 1


def test_prompts_of_different_salts_have_nothing_in_common():
    router = prefix_router(2)
    assert router.route(request(64, shared=64, family=1, salt=b"a")) == 0
    assert router.route(request(64, shared=64, family=1, salt=b"b")) == 1


def test_an_engine_with_far_more_than_its_share_is_passed_by():
    router = prefix_router(4)
    went = Counter(router.route(request(200, shared=160, family=1)) for _ in range(40))
    assert len(went) >= 3  # three with 4/3 of the mean each are within the bound
    assert max(went.values()) <= 1.5 * 40 / 4 + 1


def test_no_more_is_remembered_of_an_engine_than_its_cache_could_hold():
    router = prefix_router(1, blocks=10)
    for family in range(50):
        finished(router, tokens=64, shared=64, family=family)
    assert len(router._recent[0]) == 10
    assert set(router._holders) == set(router._recent[0])


def test_of_a_long_prompt_the_beginning_is_remembered_longest():
    router = Prefix(2, block_size=16, blocks=4)
    assert finished(router, tokens=160, shared=160, family=1) == 0
    router.route(request(1))
    assert finished(router, tokens=32, shared=32, family=1) == 0


@pytest.mark.parametrize("name", get_args(RouterName))
def test_every_router_gives_each_engine_work_and_forgets_what_ended(name: RouterName):
    router = make_router(name, 3, block_size=16, num_blocks=100)
    sent = [request(300) for _ in range(30)]
    assert set(map(router.route, sent)) == {0, 1, 2}
    for each in sent:
        router.ended(each.id, 5)
