"""What crosses the socket comes out as it went in."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from ropeway.config import CacheConfig, Config, ServerConfig
from ropeway.engine.messages import (
    Abort,
    EngineInfo,
    Explain,
    Explained,
    Failed,
    FromEngine,
    Inspect,
    Inspected,
    NewRequest,
    QueueView,
    Record,
    Recorded,
    SeatView,
    Shutdown,
    Start,
    Stats,
    Submit,
    TierStats,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
)
from ropeway.grammar import Grammar
from ropeway.outcome import Finished, LogprobColumns, PromptLogprobColumns, Refusal, Started, StepOutput
from ropeway.request import FinishReason, SamplingParams, Timeline
from ropeway.tiers import DEFAULT_TIERS
from ropeway.wire import encode

EVERY_FIELD = SamplingParams(
    n=2,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    logit_bias={5: -100.0, 7: 1.5},
    seed=2**64 - 1,
    max_tokens=None,
    min_tokens=3,
    stop=("\n", "🚀"),
    stop_token_ids=(9, 11),
    ignore_eos=True,
    logprobs=4,
    prompt_logprobs=3,
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    beam_step=3,
)
LOGPROBS = LogprobColumns(
    row=np.array([1], dtype=np.int32),
    chosen=np.array([-0.25], dtype=np.float32),
    top_ids=np.array([[3, 4]], dtype=np.int32),
    top=np.array([[-0.25, -np.inf]], dtype=np.float32),
)
PROMPT_LOGPROBS = PromptLogprobColumns(
    request=np.array([7], dtype=np.int64),
    position=np.array([1], dtype=np.int32),
    token=np.array([5], dtype=np.int32),
    chosen=np.array([-1.5], dtype=np.float32),
    rank=np.array([3], dtype=np.int32),
    top_ids=LOGPROBS.top_ids,
    top=LOGPROBS.top,
)
TIMELINE = Timeline(
    tier="batch",
    phase="swapped",
    queued_s=0.5,
    prefill_s=0.25,
    decode_s=1.5,
    preempted_s=0.125,
    swapped_s=3.0,
    waits={"slots": 0.5, "blocks": 3.0},
    preemptions={"swap": 1, "recompute": 2},
    output_tokens=7,
    cached_tokens=16,
)
CONSTRAINED = SamplingParams(
    bad_words=("a", "b"),
    allowed_token_ids=(1, 2),
    grammar=Grammar.choice(["a", "grüße"], after="</think>"),
    thinking_budget=7,
    thinking=True,
)
"""What cannot go with ``ignore_eos``."""
TO_ENGINE: list[ToEngine] = [
    Start(Config(), "/m"),
    Start(Config(cache=CacheConfig(kv_memory=0.5), server=ServerConfig(api_key="k")), "/m", [2, 7], 400),
    Submit([]),
    Submit(
        [
            NewRequest(id=1, prompt=np.arange(5, dtype=np.int32), params=EVERY_FIELD, seed=2**64 - 1, group=True),
            NewRequest(
                id=2,
                prompt=np.arange(1, dtype=np.int32),
                params=SamplingParams(),
                seed=0,
                salt=b"\x00\xff",
                leader=1,
                tier=2,
                tenant="grüße",
                arrival_s=12.25,
                deadline_s=1e300,
            ),
        ]
    ),
    Abort([1, 2**62], "disconnect"),
    Explain([1, 2**62]),
    Submit([NewRequest(id=3, prompt=np.arange(2, dtype=np.int32), params=CONSTRAINED, seed=1)]),
    Record(True),
    Inspect(),
    Shutdown(),
]
FROM_ENGINE: list[FromEngine] = [
    StepOutput(ids=np.empty(0, dtype=np.int64), tokens=np.empty(0, dtype=np.int32)),
    StepOutput(
        ids=np.array([1, 2**40], dtype=np.int64),
        tokens=np.array([5, 6], dtype=np.int32),
        finished=[
            Finished(1, FinishReason.STOP, 5, timeline=TIMELINE),
            Finished(3, FinishReason.ERROR, refusal=Refusal("Shed", "why", retry_after_s=2.5)),
        ],
        started=[Started(1, 16)],
        logprobs=LOGPROBS,
        prompt_logprobs=PROMPT_LOGPROBS,
        accepted=[4, 2**40],
    ),
    Stats(
        running=1,
        waiting=2,
        wasted_rows={"eos": 3},
        tiers={"batch": TierStats(swapped=1, refused={"shed": 2}, preemptions={"swap": 3}, predicted_tokens=40)},
        disk_failure="read-only",
        reservation=0.25,
    ),
    EngineInfo(
        model="m",
        vocab_size=400,
        max_model_len=64,
        num_blocks=9,
        block_size=16,
        max_num_seqs=8,
        end_ids=[2, 7],
        load_s=0.5,
        tiers=list(DEFAULT_TIERS),
        warnings=["there is no swap_space"],
    ),
    Explained({}),
    Explained({1: TIMELINE, 2**40: Timeline()}),
    Recorded(),
    Recorded(b'{"traceEvents": []}'),
    Inspected(),
    Inspected(
        seats=[
            SeatView(
                id=2**40,
                tier="batch",
                prompt_tokens=3,
                computed_tokens=4,
                output_tokens=1,
                limit=9,
                blocks=1,
                preemptions=2,
            )
        ],
        queue=[QueueView(id=5, tier="batch", prompt_tokens=7, waits_s=0.25, swapped=True, gated=True)],
        blocks=bytes(range(4)),
    ),
    Failed("OutOfMemory", "no room"),
]


def same(one: Any, other: Any) -> bool:
    """Equality that looks into arrays, their dtypes and shapes."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, msgspec.Struct):
        return all(same(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return bool(one == other)


def test_the_examples_are_of_every_kind_and_set_every_sampling_field() -> None:
    assert {type(message) for message in TO_ENGINE} == set(get_args(ToEngine))
    assert {type(message) for message in FROM_ENGINE} == set(get_args(FromEngine))
    usual = SamplingParams()
    unset = [
        field
        for field in usual.__struct_fields__
        if all(getattr(usual, field) == getattr(params, field) for params in (EVERY_FIELD, CONSTRAINED))
    ]
    assert unset == []


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_a_message_to_the_engine_arrives_as_it_was(message: ToEngine) -> None:
    assert same(decode_to_engine(encode(message)), message)


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda message: type(message).__name__)
def test_a_message_from_the_engine_arrives_as_it_was(message: FromEngine) -> None:
    assert same(decode_from_engine(encode(message)), message)


def test_every_setting_of_a_configuration_arrives() -> None:
    start = decode_to_engine(encode(Start(Config(cache=CacheConfig(block_size=32, prefix_cache=False)), "/m")))
    assert isinstance(start, Start)
    assert dataclasses.asdict(start.config) == dataclasses.asdict(
        Config(cache=CacheConfig(block_size=32, prefix_cache=False))
    )


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_to_engine(encode(Stats()))
    with pytest.raises(TypeError, match="object cannot be sent"):
        encode(object())  # type: ignore[arg-type]
