"""Rows of an array by their numbers."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


class IndexedRows(NamedTuple):
    """Rows of an array by their numbers, for a function of elements that reads them where they lie.

    Attributes:
        array: `[P, W]`.
        number: the row of the array for each row of the function's other arrays; negative: a row of `missing`.
        missing: the number in rows that the array does not have.
        first: the first column. The function's rows may be shorter than W.
    """

    array: Float[Array, "P W"]
    number: Int32[Array, "M"]
    missing: float
    first: int = 0

    def gathered(self, shape: tuple[int, ...]) -> Array:
        """Returns the rows as an array of this shape."""
        number = self.number.reshape(-1, 1)
        rows = self.array[jnp.maximum(number[:, 0], 0), self.first : self.first + shape[-1]]
        return jnp.where(number >= 0, rows, jnp.asarray(self.missing, rows.dtype)).reshape(shape)
