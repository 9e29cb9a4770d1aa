"""Findings: equations that mix the rows of a batch, described for error messages."""

import dataclasses
import enum


class Mixing(enum.Enum):
    """Ways in which an equation mixes rows."""

    SUM = "adds numbers of different rows"
    SLOT = "gives a row numbers that depend on its position in the batch"
    SIZE = "computes with the number of rows"
    DEVICES = "combines rows of different devices"
    MOVE = "moves, orders or counts rows of different examples"
    OTHER = "is not known to keep rows separate"


@dataclasses.dataclass(frozen=True)
class Finding:
    """An equation that mixes rows.

    Attributes:
        mixing: how it mixes them.
        primitive: the equation's primitive.
        what: a description of what it does.
        line: the line in the user's code.
        shapes: the shapes of its operands.
        dtypes: their dtypes.
    """

    mixing: Mixing
    primitive: str
    what: str
    line: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    def __str__(self) -> str:
        shapes = ", ".join(map(str, self.shapes))
        return f"{self.primitive} of {shapes} {self.what}, at {self.line}"
