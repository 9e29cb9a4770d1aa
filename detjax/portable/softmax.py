"""Softmax, log-softmax and logsumexp in plain JAX: blocks of the axis, added left to right."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from detjax.contract import ACCUMULATOR, LOG2_E, SOFTMAX_BLOCK
from detjax.numerics import LOWEST, flat_rows
from detjax.portable.tiles import map_rows, row_sum


def log_normalizer(x: Array) -> tuple[Array, Array]:
    """Maximum `m` and sum `l` of `exp(x - m)`, each `[rows, 1]` float32, of a tile `[rows, V]`."""

    def of_block(block: Array) -> tuple[Array, Array]:
        m = jnp.maximum(jnp.max(block, axis=-1, keepdims=True), LOWEST)
        return m, row_sum(exp_difference(block, m))

    m_b, l_b = _of_blocks(of_block, x.astype(ACCUMULATOR), fill=-jnp.inf)
    m = jnp.max(m_b, axis=0)
    return m, _left_to_right(lambda block: l_b[block] * exp_difference(m_b[block], m), len(m_b))


def sum_of_blocks(x: Array) -> Array:
    """Sums `[rows, 1]` of a tile `[rows, V]`, float32, as gradients need them."""
    sums = _of_blocks(row_sum, x, fill=0.0)
    return _left_to_right(lambda block: sums[block], len(sums))


def _of_blocks(of_block: Callable[[Array], PyTree[Array]], x: Array, fill: float) -> PyTree[Array]:
    """Arrays `[blocks, ...]` of what `of_block` makes of each block of a tile `[rows, V]`, the last one filled up."""
    size = min(x.shape[-1], SOFTMAX_BLOCK)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[-1] % size)), constant_values=fill)
    starts = jnp.arange(0, x.shape[-1], size, dtype=jnp.int32)
    return lax.map(lambda start: of_block(lax.dynamic_slice_in_dim(x, start, size, axis=1)), starts)


def _left_to_right(term: Callable[[Array], Array], count: int) -> Array:
    """The sum of `term(0)`, `term(1)`, ..."""
    zeros = jnp.zeros_like(term(jnp.int32(0)))
    # Behind the barrier a product is rounded before it is added, whatever instructions the processor has.
    return lax.fori_loop(0, count, lambda index, total: total + lax.optimization_barrier(term(index)), zeros)


def exp_difference(x: Array, m: Array) -> Array:
    """`exp(x - m)` as the contract has it: a power of two."""
    return jnp.exp2((x - m) * LOG2_E)


def log_softmax_tile(x: Array) -> Array:
    """`[rows, V]` float32 of a tile `[rows, V]`."""
    m, total = log_normalizer(x)
    return (x.astype(ACCUMULATOR) - m) - jnp.log(total)


def softmax_tile(x: Array) -> Array:
    """`[rows, V]` float32 of a tile `[rows, V]`."""
    m, total = log_normalizer(x)
    return exp_difference(x.astype(ACCUMULATOR), m) * (1 / total)


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
        return y * (dy - sum_of_blocks(lax.optimization_barrier(y * dy)))

    return map_rows(tile, (flat_rows(y), flat_rows(dy)), None).reshape(y.shape)


def log_softmax_backward(y: Array, dy: Array) -> Array:
    """Gradient of log-softmax's input, float32, from its output."""

    def tile(rows: tuple[Array, Array], _: None) -> Array:
        y, dy = rows
        return dy - lax.optimization_barrier(jnp.exp(y) * sum_of_blocks(dy))

    return map_rows(tile, (flat_rows(y), flat_rows(dy)), None).reshape(y.shape)


def logsumexp_backward(x: Array, y: Array, dy: Array) -> Array:
    """Gradient of logsumexp's input, float32, from its input and output."""

    def tile(rows: tuple[Array, Array, Array], _: None) -> Array:
        x, y, dy = rows
        return jnp.exp(x.astype(ACCUMULATOR) - y) * dy

    return map_rows(tile, (flat_rows(x), y.reshape(-1, 1), dy.reshape(-1, 1)), None).reshape(x.shape)
