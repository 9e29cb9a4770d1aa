"""Embedding lookup in plain JAX, and its gradient."""

from jaxtyping import Array

from detjax.contract import ACCUMULATOR
from detjax.portable.tiles import final_sum, fold_rows, initial_sum


def forward(tokens: Array, table: Array) -> Array:
    """Returns copies `[*B, D]` of the table's rows. Nothing is added, so no order needs fixing."""
    return table[tokens]


def backward(tokens: Array, table: Array, dy: Array, table_sum: Array | None = None) -> Array:
    """Returns the gradient of the table, or its next sum if it has one.

    Each row adds its tokens in ascending order, one at a time, in float32. Without a sum it is rounded once.
    """

    def add(carry: Array, rows: tuple[Array, Array], _: None) -> Array:
        token, dy = rows
        return carry.at[token[0]].add(dy[0].astype(ACCUMULATOR))

    rows = tokens.reshape(-1), dy.reshape(-1, dy.shape[-1])
    total = fold_rows(add, initial_sum(table_sum, table.shape), rows, None, size=1)
    return final_sum(total, table_sum, table)
