"""Embedding lookup, under contract."""

import functools

import jax
from jaxtyping import Array, Float, Int

from detjax.operands.accumulated_weight import AccumulatedWeight, Weight, fresh_and_carried, value_and_sum
from detjax.ops.checks import check_dtype, check_integers, check_not_empty
from detjax.ops.dispatch import Operation, backend_modules, with_vmap_rule
from detjax.runtime import compilation

_EMBED = Operation("embed", backend_modules("embedding", kernels=["hopper"], mma="hopper"))


@compilation.jit
def embed(tokens: Int[Array, "*B"], table: Weight) -> Float[Array, "*B D"]:
    """Returns the table's row of each token. Token ids must be in the vocabulary.

    Args:
        tokens: ids.
        table: `[V, D]`. With an `AccumulatedWeight` the gradient continues its sum over lookups.

    Raises:
        TypeError: the table's dtype is not under contract, or tokens are not integers.
        ValueError: an array is empty.

    Example:
        >>> ops.embed(jnp.array([2, 0]), jnp.arange(6.0).reshape(3, 2))
        Array([[4., 5.],
               [0., 1.]], dtype=float32)
    """
    if isinstance(table, AccumulatedWeight):
        table = AccumulatedWeight(table.value, table.lookups)
    table, table_sum = value_and_sum(_EMBED.taking(table))
    check_dtype("embed", table=table)
    check_integers("embed", tokens=tokens)
    check_not_empty("embed", tokens=tokens, table=table)
    return _EMBED.call(functools.partial(_embed, table_sum), tokens, table)


@jax.custom_vjp
def _embed(table_sum: Array | None, tokens: Array, table: Array) -> Array:
    del table_sum  # only the backward pass adds to it
    return with_vmap_rule(_EMBED.kernels().forward, rows=(True, False))(tokens, table)


def _forward(table_sum: Array | None, tokens: Array, table: Array) -> tuple[Array, tuple[Array, Array, Array | None]]:
    return _embed(table_sum, tokens, table), (tokens, table, table_sum)


def _backward(saved: tuple[Array, Array, Array | None], dy: Array) -> tuple[Array | None, ...]:
    tokens, table, table_sum = saved
    dtable = with_vmap_rule(_EMBED.kernels().backward, rows=(False,) * 4)(tokens, table, dy, table_sum)
    fresh, carried = fresh_and_carried([dtable], [table_sum])
    return *carried, None, *fresh


_embed.defvjp(_forward, _backward)
