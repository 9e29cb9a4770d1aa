"""Operations and nouns without the suite's check of annotations, which comes first and which users do not have."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any


def unchecked(op: Callable[..., Any]) -> Callable[..., Any]:
    """The operation without the check of annotations."""
    return inspect.unwrap(op)


def without_checks(noun: type, **fields: Any) -> Any:
    """An instance of a frozen dataclass whose fields may have any shapes and dtypes."""
    made = object.__new__(noun)
    for field in dataclasses.fields(noun):
        object.__setattr__(made, field.name, fields.get(field.name, field.default))
    return made
