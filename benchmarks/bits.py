"""Comparisons of bits that several studies make, and the rows that every batch of a comparison has in common."""

from jaxtyping import Array, Bool, Num

from detjax.bench.bits import words


def differing_tokens(a: Num[Array, "B T H K"], b: Num[Array, "B T H K"]) -> Bool[Array, "B T"]:
    """The tokens of two outputs of attention that have different bits."""
    return (words(a) != words(b)).any((2, 3))


def anchor_positions(rows: int) -> list[int]:
    """The positions of the anchor row in a batch of so many rows: first, middle and last, each once."""
    return sorted({0, rows // 2, rows - 1})
