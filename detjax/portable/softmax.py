"""Softmax, log-softmax and logsumexp in plain JAX: blocks of the axis, merged left to right."""

import jax.numpy as jnp
from jaxtyping import Array

from detjax.contract import ACCUMULATOR, LOWEST_MAXIMUM, SOFTMAX_BLOCK
from detjax.portable.tiles import flat_rows, map_rows, row_sum


def log_normalizer(x: Array) -> tuple[Array, Array]:
    """Maximum `m` and sum `l` of `exp(x - m)`, each `[rows, 1]` float32, of a tile `[rows, V]`."""
    x = x.astype(ACCUMULATOR)
    merged = None
    for start in range(0, x.shape[-1], SOFTMAX_BLOCK):
        block = x[:, start : start + SOFTMAX_BLOCK]
        block_max = jnp.maximum(jnp.max(block, axis=-1, keepdims=True), LOWEST_MAXIMUM)
        block_sum = row_sum(jnp.exp(block - block_max))
        if merged is None:
            merged = block_max, block_sum
            continue
        m = jnp.maximum(merged[0], block_max)
        merged = m, merged[1] * jnp.exp(merged[0] - m) + block_sum * jnp.exp(block_max - m)
    assert merged is not None
    return merged


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
