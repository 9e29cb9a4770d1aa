"""Tables of keys of `config.json`: a row describes how a key is read into a field and written from it."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Final

from detjax.models.configuration.json_object import LARGEST, JsonObject


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of `config.json` for a field of an options dataclass.

    Attributes:
        name: the key.
        field: the field.
        default: transformers' default, which also determines the type: a boolean, an integer, or a number above 0.
            None: a required integer.
        minimum: the minimum of integers.
        maximum: the maximum of integers.
    """

    name: str
    field: str
    default: bool | int | float | None = None
    minimum: int = 1
    maximum: int = LARGEST

    def read(self, file: JsonObject) -> bool | int | float:
        """Returns the value of the key.

        Raises:
            CheckpointError: it has another type, is out of range, or is missing.
        """
        if isinstance(self.default, bool):
            return file.boolean(self.name, self.default)
        if isinstance(self.default, float):
            return file.number(self.name, self.default)
        return file.integer(self.name, self.default, minimum=self.minimum, maximum=self.maximum)


ATTENTION_BIAS: Final = (
    Key("attention_bias", "output_bias", default=False),
    Key("attention_bias", "qkv_bias", default=False),
)
"""One key for the biases of all projections of attention."""


def read_keys(file: JsonObject, keys: Iterable[Key]) -> dict[str, Any]:
    """Returns the fields of a table, read from a file.

    Raises:
        CheckpointError: see `Key.read`.
    """
    return {key.field: key.read(file) for key in keys}


def write_keys(options: Any, keys: Iterable[Key]) -> dict[str, Any]:
    """Returns the keys of a table, with values from the fields of `options`."""
    return {key.name: getattr(options, key.field) for key in keys}
