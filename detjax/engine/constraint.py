"""A constraint on the text of a sample, such as a JSON schema."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from detjax.engine import json_schemas

FORMATS: Final[Mapping[str, Any]] = {"json_schema": None, "regex": "regex", "grammar": "lark", "choice": "choice"}
"""The kinds of constraints, with llguidance's names; it has a separate function for schemas."""


@dataclasses.dataclass(frozen=True)
class Constraint:
    r"""A restriction on the text of a sample.

    Attributes:
        kind: "json_schema": JSON that a schema accepts; "regex": text that fully matches a regular expression in the
            syntax of Rust's crate regex; "grammar": text of a context-free grammar in llguidance's variant of Lark's
            syntax; "choice": one of several texts.
        text: the schema as JSON, the expression, the grammar, or the texts as a JSON list.

    Example:
        >>> from detjax.engine import Constraint
        >>> Constraint.choice(["yes", "no"])
        Constraint(kind='choice', text='["yes","no"]')
        >>> Constraint.json_schema({"type": "integer"}).text
        '{"type":"integer"}'
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        """Checks the kind.

        Raises:
            ValueError: the kind is unknown.
        """
        if self.kind not in FORMATS:
            raise ValueError(f"Constraint: kind is {self.kind!r}; accepted: {', '.join(FORMATS)}")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any], *, any_whitespace: bool = False) -> "Constraint":
        """Returns a constraint to JSON that a schema accepts; `{"type": "object"}` accepts any object.

        Args:
            schema: the schema. Its `x-guidance` may have options of llguidance.
            any_whitespace: allow any white space between the parts of JSON. By default the JSON is one line with at
                most one space after each comma and colon, because models may emit white space until they run out of
                tokens.
        """
        options = {"x-guidance": json_schemas.ANY_WHITE_SPACE | schema.get("x-guidance", {})} if any_whitespace else {}
        return cls("json_schema", _compact({**schema, **options}))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Constraint":
        """Returns a constraint to one of several texts."""
        return cls("choice", _compact(list(texts)))


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
