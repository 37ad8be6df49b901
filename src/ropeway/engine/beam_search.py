"""Beam search: which beginnings of an answer go on, which have ended, and when nothing can change any more.

A search asks the same at every step: of each of its beams, which tokens are likeliest next? Whoever runs it puts that
to an engine, as requests for one token each; the prefix cache finds the blocks of the beams again. Here is nothing but
the search::

    beams, the likeliest first (at first one: the prompt)      prompts
      -> of each, its likeliest next tokens                    step
      -> beam + token, over all beams, the likeliest first
           an end token                   -> an answer
           it completes a stop string     -> an answer
           else                           -> a beam of the next step, until there are beam_width of them
    beams that are max_tokens long        -> answers
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from ropeway.engine.completions import CompletionText
from ropeway.engine.messages import EngineInfo
from ropeway.engine.submission import check_request
from ropeway.errors import InvalidRequest
from ropeway.outcome import Finished
from ropeway.request import BeamSearchParams, Completion, FinishReason, SamplingParams, TokenLogprob
from ropeway.text.tokenizer import Tokenizer

Top = Sequence[tuple[int, float]]
"""(token id, log-probability) of the likeliest next tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class _Beam:
    completion: Completion
    text: CompletionText
    cumulative: float
    score: float = 0.0
    """Once it is an answer."""


