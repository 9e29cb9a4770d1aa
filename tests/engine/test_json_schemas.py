"""Schemas as llguidance gets them: those that no finite answer follows are refused, and white space is bounded."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

import detjax.demo
from detjax.engine.constraint import Constraint
from detjax.engine.constraints import ConstraintCompiler
from detjax.engine.json_schemas import prepared_grammar, prepared_schema
from detjax.models import Tokenizer

TOKENIZER = Tokenizer.load(Path(detjax.demo.CHECKPOINT))
ENDLESS: dict[str, tuple[Any, str]] = {
    "itself": ({"$ref": "#"}, "#"),
    "a definition of itself": ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "#/$defs/a"),
    "two of each other": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "#/$defs/a",
    ),
    "a required property": ({"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}, "#"),
    "a property that another part requires": (
        {"type": "object", "allOf": [{"properties": {"x": {"$ref": "#"}}}, {"required": ["x"]}]},
        "#",
    ),
    "a required property by pattern": (
        {"type": "object", "patternProperties": {"^x": {"$ref": "#"}}, "required": ["xy"]},
        "#",
    ),
    "a required property by the rest": (
        {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["x"]},
        "#",
    ),
    "a number of properties": ({"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1}, "#"),
    "items": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#"),
    "the third item": (
        {"type": "array", "prefixItems": [True, True, {"$ref": "#"}], "items": False, "minItems": 3},
        "#",
    ),
    "all alternatives": (
        {"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 2}]},
        "#",
    ),
    "a property of a definition": (
        {
            "$defs": {
                "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
            },
            "type": "object",
            "properties": {"list": {"$ref": "#/$defs/node"}},
            "required": ["list"],
        },
        "#/$defs/node",
    ),
    "a name that is escaped": (
        {"$defs": {"a/b~c": {"$ref": "#/$defs/a~1b~0c"}}, "$ref": "#/$defs/a~1b~0c"},
        "#/$defs/a~1b~0c",
    ),
}
"""Schemas without a finite answer, each with the reference that never ends."""
FINITE: dict[str, Any] = {
    "an optional property": {"type": "object", "properties": {"x": {"$ref": "#"}}},
    "items that may be none": {"type": "array", "items": {"$ref": "#"}},
    "first items that may be none": {"type": "array", "prefixItems": [{"$ref": "#"}]},
    "an alternative": {"anyOf": [{"$ref": "#"}, {"type": "integer"}]},
    "a tree": {
        "$defs": {"t": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/t"}, "minItems": 2}]}},
        "$ref": "#/$defs/t",
    },
    "a nullable next": {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
    },
    "another type": {"type": ["object", "string"], "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
    "one reference twice": {"$defs": {"a": {"type": "null"}}, "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]},
    "a property called $ref": {"type": "object", "properties": {"$ref": {"type": "null"}}, "required": ["$ref"]},
    "a value that looks like one": {"const": {"$ref": "#"}},
    "nothing": {},
}


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    assert TOKENIZER is not None
    return ConstraintCompiler(TOKENIZER, 1040, [0])


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_without_a_finite_answer_is_refused_by_its_reference(compiler: ConstraintCompiler, name: str) -> None:
    schema, reference = ENDLESS[name]
    for constraint in (
        Constraint.json_schema(schema),
        Constraint("grammar", f'start: "x" answer\nanswer: %json {json.dumps(schema)}'),
    ):
        with pytest.raises(ValueError, match="has no finite answer") as raised:
            compiler.compile(constraint)
        assert f"because of $ref {reference!r}; accepted:" in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", FINITE)
def test_a_schema_with_a_finite_answer_is_taken(compiler: ConstraintCompiler, name: str) -> None:
    compiler.compile(Constraint.json_schema(FINITE[name]))
    prepared = json.loads(prepared_schema(json.dumps(FINITE[name])))
    assert {key: value for key, value in prepared.items() if key != "x-guidance"} == FINITE[name]


def test_what_cannot_end_is_left_out_of_a_schema(compiler: ConstraintCompiler) -> None:
    endless = {"$ref": "#/$defs/endless"}
    schema = {
        "$defs": {"endless": {"type": "array", "items": endless, "minItems": 1}},
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": endless, "c": {"anyOf": [endless, {"type": "null"}]}},
        "required": ["a", "c"],
        "additionalProperties": endless,
    }
    prepared = json.loads(prepared_schema(json.dumps(schema)))
    assert prepared["properties"] == {"a": {"type": "null"}, "b": False, "c": {"anyOf": [False, {"type": "null"}]}}
    assert prepared["additionalProperties"] is False
    for text, is_taken in {'{"a":null,"c":null}': True, '{"a":null,"b":[': False, '{"a":null,"c":[': False}.items():
        assert takes(compiler, Constraint.json_schema(schema), text) is is_taken


def takes(compiler: ConstraintCompiler, constraint: Constraint, text: str) -> bool:
    """Returns whether a constraint accepts the beginning of a text."""
    assert TOKENIZER is not None
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    state = compiler.compile(constraint).start()
    return state.validate_tokens(tokens) == len(tokens)


OBJECT: Any = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ONE_LINE = ['{"a":1,"b":2}', '{"a": 1, "b": 2}', '{"a": 1,"b":2}']
LOOSE = ['{ "a": 1}', '{\n"a": 1}', '{"a":  1}', '{"a": 1 }', '{"a": 1,\n"b": 2}', '{"a" : 1}']


@pytest.mark.parametrize("is_grammar", [False, True])
@pytest.mark.parametrize("options", [None, {}, {"coerce_one_of": True}, {"whitespace_flexible": False}])
def test_json_is_one_line_with_a_space_or_none(compiler: ConstraintCompiler, options: Any, is_grammar: bool) -> None:
    constraint = Constraint.json_schema(OBJECT if options is None else OBJECT | {"x-guidance": options})
    if is_grammar:
        constraint = Constraint("grammar", f"start: %json {constraint.text}")
    assert [takes(compiler, constraint, text) for text in ONE_LINE] == [True] * len(ONE_LINE)
    assert [takes(compiler, constraint, text) for text in LOOSE] == [False] * len(LOOSE)


def test_white_space_is_freed_by_an_option(compiler: ConstraintCompiler) -> None:
    free = [
        Constraint.json_schema(OBJECT, any_whitespace=True),
        Constraint.json_schema(OBJECT | {"x-guidance": {"whitespace_flexible": True}}),
        Constraint.json_schema(OBJECT | {"x-guidance": {"coerce_one_of": True}}, any_whitespace=True),
        Constraint.json_schema(OBJECT | {"x-guidance": {"whitespace_pattern": r"[\n ]{1,3}"}}),
    ]
    for constraint in free:
        assert [text for text in (*ONE_LINE, *LOOSE) if not takes(compiler, constraint, text)] == []


def test_schemas_within_grammars_are_found_and_nothing_else() -> None:
    options = json.dumps(
        {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}}
    )
    text = r"""start: "%json {" a /%json {"$ref":"#"}\/"/ // %json {"$ref":"#"}
