"""Comparisons of bits, and the anchor rows that every batch of a comparison contains."""

from jaxtyping import Array, Bool, Num

from detjax.bench.bits import words


def differing_tokens(a: Num[Array, "B T H K"], b: Num[Array, "B T H K"]) -> Bool[Array, "B T"]:
    """Returns which tokens of two attention outputs have different bits."""
    return (words(a) != words(b)).any((2, 3))


def anchor_positions(rows: int) -> list[int]:
    """Returns the positions of the anchor row in a batch of `rows` rows: first, middle and last, without repetition."""
    return sorted({0, rows // 2, rows - 1})