class BeamSearch:
    """The search of one prompt.

    Answers are ranked by ``cumulative log-probability / length ** length_penalty``, where the length counts the prompt
    but no end token: vLLM's ``get_beam_search_score`` (vllm/beam_search.py). As there, the likeliest ``2 * beam_width``
    tokens of every beam count (more, where so many of them may be end tokens that too few beams are left), and an end
    token among them makes an answer, however it ranks. Beams are ranked by their cumulative log-probability; of equal
    ones the one whose parent ranks first goes first, then the one with the lower token id, and of equal answers the one
    that came first.

    The search is over when as many answers are there as are to be told, and no beam can come to a better score than the
    last of them: log-probabilities only make a sum smaller, so a beam's best score is that of its present sum at the
    shortest or the longest length it can still have. The answers are those of a search that goes on to ``max_tokens``
    (Huang, Zhao and Ma, "When to finish? Optimal beam search for neural text generation", EMNLP 2017; transformers
    calls it ``early_stopping="never"``).
    """

    def __init__(
        self, prompt: Sequence[int], params: BeamSearchParams, info: EngineInfo, tokenizer: Tokenizer | None
    ) -> None:
        """Raises ``InvalidRequest`` and ``ContextLengthExceeded`` for what the engine can never serve to its end."""
        ending = params.answers
        check_request(info, prompt, ending)
        self._prompt = list(prompt)
        self._params = params
        self._ending = ending
        self._end_ids = frozenset((*(() if params.ignore_eos else info.end_ids), *params.stop_token_ids))
        room = info.max_model_len - len(self._prompt)
        self._longest = room if params.max_tokens is None else params.max_tokens
        needed = params.beam_width + len(self._end_ids)
        if needed > info.vocab_size:
            raise InvalidRequest(
                f"beam_width is {params.beam_width}, and {len(self._end_ids)} tokens end an answer; the model knows "
                f"{info.vocab_size} tokens, too few to begin so many answers with: lower it",
                param="beam_width",
            )
        self._candidates = min(max(2 * params.beam_width, needed), info.vocab_size)
        """Likeliest next tokens of a beam that count."""
        self._length = 0
        self._beams = [_Beam(Completion(0), CompletionText(0, ending, tokenizer), 0.0)]
        self._found: list[_Beam] = []
        """The best answers so far, the best first; no more than are to be told."""

    @property
    def over(self) -> bool:
        """Whether the answers are final."""
        if not self._beams:
            return True
        if len(self._found) < self._ending.n:
            return False
        likeliest = self._beams[0].cumulative
        attainable = max(self._score(likeliest, self._length), self._score(likeliest, self._longest))
        return self._found[-1].score >= attainable

    @property
    def prompts(self) -> list[list[int]]:
        """The tokens of every beam, prompt included: what to ask an engine about."""
        return [self._prompt + beam.completion.token_ids for beam in self._beams]

    @property
    def question(self) -> SamplingParams:
        """What to ask: the likeliest next tokens."""
        logprobs = max(self._candidates, self._ending.logprobs or 0)
        return SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=logprobs, beam_step=self._length)

    @property
    def tokens(self) -> int:
        """Tokens of all beams together."""
        return self._length * len(self._beams)

    def step(self, tops: Sequence[Top]) -> None:
        """Go on by one token. ``tops``: the likeliest next tokens of every beam, in the order of ``prompts``, the
        likeliest first. Those beyond what was asked for change nothing."""
        ended = sorted(
            (-(beam.cumulative + logprob), place, token, logprob)
            for place, (beam, top) in enumerate(zip(self._beams, tops, strict=True))
            for token, logprob in top[: self._candidates]
            if token in self._end_ids
        )
        for _, place, token, logprob in ended:
            score = self._score(self._beams[place].cumulative + logprob, self._length)
            if len(self._found) < self._ending.n or score > self._found[-1].score:
                finished = Finished(0, FinishReason.STOP, end_token=token)
                self._add(self._extended(place, token, logprob, tops[place], finished, score))
        last = Finished(0, FinishReason.LENGTH) if self._length + 1 == self._longest else None
        beams: list[_Beam] = []
        for _, place, token, logprob in heapq.merge(*(self._ranked(place, top) for place, top in enumerate(tops))):
            if token in self._end_ids:
                continue
            score = self._score(self._beams[place].cumulative + logprob, self._length + 1)
            beam = self._extended(place, token, logprob, tops[place], last, score)
            if beam.completion.finish_reason is FinishReason.STOP:
                self._add(beam)
                continue
            beams.append(beam)
            if len(beams) == self._params.beam_width:
                break
        self._length += 1
        self._beams = beams
        if last is not None:
            for beam in beams:
                self._add(beam)
            self._beams = []

    def answers(self) -> list[Completion]:
        """The best answers, the best first."""
        for index, beam in enumerate(self._found):
            completion = beam.completion
            completion.index, completion.cumulative_logprob, completion.score = index, beam.cumulative, beam.score
        return [beam.completion for beam in self._found]

    def _ranked(self, place: int, top: Top) -> Iterator[tuple[float, int, int, float]]:
        """(minus the cumulative log-probability, the beam's place, the next token, its log-probability)"""
        so_far = self._beams[place].cumulative
        for _, equal in itertools.groupby(top[: self._candidates], key=itemgetter(1)):
            for token, logprob in sorted(equal):
                yield -(so_far + logprob), place, token, logprob

    def _extended(
        self, place: int, token: int, logprob: float, top: Top, finished: Finished | None, score: float
    ) -> _Beam:
        """A beam with one more token, which may be its last."""
        parent = self._beams[place]
        before, text = parent.completion, parent.text.fork()
        told = None if self._ending.logprobs is None else TokenLogprob(token, logprob, list(top))
        delta = text.push(token, told, finished)
        completion = Completion(
            0,
            text=before.text + delta.text,
            token_ids=[*before.token_ids, token],
            logprobs=None if delta.logprobs is None else [*(before.logprobs or []), *delta.logprobs],
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        return _Beam(completion, text, parent.cumulative + logprob, score)

    def _score(self, cumulative: float, length: int) -> float:
        """``length``: of the answer, without an end token."""
        return float(cumulative / (len(self._prompt) + length) ** self._params.length_penalty)

    def _add(self, beam: _Beam) -> None:
        """Keep an answer if it is one of the best."""
        self._found.append(beam)
        self._found.sort(key=lambda each: -each.score)  # stable: of equal ones the first stays first
        del self._found[self._ending.n :]
