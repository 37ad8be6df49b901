"""What a request says its answer must look like, in any of the ways that clients know, as a ``Grammar``."""

from __future__ import annotations

from collections.abc import Callable

from ropeway.errors import InvalidRequest
from ropeway.grammar import Grammar
from ropeway.server.protocol import GenerationRequest, ResponseFormat


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


def _wishes(request: GenerationRequest, after: str) -> dict[str, Callable[[], Grammar]]:
    wishes: dict[str, Callable[[], Grammar]] = {}
    form = request.response_format
    if form is not None and form.type != "text":
        wishes["response_format"] = lambda: _of_response_format(form, after)
    others = request.structured_outputs
    for field, schema in (
        ("guided_json", request.guided_json),
        ("structured_outputs.json", others and others.json),
    ):
        if schema is not None:
            wishes[field] = lambda schema=schema: Grammar.json_schema(schema, after=after)  # type: ignore[misc]
    for field, pattern in (
        ("guided_regex", request.guided_regex),
        ("structured_outputs.regex", others and others.regex),
    ):
        if pattern is not None:
            wishes[field] = lambda pattern=pattern: Grammar.regex(pattern, after=after)  # type: ignore[misc]
    for field, options in (
        ("guided_choice", request.guided_choice),
        ("structured_outputs.choice", others and others.choice),
    ):
        if options is not None:
            wishes[field] = lambda options=options: Grammar.choice(options, after=after)  # type: ignore[misc]
    for field, rules in (
        ("guided_grammar", request.guided_grammar),
        ("structured_outputs.grammar", others and others.grammar),
    ):
        if rules is not None:
            wishes[field] = lambda rules=rules: Grammar.lark(rules, after=after)  # type: ignore[misc]
    if others is not None and others.json_object:
        wishes["structured_outputs.json_object"] = lambda: Grammar.json_object(after=after)
    return wishes


def _of_response_format(form: ResponseFormat, after: str) -> Grammar:
    if form.type == "json_object":
        return Grammar.json_object(after=after)
    if form.type != "json_schema":
        raise InvalidRequest(f"type is {form.type!r:.40}; it must be text, json_object or json_schema")
    if form.json_schema is None:
        raise InvalidRequest("type json_schema needs the schema, in json_schema")
    if form.json_schema.schema is None:
        return Grammar.json_object(after=after)
    return Grammar.json_schema(form.json_schema.schema, after=after)
