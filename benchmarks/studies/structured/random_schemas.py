"""Random JSON schemas, each with an independent check of its values."""

import json
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

_LONGEST = 12
"""Maximum length of a string. All parts of a schema are bounded, so that every sampled answer ends."""
_MAX_ITEMS = 3

type Json = Any


class Schema(NamedTuple):
    """A JSON schema and its check of a value."""

    schema: dict[str, Json]
    accepts: Callable[[Json], bool]

    def accepts_text(self, text: str) -> bool:
        """Returns whether a text is JSON that the schema accepts."""
        try:
            return self.accepts(json.loads(text))
        except ValueError:
            return False


def random_schema(draw: random.Random, depth: int = 3) -> Schema:
    """Returns a schema nested to at most `depth` levels."""
    simple = [_integer, _string, _pattern, _boolean, _enum, _constant]
    kinds = simple if depth == 0 else [_object, _object, _array, _any, *simple]
    return draw.choice(kinds)(draw, depth - 1)


def _integer(draw: random.Random, _: int) -> Schema:
    low = draw.randint(-10_000, 10_000)
    high = low + draw.randint(0, 10_000)
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return Schema(schema, lambda x: isinstance(x, int) and not isinstance(x, bool) and low <= x <= high)


def _string(draw: random.Random, _: int) -> Schema:
    longest = draw.randint(0, _LONGEST)
    return Schema({"type": "string", "maxLength": longest}, lambda x: isinstance(x, str) and len(x) <= longest)


def _pattern(draw: random.Random, _: int) -> Schema:
    pattern = draw.choice(["^[a-f]{1,8}$", "^[0-9]{4}-[0-9]{2}$", "^(yes|no|maybe)$", "^x[0-9a-f]{2,6}y?$"])
    return Schema({"type": "string", "pattern": pattern}, lambda x: isinstance(x, str) and bool(re.search(pattern, x)))


def _boolean(draw: random.Random, _: int) -> Schema:
    return Schema({"type": draw.choice([["boolean", "null"]])}, lambda x: x is None or isinstance(x, bool))


def _enum(draw: random.Random, _: int) -> Schema:
    values = draw.sample(["red", "green", "blue", "", 'a "quoted" word', "\u00e9t\u00e9", 1, 2, -7, None], 4)
    return Schema({"enum": values}, lambda x: not isinstance(x, bool) and x in values)


def _constant(draw: random.Random, _: int) -> Schema:
    value = draw.choice(["fixed", 42, [1, "two"], {"k": None}])
    return Schema({"const": value}, lambda x: x == value)


def _array(draw: random.Random, depth: int) -> Schema:
    item, least = random_schema(draw, max(depth, 0)), draw.randint(0, 2)
    most = least + draw.randint(0, _MAX_ITEMS - least)
    schema = {"type": "array", "items": item.schema, "minItems": least, "maxItems": most}
    return Schema(
        schema, lambda x: isinstance(x, list) and least <= len(x) <= most and all(item.accepts(one) for one in x)
    )


def _any(draw: random.Random, depth: int) -> Schema:
    parts = [random_schema(draw, max(depth, 0)) for _ in range(2)]
    return Schema({"anyOf": [part.schema for part in parts]}, lambda x: any(part.accepts(x) for part in parts))


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(["name", "age", "tags", "is_open", "a b", "\u00fc", "id", "next"], draw.randint(1, 4))
    fields = {name: random_schema(draw, max(depth, 0)) for name in names}
    required = [name for name in names if draw.random() < 0.7]
    schema = {
        "type": "object",
        "properties": {name: field.schema for name, field in fields.items()},
        "required": required,
        "additionalProperties": False,
    }
    return Schema(
        schema,
        lambda x: (
            isinstance(x, dict)
            and set(required) <= x.keys() <= fields.keys()
            and all(fields[name].accepts(value) for name, value in x.items())
        ),
    )
