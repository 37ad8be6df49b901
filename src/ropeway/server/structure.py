"""What a request says its answer must look like, in any of the ways that clients know, as a ``Grammar``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ropeway.errors import InvalidRequest
from ropeway.grammar import Grammar
from ropeway.server.protocol import GenerationRequest, ResponseFormat, StructuredOutputs


def grammar_of(request: GenerationRequest, *, after: str = "") -> Grammar | None:
    """``after``: what ends the reasoning before the answer. Raises ``InvalidRequest`` naming the field, also where the
    request says it in several ways."""
    wishes = _wishes(request, after)
    if not wishes:
        return None
    if len(wishes) > 1:
        fields = " and ".join(wishes)
        raise InvalidRequest(f"{fields} both say what the answer must look like; leave one out", param=list(wishes)[1])
    ((field, make),) = wishes.items()
    try:
        return make()
    except InvalidRequest as error:
        raise InvalidRequest(f"{field}: {error.message}", param=field.partition(".")[0]) from error


def structured_by(request: GenerationRequest) -> str | None:
    """The field that says what the answer must look like, if one does."""
    return next((field.partition(".")[0] for field in _wishes(request, "")), None)


def _wishes(request: GenerationRequest, after: str) -> dict[str, Callable[[], Grammar]]:
    """By the field that says it."""
    others = request.structured_outputs or StructuredOutputs()
    ways: tuple[tuple[str, Any, Callable[..., Grammar]], ...] = (
        ("response_format", _unless_text(request.response_format), _of_response_format),
        ("guided_json", request.guided_json, Grammar.json_schema),
        ("guided_regex", request.guided_regex, Grammar.regex),
        ("guided_choice", request.guided_choice, Grammar.choice),
        ("guided_grammar", request.guided_grammar, Grammar.lark),
        ("structured_outputs.json", others.json, Grammar.json_schema),
        ("structured_outputs.regex", others.regex, Grammar.regex),
        ("structured_outputs.choice", others.choice, Grammar.choice),
        ("structured_outputs.grammar", others.grammar, Grammar.lark),
        ("structured_outputs.json_object", others.json_object or None, _any_object),
    )
    return {field: partial(make, value, after=after) for field, value, make in ways if value is not None}


def _any_object(_: bool, *, after: str) -> Grammar:
    return Grammar.json_object(after=after)


def _unless_text(form: ResponseFormat | None) -> ResponseFormat | None:
    return None if form is None or form.type == "text" else form


def _of_response_format(form: ResponseFormat, *, after: str) -> Grammar:
    if form.type == "json_object":
        return Grammar.json_object(after=after)
    if form.type != "json_schema":
        raise InvalidRequest(f"type is {form.type!r:.40}; it must be text, json_object or json_schema")
    if form.json_schema is None:
        raise InvalidRequest("type json_schema needs the schema, in json_schema")
    if form.json_schema.schema is None:
        return Grammar.json_object(after=after)
    return Grammar.json_schema(form.json_schema.schema, after=after)
