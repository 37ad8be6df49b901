"""Engines and calls to choose from, at random or by hypothesis: small pools, few tokens, everything on at some time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

from hypothesis import strategies as st

from ropeway.request import SamplingParams
from ropeway.tiers import DEFAULT_TIERS, Tier
from tests.support.fake_device import VOCAB
from tests.support.world import Arrival, Setup

TIERS: tuple[tuple[Tier, ...], ...] = (
    DEFAULT_TIERS,
    (
        Tier(name="now", weight=4.0, ttft_s=0.2, tpot_s=0.02, max_queue=2),
        Tier(name="later", queue_limit_s=0.5),
    ),
    (
        Tier(name="first", weight=5.0, queue_limit_s=0.3),
        Tier(name="firm", weight=2.0, ttft_s=0.5, tpot_s=0.05, preemptible=False),
        Tier(name="rest", weight=1.0, max_queue_tokens=40),
        Tier(name="last", max_queue=6),
    ),
    (Tier(name="only", ttft_s=0.1, max_queue=5),),
)
"""Lists of tiers, each with a limit of every kind somewhere."""

# The first of each is the simplest: what a failing example is reduced to where it makes no difference.
_SETUP: dict[str, Sequence[Any]] = {
    "pool_tokens": (160, 96, 64, 64, 48, 48, 32, 24),
    "block_size": (4, 1, 2, 8),
    "max_num_seqs": (8, 5, 4, 3, 2, 1),
    "budget": (64, 32, 16, 8),
    "chunked": (True, True, True, False),
    "prefix_cache": (True, True, True, False),
    "policy": ("priority",) * 4 + ("fcfs", "deadline", "shortest"),
    "admission": ("greedy", "greedy", "watermark", "profile"),
    "batching": ("continuous",) * 6 + ("static", "dynamic"),
    "padded_rows": (False, True),
    "preemption": ("auto", "swap", "swap", "recompute"),
    "step_budget": ("constant", "tpot"),
    "shed": (False, False, True),
    "aging_s": (10.0, 0.05),
    "batch_window_s": (0.0, 0.1),
    "cost_known": (True, True, False),
    "copy_s": (0.0, 1e-4, 1e-2),
    "tiers": TIERS,
    "host_tokens": (0, 8, 32, 100, 400),
}
_ARRIVAL: dict[str, Sequence[Any]] = {
    "shared": (0, 0, 0, 0, 4, 9, 17, 32),
    "own": (1, 2, 3, 4, 7, 12),
    "which": tuple(range(8)),
    "n": (1, 1, 1, 1, 1, 2, 3),
    "max_tokens": (1, 4, 9, 16, 24, 24, 40),
    "min_tokens": (0, 0, 3, 20),
    "logprobs": (None, 1),
    "ignore_eos": (False, True, True),
    "stops": (0, 0, 1, 6),
    "salt": (b"", b"", b"", b"a"),
    "tier": (0, 1, 2, 3),
    "tenant": ("", "", "x", "y"),
    "early_s": (0.0, 0.0, 0.0, 0.05),
    "timeout_s": (None,) * 24 + (0.02, 0.2, 2.0),
}
_PURPOSES: dict[str, dict[str, Sequence[Any]]] = {
    "anything": {},
    "swap": {
        "pool_tokens": (48, 32),
        "host_tokens": (400, 100),
        "max_num_seqs": (8, 5),
        "preemption": ("swap", "swap", "auto"),
        "admission": ("greedy",),
        "batching": ("continuous",),
        "max_tokens": (24, 16, 40),
    },
    "tiers": {
        "max_num_seqs": (2, 3),
        "policy": ("priority",),
        "batching": ("continuous",),
        "tiers": TIERS[:3],
        "max_tokens": (9, 24),
    },
    "shedding": {
        "max_num_seqs": (1, 2),
        "shed": (True,),
        "cost_known": (True,),
        "tiers": (TIERS[1], TIERS[3]),
        "max_tokens": (9, 24),
    },
    "disk": {
        "pool_tokens": (64, 48),
        "host_tokens": (32, 100),
        "prefix_cache": (True,),
        "shared": (0, 9, 17, 32),
    },
    "padding": {
        "batching": ("static", "dynamic"),
        "padded_rows": (True,),
        "max_num_seqs": (5, 2),
    },
}
"""What a workload is to make likely, and the choices that do."""
PURPOSES = tuple(_PURPOSES)


def _setup(pool_tokens: int, block_size: int, host_tokens: int, **others: Any) -> Setup:
    return Setup(
        blocks=pool_tokens // block_size, block_size=block_size, host_blocks=host_tokens // block_size, **others
    )


def _arrival(
    shared: int,
    own: int,
    which: int,
    n: int,
    max_tokens: int,
    min_tokens: int,
    logprobs: int | None,
    ignore_eos: bool,
    stops: int,
    **others: Any,
) -> Arrival:
    """A prompt of ``shared`` tokens that others begin with, too, then ``own`` tokens number ``which``."""
    tail = Random(which).choices(range(1, VOCAB), k=own)
    return Arrival(
        prompt=(*range(1, shared + 1), *tail),
        params=SamplingParams(
            n=n,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            logprobs=logprobs,
            ignore_eos=ignore_eos,
            stop_token_ids=tuple(Random(which).sample(range(1, VOCAB), stops)),
        ),
        **others,
    )


def _options(table: dict[str, Sequence[Any]], purpose: str) -> dict[str, Sequence[Any]]:
    return {name: _PURPOSES[purpose].get(name, choices) for name, choices in table.items()}


def random_setup(random: Random, purpose: str) -> Setup:
    return _setup(**{name: random.choice(choices) for name, choices in _options(_SETUP, purpose).items()})


def random_arrival(random: Random, purpose: str) -> Arrival:
    return _arrival(**{name: random.choice(choices) for name, choices in _options(_ARRIVAL, purpose).items()})


@cache
def setups(purpose: str) -> st.SearchStrategy[Setup]:
    options = _options(_SETUP, purpose).items()
    return st.builds(_setup, **{name: st.sampled_from(choices) for name, choices in options})


@cache
def arrivals(purpose: str) -> st.SearchStrategy[Arrival]:
    options = _options(_ARRIVAL, purpose).items()
    return st.builds(_arrival, **{name: st.sampled_from(choices) for name, choices in options})


SECONDS = (0.0, 0.001, 0.01, 0.1)
"""How far time goes on in a step."""
AHEADS = (0, 1, 1, 1, 2)
