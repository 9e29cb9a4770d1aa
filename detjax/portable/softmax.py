"""Softmax, log-softmax and logsumexp in plain JAX: blocks of the axis, merged left to right."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from detjax.contract import ACCUMULATOR, SOFTMAX_BLOCK
from detjax.portable.tiles import flat_rows, map_rows, row_sum


def log_normalizer(x: Array) -> tuple[Array, Array]:
    """Maximum `m` and sum `l` of `exp(x - m)`, each `[rows, 1]` float32, of a tile `[rows, V]`."""
    size = min(x.shape[-1], SOFTMAX_BLOCK)
    x = jnp.pad(x.astype(ACCUMULATOR), ((0, 0), (0, -x.shape[-1] % size)), constant_values=-jnp.inf)

    def of_block(index: Array | int) -> tuple[Array, Array]:
        block = lax.dynamic_slice_in_dim(x, index * size, size, axis=1)
        m = jnp.maximum(jnp.max(block, axis=-1, keepdims=True), jnp.finfo(ACCUMULATOR).min)
        return m, row_sum(jnp.exp(block - m))

    def merge(index: Array, merged: tuple[Array, Array]) -> tuple[Array, Array]:
        (m, total), (m_b, total_b) = merged, of_block(index)
        m_new = jnp.maximum(m, m_b)
        return m_new, total * jnp.exp(m - m_new) + total_b * jnp.exp(m_b - m_new)

    return lax.fori_loop(1, x.shape[-1] // size, merge, of_block(0))


def log_softmax_tile(x: Array) -> Array:
    """`[rows, V]` float32 of a tile `[rows, V]`."""
    m, total = log_normalizer(x)
    return (x.astype(ACCUMULATOR) - m) - jnp.log(total)


def softmax_tile(x: Array) -> Array:
    """`[rows, V]` float32 of a tile `[rows, V]`."""
    m, total = log_normalizer(x)
    return jnp.exp(x.astype(ACCUMULATOR) - m) / total


def logsumexp_tile(x: Array) -> Array:
    """`[rows, 1]` float32 of a tile `[rows, V]`."""
    m, total = log_normalizer(x)
    return m + jnp.log(total)


def softmax(x: Array) -> Array:
    """`[*B, V]` float32."""
    return map_rows(lambda x, _: softmax_tile(x), flat_rows(x), None).reshape(x.shape)


def log_softmax(x: Array) -> Array:
    """`[*B, V]` float32."""
    return map_rows(lambda x, _: log_softmax_tile(x), flat_rows(x), None).reshape(x.shape)


def logsumexp(x: Array) -> Array:
    """`[*B]` float32."""
    return map_rows(lambda x, _: logsumexp_tile(x), flat_rows(x), None).reshape(x.shape[:-1])


def softmax_backward(y: Array, dy: Array) -> Array:
    """Gradient of softmax's input, float32, from its output."""

    def tile(rows: tuple[Array, Array], _: None) -> Array:
        y, dy = rows
        return y * (dy - row_sum(y * dy))

    return map_rows(tile, (flat_rows(y), flat_rows(dy)), None).reshape(y.shape)


def log_softmax_backward(y: Array, dy: Array) -> Array:
    """Gradient of log-softmax's input, float32, from its output."""

    def tile(rows: tuple[Array, Array], _: None) -> Array:
        y, dy = rows
        return dy - jnp.exp(y) * row_sum(dy)

    return map_rows(tile, (flat_rows(y), flat_rows(dy)), None).reshape(y.shape)


def logsumexp_backward(x: Array, y: Array, dy: Array) -> Array:
    """Gradient of logsumexp's input, float32, from its input and output."""

    def tile(rows: tuple[Array, Array, Array], _: None) -> Array:
        x, y, dy = rows
        return jnp.exp(x.astype(ACCUMULATOR) - y) * dy

    return map_rows(tile, (flat_rows(x), y.reshape(-1, 1), dy.reshape(-1, 1)), None).reshape(x.shape)
