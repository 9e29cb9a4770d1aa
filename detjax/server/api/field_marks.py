"""Marks for request fields that the server accepts but does not use, because no answer depends on them.

Clients send many fields with a value that matches what the server does anyway. `Unserved` accepts only those values and
rejects all others by name, since ignoring them would return a different answer than requested. `Ignored` accepts every
value of a field's type. The OpenAPI document and the table in `docs/serve/fields.md` show both.
"""

import dataclasses
import json
from typing import Any, Final

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

UNSERVED: Final = "unserved"
"""The error type of a field with an unsupported value."""


class Unserved:
    """Marks a field of any type that is accepted only with certain values or null.

    Attributes:
        values: JSON values that match what the server does anyway.
        why: a clause that says what the server does.

    Example:
        >>> from typing import Annotated, Any
        >>> from pydantic import BaseModel
        >>> from detjax.server.api.field_marks import Unserved
        >>> class Part(BaseModel):
        ...     detail: Annotated[Any, Unserved("auto", why="the checkpoint says how large images are")] = None
        ...
        >>> Part(detail="auto").detail
        'auto'
        >>> Part(detail="low")
        Traceback (most recent call last):
        pydantic_core._pydantic_core.ValidationError: 1 validation error for Part
        ...
    """

    def __init__(self, *values: Any, why: str) -> None:
        self.values, self.why = values, why

    @property
    def accepted(self) -> str:
        """The accepted values as JSON."""
        return " or ".join([*map(json.dumps, self.values), "null"])

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, _: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.values], "description": f"Not supported: {self.why}."}

    def _check(self, value: Any) -> Any:
        # Unlike in Python, true is not 1 in JSON.
        if value is None or any(
            isinstance(value, bool) is isinstance(accepted, bool) and value == accepted for accepted in self.values
        ):
            return value
        message = {"message": f"accepted: {self.accepted}, because {self.why}"}
        raise PydanticCustomError(UNSERVED, "{message}", message)


@dataclasses.dataclass(frozen=True)
class Ignored:
    """Marks a field that is accepted with every value of its type, because no answer depends on it.

    Attributes:
        why: a clause that says why it makes no difference.
    """

    why: str

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return handler(schema) | {"description": f"Makes no difference: {self.why}."}
