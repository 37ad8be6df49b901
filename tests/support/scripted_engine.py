"""An engine without a model: every completion is a script of tokens. For tests of what stands above the engine.

Text, stop strings, limits and checks are those of the real client (``CompletionText``, ``Submitter``); only the
tokens are made up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from ropeway.engine.client import Delta, Usage
from ropeway.engine.completions import CompletionText
from ropeway.engine.messages import EngineInfo, Stats
from ropeway.engine.submission import Submitter
from ropeway.errors import EngineDead, QueueFull
from ropeway.outcome import Finished
from ropeway.request import FinishReason, SamplingParams, TokenLogprob
from ropeway.text.tokenizer import Tokenizer
from tests.support.tokenizers import CHATML, byte_level

EOS = 2
SCRIPT = "The line keeps moving; grüße 你好 🚀🧠 hello world, one two three four five six. "


def scripted_tokenizer(chat_template: str | None = CHATML) -> Tokenizer:
    """Byte-level BPE of 400 ids, end token ``<|im_end|>`` (2), no BOS."""
    templates = {} if chat_template is None else {"default": chat_template}
    return Tokenizer(byte_level(400), eos_ids=[EOS], chat_templates=templates)


class ScriptedGeneration:
    def __init__(self, engine: ScriptedEngine, prompt: Sequence[int], params: SamplingParams) -> None:
        self.usage = Usage(prompt_tokens=len(prompt), cached_tokens=engine.cached_tokens)
        self.params = params
        self.cancelled = False
        self._engine = engine
        self._mail: asyncio.Queue[Delta] = asyncio.Queue()
        self._completions = [CompletionText(index, params, engine.tokenizer) for index in range(params.n)]
        self._open = set(range(params.n))
        limit = engine.info.max_model_len - len(prompt)
        self._limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
        self._task = asyncio.create_task(self._run())

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
        self._end(FinishReason.ABORT, None)

    def fail(self, error: str) -> None:
        self._task.cancel()
        self._end(FinishReason.ERROR, error)

    async def _run(self) -> None:
        engine = self._engine
        for position in range(self._limit):
            await engine.pause(position)
            if engine.fail_after is not None and position >= engine.fail_after:
                self._end(FinishReason.ERROR, "scripted failure")
                return
            for index in sorted(self._open):
                self._push(index, position)
            if not self._open:
                return

    def _push(self, index: int, position: int) -> None:
        token = self._engine.token(index, position)
        last = position + 1 == self._limit
        ended = token == EOS and not self.params.ignore_eos and position + 1 > self.params.min_tokens
        finished = None
        if ended or token in self.params.stop_token_ids:
            finished = Finished(0, FinishReason.STOP, end_token=token)
        elif last:
            finished = Finished(0, FinishReason.LENGTH)
        delta = self._completions[index].push(token, self._logprob(token), finished)
        self.usage.completion_tokens += 1
        self._put(delta)

    def _logprob(self, token: int) -> TokenLogprob | None:
        if self.params.logprobs is None:
            return None
        top = [((token + k) % 400, -0.25 - k) for k in range(self.params.logprobs)]
        return TokenLogprob(token, self._engine.logprob, top)

    def _end(self, reason: FinishReason, error: str | None) -> None:
        for index in sorted(self._open):
            self._put(self._completions[index].end(Finished(0, reason, error=error)))

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
    ) -> None:
        self.tokenizer = tokenizer
        self.info = EngineInfo(
            model="scripted", vocab_size=400, max_model_len=max_model_len, num_blocks=64, block_size=16,
            max_num_seqs=max_num_seqs,
        )  # fmt: skip
        self._encoder = scripted_tokenizer()
        self._submitter = Submitter(self.info)
        self._max_queue = max_queue
        self.live: set[ScriptedGeneration] = set()
        self.submitted: list[tuple[list[int], SamplingParams, str | None]] = []
        self.counters = Stats(preemptions=3, prefix_queries=40, prefix_hits=16, wasted_rows={"stop_string": 2})
        self.reset(script)

    def reset(self, script: str = SCRIPT) -> None:
        """Back to a healthy engine that answers ``script`` and then ends."""
        self.script = self._encoder.encode(script, add_special_tokens=False)
        self.delay_s = 0.0
        self.first_delay_s = 0.0
        self.fail_after: int | None = None
        self.failure: str | None = None
        self.cached_tokens = 0
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
        c = self.counters
        return Stats(
            running=running, waiting=count - running, blocks_live=2 * running, blocks_cached=4,
            blocks_free=60 - 2 * running, preemptions=c.preemptions, prefix_queries=c.prefix_queries,
            prefix_hits=c.prefix_hits, wasted_rows=c.wasted_rows,
        )  # fmt: skip

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, cache_salt: str | None = None
    ) -> ScriptedGeneration:
        if self.failure is not None:
            raise EngineDead(self.failure)
        self._submitter.prepare(prompt, params, salt=cache_salt)
        count = sum(each.params.n for each in self.live)
        if count + params.n > self.info.max_num_seqs + self._max_queue:
            raise QueueFull(f"{count} requests are under way, {params.n} more were asked", retry_after_s=1.5)
        self.submitted.append((list(prompt), params, cache_salt))
        generation = ScriptedGeneration(self, prompt, params)
        self.live.add(generation)
        return generation

    def die(self, why: str) -> None:
        self.failure = why
        for each in list(self.live):
            each.fail(why)

    async def close(self) -> None:
        self.die("closed")
