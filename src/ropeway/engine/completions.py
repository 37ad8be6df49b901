"""The client side of a completion: tokens to text, stop strings, and the news for whoever reads."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from ropeway.engine.client import Delta, Usage
from ropeway.outcome import Finished, LogprobColumns, PromptLogprobColumns, StepOutput
from ropeway.request import FinishReason, SamplingParams, TokenLogprob
from ropeway.text.detokenizer import IncrementalDetokenizer
from ropeway.text.stop import StopStrings
from ropeway.text.tokenizer import Tokenizer

Owner = TypeVar("Owner")


class CompletionText:
    """One completion as it grows."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.count = 0
        """Tokens of the completion, the end token included."""
        self._params = params
        self._prompt: dict[int, TokenLogprob] = {}
        """Log-probabilities of the prompt's tokens, by position."""
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._stop = StopStrings(params.stop, include=params.include_stop_str_in_output)

    def fork(self) -> CompletionText:
        """Another one that has come as far, to go on by itself."""
        other = copy.copy(self)
        other._detokenizer = None if self._detokenizer is None else self._detokenizer.fork()
        other._stop = copy.copy(self._stop)
        return other

    def tell_prompt(self, position: int, logprob: TokenLogprob) -> None:
        """Of one token of the prompt. If that is computed again, they come again, the same."""
        self._prompt[position] = logprob.cut(self._params.prompt_logprobs)

    def push(self, token: int, logprob: TokenLogprob | None, finished: Finished | None) -> Delta:
        """Take the next token, and the engine's word that it is the last one, if it is."""
        self.count += 1
        end_token = None if finished is None else finished.end_token
        text, hit = self._push_text(token, hidden=end_token is not None and not self._shows(token))
        delta = Delta(self.index, text, [token], None if logprob is None else [logprob.cut(self._params.logprobs)])
        if self.count == 1 and self._params.prompt_logprobs is not None and self.index == 0:
            delta.prompt_logprobs = [None, *(self._prompt[position] for position in sorted(self._prompt))]
            self._prompt.clear()
        if finished is not None:
            delta.timeline = finished.timeline
        if hit is None and finished is not None:
            rest, hit = self._rest()
            delta.text += rest
            delta.finish_reason = finished.reason
            if end_token in self._params.stop_token_ids:
                delta.stop_reason = end_token
        if hit is not None:
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, hit
        return delta

    def end(self, finished: Finished) -> Delta:
        """The completion ends without a further token."""
        return Delta(
            self.index, self._rest()[0], [], None, finished.reason, refusal=finished.refusal, timeline=finished.timeline
        )

    def _push_text(self, token: int, *, hidden: bool) -> tuple[str, str | None]:
        if self._detokenizer is None or hidden:
            return "", None
        return self._stop.push(self._detokenizer.push([token]), free=self.count < self._params.min_tokens)

    def _rest(self) -> tuple[str, str | None]:
        """(the text held back until the end, the stop string that its last characters complete)."""
        if self._detokenizer is None:
            return "", None
        text, hit = self._stop.push(self._detokenizer.finish())
        return (text, hit) if hit is not None else (text + self._stop.finish(), None)

    def _shows(self, end_token: int) -> bool:
        return self._params.include_stop_str_in_output and end_token in self._params.stop_token_ids


class Router(Generic[Owner]):
    """Turns the engine's columns into deltas for the owners of the completions under way."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[Owner, CompletionText, Usage]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request_id: int, owner: Owner, completion: CompletionText, usage: Usage) -> None:
        self._live[request_id] = owner, completion, usage

    def drop(self, request_id: int) -> bool:
        """Forget a completion; late messages about it are ignored. False: it has ended already."""
        return self._live.pop(request_id, None) is not None

    def owners(self) -> list[tuple[int, Owner, CompletionText]]:
        """Everything under way: (internal id, owner, completion)."""
        return self.find(list(self._live))

    def find(self, ids: Sequence[int]) -> list[tuple[int, Owner, CompletionText]]:
        """Those of these completions that are under way."""
        return [(i, self._live[i][0], self._live[i][1]) for i in ids if i in self._live]

    def receive(self, output: StepOutput) -> tuple[list[tuple[Owner, Delta]], list[int]]:
        """(news for the owners, ids that met a stop string and are to be aborted in the engine)."""
        news: list[tuple[Owner, Delta]] = []
        stopped: list[int] = []
        for started in output.started:
            if started.id in self._live:
                usage = self._live[started.id][2]
                usage.cached_tokens = max(usage.cached_tokens, started.cached_tokens)
        if output.prompt_logprobs is not None:
            for request_id, position, logprob in _prompt_logprobs(output.prompt_logprobs):
                if request_id in self._live:
                    self._live[request_id][1].tell_prompt(position, logprob)
        finished = {f.id: f for f in output.finished}
        logprobs = dict(_token_logprobs(output.logprobs, output))
        for row, (request_id, token) in enumerate(zip(output.ids.tolist(), output.tokens.tolist(), strict=True)):
            entry = self._live.get(request_id)
            end = finished.pop(request_id, None)
            if entry is None:
                continue
            owner, completion, usage = entry
            delta = completion.push(token, logprobs.get(row), end)
            usage.completion_tokens += 1
            news.append((owner, delta))
            if delta.finish_reason is not None:
                del self._live[request_id]
                if end is None:
                    stopped.append(request_id)
        for request_id, end in finished.items():  # ended without a token in this step
            if request_id in self._live:
                owner, completion, _ = self._live.pop(request_id)
                news.append((owner, completion.end(end)))
        return news, stopped


def _prompt_logprobs(columns: PromptLogprobColumns) -> Iterator[tuple[int, int, TokenLogprob]]:
    """(internal request id, position, log-probability)"""
    c = columns
    each = (c.request, c.position, c.token, c.chosen, c.rank, c.top_ids, c.top)
    for request_id, position, token, chosen, rank, ids, values in zip(*(x.tolist() for x in each), strict=True):
        yield request_id, position, TokenLogprob(token, chosen, list(zip(ids, values, strict=True)), rank)


def _token_logprobs(columns: LogprobColumns | None, output: StepOutput) -> Iterator[tuple[int, TokenLogprob]]:
    if columns is None:
        return
    for row, chosen, ids, values in zip(
        columns.row.tolist(), columns.chosen.tolist(), columns.top_ids.tolist(), columns.top.tolist(), strict=True
    ):
        top = list(zip(ids, values, strict=True))
        yield row, TokenLogprob(int(output.tokens[row]), chosen, top)
