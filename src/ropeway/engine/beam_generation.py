"""A beam search as a request under way in an engine process, like any other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from ropeway.engine.beam_search import BeamSearch, Top
from ropeway.engine.client import AsyncEngine, Delta, Generation, RequestOptions, Usage
from ropeway.request import BeamSearchParams, Completion, FinishReason, Timeline

_PARTS = ("queued_s", "prefill_s", "decode_s", "preempted_s", "swapped_s")


class BeamTimelines:
    """Implements ``Timelines``: one account for all answers, in which every step counts with its slowest request."""

    def __init__(self, answers: int) -> None:
        self.ended: dict[int, Timeline] = {}
        self._answers = answers
        self._total = Timeline()
        self._asked: Sequence[Generation] = ()

    def begin(self, asked: Sequence[Generation]) -> None:
        """A step."""
        self._asked = asked

    def end(self, told: Sequence[Timeline]) -> None:
        """The step; with the timelines of its requests."""
        if told:
            self._total = _sum(self._total, max(told, key=lambda each: each.total_s))
        self._asked = ()

    def close(self, answers: Sequence[Completion]) -> None:
        """The search is over."""
        for answer in answers:
            tokens = len(answer.token_ids)
            self.ended[answer.index] = msgspec.structs.replace(self._total, phase="finished", output_tokens=tokens)

    async def ask(self) -> Mapping[int, Timeline]:
        """See ``Timelines.ask``."""
        if self.ended:
            return self.ended
        told = [timeline for each in self._asked for timeline in (await each.timelines.ask()).values()]
        if self.ended:  # meanwhile
            return self.ended
        if told:
            now = _sum(self._total, max(told, key=lambda each: (each.phase != "finished", each.total_s)))
        else:
            now = msgspec.structs.replace(self._total)
        if now.phase == "finished":  # the step has ended, not the search
            now.phase = "decode"
        return dict.fromkeys(range(self._answers), now)


class BeamGeneration:
    """Implements ``Generation``. Its steps are asked for while it is iterated over, and its deltas are whole answers,
    the best first: which they are shows at the end."""

    def __init__(
        self,
        engine: AsyncEngine,
        prompt: Sequence[int],
        params: BeamSearchParams,
        options: RequestOptions = RequestOptions(),
    ) -> None:
        """Hands the first step to the engine; raises as ``AsyncEngine.submit`` does, for the search as a whole."""
        self._search = BeamSearch(prompt, params, engine.info, engine.tokenizer)
        self._answers = params.answers.n
        self._engine = engine
        self._options = options
        self._cancelled = False
        self._asked: list[Generation] = []
        self.usage = Usage(prompt_tokens=len(prompt))
        """While the search is under way it counts the tokens of its beams, at its end those of its answers."""
        self.timelines = BeamTimelines(self._answers)
        self._ask()
        self._first = self._asked[0]

    async def accepted(self) -> None:
        """See ``Generation.accepted``: the first step stands for all."""
        await self._first.accepted()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            tops: list[Top] = []
            told: list[Timeline] = []
            for generation in self._asked:
                async for delta in generation:
                    if delta.logprobs is None:  # it failed, or was cancelled
                        self.cancel()
                        for index in range(self._answers):
                            yield replace(delta, index=index)
                        return
                    tops.append(delta.logprobs[0].top)
                    told += [] if delta.timeline is None else [delta.timeline]
            self.timelines.end(told)
            self.usage.cached_tokens = self._first.usage.cached_tokens
            self._search.step(tops)
            self.usage.completion_tokens = self._search.tokens
            if self._search.over:
                break
            if self._cancelled:  # when this step had ended already
                for index in range(self._answers):
                    yield Delta(index, "", [], finish_reason=FinishReason.ABORT)
                return
            self._ask()
        answers = self._search.answers()
        self.usage.completion_tokens = sum(len(answer.token_ids) for answer in answers)
        self.timelines.close(answers)
        for answer in answers:
            yield Delta(
                answer.index,
                answer.text,
                answer.token_ids,
                answer.logprobs,
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
                timeline=self.timelines.ended[answer.index],
                cumulative_logprob=answer.cumulative_logprob,
                score=answer.score,
            )

    def cancel(self) -> None:
        """Abort the step under way; there is no other then. Idempotent."""
        self._cancelled = True
        for generation in self._asked:
            generation.cancel()

    def _ask(self) -> None:
        """Hand the next step to the engine, all of it or nothing."""
        question = self._search.question
        self._asked = []
        try:
            for prompt in self._search.prompts:
                self._asked.append(self._engine.submit(prompt, question, self._options))
        except BaseException:
            self.cancel()
            raise
        self.timelines.begin(self._asked)


def _sum(before: Timeline, step: Timeline) -> Timeline:
    """The account of both, one after the other; cached tokens are those of the first step."""
    total = msgspec.structs.replace(step, waits=dict(before.waits), preemptions=dict(before.preemptions))
    for part in _PARTS:
        setattr(total, part, getattr(before, part) + getattr(step, part))
    for what, seconds in step.waits.items():
        total.waits[what] = total.waits.get(what, 0.0) + seconds
    for kind, count in step.preemptions.items():
        total.preemptions[kind] = total.preemptions.get(kind, 0) + count
    total.output_tokens = before.output_tokens + step.output_tokens
    total.cached_tokens = before.cached_tokens if before.output_tokens else step.cached_tokens
    return total
