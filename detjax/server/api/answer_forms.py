"""Constraints on an answer's form, such as a JSON schema."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from detjax.engine import Constraint
from detjax.server.http.field_types import MAX_CHOICES, Body


class JsonSchemaFormat(Body):
    name: str | None = Field(default=None, description="A name for the client's own use.")
    description: str | None = Field(default=None, description="A description for the client's own use.")
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON schema that the answer follows.")
    strict: bool | None = Field(default=None, description="Makes no difference: every answer follows the schema.")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = Field(description="The form of the answer.")
    json_schema: JsonSchemaFormat | None = Field(default=None, description="The schema, only with type json_schema.")

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") is (self.json_schema is None):
            raise ValueError("accepted: json_schema with type 'json_schema', and with no other type")
        return self

    def constraint(self) -> Constraint | None:
        """Returns the answer's constraint, or None for any text."""
        if self.type == "text":
            return None
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.schema_
        return Constraint.json_schema(schema)


class StructuredOutputs(Body):
    json_: dict[str, Any] | None = Field(default=None, alias="json", description="A JSON schema.")
    regex: str | None = Field(default=None, description="A regular expression that the whole answer matches.")
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = Field(
        default=None, description="Texts to choose the answer from."
    )
    grammar: str | None = Field(default=None, description="A grammar in llguidance's variant of Lark's syntax.")
    disable_any_whitespace: bool | None = Field(
        default=None,
        description="false, with json: allow any white space in the JSON. Default: one line, with at most one space "
        "after each comma and colon.",
    )

    @model_validator(mode="after")
    def _check_number(self) -> "StructuredOutputs":
        forms = self.model_fields_set - {"disable_any_whitespace"}
        if len(forms) != 1 or self.constraint() is None:
            raise ValueError("accepted: one of json, regex, choice and grammar")
        if self.disable_any_whitespace is False and self.json_ is None:
            raise ValueError("accepted: disable_any_whitespace: false only with json")
        return self

    def constraint(self) -> Constraint | None:
        """Returns the answer's constraint."""
        if self.json_ is not None:
            return Constraint.json_schema(self.json_, any_whitespace=self.disable_any_whitespace is False)
        if self.choice is not None:
            return Constraint.choice(self.choice)
        if self.regex is not None:
            return Constraint("regex", self.regex)
        return None if self.grammar is None else Constraint("grammar", self.grammar)
