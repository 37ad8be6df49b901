"""One HTTP request's generations under way: all its prompts and choices as one stream of deltas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from ropeway.engine.beam_generation import BeamGeneration
from ropeway.engine.client import AsyncEngine, Delta, Generation, RequestOptions, Usage, error_of
from ropeway.errors import InvalidRequest, RopewayError
from ropeway.request import BeamSearchParams, Completion, FinishReason, SamplingParams, TokenLogprob
from ropeway.server.errors import ClientGone
from ropeway.server.explaining import Record, Records
from ropeway.server.keys import Lease
from ropeway.server.metrics import Metrics, Stopwatch
from ropeway.server.protocol import PromptTokensDetails, UsageBody


def check_choices(prompts: int, n: int, most: int) -> None:
    """Raise ``InvalidRequest`` when ``n`` choices of each prompt are more than ``most``, which can ever be held."""
    if prompts * n > most:
        raise InvalidRequest(
            f"{prompts} prompts of n={n} choices are {prompts * n} requests; this server holds at most {most} at once",
            param="n" if prompts == 1 else "prompt",
        )


class Generating:
    """Choice ``i`` of prompt ``p`` has index ``p * n + i`` over all."""

    def __init__(
        self,
        engine: AsyncEngine,
        metrics: Metrics,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        options: RequestOptions,
        *,
        most: int,
        record: Record,
        records: Records,
        lease: Lease | None = None,
        beams: BeamSearchParams | None = None,
    ) -> None:
        """Hands all prompts to the engine, or none: what its client refuses at once (``QueueFull``, ``InvalidRequest``,
        ``EngineDead``) is raised here. ``most``: choices that fit into the queue and the seats together. ``record`` is
        kept in ``records`` from then on. ``lease``: what the caller is charged with, ended with this. ``beams``: search
        for answers, which ``params`` describe."""
        self._lease = lease
        self._n = params.n
        self._beams = 0 if beams is None else beams.beam_width * len(prompts)
        self._over = False
        self._cancelled: RopewayError | None = None
        self._record, self._records = record, records
        self._generations: list[Generation] = []
        self._prompt_logprobs: list[list[TokenLogprob | None] | None] = [None] * len(prompts)
        try:
            check_choices(len(prompts), params.n if beams is None else beams.beam_width, most)
            for prompt in prompts:
                if beams is None:
                    self._generations.append(engine.submit(prompt, params, options))
                else:
                    self._generations.append(BeamGeneration(engine, prompt, beams, options))
        except BaseException:
            for generation in self._generations:
                generation.cancel()
            if lease is not None:
                lease.end(0)
            raise
        record.begin(self._generations, params.n)
        records.add(record)
        self._stopwatches = [
            Stopwatch(metrics, record.tier, record.arrival_s, len(prompt), params.n) for prompt in prompts
        ]

    @property
    def choices(self) -> int:
        return len(self._generations) * self._n

    @property
    def beams(self) -> int:
        """How many beams it may have in the engine at once, from now on."""
        return 0 if self._over else self._beams

    @property
    def record(self) -> Record:
        return self._record

    @property
    def ttft_s(self) -> float | None:
        """From its arrival to its first token, of whichever prompt; None: there was none yet."""
        return min((watch.ttft_s for watch in self._stopwatches if watch.ttft_s is not None), default=None)

    async def accepted(self) -> None:
        """Return when the engine has taken every choice of every prompt into its queue. If it refuses one, all are
        cancelled and this raises why: ``Shed``, ``QueueFull``, ``QueueTimeout``, ``DeadlineExceeded``, ..."""
        try:
            for generation in self._generations:
                await generation.accepted()
            if self._over:
                raise self._why_over()
        except BaseException as error:
            if isinstance(error, RopewayError):
                self._note(error)
                if self._lease is not None:
                    self._lease.end(0)  # nothing of it was computed
            self.cancel()
            raise

    def cancel(self, why: RopewayError | None = None) -> None:
        """Abort what is unfinished. ``why`` is what ``accepted`` and ``deltas`` then raise, ``ClientGone`` by default;
        the first reason counts."""
        self._over = True
        self._cancelled = self._cancelled or why
        for generation in self._generations:
            generation.cancel()
        self._records.end(self._record)
        if self._lease is not None:
            self._lease.end(self.usage().total_tokens)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Deltas of all choices as they come, ``index`` over all. Leaving early cancels the rest.

        Raises what the engine ended a choice with (``EngineDead``, ``QueueTimeout``, ``DeadlineExceeded``, ...), and
        the reason of ``cancel`` when that came first."""
        try:
            async with contextlib.aclosing(self._merged()) as merged:
                async for position, delta in merged:
                    self._stopwatches[position].saw(delta)
                    delta.index += position * self._n
                    if delta.prompt_logprobs is not None:
                        self._prompt_logprobs[position] = delta.prompt_logprobs
                    self._record.saw(delta.index, delta)
                    self._check(delta)
                    yield delta
        except RopewayError as error:
            self._note(error)
            raise
        finally:
            self.cancel()

    async def collect(self) -> list[Completion]:
        """All choices, complete. Raises as ``deltas`` does."""
        completions = [Completion(index) for index in range(self.choices)]
        async with contextlib.aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                completion = completions[delta.index]
                completion.text += delta.text
                completion.token_ids += delta.token_ids
                if delta.logprobs is not None:
                    completion.logprobs = (completion.logprobs or []) + delta.logprobs
                if delta.finish_reason is not None:
                    completion.finish_reason = delta.finish_reason
                    completion.stop_reason = delta.stop_reason
                    completion.cumulative_logprob, completion.score = delta.cumulative_logprob, delta.score
        return completions

    def prompt_logprobs(self, prompt: int) -> list[TokenLogprob | None] | None:
        """Known by the first token of any of its choices. None: nobody asked."""
        return self._prompt_logprobs[prompt]

    def usage(self) -> UsageBody:
        """Complete once every choice has finished."""
        parts: list[Usage] = [generation.usage for generation in self._generations]
        prompt = sum(part.prompt_tokens for part in parts)
        completion = sum(part.completion_tokens for part in parts)
        return UsageBody(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(sum(part.cached_tokens for part in parts)),
        )

    def _check(self, delta: Delta) -> None:
        if delta.finish_reason is FinishReason.ERROR:
            raise error_of(delta.refusal)
        if delta.finish_reason is FinishReason.ABORT:
            raise self._why_over()

    def _why_over(self) -> RopewayError:
        return self._cancelled or ClientGone("the client closed its connection")

    def _note(self, error: RopewayError) -> None:
        self._record.error = self._record.error or error.code or error.kind

    async def _merged(self) -> AsyncGenerator[tuple[int, Delta], None]:
        if len(self._generations) == 1:
            async for delta in self._generations[0]:
                yield 0, delta
            return
        arrived: asyncio.Queue[tuple[int, Delta] | None] = asyncio.Queue()

        async def pump(position: int, generation: Generation) -> None:
            async for delta in generation:
                arrived.put_nowait((position, delta))

        pumps = asyncio.gather(*(pump(position, each) for position, each in enumerate(self._generations)))
        pumps.add_done_callback(lambda _: arrived.put_nowait(None))
        try:
            while (item := await arrived.get()) is not None:
                yield item
            await pumps
        finally:
            pumps.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await pumps
