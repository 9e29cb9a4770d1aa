"""Embedding lookup, under contract."""

import jax
from jaxtyping import Array, Float, Int

from detjax import backends, compilation, stock
from detjax.ops.checks import check_dtype, check_integers, check_not_empty
from detjax.ops.dispatch import kernels, with_vmap_rule
from detjax.portable import embedding as portable_embedding

# A gather moves bits and adds none, so Hopper needs no kernel of its own.
_KERNELS = {"portable": portable_embedding, "hopper": portable_embedding, "tpu": portable_embedding}


@compilation.jit
def embed(tokens: Int[Array, "*B"], table: Float[Array, "V D"]) -> Float[Array, "*B D"]:
    """Returns the table's rows at the tokens; ids must lie within the vocabulary.

    Raises:
        TypeError: the table's dtype is not under contract, or tokens are not integers.
        ValueError: an array is empty.
    """
    check_dtype("embed", table=table)
    check_integers("embed", tokens=tokens)
    check_not_empty("embed", tokens=tokens, table=table)
    if backends.backend() == backends.STOCK:
        return stock.embed(tokens, table)
    return _embed(tokens, table)


@jax.custom_vjp
def _embed(tokens: Array, table: Array) -> Array:
    return with_vmap_rule(kernels("embed", _KERNELS).forward, rows=(True, False))(tokens, table)


def _forward(tokens: Array, table: Array) -> tuple[Array, tuple[Array, Array]]:
    return _embed(tokens, table), (tokens, table)


def _backward(saved: tuple[Array, Array], dy: Array) -> tuple[None, Array]:
    backward = kernels("embed", _KERNELS).backward
    return None, with_vmap_rule(backward, rows=(False,) * 3)(*saved, dy)


_embed.defvjp(_forward, _backward)
