"""The bodies of the HTTP API: OpenAI's, with vLLM's extra fields.

Requests are strict about types (``"0.7"`` is no number, ``true`` no count); null means absent, as OpenAI has it.
Ranges of sampling fields are checked by ``SamplingParams``, the only place that knows them. Which other fields are
refused, and which are let pass, is said in ``fields.py``.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ropeway.request import FinishReason


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    """One more chunk at the end, without choices, with the usage of the whole request."""


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    """Absent: any object."""
    strict: bool | None = None
    """Schemas are followed to the letter, strict or not."""


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's way to say what the answer must look like."""

    type: str
    """``text``, ``json_object`` or ``json_schema``."""
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of them."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class FunctionDefinition(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, kw_only=True):
    type: str = "function"
    function: FunctionDefinition


class NamedFunction(msgspec.Struct, kw_only=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    type: str = "function"
    function: NamedFunction


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What chat and text completions have in common."""

    model: str | None = None
    """A served name; absent: the first of them."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    """Token id, as text, -> bias."""
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    """Prefixes in the cache are shared only under the same salt."""
    priority: int | str | None = None
    """A tier by name, or by number as vLLM has it: 0 is the default tier, lower is more urgent. The header
    ``X-Ropeway-Tier`` says the same; this field wins."""
    user: str | None = None
    """Whose request it is: users of one tier get equal shares of it."""
    timeout: float | None = None
    """Seconds from its arrival after which the request is given up (504); Ropeway's own. The header
    ``X-Ropeway-Timeout`` says the same; this field wins."""
    return_token_ids: bool | None = None
    """Give the token ids of the prompt and of every choice, beside their text."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add its beginning-of-text token (chat: default off, the template does it)."""
    use_beam_search: bool | None = None
    """Answer with the ``n`` likeliest answers that a search with so many beams finds (text completions: with
    ``best_of`` beams); vLLM's. Not in a stream."""
    length_penalty: float | None = None
    """Of a beam search: its answers' cumulative log-probabilities are divided by their lengths to this power."""
    prompt_logprobs: int | None = None
    """Tell the log-probabilities of the prompt's tokens and of so many likeliest ones at their places; vLLM's. Not in
    a stream."""
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """vLLM's way to say what the answer must look like; the ``guided_`` fields are its older one."""
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    """Goes before ``max_tokens``. Neither: up to the context."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The answer carries on the last message, which must be the assistant's."""
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | NamedTool | None = None
    """``none``, ``auto`` (the default where there are tools), ``required``, or one tool."""
    parallel_tool_calls: bool | None = None
    """False: at most one call, where calls are forced."""
    reasoning_effort: str | None = None
    """``none``: answer without reasoning, if the model can; other words mean nothing here."""
    thinking_token_budget: int | None = None
    """Most tokens of reasoning, where the model reasons; vLLM's."""
    include_reasoning: bool | None = None
    """False: leave the reasoning out of the answer."""


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[Any]
    """Text, token ids, or a list of either; each prompt has ``n`` choices, in order."""
    logprobs: int | None = None
    best_of: int | None = None
    """Generate so many, and answer with the ``n`` likeliest (by the mean log-probability of their tokens)."""
    echo: bool | None = None
    """Begin every choice with its prompt; with ``logprobs`` those of the prompt, too, and with ``max_tokens`` 0 nothing
    else."""


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[ToolDefinition] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: str | list[Any]


# --------------------------------------------------------------------------- responses


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class UsageBody(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Columns over the tokens of a choice (of a chunk, in a stream). Nothing is known of a prompt's first token."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []
    """Characters of the choice's text before the token."""


class PromptLogprob(msgspec.Struct, kw_only=True):
    """vLLM's."""

    logprob: float
    rank: int
    """1: no token is likelier."""
    decoded_token: str


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str
    """JSON; in a stream, some more of it."""


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: CalledFunction


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """The first one of a call has its id and name."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: CalledFunction


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    """vLLM's: the stop string, or the id of the token, that ended it."""
    token_ids: list[int] | UnsetType = UNSET
    cumulative_logprob: float | UnsetType = UNSET
    """Of a beam; Ropeway's own, as is ``score``."""
    score: float | UnsetType = UNSET
    """What the beams are ranked by."""


class ChatDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    """The same in a whole answer and in a chunk of a stream, where ``finish_reason`` may be null."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    cumulative_logprob: float | UnsetType = UNSET
    """Of a beam; Ropeway's own, as is ``score``."""
    score: float | UnsetType = UNSET
    """What the beams are ranked by."""
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType = UNSET
    """Token id -> what is known of it, for every token of the prompt; null for the first."""


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "ropeway"
    root: str
    """The model as it was named to the server."""
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    prompt: str


class TimeParts(msgspec.Struct, kw_only=True):
    """Seconds; they sum to ``e2e_s``."""

    queued_s: float
    """From its arrival to its first seat."""
    prefill_s: float
    """Seated, until its next token: the first one, or the next after a preemption."""
    decode_s: float
    preempted_s: float
    """Without a seat, its blocks dropped."""
    swapped_s: float
    """Without a seat, its blocks in host memory."""
    delivery_s: float = 0.0
    """From the engine to the client: messages, text, sending."""


class ChoiceTiming(msgspec.Struct, kw_only=True):
    index: int
    phase: str
    """What it does now: queued, prefill, decode, preempted, swapped or finished; unknown: the engine did not say."""
    finish_reason: FinishReason | None
    e2e_s: float
    """From the request's arrival to its end, or to now."""
    parts: TimeParts
    waits_s: dict[str, float]
    """Of the time without a seat, how much was for want of ``slots``, ``blocks`` or ``budget``, for a step's end
    (``step``), because another ``tier`` went first, or for a ``gate`` (a sibling's prefill, a prefix from disk)."""
    preemptions: dict[str, int]
    """By kind: swap, recompute."""
    output_tokens: int
    cached_tokens: int


class RequestTiming(msgspec.Struct, kw_only=True):
    """Where a request's time went. Of several choices, ``phase``, ``parts`` and ``waits_s`` are those of the one that
    ended last or is under way."""

    id: str
    object: str = "request"
    request_id: str
    """The ``X-Request-Id`` of the answer."""
    created: int
    tier: str
    phase: str
    error: str | None
    """Code of the error it ended with."""
    e2e_s: float
    parts: TimeParts
    waits_s: dict[str, float]
    preemptions: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    choices: list[ChoiceTiming]


class Health(msgspec.Struct, kw_only=True, omit_defaults=True):
    status: str
    since: int = 0
    """When the engine came to life, in seconds since 1970."""
    warnings: list[str] = []
    """What was configured and cannot be had; the server serves without it."""
    disk_failure: str | None = None
    """Why there is no disk cache though one was configured."""


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, kw_only=True):
    error: ErrorDetail
