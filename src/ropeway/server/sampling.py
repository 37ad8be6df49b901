"""A request's sampling fields as ``SamplingParams``: the request's own, else the model's, else the built-in ones."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from ropeway.errors import ConfigError, InvalidRequest
from ropeway.grammar import Grammar
from ropeway.request import SamplingParams
from ropeway.server.limits import MAX_LOGIT_BIAS
from ropeway.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest

logger = logging.getLogger(__name__)

_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_FROM_REQUEST = (
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs"),
)
_DEFAULTS = (*_FROM_MODEL, "presence_penalty", "frequency_penalty")
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for text completions."""


def read_defaults(model: Path) -> dict[str, float]:
    """The sampling fields a model's folder recommends in ``generation_config.json``; {} when it has none.

    What is unusable is passed over with a warning: a recommendation is no reason not to serve.
    """
    try:
        content = json.loads((model / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    defaults: dict[str, float] = {}
    for name in _FROM_MODEL:
        value = content.get(name) if isinstance(content, dict) else None
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidRequest as error:
            logger.warning("the model's generation_config.json is ignored where %s", error.message)
        else:
            defaults[name] = value
    return defaults


def given_defaults(text: str | None) -> dict[str, float]:
    """The setting ``sampling_defaults``. Raises ``ConfigError`` naming what is wrong with it."""
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"sampling_defaults is no JSON: {error}", param="sampling_defaults") from error
    if not isinstance(content, dict):
        raise ConfigError("sampling_defaults must be a JSON object", param="sampling_defaults")
    for name, value in content.items():
        if name not in _DEFAULTS:
            raise ConfigError(
                f"sampling_defaults has {name!r:.40}; it may have {', '.join(_DEFAULTS)}", param="sampling_defaults"
            )
        try:
            SamplingParams(**{name: value})
        except InvalidRequest as error:
            raise ConfigError(f"sampling_defaults: {error.message}", param="sampling_defaults") from error
    return content


def chat_params(
    request: ChatCompletionRequest,
    defaults: Mapping[str, float],
    *,
    grammar: Grammar | None = None,
    show_special_tokens: bool = False,
    thinking: bool = False,
) -> SamplingParams:
    """``show_special_tokens``: whatever the request says. ``thinking``: the prompt ends within the reasoning. Raises
    ``InvalidRequest`` naming the field."""
    with in_chat_words(request):
        params = _params(request, defaults, chat_max_tokens(request), chat_top_logprobs(request), grammar)
        return msgspec.structs.replace(
            params,
            skip_special_tokens=params.skip_special_tokens and not show_special_tokens,
            thinking_budget=request.thinking_token_budget,
            thinking=thinking and request.thinking_token_budget is not None,
        )


def chat_max_tokens(request: ChatCompletionRequest) -> int | None:
    """None: up to the context."""
    return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens


def chat_top_logprobs(request: ChatCompletionRequest) -> int | None:
    """As ``SamplingParams`` has them. Raises ``InvalidRequest``."""
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


@contextlib.contextmanager
def in_chat_words(request: ChatCompletionRequest) -> Iterator[None]:
    """What is raised in here names the fields as chats call them."""
    try:
        yield
    except InvalidRequest as error:
        if error.param == "logprobs":
            raise InvalidRequest(f"top_{error.message}", param="top_logprobs") from error
        if error.param == "max_tokens" and request.max_completion_tokens is not None:
            message = error.message.replace("max_tokens", "max_completion_tokens")
            raise InvalidRequest(message, param="max_completion_tokens") from error
        raise


def completion_params(
    request: CompletionRequest, defaults: Mapping[str, float], *, grammar: Grammar | None = None
) -> SamplingParams:
    """``n`` of the result is how many are generated. Raises ``InvalidRequest`` naming the field."""
    _check_best_of(request)
    max_tokens = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if request.max_tokens is None and request.min_tokens is not None:
        max_tokens = max(max_tokens, request.min_tokens)
    params = _params(request, defaults, 1 if scores(request) else max_tokens, request.logprobs, grammar)
    if request.echo and params.logprobs is not None:
        params = msgspec.structs.replace(params, prompt_logprobs=max(params.logprobs, params.prompt_logprobs or 0))
    if not chooses(request):
        return params
    ranked_by = 0 if params.logprobs is None else params.logprobs
    return msgspec.structs.replace(params, n=request.best_of, logprobs=ranked_by)


def scores(request: CompletionRequest) -> bool:
    """Whether nothing is asked for but the prompt itself. One token is made all the same, and not told."""
    return bool(request.echo) and request.max_tokens == 0


def chooses(request: CompletionRequest) -> bool:
    """Whether only the best of what is generated is told. A beam search does so itself."""
    return not request.use_beam_search and request.best_of is not None and request.best_of != (request.n or 1)


def _check_best_of(request: CompletionRequest) -> None:
    if not chooses(request):
        return
    assert request.best_of is not None
    if request.best_of < (request.n or 1):
        raise InvalidRequest(f"best_of is {request.best_of}; it must be at least n ({request.n or 1})", param="best_of")
    if request.stream:
        raise InvalidRequest("best_of above n cannot be streamed: which is best shows at the end", param="best_of")


def _params(
    request: GenerationRequest,
    defaults: Mapping[str, float],
    max_tokens: int | None,
    logprobs: int | None,
    grammar: Grammar | None,
) -> SamplingParams:
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest(
            "prompt_logprobs cannot be streamed; leave out stream, or use echo and logprobs of /v1/completions",
            param="prompt_logprobs",
        )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if request.length_penalty not in (None, 1.0):
        raise InvalidRequest("length_penalty needs use_beam_search to be true", param="length_penalty")
    given = {name: value for name in _FROM_REQUEST if (value := getattr(request, name)) is not None}
    return SamplingParams(
        **{**defaults, **given},
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=stop_strings(request),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logit_bias=_logit_bias(request.logit_bias or {}),
        bad_words=tuple(request.bad_words or ()),
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        grammar=grammar,
    )


def stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    stop = request.stop
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    if len(given) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias has {len(given)} entries; the limit is {MAX_LOGIT_BIAS}", param="logit_bias")
    for key in given:
        if not re.fullmatch(r"-?[0-9]{1,18}", key):
            raise InvalidRequest(f"logit_bias names {key[:32]!r}, which is no token id", param="logit_bias")
    return {int(key): float(bias) for key, bias in given.items()}
