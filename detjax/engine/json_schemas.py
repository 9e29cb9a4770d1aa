"""Prepares JSON schemas for llguidance: bounds white space, and removes parts that no finite answer satisfies."""

import json
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

type Schema = dict[str, Any] | bool

ANY_WHITE_SPACE: Final[Mapping[str, Any]] = {"whitespace_flexible": True}
"""`x-guidance` options that allow any white space between the parts of JSON."""
_ONE_LINE: Final[Mapping[str, Any]] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""`x-guidance` options for JSON in one line, with at most one space after a comma and a colon: otherwise models may
emit white space until they run out of tokens."""
_OPTIONS: Final = "x-guidance"
_LISTS: Final = "allOf", "anyOf", "oneOf", "prefixItems"
_MAPS: Final = "properties", "patternProperties"
_DEFINITIONS: Final = "$defs", "definitions"
_SINGLE: Final = "additionalProperties", "items", "additionalItems"
_MAX_STEPS: Final = 1_000_000
"""Limit of the search for finite answers, about a second. A schema that takes more is left unchanged."""
_MAX_QUOTE: Final = 80
_LARK_JSON: Final = re.compile(
    r"""
    "(?:\\.|[^"\\\n])*"             # a string
    | //[^\n]* | \#[^\n]*           # a comment
    | /(?:\\.|[^/\\\n])+/           # a regular expression
    | %json\s*(?=\{)                # a schema comes next
    """,
    re.VERBOSE,
)


def prepared_schema(text: str) -> str:
    """Returns a schema, given as JSON, for llguidance. White space is bounded unless its `x-guidance` says otherwise.

    Properties, items and alternatives without a finite value are forbidden: an answer that began one could not end.

    Raises:
        ValueError: it is not JSON, or it has no finite answer; the message names the `$ref`.
    """
    schema = json.loads(text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return text
    search = _Search(schema)
    if search.is_endless(schema):
        if (cause := search.endless_reference()) is not None:
            raise ValueError(
                f"it has no finite answer, because of $ref {cause[:_MAX_QUOTE]!r}; accepted: schemas whose recursion "
                "can end, for example by null, an empty array or a property that is not required"
            )
    else:
        schema = search.pruned(schema)
    return json.dumps({_OPTIONS: _options(schema.get(_OPTIONS))} | {k: v for k, v in schema.items() if k != _OPTIONS})


def prepared_grammar(text: str) -> str:
    """Returns a grammar in llguidance's variant of Lark's syntax with prepared schemas; see `prepared_schema`.

    Raises:
        ValueError: a schema has no finite answer.
    """
    pieces, end = list[str](), 0
    while (match := _LARK_JSON.search(text, end)) is not None:
        pieces.append(text[end : match.end()])
        end = match.end()
        if match[0].startswith("%json"):
            try:
                schema, length = json.JSONDecoder().raw_decode(text[end:])
            except ValueError:  # llguidance reports where
                continue
            pieces.append(prepared_schema(json.dumps(schema)))
            end += length
    return "".join([*pieces, text[end:]])


def _options(given: Any) -> Any:
    """Returns the options of a schema's `x-guidance`, with bounded white space unless they set white space."""
    if given is None:
        return _ONE_LINE
    if not isinstance(given, dict) or given.get("whitespace_flexible") or given.get("whitespace_pattern"):
        return given
    return dict(_ONE_LINE) | given


class _Search:
    """Finds the parts of a schema that have a finite value, as a least fixed point.

    Initially no part is known to have one. Each round adds the parts that have a value made of known parts, until a
    round adds none.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._parts = {id(part): part for part in _all_parts(root)}
        """Parts by `id`; the root keeps them alive, so ids are unique."""
        self._known: dict[frozenset[int], bool] = {frozenset([one]): False for one in self._parts}
        """For each set of schemas, by their ids: whether a finite value is known that satisfies all of them."""
        self._steps = 0
        while self._steps < _MAX_STEPS and self._round():
            pass

    def is_endless(self, part: Any) -> bool:
        """Returns whether no finite value satisfies a part of the root."""
        return self._steps < _MAX_STEPS and not self._known.get(frozenset([id(part)]), True)

    def endless_reference(self) -> str | None:
        """Returns a `$ref` that makes the root recursive without end, if there is one."""
        part: Any = self._root
        seen, last = set[int](), None
        while isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            target = self._target(part)
            if target is not None and self.is_endless(target):
                last, part = part["$ref"], target
            else:
                part = next(filter(self.is_endless, _parts(part)), None)
        # Several parts together may be endless although each of them could end.
        others = (part["$ref"] for part in self._parts.values() if self.is_endless(self._target(part)))
        return last or next(others, None)

    def pruned(self, schema: Any) -> Any:
        """Returns a part of the root with parts without a finite value replaced by false, which accepts nothing."""
        if not isinstance(schema, dict):
            return schema
        if self.is_endless(schema):
            return False
        pruned = dict(schema)
        for name in (*_LISTS, *_SINGLE):
            if isinstance(value := pruned.get(name), list):
                pruned[name] = [self.pruned(one) for one in value]
            elif isinstance(value, dict):
                pruned[name] = self.pruned(value)
        for name in (*_MAPS, *_DEFINITIONS):
            if isinstance(value := pruned.get(name), dict):
                pruned[name] = {key: self.pruned(one) for key, one in value.items()}
        return pruned

    def _round(self) -> bool:
        """Visits all unknown values once. Returns whether it learned anything, including new values to visit."""
        before = len(self._known), sum(self._known.values())
        for key in [key for key, is_known in self._known.items() if not is_known]:
            self._known[key] = self._can_end([(self._parts[one], frozenset()) for one in key])
        return (len(self._known), sum(self._known.values())) != before

    def _has_finite(self, parts: Iterable[Schema]) -> bool:
        """Returns whether a finite value is known that satisfies all schemas; if not, later rounds look for one."""
        parts = [part for part in parts if part is not True]
        if not all(isinstance(part, dict) and id(part) in self._parts for part in parts):
            return False
        return self._known.setdefault(frozenset(map(id, parts)), not parts)

    def _can_end(self, pending: list[tuple[Any, frozenset[int]]]) -> bool:
        """Returns whether a finite value is known to satisfy schemas.

        Args:
            pending: schemas, or lists of alternatives, each with the ids of the schemas that led to it by `$ref` and
                combinations only.
        """
        branches = [(pending, dict[int, dict[str, Any]]())]
        while branches:
            pending, facts = branches.pop()
            while pending:
                part, path = pending.pop()
                self._steps += 1 + len(path)
                if self._steps >= _MAX_STEPS:
                    return True
                if isinstance(part, list):
                    branches += [([*pending, (one, path)], dict(facts)) for one in part]
                    self._steps += len(part) * (len(pending) + len(facts))
                    break
                if part is False or id(part) in path:  # a schema defined only by itself
                    break
                if isinstance(part, dict) and id(part) not in facts:
                    facts[id(part)] = part
                    path |= {id(part)}
                    target = self._target(part)
                    pending += [] if target is None else [(target, path)]
                    pending += [(one, path) for one in _items(part, "allOf")]
                    pending += [(part[name], path) for name in ("anyOf", "oneOf") if isinstance(part.get(name), list)]
            else:
                keywords = [*facts.values()]
                if self._has_plain_value(keywords) or self._has_array(keywords) or self._has_object(keywords):
                    return True
        return False

    @staticmethod
    def _has_plain_value(facts: Sequence[dict[str, Any]]) -> bool:
        """Returns whether a scalar or a given value may satisfy the schemas; llguidance checks the details."""
        return any("const" in fact or "enum" in fact for fact in facts) or bool(
            _types(facts) & {"string", "number", "integer", "boolean", "null"}
        )

    def _has_array(self, facts: Sequence[dict[str, Any]]) -> bool:
        if "array" not in _types(facts):
            return False
        least = max((_number(fact, "minItems") for fact in facts), default=0)
        # All positions after the last one that a schema names are alike.
        named = max((len(_first_items(fact)) for fact in facts), default=0)
        return all([self._has_finite(_item(fact, at) for fact in facts) for at in range(min(least, named + 1))])

    def _has_object(self, facts: Sequence[dict[str, Any]]) -> bool:
        if "object" not in _types(facts):
            return False
        required = {name for fact in facts for name in _items(fact, "required") if isinstance(name, str)}
        if not all([self._has_finite(_property_schemas(facts, name)) for name in sorted(required)]):
            return False
        lacking = max((_number(fact, "minProperties") for fact in facts), default=0) - len(required)
        if lacking <= 0 or self._has_finite(fact.get("additionalProperties", True) for fact in facts):
            return True
        patterns = [one for fact in facts for one in _mapping(fact, "patternProperties").values()]
        optional = {name for fact in facts for name in _mapping(fact, "properties")} - required
        finite = [self._has_finite(_property_schemas(facts, name)) for name in sorted(optional)]
        return any([self._has_finite([one]) for one in patterns]) or sum(finite) >= lacking

    def _target(self, part: Mapping[str, Any]) -> Schema | None:
        """Returns the schema that `$ref` refers to, or None if there is no reference or its target is not in the
        root."""
        pointer = part.get("$ref")
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            return None
        target: Any = self._root
        for name in pointer[1:].split("/")[1:]:
            name = urllib.parse.unquote(name).replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and name in target:
                target = target[name]
            elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            else:
                return None
        return target if isinstance(target, dict | bool) and pointer[1:2] in ("", "/") else None


def _parts(schema: Mapping[str, Any]) -> Iterator[Schema]:
    """Yields the direct subschemas of a schema, except definitions."""
    for name in (*_LISTS, *_SINGLE):
        value = schema.get(name)
        yield from value if isinstance(value, list) else [value] if isinstance(value, dict | bool) else []
    for name in _MAPS:
        yield from _mapping(schema, name).values()


def _all_parts(schema: Schema) -> Iterator[dict[str, Any]]:
    """Yields a schema and all its subschemas, including definitions."""
    pending: list[Any] = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            yield part
            pending += _parts(part)
            pending += [one for name in _DEFINITIONS for one in _mapping(part, name).values()]


def _types(facts: Sequence[Mapping[str, Any]]) -> set[str]:
    """Returns the types that all schemas accept."""
    types = {"string", "number", "integer", "boolean", "null", "array", "object"}
    for fact in facts:
        if isinstance(given := fact.get("type"), str):
            types &= {given, "integer"} if given == "number" else {given}
        elif isinstance(given, list):
            types &= {one for one in given if isinstance(one, str)} | ({"integer"} if "number" in given else set())
    return types


def _items(schema: Mapping[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _mapping(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = schema.get(name)
    return value if isinstance(value, dict) else {}


def _number(schema: Mapping[str, Any], name: str) -> int:
    value = schema.get(name, 0)
    return int(value) if isinstance(value, int | float) and value < 2**63 else 0


def _first_items(schema: Mapping[str, Any]) -> list[Any]:
    """Returns the schemas of an array's first items. Older drafts have them in `items`."""
    return _items(schema, "prefixItems") or _items(schema, "items")


def _item(schema: Mapping[str, Any], index: int) -> Schema:
    """Returns the schema of an array's item."""
    first = _first_items(schema)
    if index < len(first):
        return first[index]
    rest = schema.get("additionalItems" if isinstance(schema.get("items"), list) else "items", True)
    return rest if isinstance(rest, dict | bool) else True


def _property_schemas(facts: Sequence[Mapping[str, Any]], name: str) -> list[Schema]:
    """Returns the schemas that a property's value has to satisfy."""
    schemas: list[Schema] = []
    for fact in facts:
        named = [_mapping(fact, "properties")[name]] if name in _mapping(fact, "properties") else []
        named += [one for pattern, one in _mapping(fact, "patternProperties").items() if _matches(pattern, name)]
        schemas += named or [fact.get("additionalProperties", True)]
    return schemas


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False
