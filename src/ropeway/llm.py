"""The Python API: ``LLM`` runs the engine in this process, ``AsyncLLM`` in one of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from numbers import Integral
from types import TracebackType
from typing import Any, Self

from ropeway.config import Config
from ropeway.engine.beam_generation import BeamGeneration
from ropeway.engine.beam_search import BeamSearch
from ropeway.engine.client import AsyncEngine, Delta, Generation, RequestOptions, Usage, error_of
from ropeway.engine.completions import CompletionText, Router
from ropeway.engine.messages import NewRequest
from ropeway.engine.startup import StartUp
from ropeway.engine.submission import Submitter
from ropeway.errors import EngineDead, InvalidRequest
from ropeway.loading.sources import resolve as resolve_source
from ropeway.outcome import Refusal, StepOutput
from ropeway.request import BeamSearchParams, Completion, RequestOutput, SamplingParams
from ropeway.settings import resolve as resolve_settings
from ropeway.text.tokenizer import Tokenizer
from ropeway.tiers import find_tier

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class _Call:
    """One prompt of a ``generate`` call: its deltas, put together."""

    def __init__(self, prompt: str | None, ids: Sequence[int], params: SamplingParams) -> None:
        self.usage = Usage(prompt_tokens=len(ids))
        self.output = RequestOutput(
            prompt=prompt,
            prompt_token_ids=list(ids),
            outputs=[Completion(index, logprobs=None if params.logprobs is None else []) for index in range(params.n)],
        )
        self.open = params.n
        self.refusal: Refusal | None = None
        self.news: deque[Delta] | None = None
        """Deltas for whoever reads them one by one."""

    def add(self, delta: Delta) -> None:
        if self.news is not None:
            self.news.append(delta)
        self.refusal = self.refusal or delta.refusal
        completion = self.output.outputs[delta.index]
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        if delta.logprobs and completion.logprobs is not None:
            completion.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
            completion.cumulative_logprob, completion.score = delta.cumulative_logprob, delta.score
            self.output.cached_tokens = self.usage.cached_tokens
            self.open -= 1

    def result(self) -> RequestOutput:
        """The whole output; raises what the engine refused or ended it with."""
        if self.refusal is not None:
            raise error_of(self.refusal)
        return self.output


class _Search:
    """One prompt of a ``beam_search`` call."""

    def __init__(self, prompt: str | None, ids: Sequence[int], search: BeamSearch) -> None:
        self.output = RequestOutput(prompt=prompt, prompt_token_ids=list(ids), outputs=[])
        self.calls: list[_Call] = []
        """What the engine has been asked for the next step."""
        self._search = search

    @property
    def open(self) -> bool:
        """Whether the engine has not answered yet."""
        return any(call.open for call in self.calls)

    @property
    def over(self) -> bool:
        return self._search.over

    @property
    def prompts(self) -> list[list[int]]:
        return self._search.prompts

    @property
    def question(self) -> SamplingParams:
        return self._search.question

    def step(self) -> None:
        """Go on with what the engine has answered; raises what it refused or ended a request with."""
        answers = [call.result() for call in self.calls]
        self.calls = []
        if not self._search.tokens:
            self.output.cached_tokens = answers[0].cached_tokens
        self._search.step([answer.logprobs[0].top for answer in answers if answer.logprobs])
        if self._search.over:
            self.output.outputs = self._search.answers()


class LLM:
    """Offline inference in this process.

    >>> with LLM("smollm2-135m") as llm:
    ...     print(llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].text)

    ``fields`` are the settings of ``ropeway.config`` by name (``max_num_seqs=8``, ``device="reference"``).
    Not to be used from two threads at once.
    """

    def __init__(self, model: str = "smollm2-135m", **fields: Any) -> None:
        self._open(_settings(model, fields))

    @classmethod
    def from_config(cls, config: Config, startup: StartUp | None = None) -> Self:
        """The same from settings that are resolved already. ``startup`` goes on with the parts of loading."""
        llm = cls.__new__(cls)
        llm._open(config, startup)
        return llm

    def _open(self, config: Config, startup: StartUp | None = None) -> None:
        startup = startup or StartUp()
        from ropeway.engine.assembly import assemble

        startup.ended("torch")
        self.config = config
        path = resolve_source(config.model.model)
        self.tokenizer = Tokenizer.from_path(path)
        startup.ended("tokenizer")
        self._router: Router[_Call] = Router()
        assembly = assemble(
            self.config,
            path,
            self._receive,
            end_ids=() if self.tokenizer is None else self.tokenizer.eos_ids,
            vocab_size=None if self.tokenizer is None else self.tokenizer.vocab_size,
            startup=startup,
        )
        self._assembly = assembly
        self.engine = assembly.engine
        self.info = assembly.info
        self.worker = assembly.worker
        self._submitter = Submitter(self.info)
        self._ahead = int(self.config.engine.async_scheduling)
        self._received = False
        """Whether the engine has said anything since its last step began."""
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts (text or token ids), all of them in one continuous batch, in the given order.

        ``params``: one for all, or one per prompt; a model's own recommendations (generation_config.json) apply
        on the server only. Raises ``InvalidRequest`` before anything runs."""
        prepared = self._encode_all(prompts)
        each = [params or SamplingParams()] * len(prepared) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prepared):
            raise InvalidRequest(f"{len(each)} params for {len(prepared)} prompts; give one for all, or one per prompt")
        return self._run([(text, ids, p) for (text, ids), p in zip(prepared, each, strict=True)], progress=progress)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[RequestOutput]:
        """The likeliest answers that a search finds to each prompt (text or token ids), in the given order of the
        prompts; of each the best first, with their scores.

        As many searches run at once as there are seats for all of their beams. Raises ``InvalidRequest`` before
        anything runs."""
        searches = [
            _Search(text, ids, BeamSearch(ids, params, self.info, self.tokenizer))
            for text, ids in self._encode_all(prompts)
        ]
        most = max(self.info.max_num_seqs // params.beam_width, 1)
        waiting = deque(searches)
        under_way: list[_Search] = []
        try:
            while waiting or under_way:
                while waiting and len(under_way) < most:
                    under_way.append(waiting.popleft())
                    self._ask(under_way[-1])
                self._step()
                for search in [each for each in under_way if not each.open]:
                    search.step()
                    if search.over:
                        under_way.remove(search)
                    else:
                        self._ask(search)
        finally:
            self._abort([call for search in under_way for call in search.calls])
        return [search.output for search in searches]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        *,
        progress: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages), or several. ``template``: variables of the chat template."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if several else [messages]
        ids = [self._need_tokenizer().encode_chat(m, **template) for m in conversations]
        return self._run([(None, i, params or _CHAT) for i in ids], progress=progress)

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> Iterator[Delta]:
        """The answer as it is made. Leaving the loop early aborts it."""
        ids = self._need_tokenizer().encode_chat(messages, **template)
        call = self._submit(None, self._prepare(ids, params or _CHAT))
        call.news = deque()
        try:
            while call.open or call.news:
                while call.news:
                    yield call.news.popleft()
                if call.open:
                    self._step()
            call.result()
        finally:
            self._abort([call])

    def close(self) -> None:
        """Give memory and threads back. May be called twice."""
        if not self._closed:
            self._closed = True
            self._assembly.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode_all(self, prompts: Prompt | Sequence[Prompt]) -> list[tuple[str | None, Sequence[int]]]:
        """(its text if it was given as text, its token ids) of each."""
        each: Sequence[Prompt] = [prompts] if _is_one_prompt(prompts) else prompts  # type: ignore[list-item, assignment]
        return [(prompt if isinstance(prompt, str) else None, self._encode(prompt)) for prompt in each]

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return self._need_tokenizer().encode(prompt)
        return _token_ids(prompt)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(f"{self.config.model.model} has no tokenizer; give the prompt as token ids")
        return self.tokenizer

    def _submit(self, prompt: str | None, group: Sequence[NewRequest]) -> _Call:
        if self._closed:
            raise EngineDead("this LLM has been closed; make a new one")
        params = group[0].params
        call = _Call(prompt, group[0].prompt.tolist(), params)
        for index, new in enumerate(group):
            self._router.add(new.id, call, CompletionText(index, params, self.tokenizer), call.usage)
        self.engine.submit(group)
        return call

    def _run(
        self, requests: Sequence[tuple[str | None, Sequence[int], SamplingParams]], *, progress: bool
    ) -> list[RequestOutput]:
        groups = [self._prepare(ids, params) for _, ids, params in requests]
        calls: list[_Call] = []
        try:
            for (text, _, _), group in zip(requests, groups, strict=True):
                calls.append(self._submit(text, group))
                if calls[-1].refusal is not None:
                    calls[-1].result()
            with _progress_bar(calls, shown=progress) as show:
                first_open = 0
                while first_open < len(calls):
                    if calls[first_open].open:
                        self._step()
                        show()
                    else:
                        first_open += 1
        finally:
            self._abort(calls)
        return [call.result() for call in calls]

    def _ask(self, search: _Search) -> None:
        question = search.question
        for ids in search.prompts:
            search.calls.append(self._submit(None, self._prepare(ids, question)))

    def _prepare(self, ids: Sequence[int], params: SamplingParams) -> list[NewRequest]:
        """Of the lowest tier: nobody waits for one answer of many."""
        return self._submitter.prepare(ids, params, tier=len(self.info.tiers) - 1)

    def _step(self) -> None:
        steps, self._received = self.engine.steps, False
        self.engine.step(self._ahead)
        if self.engine.steps == steps and not self._received:
            time.sleep(self.engine.patience_s())  # nothing can run until something changes, such as a load from disk

    def _abort(self, calls: Sequence[_Call]) -> None:
        """Drop what has not ended, and let the device finish what is under way."""
        ours = set(map(id, calls))
        left = [request_id for request_id, owner, _ in self._router.owners() if id(owner) in ours]
        for request_id in left:
            self._router.drop(request_id)
        self.engine.abort(left, "cancel")
        self.engine.drain()

    def _receive(self, output: StepOutput) -> None:
        self._received = True
        news, stopped = self._router.receive(output)
        for call, delta in news:
            call.add(delta)
        self.engine.abort(stopped, "stop_string")


