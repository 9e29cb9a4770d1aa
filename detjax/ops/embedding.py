"""Embedding lookup, under contract."""

import jax
from jaxtyping import Array, Float, Int

from detjax import compilation
from detjax.ops.checks import check_dtype, check_integers, check_not_empty
from detjax.ops.dispatch import Operation, with_vmap_rule

_EMBED = Operation(
    "embed",
    {
        "portable": "detjax.portable.embedding",
        "hopper": "detjax.portable.embedding",  # A gather adds nothing, so the chips need no kernels of their own.
        "tpu": "detjax.portable.embedding",
        "stock": "detjax.stock.embedding",
    },
)


@compilation.jit
def embed(tokens: Int[Array, "*B"], table: Float[Array, "V D"]) -> Float[Array, "*B D"]:
    """Returns the table's row of each token. Token ids must lie within the vocabulary.

    Raises:
        TypeError: the table's dtype is not under contract, or tokens are not integers.
        ValueError: an array is empty.
    """
    check_dtype("embed", table=table)
    check_integers("embed", tokens=tokens)
    check_not_empty("embed", tokens=tokens, table=table)
    return _EMBED.call(_embed, tokens, table)


@jax.custom_vjp
def _embed(tokens: Array, table: Array) -> Array:
    return with_vmap_rule(_EMBED.kernels().forward, rows=(True, False))(tokens, table)


def _forward(tokens: Array, table: Array) -> tuple[Array, tuple[Array, Array]]:
    return _embed(tokens, table), (tokens, table)


def _backward(saved: tuple[Array, Array], dy: Array) -> tuple[None, Array]:
    return None, with_vmap_rule(_EMBED.kernels().backward, rows=(False,) * 3)(*saved, dy)


_embed.defvjp(_forward, _backward)
