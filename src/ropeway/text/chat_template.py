"""Chat templates: the jinja2 dialect in which models on the hubs describe their prompts, in a sandbox."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ropeway.errors import InvalidRequest, LoadError

MAX_OUTPUT = 32 * 1024 * 1024
"""Most characters a template may render."""
MAX_TIME_S = 20.0
"""Longest time a template may take."""


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks what the assistant wrote, for training; here it renders its
    body."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which models have never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template. Immutable; may be rendered from several threads at once."""

    def __init__(self, source: str) -> None:
        """Raises ``LoadError`` when ``source`` is no valid template."""
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise LoadError(f"the model's chat template is invalid at line {error.lineno}: {error.message}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of the prompt.

        Raises ``InvalidRequest`` with the template's own words when it calls ``raise_exception``, and when it fails on
        these messages or outgrows ``MAX_OUTPUT`` or ``MAX_TIME_S``.
        """
        parts: list[str] = []
        size = 0
        deadline = time.monotonic() + MAX_TIME_S
        try:
            for part in self._template.generate(**variables):
                parts.append(part)
                size += len(part)
                if size > MAX_OUTPUT:
                    raise InvalidRequest(
                        f"the chat template renders more than {MAX_OUTPUT} characters; send fewer or shorter messages",
                        param="messages",
                    )
                if time.monotonic() > deadline:
                    raise InvalidRequest(
                        f"the chat template takes more than {MAX_TIME_S:g} s; send fewer or shorter messages",
                        param="messages",
                    )
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses: {error.message or error}", param="messages"
            ) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error
        return "".join(parts)
