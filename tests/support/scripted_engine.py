"""An engine without a model: every completion is a script of tokens, and so is the likeliest beam of a search. For
tests of what stands above the engine.

Text, stop strings, limits and checks are those of the real client (``CompletionText``, ``Submitter``); only the
tokens are made up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from ropeway.engine.client import Delta, RequestOptions, Usage, error_of
from ropeway.engine.completions import CompletionText
from ropeway.engine.generation import cut
from ropeway.engine.messages import EngineInfo, Inspected, QueueView, SeatView, Stats, TierStats
from ropeway.engine.submission import Submitter
from ropeway.errors import EngineDead, QueueFull
from ropeway.outcome import Finished, Refusal
from ropeway.request import FinishReason, SamplingParams, Timeline, TokenLogprob
from ropeway.text.tokenizer import Tokenizer
from ropeway.tiers import DEFAULT_TIERS
from tests.support.tokenizers import CHATML, byte_level

EOS = 2
SCRIPT = "The line keeps moving; grüße 你好 🚀🧠 hello world, one two three four five six. "


def scripted_tokenizer(chat_template: str | None = CHATML) -> Tokenizer:
    """Byte-level BPE of 400 ids, end token ``<|im_end|>`` (2), no BOS."""
    templates = {} if chat_template is None else {"default": chat_template}
    return Tokenizer(byte_level(400), eos_ids=[EOS], chat_templates=templates)


class ScriptedTimelines:
    """Implements ``Timelines``: phases as long as they really were."""

    def __init__(self, engine: ScriptedEngine, tier: str, arrival_s: float, n: int) -> None:
        self.ended: dict[int, Timeline] = {}
        self.seated_s: float | None = None
        self.begun_s: float | None = None
        self._engine = engine
        self._tier = tier
        self._arrival_s = arrival_s
        self._n = n

    def now(self) -> Timeline:
        now = time.monotonic()
        seated = now if self.seated_s is None else self.seated_s
        begun = now if self.begun_s is None else self.begun_s
        return Timeline(
            tier=self._tier,
            phase="queued" if self.seated_s is None else "prefill" if self.begun_s is None else "decode",
            queued_s=seated - self._arrival_s,
            prefill_s=begun - seated,
            decode_s=now - begun,
            waits={"slots": seated - self._arrival_s},
            preemptions=dict(self._engine.preempted),
            cached_tokens=self._engine.cached_tokens,
        )

    def end(self, index: int) -> Timeline:
        timeline = self.now()
        timeline.phase = "finished"
        self.ended[index] = timeline
        return timeline

    def end_here(self, index: int) -> None:
        """The completion was ended on this side; the engine accounts for it ``told_s`` later."""
        total_s = time.monotonic() - self._arrival_s

        def tell() -> None:
            self.ended[index] = cut(self.now(), total_s)

        asyncio.get_running_loop().call_later(self._engine.told_s, tell)

    async def ask(self) -> Mapping[int, Timeline]:
        if len(self.ended) < self._n:
            await asyncio.sleep(self._engine.told_s)
        if not self._engine.explains:
            return self.ended
        return {index: self.now() for index in range(self._n)} | self.ended


class ScriptedGeneration:
    def __init__(
        self, engine: ScriptedEngine, prompt: Sequence[int], params: SamplingParams, options: RequestOptions
    ) -> None:
        self.usage = Usage(prompt_tokens=len(prompt), cached_tokens=engine.cached_tokens)
        self.params = params
        self.cancelled = False
        tier = engine.info.tiers[1 if options.tier is None else options.tier]
        arrival_s = time.monotonic() if options.arrival_s is None else options.arrival_s
        self.timelines = ScriptedTimelines(engine, tier.name, arrival_s, params.n)
        self._engine = engine
        self._mail: asyncio.Queue[Delta] = asyncio.Queue()
        self._completions = [CompletionText(index, params, engine.tokenizer) for index in range(params.n)]
        self._open = set(range(params.n))
        self._answered = asyncio.Event()
        self._refusal: Refusal | None = None
        limit = engine.info.max_model_len - len(prompt)
        self._limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
        self._task = asyncio.create_task(self._run())

    async def accepted(self) -> None:
        await self._answered.wait()
        if self._refusal is not None:
            raise error_of(self._refusal)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        left = self.params.n
        while left:
            delta = await self._mail.get()
            left -= delta.finish_reason is not None
            yield delta

    def cancel(self) -> None:
        if not self._open:
            return
        self.cancelled = True
        self._task.cancel()
        for index in self._open:
            self.timelines.end_here(index)
        self._end(FinishReason.ABORT)

    def fail(self, refusal: Refusal) -> None:
        self._task.cancel()
        self._end(FinishReason.ERROR, refusal)

    async def _run(self) -> None:
        engine = self._engine
        await asyncio.sleep(engine.answer_s)
        if engine.refusal is not None and engine.accepts < self.params.n:
            self._end(FinishReason.ERROR, engine.refusal)
            return
        engine.accepts -= self.params.n
        self._answered.set()
        await asyncio.sleep(engine.queue_s)
        self.timelines.seated_s = time.monotonic()
        for position in range(self._limit):
            await engine.pause(position)
            if engine.fail_after is not None and position >= engine.fail_after:
                self._end(FinishReason.ERROR, engine.fail_with)
                return
            if position == 0:
                self.timelines.begun_s = time.monotonic()
            for index in sorted(self._open):
                self._push(index, position)
            if not self._open:
                return

    def _push(self, index: int, position: int) -> None:
        token = self._engine.token(index, position + (self.params.beam_step or 0))
        last = position + 1 == self._limit
        ended = token == EOS and not self.params.ignore_eos and position + 1 > self.params.min_tokens
        finished = None
        if ended or token in self.params.stop_token_ids:
            finished = Finished(0, FinishReason.STOP, end_token=token, timeline=self.timelines.end(index))
        elif last:
            finished = Finished(0, FinishReason.LENGTH, timeline=self.timelines.end(index))
        delta = self._completions[index].push(token, self._logprob(token), finished)
        if delta.finish_reason is not None and finished is None:
            self.timelines.end_here(index)
        self.usage.completion_tokens += 1
        self._put(delta)

    def _logprob(self, token: int) -> TokenLogprob | None:
        if self.params.logprobs is None:
            return None
        top = [((token + k) % 400, -0.25 - k) for k in range(self.params.logprobs)]
        return TokenLogprob(token, self._engine.logprob, top)

    def _end(self, reason: FinishReason, refusal: Refusal | None = None) -> None:
        self._refusal = refusal
        for index in sorted(self._open):
            timeline = None if reason is FinishReason.ABORT else self.timelines.end(index)
            self._put(self._completions[index].end(Finished(0, reason, refusal=refusal, timeline=timeline)))
        self._answered.set()

    def _put(self, delta: Delta) -> None:
        if delta.finish_reason is not None:
            self._open.discard(delta.index)
            if not self._open:
                self._engine.live.discard(self)
        self._mail.put_nowait(delta)


class ScriptedEngine:
    """Implements ``AsyncEngine``. Tests set its attributes from another thread, which is safe for plain values."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None = None,
        script: str = SCRIPT,
        max_model_len: int = 1024,
        max_num_seqs: int = 4,
        max_queue: int = 8,
        warnings: Sequence[str] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.info = EngineInfo(
            model="scripted", vocab_size=400, max_model_len=max_model_len, num_blocks=64, block_size=16,
            max_num_seqs=max_num_seqs, end_ids=[EOS], tiers=list(DEFAULT_TIERS), warnings=list(warnings),
        )  # fmt: skip
        self._encoder = scripted_tokenizer()
        self._submitter = Submitter(self.info)
        self._max_queue = max_queue
        self.live: set[ScriptedGeneration] = set()
        self.submitted: list[tuple[list[int], SamplingParams, RequestOptions]] = []
        self.counters = Stats(preemptions=3, prefix_queries=40, prefix_hits=16, wasted_rows={"stop_string": 2})
        self.reset(script)

    def reset(self, script: str = SCRIPT) -> None:
        """Back to a healthy engine that takes everything, answers ``script`` and then ends."""
        self.script = self._encoder.encode(script, add_special_tokens=False)
        self.delay_s = 0.0
        self.first_delay_s = 0.0
        self.answer_s = 0.0
        """Until it takes a request, or refuses it."""
        self.queue_s = 0.0
        """Until it gives one a seat."""
        self.told_s = 0.0
        """Until it says where the time of a request went that was ended on this side."""
        self.explains = True
        self.refusal: Refusal | None = None
        """What it says to all requests but the next ``accepts`` completions."""
        self.accepts = 0
        self.fail_after: int | None = None
        self.fail_with = Refusal("RopewayError", "scripted failure")
        self.failure: str | None = None
        self.dead = asyncio.Event()
        self.cached_tokens = 0
        self.preempted: dict[str, int] = {}
        self.logprob = -0.25
        self.submitted.clear()

    def token(self, index: int, position: int) -> int:
        """Choices differ: each starts at its own place of the script. The end token comes when the script is over."""
        at = position + 3 * index
        return self.script[at] if at < len(self.script) else EOS if at == len(self.script) else self.script[0]

    async def pause(self, position: int) -> None:
        await asyncio.sleep(self.first_delay_s if position == 0 else self.delay_s)

    @property
    def stats(self) -> Stats:
        count = sum(each.params.n for each in self.live)
        running = min(count, self.info.max_num_seqs)
        tiers = {"standard": TierStats(running=running, waiting=count - running), **self.counters.tiers}
        return msgspec.structs.replace(
            self.counters, running=running, waiting=count - running, blocks_live=2 * running, blocks_cached=4,
            blocks_free=60 - 2 * running, tiers=tiers,
        )  # fmt: skip

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, options: RequestOptions = RequestOptions()
    ) -> ScriptedGeneration:
        if self.failure is not None:
            raise EngineDead(self.failure)
        self._submitter.prepare(prompt, params, salt=options.cache_salt, tier=options.tier, tenant=options.tenant)
        count = sum(each.params.n for each in self.live)
        if not params.beam_step and count + params.n > self.info.max_num_seqs + self._max_queue:
            raise QueueFull(f"{count} requests are under way, {params.n} more were asked", retry_after_s=1.5)
        self.submitted.append((list(prompt), params, options))
        generation = ScriptedGeneration(self, prompt, params, options)
        self.live.add(generation)
        return generation

    async def record(self, on: bool) -> bytes:
        return b"" if on else b"{}"

    async def inspect(self) -> Inspected:
        seat = SeatView(
            id=7, tier="standard", prompt_tokens=10, computed_tokens=14, output_tokens=4, limit=40, blocks=1,
            preemptions=0,
        )  # fmt: skip
        waiting = QueueView(id=8, tier="batch", prompt_tokens=3, waits_s=1.5, swapped=False, gated=False)
        return Inspected(seats=[seat] * len(self.live), queue=[waiting], blocks=bytes([2, 3, 1] + [0] * 61))

    async def died(self) -> str:
        await self.dead.wait()
        assert self.failure is not None
        return self.failure

    def die(self, why: str) -> None:
        self.failure = why
        self.dead.set()
        for each in list(self.live):
            each.fail(Refusal("EngineDead", why))

    async def close(self) -> None:
        self.die("closed")
