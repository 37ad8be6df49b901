"""From a chat request to a prompt, sampling parameters and a reader of answers; whatever API it came by."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from ropeway.engine.client import Delta
from ropeway.errors import InvalidRequest
from ropeway.grammar import Grammar, told_plainly
from ropeway.request import BeamSearchParams, FinishReason, SamplingParams
from ropeway.server.beams import chat_beams
from ropeway.server.protocol import ChatCompletionRequest
from ropeway.server.sampling import chat_params
from ropeway.server.state import State
from ropeway.server.structure import grammar_of
from ropeway.server.tooling import ToolUse, tool_use
from ropeway.text.answers.families import BEGIN_OF_REASONING, END_OF_REASONING, Writing, thinks
from ropeway.text.answers.parts import (
    Arguments,
    CallBegins,
    Content,
    FirstCallReader,
    Part,
    PartReader,
    Reasoning,
)

_END_TOKENS = 16
"""Tokens at a prompt's end that tell whether the model reasons from there."""


@dataclass(frozen=True)
class Chat:
    """One conversation, ready to be answered."""

    prompt: list[int]
    prompt_end: str
    params: SamplingParams
    """With ``beams``: how their answers end."""
    use: ToolUse
    writing: Writing
    begin_of_reasoning: Sequence[int]
    """Token ids of the mark; likewise."""
    end_of_reasoning: Sequence[int]
    beams: BeamSearchParams | None = None
    """The search to answer by, if it is one."""

    def reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """How many tokens of an answer are reasoning, the mark at its end included."""
        size, begin = len(self.end_of_reasoning), len(self.begin_of_reasoning)
        if not thinks(self.prompt_end) and list(token_ids[:begin]) != list(self.begin_of_reasoning):
            return 0
        ends = (
            place + size
            for place in range(len(token_ids) - size + 1)
            if list(token_ids[place : place + size]) == list(self.end_of_reasoning)
        )
        return next(ends, len(token_ids))

    def reader(self) -> PartReader:
        """For one choice."""
        reader = self.writing.reader(self.use.names, prompt_end=self.prompt_end)
        return reader if self.use.several or not self.use.tools else FirstCallReader(reader)

    def finish_reason(self, reason: FinishReason, *, called: bool) -> str:
        """OpenAI's word for it: an answer that called a tool which the request named has simply stopped."""
        return "tool_calls" if called and not self.use.named and reason is FinishReason.STOP else reason.value


async def prepare_chat(state: State, body: ChatCompletionRequest) -> Chat:
    """Raises ``InvalidRequest`` naming the field, ``ContextLengthExceeded``, ``QueueFull``."""
    use = tool_use(body, state.writing)
    if not state.writing.reasons:
        body.thinking_token_budget = None
    # What is wrong costs nothing.
    beams = chat_beams(body)
    if beams is not None and use.forced:
        raise InvalidRequest(
            "a call of a tool can't be forced with use_beam_search; leave out tool_choice, or set it to auto",
            param="tool_choice",
        )
    params = chat_params(body, state.sampling_defaults, grammar=grammar_of(body)) if beams is None else beams.answers
    template_kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        template_kwargs.setdefault("enable_thinking", body.reasoning_effort != "none")
    prompt = await state.prompts.chat(
        body.messages,
        tools=use,
        writing=state.writing,
        add_special_tokens=body.add_special_tokens,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=template_kwargs,
    )
    tokenizer = state.prompts.need_tokenizer()
    end = tokenizer.decode(prompt[-_END_TOKENS:], skip_special_tokens=False)
    after = state.writing.answers_after(end)
    grammar = _grammar(use, state.writing, grammar_of(body, after=after), after)
    hidden = bool(use.tools) and state.writing.tools is not None and state.writing.tools.hidden
    if beams is not None:
        if grammar is not None:
            raise InvalidRequest(
                "a strict tool can't be called with use_beam_search, which nothing guides; leave out strict",
                param="tools",
            )
        beams = msgspec.structs.replace(beams, skip_special_tokens=beams.skip_special_tokens and not hidden)
        params = beams.answers
    elif state.writing.reasons or grammar != params.grammar or hidden:
        params = chat_params(
            body, state.sampling_defaults, grammar=grammar, show_special_tokens=hidden, thinking=thinks(end)
        )
    begin, over = (tokenizer.encode(m, add_special_tokens=False) for m in (BEGIN_OF_REASONING, END_OF_REASONING))
    return Chat(prompt, end, params, use, state.writing, begin, over, beams)


def _grammar(use: ToolUse, writing: Writing, answer: Grammar | None, after: str) -> Grammar | None:
    """An answer that must call a tool, or may where the answer itself has to look like something."""
    if use.forced or answer is None:
        return use.grammar(writing, after)
    if not use.tools or answer.kind != "json_schema" or writing.tools is None:
        return answer
    calls = writing.tools.grammar(use.tools, several=use.several).replace("start:", "calls:", 1)
    schema = json.dumps(told_plainly(json.loads(answer.text)))
    return Grammar.lark(f"start: calls | json\njson: %json {schema}\n{calls}", after=after)


@dataclass
class Call:
    name: str
    arguments: str = ""


@dataclass
class Message:
    """The parts of an answer, put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            match part:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegins(_, name):
                    self.calls.append(Call(name))
                case Arguments(index, text):
                    self.calls[index].arguments += text


def read_message(chat: Chat, text: str) -> Message:
    """A whole answer."""
    reader, message = chat.reader(), Message()
    message.add(reader.push(text))
    message.add(reader.finish())
    return message


class ChoiceReaders:
    """The choices of one answer that comes piece by piece."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._readers: dict[int, PartReader] = {}
        self._called: set[int] = set()

    def read(self, delta: Delta) -> list[Part]:
        reader = self._readers.get(delta.index)
        if reader is None:
            reader = self._readers[delta.index] = self._chat.reader()
        parts = reader.push(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            parts = [*parts, *reader.finish()]
        if any(isinstance(part, CallBegins) for part in parts):
            self._called.add(delta.index)
        return parts

    def called(self, index: int) -> bool:
        """Whether this choice has called a tool."""
        return index in self._called


def text_of(parts: Sequence[Part], kind: type[Content] | type[Reasoning]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))
