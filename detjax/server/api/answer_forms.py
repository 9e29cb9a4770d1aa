"""Constraints on an answer's form, such as a JSON schema, under the names that OpenAI, vLLM and SGLang give them."""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from detjax.engine import Constraint, FieldError
from detjax.models import Tokenizer
from detjax.server.api.field_marks import Unserved
from detjax.server.api.structural_tags import grammar_of
from detjax.server.http.field_types import MAX_CHOICES, Body

type Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


def _text_or_object(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else "<object>" if isinstance(value, dict) else None


type Schema = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")],
    Discriminator(
        _text_or_object,
        custom_error_type="schema_type",
        custom_error_message="accepted: an object, or a string with an object as JSON",
    ),
]


def _object_of(value: str | dict[str, Any]) -> dict[str, Any]:
    """Returns an object that may be given as JSON in a string."""
    if isinstance(value, dict):
        return value
    try:
        content = json.loads(value)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError("it is a string that is not an object as JSON; accepted: an object, or its JSON")
    return content


class JsonSchemaFormat(Body):
    name: str | None = Field(default=None, description="A name for the client's own use.")
    description: str | None = Field(default=None, description="A description for the client's own use.")
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON schema that the answer follows.")
    strict: bool | None = Field(default=None, description="Makes no difference: every answer follows the schema.")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag"] = Field(description="The form of the answer.")
    json_schema: JsonSchemaFormat | None = Field(default=None, description="The schema, only with type json_schema.")
    format: dict[str, Any] | None = Field(
        default=None, description="The format in xgrammar's form, only with type structural_tag."
    )
    structures: list[dict[str, Any]] | None = Field(
        default=None, description="Objects with begin, schema and end: the older form of structural tags."
    )
    triggers: list[str] | None = Field(
        default=None, description="Texts after which one of the structures follows, only with structures."
    )

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") is (self.json_schema is None):
            raise ValueError("accepted: json_schema with type 'json_schema', and with no other type")
        given = {name for name in ("format", "structures", "triggers") if getattr(self, name) is not None}
        if given not in ([{"format"}, {"structures", "triggers"}] if self.type == "structural_tag" else [set()]):
            raise ValueError(
                "accepted: format, or structures and triggers, with type 'structural_tag', and with no other type"
            )
        return self

    def constraint(self, tokenizer: Tokenizer) -> Constraint | None:
        """Returns the answer's constraint, or None for any text."""
        if self.type == "text":
            return None
        if self.type == "structural_tag":
            return Constraint(
                "grammar", grammar_of(self.model_dump(include={"format", "structures", "triggers"}), tokenizer)
            )
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.schema_
        return Constraint.json_schema(schema)


class StructuredOutputs(Body):
    json_: Schema | None = Field(default=None, alias="json", description="A JSON schema, or its JSON in a string.")
    json_object: bool | None = Field(default=None, description="true: any JSON object.")
    regex: str | None = Field(default=None, description="A regular expression that the whole answer matches.")
    choice: Choices | None = Field(default=None, description="Texts to choose the answer from.")
    grammar: str | None = Field(
        default=None, description="A grammar in llguidance's variant of Lark's syntax, or in GBNF, also called EBNF."
    )
    structural_tag: str | None = Field(default=None, description="A structural tag as JSON; see response_format.")
    disable_any_whitespace: bool | None = Field(
        default=None,
        description="false, with json: allow any white space in the JSON. Default: one line, with at most one space "
        "after each comma and colon.",
    )

    @model_validator(mode="after")
    def _check_number(self) -> "StructuredOutputs":
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        forms = [name for name in given if name != "disable_any_whitespace"]
        if len(forms) != 1 or self.json_object is False:
            raise ValueError("accepted: one of json, json_object: true, regex, choice, grammar and structural_tag")
        if self.disable_any_whitespace is False and forms[0] not in ("json_", "json_object"):
            raise ValueError("accepted: disable_any_whitespace: false only with json")
        return self

    def constraint(self, tokenizer: Tokenizer) -> Constraint:
        """Returns the answer's constraint."""
        if self.json_ is not None or self.json_object:
            schema = {"type": "object"} if self.json_ is None else _object_of(self.json_)
            return Constraint.json_schema(schema, any_whitespace=self.disable_any_whitespace is False)
        if self.choice is not None:
            return Constraint.choice(self.choice)
        if self.regex is not None:
            return Constraint("regex", self.regex)
        if self.structural_tag is not None:
            return Constraint("grammar", grammar_of(_object_of(self.structural_tag), tokenizer))
        assert self.grammar is not None
        return Constraint("grammar", _lark(self.grammar))


