"""Text to token ids and back, on the ``tokenizers`` library."""

from __future__ import annotations

import secrets
import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ropeway.errors import InvalidRequest
from ropeway.text.chat_template import ChatTemplate
from ropeway.text.control import ControlSpellings, Marks
from ropeway.text.messages import normalise_messages
from ropeway.text.pieces import PieceDecoder, take_apart

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "raise_exception"})


class Tokenizer:
    """A model's vocabulary, special tokens and chat templates. Its methods may be called from several threads at once.

    *Special* tokens are the control tokens of the model (``<|im_end|>``, ``<s>``): they are skipped in decoded text,
    and users cannot write them in a chat. Other added tokens (``<tool_call>``) are ordinary vocabulary.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        named_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """``eos_ids``: ids that end a text, from every source the model has. ``named_tokens``: ``bos_token``,
        ``eos_token``, ... as templates see them. ``chat_templates``: by name, ``default`` and perhaps ``tool_use``.

        Raises ``LoadError`` for an invalid template.
        """
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(eos_ids))
        self.named_tokens = dict(named_tokens or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(id_ for id_, token in added.items() if token.special)
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        """The ids the tokenizer knows are below this; the model's own vocabulary may be padded beyond it."""
        self._spellings = ControlSpellings(token.content for token in added.values() if token.special)
        self._templates = {name: ChatTemplate(source) for name, source in (chat_templates or {}).items()}
        self._pieces: dict[int, bytes] = {}
        self._plain_lock = threading.Lock()
        self._plain: tokenizers.Tokenizer | None = None

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer | None:
        """The tokenizer of a model folder (which may just hold a ``.gguf`` file) or a ``.gguf`` file; None when it has
        none.

        Raises ``LoadError`` for damaged files, and for a folder whose kind of tokenizer needs transformers when that
        is not installed; ``Unsupported`` for a kind not known here.
        """
        path = Path(path)
        if path.suffix == ".gguf":
            return cls._from_gguf(path)
        from ropeway.text.tokenizer_folder import tokenizer_from_folder

        tokenizer = tokenizer_from_folder(path)
        if tokenizer is None and (files := sorted(path.glob("*.gguf"))):
            return cls._from_gguf(files[0])
        return tokenizer

    @classmethod
    def _from_gguf(cls, path: Path) -> Tokenizer | None:
        from ropeway.loading.gguf.reader import read_metadata
        from ropeway.text.gguf_tokenizer import tokenizer_from_gguf

        metadata = read_metadata(path)
        if metadata.scalar("tokenizer.ggml.model", str, "none") in ("none", "no_vocab"):
            return None
        backend, settings = tokenizer_from_gguf(metadata)
        return cls(
            backend,
            eos_ids=settings.eos_ids,
            named_tokens=settings.named_tokens,
            chat_templates=settings.chat_templates,
        )

    # -- text to ids ---------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True, *, parse_special: bool = True) -> list[int]:
        """Token ids of ``text``.

        ``add_special_tokens`` adds what the model wants around a text (a BOS token, as a rule). With ``parse_special``
        a special token spelled in ``text`` becomes that token, which is what the completions endpoint does; without,
        it is ordinary text. Raises ``InvalidRequest`` for lone surrogates, which no UTF-8 can hold.
        """
        _check_text(text)
        backend = self.backend
        if not parse_special and self._spellings.found_in(text):
            backend = self._plain_backend()
        return _ids(backend, text, add_special_tokens=add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of the rendered chat (see ``apply_chat_template``), in which special tokens come from the template
        alone: one spelled in a message, a name or a tool is encoded as the text it is. All other text is tokenised as
        in the whole rendered string."""
        marks = Marks()
        try:
            marked_messages = self._spellings.mark(normalise_messages(messages), marks)
            marked_tools = self._spellings.mark(list(tools), marks) if tools else None
            marked_kwargs = self._spellings.mark(kwargs, marks)
        except RecursionError as error:
            raise InvalidRequest(
                "messages, tools or variables of the chat template are nested too deeply; send flatter ones",
                param="messages",
            ) from error
        text = self._render(marked_messages, marked_tools, add_generation_prompt, continue_final_message, marked_kwargs)
        if not marks.used:
            return self.encode(text, add_special_tokens=False)
        text, written = marks.remove(text)
        _check_text(text)
        (encoding,) = self.backend.encode_batch([text], add_special_tokens=False)
        ids: list[int] = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self.special_ids and _overlaps(written, start, end):
                ids += self._encode_as_text(text[start:end])
            else:
                ids.append(token)
        return ids

    def _encode_as_text(self, text: str) -> list[int]:
        """Ids of ``text`` without any special token."""
        plain = self._plain_backend()
        ids = _ids(plain, text, add_special_tokens=False)
        if self.special_ids.isdisjoint(ids):
            return ids
        # Some vocabularies hold their control tokens as pieces that the model itself can produce.
        return [
            token
            for character in text
            for token in _ids(plain, character, add_special_tokens=False)
            if token not in self.special_ids
        ]

    def _plain_backend(self) -> tokenizers.Tokenizer:
        """A twin that recognises no special tokens; the library has this as a property of the tokenizer, not as an
        argument. Rarely needed, so made at first need."""
        with self._plain_lock:
            if self._plain is None:
                plain = tokenizers.Tokenizer.from_str(self.backend.to_str())
                plain.encode_special_tokens = True
                self._plain = plain
            return self._plain

    # -- chat ----------------------------------------------------------------------------------------------------

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @property
    def template_sources(self) -> list[str]:
        """The chat templates as the model has them."""
        return [template.source for template in self._templates.values()]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a chat, as the model's template writes it (to show it; ``encode_chat`` is what to run).

        ``continue_final_message`` ends the prompt inside the last message, for the model to go on with it; there is no
        generation prompt then. ``kwargs`` are variables of the template (``enable_thinking``). Raises
        ``InvalidRequest`` when the model has no template, and with the template's words when it refuses the messages.
        """
        return self._render(normalise_messages(messages), tools, add_generation_prompt, continue_final_message, kwargs)

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        template = self._choose_template(tools)
        if reserved := _RESERVED.intersection(variables):
            raise InvalidRequest(f"{min(reserved)} cannot be set as a variable of the chat template")
        cut: str | None = None
        if continue_final_message:
            messages, cut = _mark_end(messages)
        text = template.render(
            {
                "documents": None,
                **self.named_tokens,
                **variables,
                "messages": messages,
                "tools": list(tools) if tools else None,
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
            }
        )
        if cut is None:
            return text
        end = text.rfind(cut.rstrip())
        if end < 0:
            raise InvalidRequest("the chat template does not show the final message, so it cannot be continued")
        trimmed = not text.startswith(cut, end)
        return text[:end].rstrip() if trimmed else text[:end]

    def _choose_template(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if self._templates:
            raise InvalidRequest(f"this model has no default chat template, only {', '.join(sorted(self._templates))}")
        raise InvalidRequest("this model has no chat template; send a prompt to /v1/completions instead")

    # -- ids to text ---------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; invalid UTF-8 shows as U+FFFD, ids beyond the vocabulary as nothing.

        Raises ``InvalidRequest`` for ids that are negative or need more than 32 bits."""
        try:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise InvalidRequest(f"token ids go from 0 to {self.vocab_size - 1}") from error

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token inside a text; they need not be valid UTF-8. Nothing for an unknown id."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make_piece(token_id)
        return piece

    def token_text(self, token_id: int) -> str:
        """``token_bytes`` as text, with U+FFFD for what is not UTF-8."""
        return self.token_bytes(token_id).decode(errors="replace")

    @cached_property
    def piece_decoder(self) -> PieceDecoder | None:
        """How tokens decode one by one; None if they don't."""
        return take_apart(self.backend.decoder)

    def spelling(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it (``Ġthe``, ``▁the``); None for an id it doesn't know."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def _make_piece(self, token_id: int) -> bytes:
        token = self.spelling(token_id)
        if token is None:
            return b""
        if self.piece_decoder is None:
            return self.backend.decode([token_id], skip_special_tokens=False).encode()
        return self.piece_decoder.piece(token)


def _ids(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids. The library lets go of Python's lock for batches only, and a long text takes a while."""
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; "
            "that is no valid Unicode text"
        ) from error


def _overlaps(intervals: list[tuple[int, int]], start: int, end: int) -> bool:
    """Whether [start, end) meets one of the disjoint ascending half-open ``intervals``."""
    before = bisect_right(intervals, (end - 1, 1 << 62)) - 1
    return before >= 0 and intervals[before][1] > start


def _mark_end(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The messages with a mark at the end of the last one's text, and the mark. It ends in a blank, whose loss tells
    that the template trims messages."""
    mark = f"e{secrets.token_hex(12)}f "
    content = messages[-1].get("content")
    if not isinstance(content, str):
        raise InvalidRequest("the final message has no text to continue", param="messages")
    return [*messages[:-1], {**messages[-1], "content": content + mark}], mark
