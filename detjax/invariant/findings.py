"""Findings: equations that mix the rows of a batch, described for error messages."""

import dataclasses
import enum


class Mixing(enum.Enum):
    """The way in which an equation mixes rows."""

    SUM = "adds numbers of different rows"
    SLOT = "gives a row numbers that depend on its place in the batch"
    SIZE = "computes with the number of rows"
    DEVICES = "meets the rows of other devices"
    MOVE = "moves, orders or counts rows of different examples"
    OTHER = "has no rule here"


@dataclasses.dataclass(frozen=True)
class Finding:
    """An equation that mixes rows.

    Attributes:
        mixing: in which way.
        primitive: the equation's primitive.
        what: what it does, in words.
        line: the user's line.
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
