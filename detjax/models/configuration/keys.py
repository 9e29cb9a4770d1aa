"""Tables of keys of `config.json`: a row says how one is read into a field, and it is written from there."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Final

from detjax.models.configuration.json_object import LARGEST, JsonObject


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of `config.json` that says a field of an options' dataclass.

    Attributes:
        name: the key.
        field: the field.
        default: the value that transformers takes where the key is left out, which also tells the type: a boolean, an
            integer, or a number above 0. None: an integer that may not be left out.
        minimum: the least integer.
        maximum: the largest integer.
    """

    name: str
    field: str
    default: bool | int | float | None = None
    minimum: int = 1
    maximum: int = LARGEST

    def read(self, file: JsonObject) -> bool | int | float:
        """Reads the key.

        Raises:
            CheckpointError: it has another type or is out of range, or it is missing.
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
    """Returns the fields that a table reads.

    Raises:
        CheckpointError: see `Key.read`.
    """
    return {key.field: key.read(file) for key in keys}


def write_keys(options: Any, keys: Iterable[Key]) -> dict[str, Any]:
    """Returns the keys that say the fields of `options`."""
    return {key.name: getattr(options, key.field) for key in keys}