a: %json {} | "\"%json {" # %json {"$ref":"#"}
"""
    assert prepared_grammar(text) == text.replace("a: %json {}", f"a: %json {options}")
    assert prepared_grammar("start: %json {broken") == "start: %json {broken"


def random_schema(draw: random.Random, depth: int = 3) -> Any:
    """A schema that refers to definitions `d0` to `d3`."""
    kind = draw.randrange(7 if depth else 2)
    if kind == 0:
        return {"$ref": f"#/$defs/d{draw.randrange(4)}"}
    if kind == 1:
        return {"type": draw.choice(["null", "object", "array"])} if draw.random() < 0.3 else {"$ref": "#/$defs/d0"}
    parts = [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 2))]
    if kind == 2:
        return {"anyOf": parts}
    if kind == 3:
        return {"type": "array", "items": parts[0], "minItems": draw.randrange(2)}
    if kind == 4:
        return {"type": "array", "prefixItems": parts, "minItems": draw.randrange(3)}
    names = [f"p{number}" for number in range(len(parts))]
    return {
        "type": "object",
        "properties": dict(zip(names, parts, strict=True)),
        "required": [name for name in names if draw.random() < 0.7],
    }


def ends(schema: Any, root: Any, depth: int) -> bool:
    """Returns whether a value with at most this depth of references satisfies a schema, by definition."""
    if "$ref" in schema:
        return depth > 0 and ends(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, depth - 1)
    if "anyOf" in schema:
        return any(ends(one, root, depth) for one in schema["anyOf"])
    needed = [schema["properties"][name] for name in schema.get("required", ())]
    needed += schema.get("prefixItems", [])[: schema.get("minItems", 0)]
    needed += [schema["items"]] * schema.get("minItems", 0) if "items" in schema else []
    return all(ends(one, root, depth) for one in needed)


def test_what_can_end_is_what_ends_with_few_references() -> None:
    draw, seen = random.Random(0), []
    for _ in range(400):
        root = {"$defs": {f"d{number}": random_schema(draw) for number in range(4)}, **random_schema(draw)}
        try:
            prepared_schema(json.dumps(root))
            seen.append(True)
        except ValueError:
            seen.append(False)
        assert seen[-1] is ends(root, root, 4), root  # of four definitions none has to come twice on a way
    assert 40 < sum(seen) < 360


def test_a_long_chain_of_references_costs_little() -> None:
    size = 3000
    chain = {f"d{number}": {"anyOf": [{"$ref": f"#/$defs/d{number + 1}"}]} for number in range(size)}
    for last in ({"type": "null"}, {"$ref": "#/$defs/d0"}):
        prepared_schema(json.dumps({"$defs": chain | {f"d{size}": last}, "$ref": "#/$defs/d0"}))
