"""Declarations of tools as TypeScript types, which Kimi K2.5's chat template takes in place of JSON.

The code of its tokenizer writes these declarations; code of checkpoints is never run.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

VARIABLE: Final = "tools_ts_str"
"""The template's variable for the declarations."""
_STEP: Final = "  "
_NAMES: Final = {"integer": "number", "object": "{}", "array": "Array<any>"}
"""TypeScript's types in unions, if JSON schema has other names for them."""
_BOUNDS: Final = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
"""Keys of a schema that comments state, in order, by the schema's type."""
_ROOT: Final = "parameters"
"""The name of the arguments' type if the schema refers to itself."""
_SCALARS: Final = {"string": (str,), "number": (int, float), "integer": (int,), "boolean": (bool,)}
"""Python's types of the values of an enum, by its type."""


class _Unsupported(Exception):
    """A schema has no declaration."""


def with_declarations(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the template's variables for tools: sorted by key, and their declarations.

    The latter are missing if a schema has none; the template then writes JSON.
    """
    ordered = _sorted(list(tools))
    written = _declarations(ordered)
    return {"tools": ordered} | ({} if written is None else {VARIABLE: written})


def _declarations(tools: Sequence[Mapping[str, Any]]) -> str | None:
    functions = [tool["function"] for tool in tools if tool.get("type") == "function" and tool.get("function")]
    try:
        written = [_Function(function).declaration() for function in functions]
    except (_Unsupported, AttributeError, LookupError, RecursionError, TypeError):
        return None
    if not written:
        return None
    return "\n".join(["# Tools", "", "## functions", "namespace functions {", *written, "}", ""])


def _sorted(value: Any) -> Any:
    """Returns nested objects with their keys in order."""
    if isinstance(value, Mapping):
        return {key: _sorted(item) for key, item in sorted(value.items())}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


class _Function:
    """A function, and the schemas that its parameters refer to."""

    def __init__(self, function: Mapping[str, Any]) -> None:
        self._function = function
        self._definitions: dict[str, Any] = {}
        self._refers_to_itself = False

    def declaration(self) -> str:
        """Returns the function's type, after the types that it refers to and its description."""
        function = self._function
        parameters = function.get("parameters") or {}
        written, lines, name = self._object(parameters, ""), [], function.get("name", "function")
        if self._refers_to_itself:
            fields = ",\n".join(field for _, _, field in self._fields(parameters, _STEP))
            lines.append(f"interface {_ROOT} {{{f'\n{fields}\n' if fields else ''}}}")
            written = _ROOT
        for defined, schema in list(self._definitions.items()):
            shape = self._type(schema, "")
            lines += [*_description(schema, ""), f"interface {defined} {shape}"]
        return "\n".join([*lines, *_description(function, ""), f"type {name} = (_: {written}) => any;"])

    def _type(self, schema: Any, indent: str) -> str:
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join([self._type(one, indent) for one in schema["anyOf"]])
        if "enum" in schema:
            return _enum(schema)
        if "type" not in schema:
            if schema:
                raise _Unsupported
            return "any"
        kind = schema["type"]
        if isinstance(kind, list):
            return " | ".join(map(_in_union, kind))
        if kind == "object":
            return self._object(schema, indent)
        return self._array(schema, indent) if kind == "array" else "number" if kind == "integer" else kind

    def _reference(self, reference: str) -> str:
        if reference == "#":
            self._refers_to_itself = True
            return _ROOT
        name = reference.rpartition("/")[2]
        if not reference.startswith("#/$defs/") or not isinstance(self._definitions.get(name), Mapping):
            raise _Unsupported
        return name

    def _object(self, schema: Mapping[str, Any], indent: str) -> str:
        self._definitions |= schema.get("$defs") or {}
        further = schema.get("additionalProperties")
        inner = indent + _STEP
        # Types are written in the order in which references are resolved: further properties come first.
        kind = {True: "any", False: "never"}.get(further) if isinstance(further, bool) else None
        if kind is None and further is not None:
            kind = self._type(further, inner)
        fields = [field for _, _, field in sorted(self._fields(schema, inner))]
        fields += [] if kind is None else [f"{inner}[k: string]: {kind}"]
        return f"{{\n{',\n'.join(fields)}\n{indent}}}" if fields else "{}"

    def _fields(self, schema: Mapping[str, Any], indent: str) -> Iterator[tuple[bool, str, str]]:
        """Yields for each property whether it is optional, its name, and its declaration with comments."""
        required = schema.get("required", [])
        for name, one in schema.get("properties", {}).items():
            optional = name not in required
            lines = list(_comments(one, indent))
            default = one.get("default") if isinstance(one, Mapping) else None
            if default is not None:
                is_number = isinstance(default, int | float)
                shown = repr(default) if is_number else json.dumps(default, ensure_ascii=False)
                lines.append(f"{indent}// Default: {shown}")
            lines.append(f"{indent}{name}{'?' if optional else ''}: {self._type(one, indent)}")
            yield optional, name, "\n".join(lines)

    def _array(self, schema: Mapping[str, Any], indent: str) -> str:
        items = schema.get("items") or {}
        comments = list(_comments(items, indent + _STEP))
        if not comments:
            return f"Array<{self._type(items, indent)}>"
        inner = indent + _STEP
        return "\n".join(["Array<", *comments, inner + self._type(items, inner), f"{indent}>"])


def _in_union(kind: str) -> str:
    """Returns TypeScript's name of a type in a union."""
    if kind not in (*_SCALARS, "null", "object", "array"):
        raise _Unsupported
    return _NAMES.get(kind, kind)


def _enum(schema: Mapping[str, Any]) -> str:
    """Returns the values of an enum."""
    kind = schema.get("type")
    if isinstance(kind, list):
        others = [one for one in kind if one != "null"]
        if len(kind) > 2 or (len(kind) == 2 and len(others) == 2):
            raise _Unsupported
        kind = (others or kind)[0]
    accepted = _SCALARS.get(kind) if isinstance(kind, str) else None
    values = schema["enum"]
    if accepted is not None and any(one is not None and not isinstance(one, accepted) for one in values):
        raise _Unsupported
    return " | ".join(f'"{one}"' if isinstance(one, str) else str(one) for one in values)


def _comments(schema: Any, indent: str) -> Iterator[str]:
    """Yields lines of comments: a schema's description, and its bounds."""
    if not isinstance(schema, Mapping):
        return
    yield from _description(schema, indent)
    is_plain = not any(key in schema for key in ("$ref", "anyOf", "enum"))
    kind = schema.get("type") if is_plain else None
    bounds = _BOUNDS.get(kind, ()) if isinstance(kind, str) else ()
    stated = [f"{key}: {schema[key]}" for key in bounds if key in schema]
    if stated:
        yield f"{indent}// {', '.join(stated)}"


def _description(schema: Mapping[str, Any], indent: str) -> Iterator[str]:
    for line in (schema.get("description") or "").split("\n") if schema.get("description") else ():
        yield f"{indent}// {line}" if line else ""
