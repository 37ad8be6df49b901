"""A request's fields as ``BeamSearchParams``, where ``use_beam_search`` asks for such a search.

It follows the model's own log-probabilities. A field that would change what may come next, or that makes no sense with
it, is refused by name unless its value means "off"; the model's recommendations for sampling don't count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ropeway.errors import InvalidRequest
from ropeway.request import BeamSearchParams
from ropeway.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from ropeway.server.sampling import (
    COMPLETION_MAX_TOKENS,
    chat_max_tokens,
    chat_top_logprobs,
    in_chat_words,
    stop_strings,
)
from ropeway.server.structure import structured_by

_OFF: Mapping[str, tuple[Any, ...]] = {
    "temperature": (0,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "seed": (),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "thinking_token_budget": (),
    "prompt_logprobs": (),
    "echo": (False,),
}
"""Field -> values that change nothing; null never does."""


def chat_beams(request: ChatCompletionRequest) -> BeamSearchParams | None:
    """None: no search is asked for. Raises ``InvalidRequest`` naming the field."""
    if not request.use_beam_search:
        return None
    with in_chat_words(request):
        width = 1 if request.n is None else request.n
        return _beams(request, "n", width, chat_max_tokens(request), chat_top_logprobs(request))


def completion_beams(request: CompletionRequest) -> BeamSearchParams | None:
    """The same of a text completion, whose ``best_of`` may say how many beams there are."""
    if not request.use_beam_search:
        return None
    max_tokens = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    n = 1 if request.n is None else request.n
    width, name = (n, "n") if request.best_of is None else (request.best_of, "best_of")
    if width < n:
        raise InvalidRequest(f"best_of is {width}; it must be at least n ({n})", param="best_of")
    return _beams(request, name, width, max_tokens, request.logprobs)


def _beams(
    request: GenerationRequest, width_name: str, width: int, max_tokens: int | None, logprobs: int | None
) -> BeamSearchParams:
    """``width_name``: the field that says the width."""
    if request.stream:
        raise InvalidRequest(
            "a beam search cannot be streamed: which answers are best shows at the end; leave out stream",
            param="stream",
        )
    if request.stream_options is not None:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    for name, off in _OFF.items():
        value = getattr(request, name, None)
        if value is not None and value not in off:
            raise InvalidRequest(_refusal(name), param=name)
    if (field := structured_by(request)) is not None:
        raise InvalidRequest(_refusal(field), param=field)
    try:
        return BeamSearchParams(
            beam_width=width,
            n=1 if request.n is None else request.n,
            max_tokens=max_tokens,
            length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
            ignore_eos=bool(request.ignore_eos),
            stop=stop_strings(request),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            include_stop_str_in_output=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            logprobs=logprobs,
        )
    except InvalidRequest as error:
        if error.param == "beam_width":
            raise InvalidRequest(error.message.replace("beam_width", width_name), param=width_name) from error
        raise


def _refusal(field: str) -> str:
    return f"{field} does not go with use_beam_search, which follows the model's own log-probabilities; leave it out"
