"""Arguments that a model writes as tagged text, one value after another, and the JSON that clients get.

A tagged value has no quotes, so its type follows from the tool's JSON schema: a string is the text as it is, any other
value is read as JSON, and text that is not JSON is a string again.
"""

import json
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from detjax.server.tools.definitions import FunctionFields

_STRING: Final = frozenset({"string"})
_JSON_TYPES: Final = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_PYTHON: Final = {"True": ("boolean", "true"), "False": ("boolean", "false"), "None": ("null", "null")}
"""Python's names of values, which models write too, with their type and their JSON."""
_DEEPEST: Final = 32
"""Maximum number of references and combinations between a property and its types."""


def parameter_schema(tool: FunctionFields | None, name: str) -> Any:
    """Returns the JSON schema of a tool's parameter; None if it is unknown, so that its values are strings."""
    schema = None if tool is None else tool.parameters
    if not isinstance(schema, dict):
        return None
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return schema.get("additionalProperties")


def types_of(schema: Any, root: Mapping[str, Any] | None, depth: int = 0) -> frozenset[str]:
    """Returns the JSON types of the values that a schema accepts; "string" if it does not say.

    Args:
        schema: the schema of a value.
        root: the schema that `$ref` refers to.
        depth: the number of references and combinations that led here.
    """
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return _STRING
    target = referenced(schema, root)
    if target is not None:
        return types_of(target, root, depth + 1)
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset([given])
    if isinstance(given, list) and given:
        return frozenset(one for one in given if isinstance(one, str))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    if values:
        return frozenset(map(_type_of, values))
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list) and schema[name]:
            return frozenset().union(*(types_of(one, root, depth + 1) for one in schema[name]))
    if isinstance(schema.get("allOf"), list) and schema["allOf"]:
        return frozenset.intersection(*(types_of(one, root, depth + 1) for one in schema["allOf"]))
    if "properties" in schema:
        return frozenset(["object"])
    return frozenset(["array"]) if "items" in schema else _STRING


def referenced(schema: Mapping[str, Any], root: Any) -> Any:
    """Returns the schema that `$ref` refers to in the root; None without a reference that can be followed."""
    pointer = schema.get("$ref")
    if not isinstance(pointer, str) or not pointer.startswith("#/"):
        return None
    for name in pointer[2:].split("/"):
        name = urllib.parse.unquote(name).replace("~1", "/").replace("~0", "~")
        if not isinstance(root, Mapping) or name not in root:
            return None
        root = root[name]
    return root


def value_json(text: str, types: frozenset[str]) -> str:
    """Returns the JSON of a value that is written as `text`, given the types that its schema accepts."""
    bare = text.strip()
    if bare in _PYTHON and (not types or _PYTHON[bare][0] in types):
        return _PYTHON[bare][1]
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if "string" in types and (isinstance(value, str) or not _accepts(types, value)):
        return json.dumps(text, ensure_ascii=False)
    return bare


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"JSON has no {constant}")


def _type_of(value: Any) -> str:
    return _JSON_TYPES.get(type(value)) or ("array" if isinstance(value, list) else "object")


def _accepts(types: frozenset[str], value: Any) -> bool:
    kind = _type_of(value)
    return kind in types or (kind == "integer" and "number" in types)


class ArgumentWriter:
    """Writes the JSON object of a call's arguments while the tagged values come.

    A string is written character by character, any other value once it is complete.
    """

    def __init__(self, tools: Sequence[FunctionFields], name: str) -> None:
        """A writer of the arguments of a call of the tool with this name, which may be unknown."""
        self._tool = next((tool for tool in tools if tool.name == name), None)
        self._is_empty = True
        self._types = _STRING
        self._pieces: list[str] = []
        """The text of a value that is not a string, read so far."""

    def begin(self, key: str, is_string: bool | None = None) -> Iterator[str]:
        """Yields the JSON up to a value. The schema says whether it is a string, unless `is_string` does."""
        yield ("{" if self._is_empty else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        self._is_empty = False
        if is_string is None:
            root = None if self._tool is None else self._tool.parameters
            self._types = types_of(parameter_schema(self._tool, key), root)
        else:
            self._types = _STRING if is_string else frozenset()
        self._pieces = []
        if self._types == _STRING:
            yield '"'

    def add(self, text: str) -> Iterator[str]:
        """Yields the JSON of a piece of the value."""
        if self._types != _STRING:
            self._pieces.append(text)
        elif text:
            yield json.dumps(text, ensure_ascii=False)[1:-1]

    def end_value(self) -> Iterator[str]:
        """Yields the JSON at the end of the value."""
        yield '"' if self._types == _STRING else value_json("".join(self._pieces), self._types)
        self._pieces = []

    def end(self) -> Iterator[str]:
        """Yields the end of the object."""
        yield "{}" if self._is_empty else "}"

    def break_off(self) -> Iterator[str]:
        """Yields what is known of a value that ends with the answer."""
        yield from filter(None, ["".join(self._pieces)])
