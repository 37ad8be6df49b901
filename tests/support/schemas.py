"""JSON schemas of varied features, the same ones every time."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

_WORDS = ("name", "age", "city", "tags", "active", "score", "id", "items", "unit", "note", "color", "größe")
_FORMATS = ("date", "date-time", "uuid", "ipv4", "ipv6", "email")
_PATTERNS = ("^[a-z]{1,8}$", "^[A-Z]{2}-[0-9]{3}$", "^(yes|no|maybe)$", "^#[0-9a-f]{6}$")


def schemas(count: int) -> list[Schema]:
    """``count`` different ones: scalars with bounds, enums, consts, patterns, formats, arrays, tuples, nested and open
    objects, alternatives, intersections, references and recursion."""
    random_ = random.Random(20)
    makers = (
        _person, _bounded, _array, _tuple, _alternatives, _reference, _recursive, _open_object, _formats, _patterns,
        _intersection, _nullable, _nested,
    )  # fmt: skip
    found: list[Schema] = []
    while len(found) < count:
        schema = makers[len(found) % len(makers)](random_)
        if schema not in found:
            found.append(schema)
    return found


def _object(properties: Schema, *, required: list[str] | None = None) -> Schema:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _scalar(random_: random.Random) -> Schema:
    low = random_.randint(-50, 50)
    return random_.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + random_.randint(1, 500)},
            {"type": "boolean"},
            {"type": "string", "maxLength": random_.randint(1, 12)},
            {"enum": random_.sample(["red", "green", "blue", 1, 2.5, None, True], random_.randint(2, 5))},
            {"const": random_.choice(["fixed", 7, False])},
        ]
    )


def _person(random_: random.Random) -> Schema:
    names = random_.sample(_WORDS, random_.randint(1, 4))
    properties = {name: _scalar(random_) for name in names}
    return _object(properties, required=random_.sample(names, random_.randint(0, len(names))))


def _bounded(random_: random.Random) -> Schema:
    low = random_.randint(-1000, 1000)
    kind: Schema = random_.choice(
        [
            {"type": "integer", "exclusiveMinimum": low, "maximum": low + 3},
            {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": random_.choice([2, 5, 10, 25])},
            {"type": "number", "minimum": low / 10, "maximum": low / 10 + 1},
        ]
    )
    return _object({random_.choice(_WORDS): kind})


def _array(random_: random.Random) -> Schema:
    least = random_.randint(0, 2)
    return {"type": "array", "items": _scalar(random_), "minItems": least, "maxItems": least + random_.randint(1, 3)}


def _tuple(random_: random.Random) -> Schema:
    places = [_scalar(random_) for _ in range(random_.randint(1, 3))]
    return {"type": "array", "prefixItems": places, "items": False, "minItems": len(places)}


def _alternatives(random_: random.Random) -> Schema:
    kinds = random_.sample(_WORDS, 3)
    return {"anyOf": [_object({"kind": {"const": kind}, "value": _scalar(random_)}) for kind in kinds]}


def _reference(random_: random.Random) -> Schema:
    pair = {"$ref": "#/$defs/point"}
    schema = _object({random_.choice(_WORDS): pair, "other": {"type": "array", "items": pair, "maxItems": 2}})
    return {
        **schema,
        "$defs": {"point": _object({"x": _scalar(random_), "y": {"type": "integer", "maximum": 99, "minimum": 0}})},
    }


def _recursive(random_: random.Random) -> Schema:
    node = _object({"value": _scalar(random_), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def _open_object(random_: random.Random) -> Schema:
    return {
        "type": "object",
        "properties": {random_.choice(_WORDS): _scalar(random_)},
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": random_.randint(1, 99)},
    }


def _formats(random_: random.Random) -> Schema:
    return _object({name: {"type": "string", "format": random_.choice(_FORMATS)} for name in random_.sample(_WORDS, 2)})


def _patterns(random_: random.Random) -> Schema:
    return _object(
        {name: {"type": "string", "pattern": random_.choice(_PATTERNS)} for name in random_.sample(_WORDS, 2)}
    )


def _intersection(random_: random.Random) -> Schema:
    low = random_.randint(0, 100)
    return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + random_.randint(1, 9)}]}


def _nullable(random_: random.Random) -> Schema:
    return _object(
        {name: {"type": [random_.choice(["integer", "boolean"]), "null"]} for name in random_.sample(_WORDS, 3)}
    )


def _nested(random_: random.Random) -> Schema:
    inner = _person(random_)
    for _ in range(random_.randint(1, 3)):
        inner = _object({random_.choice(_WORDS): inner})
    return inner
