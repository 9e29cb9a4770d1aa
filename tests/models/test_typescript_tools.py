"""Declarations of tools in TypeScript, as the code of Kimi K2.5's tokenizer writes them."""

from typing import Any

import pytest

from detjax.models.text.typescript_tools import with_declarations


def declared(parameters: dict[str, Any] | None, description: str | None = None) -> str | None:
    """The declarations of one function, without the lines around them."""
    function = {"name": "f", "description": description, "parameters": parameters}
    written = with_declarations([{"type": "function", "function": function}]).get("tools_ts_str")
    if written is None:
        return None
    begin, end = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    assert written.startswith(begin) and written.endswith(end)
    return written.removeprefix(begin).removesuffix(end)


def field(schema: Any) -> str | None:
    """The declaration of an optional parameter x."""
    written = declared({"properties": {"x": schema}})
    begin, end = "type f = (_: {\n", "\n}) => any;"
    return None if written is None else written.removeprefix(begin).removesuffix(end)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, "  x?: string"),
        ({"type": "integer", "minimum": 1, "maximum": 9, "maxLength": 3}, "  // maximum: 9, minimum: 1\n  x?: number"),
        ({"type": "string", "pattern": "^a", "minLength": 2}, "  // minLength: 2, pattern: ^a\n  x?: string"),
        ({"type": "boolean", "description": "One.\n\nTwo."}, "  // One.\n\n  // Two.\n  x?: boolean"),
        ({"type": "string", "default": "é"}, '  // Default: "é"\n  x?: string'),
        ({"type": "boolean", "default": False}, "  // Default: False\n  x?: boolean"),
        ({"type": ["string", "null", "integer", "object"]}, "  x?: string | null | number | {}"),
        ({"enum": ["a", 1, None, True]}, '  x?: "a" | 1 | None | True'),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "  x?: string | Array<any>"),
        ({"type": "array", "items": {"type": "number"}, "maxItems": 2}, "  // maxItems: 2\n  x?: Array<number>"),
        (
            {"type": "array", "items": {"type": "number", "description": "Each."}},
            "  x?: Array<\n    // Each.\n    number\n  >",
        ),
        ({"type": "object", "additionalProperties": False}, "  x?: {\n    [k: string]: never\n  }"),
        ({}, "  x?: any"),
        (True, "  x?: any"),
        ({"title": "no type"}, None),
        ({"type": ["odd"]}, None),
        ({"type": "integer", "enum": ["a"]}, None),
        ({"type": ["string", "integer"], "enum": ["a"]}, None),
        ({"$ref": "#/$defs/Missing"}, None),
        ({"anyOf": 7}, None),
    ],
)
def test_a_parameter_has_a_type_and_comments(schema: Any, expected: str | None) -> None:
    assert field(schema) == expected


def test_required_parameters_come_first_each_in_order_of_names() -> None:
    properties = {name: {"type": "string"} for name in ("d", "b", "c", "a")}
    expected = "// Does it.\ntype f = (_: {\n  b: string,\n  d: string,\n  a?: string,\n  c?: string\n}) => any;"
    assert declared({"properties": properties, "required": ["d", "b"]}, "Does it.") == expected
    assert declared(None) == declared({}) == "type f = (_: {}) => any;"


def test_types_that_are_referred_to_come_before_the_function() -> None:
    place = {"type": "object", "description": "A place.", "properties": {"name": {"type": "string"}}}
    written = declared({"$defs": {"Place": place}, "properties": {"at": {"$ref": "#/$defs/Place"}}})
    interface = "// A place.\ninterface Place {\n  name?: string\n}"
    assert written == f"{interface}\ntype f = (_: {{\n  at?: Place\n}}) => any;"


def test_a_schema_that_refers_to_itself_has_a_name() -> None:
    written = declared({"properties": {"child": {"$ref": "#"}, "a": {"type": "string"}}, "required": ["child"]})
    expected = "interface parameters {\n  a?: string,\n  child: parameters\n}\ntype f = (_: parameters) => any;"
    assert written == expected


def test_a_schema_without_declaration_leaves_all_tools_to_the_template() -> None:
    good, bad = ({"name": name, "parameters": {"properties": {"x": schema}}} for name, schema in (("b", {}), ("a", 7)))
    tools = [{"type": "function", "function": one} for one in (good, bad)]
    assert with_declarations(tools) == {"tools": tools}
    assert list(with_declarations(tools)["tools"][0]) == ["function", "type"]
