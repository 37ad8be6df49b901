"""Sampling parameters as users give them."""

from __future__ import annotations

from typing import Any

import pytest

from ropeway.engine.messages import NewRequest, Submit, decode_to_engine
from ropeway.errors import InvalidRequest
from ropeway.request import MAX_STOP_TOKEN_IDS, SamplingParams
from ropeway.wire import encode


def test_a_single_stop_string_is_one_stop_and_lists_are_taken() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[7]).stop_token_ids == (7,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ignore_eos", "no"),
        ("skip_special_tokens", 1),
        ("include_stop_str_in_output", None),
        ("stop", ("\ud800",)),
        ("stop", ("",)),
        ("stop", (5,)),
        ("stop", ("x" * 1025,)),
        ("stop_token_ids", tuple(range(MAX_STOP_TOKEN_IDS + 1))),
        ("stop_token_ids", ("7",)),
        ("n", True),
        ("n", 0),
        ("temperature", float("nan")),
        ("temperature", "0.7"),
        ("temperature", 10**400),
        ("logit_bias", {5: -(10**400)}),
        ("top_p", 0.0),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("seed", 2**64),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {"5": 1.0}),
    ],
)
def test_a_value_of_the_wrong_kind_or_size_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field
    assert field.split("_")[0] in refused.value.message


def test_whatever_can_be_constructed_can_be_sent() -> None:
    import numpy as np

    params = SamplingParams(
        stop="END",  # type: ignore[arg-type]
        stop_token_ids=[7],  # type: ignore[arg-type]
        temperature=0,
        logit_bias={5: 1},
        seed=2**64 - 1,
        max_tokens=None,
    )
    new = NewRequest(id=1, prompt=np.array([1], dtype=np.int32), params=params, seed=1)
    received = decode_to_engine(encode(Submit([new])))
    assert isinstance(received, Submit)
    assert received.requests[0].params == params