class AsyncLLM:
    """The same for asyncio: many calls at once share the batch of an engine process.

    >>> async with await AsyncLLM.start("smollm2-135m") as llm:
    ...     output = await llm.generate("The capital of France is")
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    @classmethod
    async def start(cls, model: str = "smollm2-135m", **fields: Any) -> AsyncLLM:
        """Start an engine process and load the model into it. Raises what loading raises."""
        from ropeway.engine.process import start_engine

        return cls(await start_engine(_settings(model, fields)))

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: str | int | None = None
    ) -> RequestOutput:
        """Complete one prompt. ``priority``: a tier by name, or by number, where 0 is the default tier and lower is
        more urgent. Raises what the engine refuses it with, such as ``Shed``."""
        params, options = params or SamplingParams(), self._options(priority)
        ids = await asyncio.to_thread(self._encode, prompt)
        return await _collect(self.engine.submit(ids, params, options), prompt, ids, params)

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, *, priority: str | int | None = None
    ) -> RequestOutput:
        """The likeliest answers that a search finds to one prompt, the best first; ``priority`` as in ``generate``.
        Raises what the engine refuses it with."""
        options = self._options(priority)
        ids = await asyncio.to_thread(self._encode, prompt)
        return await _collect(BeamGeneration(self.engine, ids, params, options), prompt, ids, params.answers)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: str | int | None = None
    ) -> AsyncIterator[Delta]:
        """The completion as it is made; ``priority`` as in ``generate``. Leaving the loop early aborts it."""
        options = self._options(priority)
        ids = await asyncio.to_thread(self._encode, prompt)
        generation = self.engine.submit(ids, params or SamplingParams(), options)
        try:
            async for delta in generation:
                if delta.refusal is not None:
                    raise error_of(delta.refusal)
                yield delta
        finally:
            generation.cancel()

    async def close(self) -> None:
        await self.engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _options(self, priority: str | int | None) -> RequestOptions:
        return RequestOptions(tier=find_tier(self.engine.info.tiers, priority), arrival_s=time.monotonic())

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return _token_ids(prompt)
        if self.engine.tokenizer is None:
            raise InvalidRequest(f"{self.engine.info.model} has no tokenizer; give the prompt as token ids")
        return self.engine.tokenizer.encode(prompt)


async def _collect(generation: Generation, prompt: Prompt, ids: Sequence[int], params: SamplingParams) -> RequestOutput:
    """The whole output, however it comes; left early, it is aborted."""
    call = _Call(prompt if isinstance(prompt, str) else None, ids, params)
    call.usage = generation.usage
    try:
        async for delta in generation:
            call.add(delta)
    finally:
        generation.cancel()
    return call.result()


def _settings(model: str, fields: Mapping[str, Any]) -> Config:
    resolved = resolve_settings({"model": model, **fields}, given_as="argument")
    for note in resolved.notes:
        log.warning("%s", note)
    return resolved.config


_BAR_S = 0.1
"""Between two updates of the progress bar."""
_CHAT = SamplingParams(max_tokens=None)
"""Without other wishes, an answer may be as long as the context."""


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))


def _token_ids(prompt: Sequence[int]) -> list[int]:
    """The prompt as plain integers. Raises ``InvalidRequest`` for anything else."""
    bad = [token for token in prompt if not isinstance(token, Integral) or isinstance(token, bool)]
    if bad:
        raise InvalidRequest(f"a prompt is text or a list of token ids, not one with {bad[0]!r}", param="prompt")
    return [int(token) for token in prompt]


@contextlib.contextmanager
def _progress_bar(calls: Sequence[_Call], *, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar over requests with the number of tokens, on a terminal only; what is yielded brings it up to date."""
    if not shown or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.fields[tokens]} tokens"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress("generating", BarColumn(), MofNCompleteColumn(), *columns, console=console, transient=True) as bar:
        task = bar.add_task("generating", total=len(calls), tokens=0)
        next_s = 0.0

        def show() -> None:
            nonlocal next_s
            now = time.monotonic()
            if now >= next_s:
                next_s = now + _BAR_S
                tokens = sum(call.usage.completion_tokens for call in calls)
                bar.update(task, completed=sum(not call.open for call in calls), tokens=tokens)

        yield show