class FormFields(Body):
    """The fields that constrain an answer's form in the APIs of vLLM and SGLang. Requests may have one of them."""

    structured_outputs: StructuredOutputs | None = Field(default=None, description="Constrains the answer's form.")
    guided_json: Schema | None = Field(default=None, description="The same as json of structured_outputs.")
    guided_regex: str | None = Field(default=None, description="The same as regex of structured_outputs.")
    guided_choice: Choices | None = Field(default=None, description="The same as choice of structured_outputs.")
    guided_grammar: str | None = Field(default=None, description="The same as grammar of structured_outputs.")
    guided_decoding_backend: Annotated[Any, Unserved("auto", "guidance", why="llguidance computes all masks")] = None
    guided_whitespace_pattern: Annotated[Any, Unserved(why="a schema's x-guidance has it")] = None
    structural_tag: str | None = Field(default=None, description="The same as structural_tag of structured_outputs.")
    regex: str | None = Field(default=None, description="The same as regex of structured_outputs.")
    ebnf: str | None = Field(default=None, description="A grammar in GBNF, also called EBNF, whose first rule is root.")
    json_schema: Schema | None = Field(default=None, description="The same as json of structured_outputs.")

    def form_given(self) -> str | None:
        """Returns the name of the field that constrains the answer's form, or None.

        Raises a ValueError if there are several.
        """
        names = [name for name in ("structured_outputs", *_OTHER_NAMES) if getattr(self, name) is not None]
        if len(names) > 1:
            raise FieldError(f"{' and '.join(names)} are given; accepted: one of them", names[1])
        return names[0] if names else None

    def form_constraint(self, tokenizer: Tokenizer) -> Constraint | None:
        """Returns the constraint of these fields, or None for any text.

        Raises a ValueError if it is not valid.
        """
        name = self.form_given()
        if name is None:
            return None
        value = getattr(self, name)
        try:
            if name != "structured_outputs":
                value = _OTHER_NAMES[name](value)
            assert isinstance(value, StructuredOutputs)
            return value.constraint(tokenizer)
        except FieldError:
            raise
        except ValueError as error:
            raise FieldError(f"{name}: {error}", "constraint") from None


_OTHER_NAMES: dict[str, Callable[[Any], StructuredOutputs]] = {
    "guided_json": lambda value: StructuredOutputs(json=value),
    "guided_regex": lambda value: StructuredOutputs(regex=value),
    "guided_choice": lambda value: StructuredOutputs(choice=value),
    "guided_grammar": lambda value: StructuredOutputs(grammar=value),
    "structural_tag": lambda value: StructuredOutputs(structural_tag=value),
    "regex": lambda value: StructuredOutputs(regex=value),
    "ebnf": lambda value: StructuredOutputs(grammar=_lark(value, is_gbnf=True)),
    "json_schema": lambda value: StructuredOutputs(json=value),
}
"""For each other name of a constraint, the structured outputs that it stands for."""


def _lark(grammar: str, *, is_gbnf: bool = False) -> str:
    """Returns a grammar in llguidance's variant of Lark's syntax, which may be given in GBNF."""
    try:
        from llguidance.gbnf_to_lark import any_to_lark, gbnf_to_lark
    except ModuleNotFoundError:  # compiling the constraint reports it
        return grammar
    try:
        # The header without options would be in the way of rules for reasoning.
        return (gbnf_to_lark if is_gbnf else any_to_lark)(grammar).removeprefix("%llguidance {}").lstrip()
    except RecursionError:
        raise ValueError("the grammar is nested too deeply; accepted: fewer levels") from None
    except Exception as error:  # the library raises its own kinds
        raise ValueError(f"the grammar is neither in Lark's syntax nor in GBNF: {str(error)[:400]}") from None
