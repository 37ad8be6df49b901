"""POST /v1/completions"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ropeway.engine.client import Delta
from ropeway.errors import RopewayError
from ropeway.request import Completion, FinishReason, TokenLogprob
from ropeway.server.answering import respond
from ropeway.server.auth import caller_of
from ropeway.server.beams import completion_beams
from ropeway.server.chat import worth_a_chunk
from ropeway.server.generating import Generating, check_choices
from ropeway.server.logprobs import CompletionLogprobWriter, prompt_logprobs, score_of
from ropeway.server.options import request_options
from ropeway.server.prompts import Prompt, Prompts, split_prompts
from ropeway.server.protocol import CompletionChoice, CompletionLogprobs, CompletionRequest, UsageBody
from ropeway.server.sampling import chooses, completion_params, scores
from ropeway.server.state import State, state_of
from ropeway.server.streaming import DONE, error_event, event
from ropeway.server.structure import grammar_of


async def create_completion(request: Request) -> Response:
    arrival_s = time.monotonic()
    state = state_of(request)
    body = await state.read(request, CompletionRequest)
    options = request_options(body, request.headers, state.engine.info.tiers, arrival_s, caller_of(request))
    model = state.model_name(body.model)
    beams = completion_beams(body)
    if beams is None:
        params = completion_params(body, state.sampling_defaults, grammar=grammar_of(body))
    else:
        params = beams.answers
    given = split_prompts(body.prompt)
    # Before they cost anything.
    check_choices(len(given), params.n if beams is None else beams.beam_width, state.most_requests)
    prompts = await _encode(state.prompts, given, body.add_special_tokens is not False)
    echoes = await _echoes(state, given) if body.echo else None
    answer = CompletionAnswer(state, body, model, echoes)
    return await respond(request, answer, prompts, params, options, stream=bool(body.stream), beams=beams)


async def _echoes(state: State, given: Sequence[Prompt]) -> list[str]:
    """Every prompt as text; of one that is too long to be served, nothing."""
    tokenizer, most = state.engine.tokenizer, state.engine.info.max_model_len

    def text(prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        return "" if tokenizer is None or len(prompt) > most else tokenizer.decode(prompt, skip_special_tokens=False)

    return await state.prompts.run(lambda: [text(prompt) for prompt in given])


async def _encode(prompts: Prompts, given: Sequence[Prompt], add_special_tokens: bool) -> list[list[int]]:
    """Token ids of every prompt; those given as ids need no tokenizer. Either all are text or none is."""
    texts = [each for each in given if isinstance(each, str)]
    if not texts:
        return [each for each in given if isinstance(each, list)]
    return await prompts.encode(texts, add_special_tokens=add_special_tokens)


class CompletionAnswer:
    """Writes the answer to one request, whole or in chunks. Without a tokenizer the text is empty and the token ids
    are given unasked."""

    def __init__(self, state: State, body: CompletionRequest, model: str, echoes: Sequence[str] | None) -> None:
        """``echoes``: what the choices of each prompt begin with."""
        self._echoes = echoes
        self._scores = scores(body)
        self._best_of = body.best_of if chooses(body) else None
        self._logprobs = body.logprobs
        self._prompt_logprobs = body.prompt_logprobs
        self._tokenizer = state.engine.tokenizer
        self._skip_special_tokens = body.skip_special_tokens is not False
        self._token_ids = bool(body.return_token_ids) or self._tokenizer is None
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._n = body.n or 1
        self._writers: dict[int, CompletionLogprobWriter] = {}
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.model = model
        self._frame: dict[str, Any] = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(
        self, generating: Generating, completions: Sequence[Completion], prompts: Sequence[list[int]]
    ) -> dict[str, Any]:
        told = completions if self._best_of is None else self._best(completions, self._best_of)
        choices = [self._first_choice(each, generating, prompts) for each in told]
        return {**self._frame, "choices": choices, "usage": self._usage_of(generating)}

    async def chunks(self, generating: Generating, prompts: Sequence[list[int]]) -> AsyncGenerator[bytes, None]:
        frame = {**self._frame, "usage": None} if self._usage else self._frame
        begun: set[int] = set()
        async with contextlib.aclosing(generating.deltas()) as deltas:
            async for delta in deltas:
                first = delta.index not in begun
                if not worth_a_chunk(delta, delta.text or (first and self._echoes), self._token_ids):
                    continue
                begun.add(delta.index)
                if not first:
                    choice = self._choice(delta)
                elif self._echoes and self._logprobs is not None:  # a long prompt's are many
                    choice = await asyncio.to_thread(self._first_choice, delta, generating, prompts)
                else:
                    choice = self._first_choice(delta, generating, prompts)
                yield event({**frame, "choices": [choice]})
        if self._usage:
            yield event({**frame, "choices": [], "usage": self._usage_of(generating)})
        yield DONE

    def broken(self, error: RopewayError) -> bytes:
        return error_event(error)

    def _best(self, completions: Sequence[Completion], generated: int) -> list[Completion]:
        """Of each prompt's, the likeliest ``n``, in that order, numbered anew."""
        best: list[Completion] = []
        for first in range(0, len(completions), generated):
            ranked = sorted(completions[first : first + generated], key=_mean_logprob, reverse=True)
            for each in ranked[: self._n]:
                each.index = len(best)
                best.append(each)
        return best

    def _first_choice(
        self, piece: Completion | Delta, generating: Generating, prompts: Sequence[list[int]]
    ) -> CompletionChoice:
        """With all that is told of its prompt."""
        if self._scores:
            piece = Completion(piece.index, logprobs=[], finish_reason=FinishReason.LENGTH)
        position = piece.index // self._n
        logprobs, told = None, generating.prompt_logprobs(position)
        if self._echoes and self._logprobs is not None and told is not None:
            logprobs = CompletionLogprobs()
            ours = _cut(told, self._logprobs)
            self._writer(piece.index).write_prompt(logprobs, prompts[position], ours, self._echoes[position])
        choice = self._choice(piece, logprobs)
        if self._echoes:
            choice.text = self._echoes[position] + choice.text
        if self._token_ids:
            choice.prompt_token_ids = prompts[position]
        if self._prompt_logprobs is not None and told is not None:
            choice.prompt_logprobs = prompt_logprobs(_cut(told, self._prompt_logprobs), self._tokenizer)
        return choice

    def _choice(self, piece: Completion | Delta, logprobs: CompletionLogprobs | None = None) -> CompletionChoice:
        """``logprobs``: those before the piece's own."""
        if piece.logprobs is not None and self._logprobs is not None:
            logprobs = logprobs or CompletionLogprobs()
            self._writer(piece.index).write(logprobs, piece.logprobs)
        return CompletionChoice(
            index=piece.index,
            text=piece.text,
            logprobs=logprobs,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if self._token_ids else UNSET,
            cumulative_logprob=score_of(piece.cumulative_logprob),
            score=score_of(piece.score),
        )

    def _writer(self, index: int) -> CompletionLogprobWriter:
        if index not in self._writers:
            self._writers[index] = CompletionLogprobWriter(self._tokenizer, self._skip_special_tokens)
        return self._writers[index]

    def _usage_of(self, generating: Generating) -> UsageBody:
        usage = generating.usage()
        if self._scores:
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage


def _cut(told: Sequence[TokenLogprob | None], most: int) -> list[TokenLogprob | None]:
    return [None if each is None else each.cut(most) for each in told]


def _mean_logprob(completion: Completion) -> float:
    logprobs = [each.logprob for each in completion.logprobs or []]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")
