"""Marks of request fields that the server accepts and does not act on, because no answer depends on them.

Clients send many fields whose value asks for what the server does anyway. `Unserved` accepts exactly those values and
refuses all others by name, because ignoring them would give another answer than the one that was asked for. `Ignored`
accepts every value of a field's type. The OpenAPI document and the table in `docs/serve/fields.md` show both.
"""

import dataclasses
import json
from typing import Any, Final

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

UNSERVED: Final = "unserved"
"""The type of the error of a field that has a value which is not served."""


class Unserved:
    """Marks a field that is accepted only with certain values, besides null. A field of any type may have it.

    Attributes:
        values: JSON values that ask for what the server does anyway.
        why: what the server does, as a sentence without its full stop.

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
        return {"enum": [None, *self.values], "description": f"Not served: {self.why}."}

    def _check(self, value: Any) -> Any:
        if value is None or any(_are_equal(value, accepted) for accepted in self.values):
            return value
        message = {"message": f"accepted: {self.accepted}, because {self.why}"}
        raise PydanticCustomError(UNSERVED, "{message}", message)


@dataclasses.dataclass(frozen=True)
class Ignored:
    """Marks a field that is accepted with every value of its type, because no answer depends on it.

    Attributes:
        why: why it makes no difference, as a sentence without its full stop.
    """

    why: str

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return handler(schema) | {"description": f"Makes no difference: {self.why}."}


def _are_equal(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal. Python takes true for 1, which JSON does not."""
    return (isinstance(value, bool) is isinstance(other, bool)) and value == other
