"""What a request is: its sampling parameters, its life in the scheduler, and its output.

Shared by every floor; imports neither torch nor anything of Ropeway but the errors."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ropeway.errors import InvalidRequest
from ropeway.grammar import Grammar

MAX_LOGPROBS = 20
"""Largest ``logprobs`` (OpenAI's limit for ``top_logprobs``)."""
MAX_N = 128
"""Largest ``n`` (OpenAI's limit)."""
MAX_BEAM_WIDTH = 128
"""Most beams of a search."""
MAX_STOP = 16
"""Largest number of stop strings."""
MAX_STOP_LENGTH = 1024
"""Most characters of a stop string."""
MAX_STOP_TOKEN_IDS = 64
"""Largest number of ``stop_token_ids``: every step compares its tokens with all of a request's."""
MAX_BAD_WORDS = 256
"""Largest number of ``bad_words``."""
MAX_ALLOWED_TOKEN_IDS = 2**18
"""Largest number of ``allowed_token_ids``."""
MAX_BEAM_LOGPROBS = 2 * MAX_BEAM_WIDTH + MAX_STOP_TOKEN_IDS
"""Largest ``logprobs`` of a step of a beam search, which users don't ask for themselves."""


class FinishReason(enum.StrEnum):
    STOP = "stop"
    """An end token, a stop token id or a stop string."""
    LENGTH = "length"
    """``max_tokens``, or the context is full."""
    ABORT = "abort"
    """The client went away or cancelled."""
    ERROR = "error"
    """The engine failed."""


Phase = Literal["queued", "prefill", "decode", "preempted", "swapped"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose tokens and when to stop. Names and meanings are those of the OpenAI API and of vLLM.

    Raises ``InvalidRequest`` (naming the field) on construction when a value is out of range.
    """

    n: int = 1
    """Number of completions of the prompt."""
    temperature: float = 1.0
    """0 is greedy; below 1e-3 too, where float32 softmax is a point mass in all but exact ties."""
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (CTRL, section 4.1)."""
    presence_penalty: float = 0.0
    """Subtracted from logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output."""
    logit_bias: dict[int, float] = {}
    """Token id -> value in [-100, 100] added to its logit; -100 bans the token."""
    seed: int | None = None
    """Same seed, same request: same tokens. None draws one."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: up to the context."""
    min_tokens: int = 0
    """End tokens and stop token ids are masked, stop strings ignored, before this many tokens."""
    stop: tuple[str, ...] = ()
    """Text that ends the completion; cut before it unless ``include_stop_str_in_output``."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the completion like the model's own; honoured under ``ignore_eos`` too."""
    ignore_eos: bool = False
    """Every end token of the model (all of generation_config's too) is an ordinary token."""
    logprobs: int | None = None
    """None: none; k >= 0: of each chosen token and of the k most likely, after penalties, bias and masks,
    before temperature and truncation."""
    prompt_logprobs: int | None = None
    """k >= 0: log-probabilities of the prompt's tokens, each given those before it, and of the k most likely ones at
    their places. The prompt is then computed whole, whatever the prefix cache has."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words: tuple[str, ...] = ()
    """Texts that the completion must not hold; of each, the tokens it has with and without a blank before it are never
    generated in a row."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens may be generated; None: all."""
    grammar: Grammar | None = None
    """What the completion must look like. It ends when it has come to the grammar's end, and before that only by
    ``max_tokens`` or a stop string."""
    thinking_budget: int | None = None
    """Most tokens of reasoning between <think> and </think>; then the latter is forced. None: no limit."""
    thinking: bool = False
    """For ``thinking_budget``: whether the prompt ends within the reasoning."""
    beam_step: int | None = None
    """Which step of a beam search this is, from 0; None: of none. Such a request asks for one token, whose ``logprobs``
    may be ``MAX_BEAM_LOGPROBS``; after the first one the search is under way and is not refused any more."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            if isinstance(getattr(self, name), list):
                msgspec.structs.force_setattr(self, name, tuple(getattr(self, name)))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, not {getattr(self, name)!r}", param=name)
        _whole("n", self.n, 1, MAX_N)
        _real("temperature", self.temperature, 0.0, 100.0)
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _whole("top_k", self.top_k, -1, 2**31 - 1)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}); lower one or raise the other",
                param="min_tokens",
            )
        if self.beam_step is not None:
            _whole("beam_step", self.beam_step, 0, 2**31 - 1)
        for name, most in (
            ("logprobs", MAX_LOGPROBS if self.beam_step is None else MAX_BEAM_LOGPROBS),
            ("prompt_logprobs", MAX_LOGPROBS),
        ):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, most)
        if len(self.stop) > MAX_STOP:
            raise InvalidRequest(f"{len(self.stop)} stop strings; the limit is {MAX_STOP}", param="stop")
        for stop in self.stop:
            if not isinstance(stop, str) or not stop or (not stop.isascii() and _surrogates(stop)):
                raise InvalidRequest("a stop string must be non-empty text without lone surrogates", param="stop")
            if len(stop) > MAX_STOP_LENGTH:
                raise InvalidRequest(
                    f"a stop string has {len(stop)} characters; the limit is {MAX_STOP_LENGTH}", param="stop"
                )
        for token, bias in self.logit_bias.items():
            _whole("logit_bias", token, 0, 2**31 - 1)
            _real("logit_bias", bias, -100.0, 100.0)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"{len(self.stop_token_ids)} stop_token_ids; the limit is {MAX_STOP_TOKEN_IDS}", param="stop_token_ids"
            )
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, 2**31 - 1)
        self._check_constraints()

    def _check_constraints(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest(f"{len(self.bad_words)} bad_words; the limit is {MAX_BAD_WORDS}", param="bad_words")
        for word in self.bad_words:
            if not isinstance(word, str) or not word or len(word) > MAX_STOP_LENGTH:
                raise InvalidRequest(f"a bad word must be text of 1 to {MAX_STOP_LENGTH} characters", param="bad_words")
        if self.allowed_token_ids is not None:
            if not 0 < len(self.allowed_token_ids) <= MAX_ALLOWED_TOKEN_IDS:
                raise InvalidRequest(
                    f"allowed_token_ids names {len(self.allowed_token_ids)} tokens; from 1 to {MAX_ALLOWED_TOKEN_IDS} "
                    "can be",
                    param="allowed_token_ids",
                )
            if self.n * len(self.allowed_token_ids) > MAX_ALLOWED_TOKEN_IDS:
                raise InvalidRequest(
                    f"allowed_token_ids times n are {self.n * len(self.allowed_token_ids)}; the limit is "
                    f"{MAX_ALLOWED_TOKEN_IDS}",
                    param="allowed_token_ids",
                )
            for token in self.allowed_token_ids:
                _whole("allowed_token_ids", token, 0, 2**31 - 1)
        if self.thinking_budget is not None:
            _whole("thinking_budget", self.thinking_budget, 0, 2**31 - 1)
        if self.grammar is not None and self.ignore_eos:
            raise InvalidRequest(
                "ignore_eos cannot go with structured output, whose end is an end token; leave one out",
                param="ignore_eos",
            )

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-3

    @property
    def constrained(self) -> bool:
        """Whether what may be sampled depends on what was said before, or is limited at all."""
        limits = (self.grammar, self.bad_words or None, self.allowed_token_ids, self.thinking_budget)
        return any(limit is not None for limit in limits)

    def check_vocabulary(self, size: int) -> None:
        """Raise ``InvalidRequest`` for a token id outside the model's vocabulary of ``size`` ids."""
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        ):
            worst = max(ids, default=-1)
            if worst >= size:
                raise InvalidRequest(
                    f"{name} names token id {worst}; this model's ids go from 0 to {size - 1}", param=name
                )


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to search for likely answers. Names and meanings are those of vLLM; log-probabilities are the model's own.

    Raises ``InvalidRequest`` (naming the field) on construction when a value is out of range.
    """

    beam_width: int
    """Beginnings of answers that are followed at once."""
    n: int | None = None
    """How many of the answers are told, the best first; None: ``beam_width``."""
    max_tokens: int | None = 16
    """Most tokens of an answer; None: up to the context."""
    length_penalty: float = 1.0
    """An answer's score is its cumulative log-probability divided by its length to this power: above 0 favours long
    answers, below 0 short ones. The length counts the prompt, and no end token."""
    ignore_eos: bool = False
    """Every end token of the model is an ordinary token."""
    stop: tuple[str, ...] = ()
    """Text that ends a beam; cut before it unless ``include_stop_str_in_output``."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a beam like the model's own; honoured under ``ignore_eos`` too."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """None: none; k >= 0: of each token of an answer and of the k most likely ones at its place."""

    def __post_init__(self) -> None:
        _whole("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        if self.n is not None:
            _whole("n", self.n, 1, MAX_BEAM_WIDTH)
            if self.n > self.beam_width:
                raise InvalidRequest(
                    f"n is {self.n}; it must be at most beam_width ({self.beam_width}), which finds so many answers",
                    param="n",
                )
        _real("length_penalty", self.length_penalty, -10.0, 10.0)
        checked = self.answers
        for name in ("stop", "stop_token_ids"):
            msgspec.structs.force_setattr(self, name, getattr(checked, name))

    @property
    def answers(self) -> SamplingParams:
        """How many answers there are, how they end and what is told of them, as an ordinary request says it."""
        return SamplingParams(
            n=self.beam_width if self.n is None else self.n,
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            logprobs=self.logprobs,
        )


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be a whole number, not {value!r}", param=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; it must be from {low} to {high}", param=name)


def _real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise InvalidRequest(f"{name} must be a finite number, not {value!r}", param=name)
    if not low <= value <= high or (open_low and value == low):
        bound = "above" if open_low else "at least"
        raise InvalidRequest(f"{name} is {value}; it must be {bound} {low} and at most {high}", param=name)


def _surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


class Timeline(msgspec.Struct, kw_only=True):
    """Where a request's time went, in seconds by the engine's clock; the phases follow each other without gaps, so they
    sum to the time from its arrival to its end (or to now)."""

    tier: str = ""
    phase: Literal["queued", "prefill", "decode", "preempted", "swapped", "finished"] = "queued"
    """What it does now."""
    queued_s: float = 0.0
    """Until its first seat."""
    prefill_s: float = 0.0
    """Seated, until its next token is computed: the first one, or the next after a preemption."""
    decode_s: float = 0.0
    preempted_s: float = 0.0
    """Without a seat, its blocks dropped."""
    swapped_s: float = 0.0
    """Without a seat, its blocks in host memory."""
    waits: dict[str, float] = {}
    """Of the time without a seat, how much was for want of ``slots``, ``blocks`` or ``budget`` (its own or that of
    those before it), because a higher ``tier`` was first, for a ``gate`` (a sibling's prefill, a prefix on its way from
    disk), or until the next ``step`` was planned."""
    preemptions: dict[str, int] = {}
    """How often it was preempted, by ``swap`` and ``recompute``."""
    output_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_s(self) -> float:
        return self.queued_s + self.prefill_s + self.decode_s + self.preempted_s + self.swapped_s


class Gate:
    """What a waiting request waits for before it may be seated: a sibling's prefill, a prefix on its way from disk, a
    compiled grammar. A gate holds no device blocks. It opens when all of these are there, and stays open."""

    __slots__ = ("waits",)

    def __init__(self) -> None:
        self.waits = 1
        """Things that are not there yet."""

    @property
    def open(self) -> bool:
        return self.waits <= 0


@dataclass(slots=True, eq=False)
class Swapped:
    """A request's keys and values while it has no seat: pinned host blocks, one for each block it held."""

    host_blocks: list[int]
    computed: int
    """Positions [0, computed) are in them."""


@dataclass(slots=True, eq=False)
class Request:
    """One completion in the scheduler, which owns the only copy of this truth.

    While the request is seated its tokens live in the scheduler's columns; ``tokens`` is brought up to
    date when it leaves its seat.
    """

    id: int
    """Unique within the engine, never reused; what clients call the request is not its identity."""
    tokens: NDArray[np.int32]
    """Prompt and the output known so far."""
    prompt_tokens: int
    """Length of the prompt: where the output begins, whatever has been recomputed."""
    params: SamplingParams
    limit: int
    """Most tokens this sequence may have in all: min(prompt + max_tokens, context)."""
    end_ids: tuple[int, ...] = ()
    """Token ids that end it: the model's (unless ``ignore_eos``) and ``stop_token_ids``."""
    seed: int = 0
    """64-bit key of its random stream."""
    keys: list[bytes] | None = None
    """Prefix-cache keys: the root (tenant, adapter), then one per leading full block known so far.
    None: its blocks are not shared."""
    private: bool = False
    """Its blocks are shared with its siblings only, so they are not worth keeping."""
    tier: int = 0
    """Rank of its tier; 0 is the highest."""
    tenant: str = ""
    arrival_s: float = 0.0
    """On the engine's clock, as all times here."""
    deadline_s: float | None = None
    """When it is given up."""
    leader: Request | None = None
    """For n > 1: the sibling whose prefill this one shares; its gate opens with that prefill's end."""

    order: int = 0
    """How many came before it."""
    urgency: float = 0.0
    """The policy's key: lower goes first, then lower ``order``; fixed for its life."""
    gate: Gate | None = None
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when it was first seated."""
    fetched_blocks: int = 0
    """Blocks of its prefix that were asked of the disk when it came."""
    preemptions: int = 0
    swapped: Swapped | None = None
    slot: int = -1
    """Its seat, or -1."""
    unsettled: int = 0
    """Steps in flight that hold a row of it."""
    finish: FinishReason | None = None
    followers: list[Request] = field(default_factory=list)
    """Siblings whose gates open when this request's prompt has been computed."""
    published: int = 0
    """Leading blocks of its seat that are findable under their keys."""
    length_class: int = 0
    """Handle of its output-length profile."""
    luck: float = 0.0
    """In [0, 1): which quantile of its length distribution its predicted length is."""
    predicted_tokens: int = 0
    """Its output length as predicted when it came."""
    expected_ttft_s: float | None = None
    """Its time to first token as predicted when it came; None: nobody was ahead of it."""
    phase: Phase = "queued"
    since_s: float = 0.0
    """When the phase began."""
    timeline: Timeline = field(default_factory=Timeline)
    """Without the phase it is in."""
    waits_from: tuple[float, ...] = ()
    """The waiting accounts of its tier when it last lost or did not yet have a seat."""

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def started(self) -> bool:
        """Whether it has had a seat."""
        return self.cached_tokens is not None

    @property
    def gated(self) -> bool:
        """Whether it waits for a gate to open."""
        return self.gate is not None and not self.gate.open


@dataclass(slots=True)
class TokenLogprob:
    """Log-probability of a chosen token and of the likeliest ones at its position."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    """(token id, log-probability), most likely first."""
    rank: int | None = None
    """1: no token is likelier. Told of the tokens of a prompt."""

    def cut(self, most: int | None) -> TokenLogprob:
        """With the likeliest ``most`` alternatives; of a step, all have as many as the most that one asks for."""
        return TokenLogprob(self.token_id, self.logprob, self.top[:most], self.rank)


@dataclass(slots=True)
class Completion:
    """One of the ``n`` completions of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string, or the id of the token, that ended it."""
    cumulative_logprob: float | None = None
    """Of a beam: the sum over its tokens, the end token included."""
    score: float | None = None
    """Of a beam: what the answers are ranked by; see ``BeamSearchParams.length_penalty``."""


@dataclass(slots=True)
class RequestOutput:
    """What ``LLM.generate`` and ``LLM.beam_search`` return for one prompt. The first completion's fields are at hand
    directly."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Of every token of the prompt; None for the first, before which there is nothing."""

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason
