"""From text to token ids, off the event loop: chat templates and tokenizers run in threads of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

import msgspec

from ropeway.errors import ContextLengthExceeded, InvalidRequest, QueueFull
from ropeway.server.limits import MAX_MESSAGES
from ropeway.server.tooling import ToolUse
from ropeway.text.answers.families import Writing
from ropeway.text.tokenizer import Tokenizer

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_THREADS = 2
_TEMPLATE_ARGUMENTS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "self")

TokenId = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""What fits into an int64; whether it is in the vocabulary, the engine's client says."""
Prompt = str | list[int]
Result = TypeVar("Result")


class Prompts:
    """Prepares prompts, a bounded number at a time."""

    def __init__(self, tokenizer: Tokenizer | None, *, max_model_len: int, most: int) -> None:
        """``most``: requests that may be under preparation at once; beyond that ``QueueFull``."""
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._most = most
        self._busy = 0
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="ropeway-text")
        self._side_pool = ThreadPoolExecutor(1, thread_name_prefix="ropeway-text-aside")
        self._longest_token = _longest_token(tokenizer) if tokenizer is not None else 0

    def close(self) -> None:
        for pool in (self._pool, self._side_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[], Result], *, aside: bool = False) -> Result:
        """``work()`` in a thread. ``aside``: in one of its own, for work of no bounded length, so that prompts are not
        kept waiting. Raises ``QueueFull`` when too many wait for one."""
        if self._busy >= self._most:
            raise QueueFull(f"{self._busy} requests are being tokenized, as many as this server takes; try again later")
        self._busy += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._side_pool if aside else self._pool, work)
        finally:
            self._busy -= 1

    def need_tokenizer(self) -> Tokenizer:
        """Raises ``InvalidRequest`` for a model that has none."""
        if self.tokenizer is None:
            raise InvalidRequest(
                "this model has no tokenizer; send token ids as the prompt of /v1/completions", param="prompt"
            )
        return self.tokenizer

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: ToolUse = ToolUse(),
        writing: Writing = Writing(),
        add_special_tokens: bool | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        bounded: bool = True,
    ) -> list[int]:
        """Token ids of a chat; ``bounded`` as in ``encode``. Raises ``InvalidRequest``, ``ContextLengthExceeded``."""
        tokenizer = self.need_tokenizer()
        checked = check_messages(tools.instructed(messages, writing))
        if bounded:
            self._check_length(sum(_characters(message["content"]) for message in checked), "messages")
        for name in _TEMPLATE_ARGUMENTS:
            if name in (template_kwargs or {}):
                raise InvalidRequest(
                    f"chat_template_kwargs must not hold {name}; it has a field of its own",
                    param="chat_template_kwargs",
                )
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message and add_generation_prompt exclude each other",
                    param="continue_final_message",
                )
            if checked[-1]["role"] != "assistant":
                raise InvalidRequest(
                    "continue_final_message needs an assistant message at the end", param="continue_final_message"
                )

        def work() -> list[int]:
            ids = tokenizer.encode_chat(
                checked,
                tools=tools.shown or None,
                add_generation_prompt=add_generation_prompt is not False and not continue_final_message,
                continue_final_message=bool(continue_final_message),
                **(template_kwargs or {}),
            )
            return [*tokenizer.encode("", True), *ids] if add_special_tokens else ids

        return await self.run(work, aside=not bounded)

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, bounded: bool = True
    ) -> list[list[int]]:
        """Token ids of every text.

        ``bounded``: a text with more characters than the longest possible prompt is refused before it costs
        anything (``ContextLengthExceeded``); no tokenizer makes fewer tokens of it than the context has.
        """
        tokenizer = self.need_tokenizer()
        if bounded:
            for text in texts:
                self._check_length(len(text), "prompt")
        return await self.run(lambda: [tokenizer.encode(text, add_special_tokens) for text in texts], aside=not bounded)

    def _check_length(self, characters: int, param: str) -> None:
        most = self._max_model_len * self._longest_token
        if characters > most:
            raise ContextLengthExceeded(
                f"{param} has {characters} characters; the context of {self._max_model_len} tokens cannot hold more "
                f"than {most}",
                param=param,
            )


def split_prompts(prompt: str | list[Any]) -> list[Prompt]:
    """The prompts in the ``prompt`` field, which is one or several, as text or as token ids.

    Raises ``InvalidRequest`` for an empty one and for mixed or nested lists."""
    if isinstance(prompt, str):
        return [_not_empty(prompt, "prompt")]
    if not prompt:
        raise InvalidRequest("prompt is empty; it must hold at least one token", param="prompt")
    kinds: tuple[Any, ...] = (list[TokenId], list[str], list[list[TokenId]])
    first = prompt[0]
    kind = kinds[1] if isinstance(first, str) else kinds[2] if isinstance(first, list) else kinds[0]
    try:
        checked = msgspec.convert(prompt, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            f"prompt must be text, token ids, or a list of either, not a mixture: {str(error).replace('`', '')}",
            param="prompt",
        ) from error
    if kind is kinds[0]:
        return [checked]
    return [_not_empty(each, f"prompt[{index}]") for index, each in enumerate(checked)]


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a known role and with content; what an assistant did not say is empty text.

    Raises ``InvalidRequest`` naming the place of what is wrong, such as a part that is no text."""
    if not messages:
        raise InvalidRequest("messages is empty; send at least one", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"{len(messages)} messages; the limit is {MAX_MESSAGES}", param="messages")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        shown = "missing" if role is None else f"{role!r:.40}"
        raise InvalidRequest(
            f"{place}.role is {shown}; it must be one of {', '.join(sorted(_ROLES))}", param="messages"
        )
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, list):
        if not content and role != "assistant":
            raise InvalidRequest(f"{place}.content is empty", param="messages")
        for index, part in enumerate(content):
            _check_part(part, f"{place}.content[{index}]")
    elif not isinstance(content, str):
        kind = "missing" if content is None else f"of type {type(content).__name__}"
        raise InvalidRequest(f"{place}.content is {kind}; it must be text or a list of text parts", param="messages")
    checked = {**message, "content": content}
    calls = checked.get("tool_calls", ())
    if calls is None:
        del checked["tool_calls"]
    elif calls:
        _check_calls(calls, f"{place}.tool_calls")
    return checked


def _check_calls(calls: Any, place: str) -> None:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{place} must be a list", param="messages")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{place}[{index}].function must be an object with a name", param="messages")
        if not isinstance(function.get("arguments", ""), str | Mapping):
            raise InvalidRequest(f"{place}[{index}].function.arguments must be JSON text", param="messages")


def _check_part(part: Any, place: str) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise InvalidRequest(f"{place} must be an object with a type", param="messages")
    if kind != "text":
        raise InvalidRequest(f"{place}.type is {kind!r:.40}; this server reads text only", param="messages")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{place}.text must be text", param="messages")


def _characters(content: str | list[Any]) -> int:
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


def _not_empty(prompt: Any, place: str) -> Any:
    if len(prompt) == 0:
        raise InvalidRequest(f"{place} is empty; it must hold at least one token", param="prompt")
    return prompt


def _longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token; a token never has more characters than bytes."""
    return max((len(tokenizer.token_bytes(id_)) for id_ in range(tokenizer.vocab_size)), default=0)
