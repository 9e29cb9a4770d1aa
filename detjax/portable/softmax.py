"""Softmax, log-softmax and logsumexp in plain JAX, with the blocks of a row added left to right."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from detjax.contract import ACCUMULATOR, LOG2_E, SOFTMAX_BLOCK
from detjax.operands.numerics import LOWEST, flat_rows
from detjax.portable.tiles import map_rows, row_sum
from detjax.runtime import varying


def log_normalizer(x: Array) -> tuple[Array, Array]:
    """Returns the maximum `m` and the sum of `exp(x - m)` of a tile's rows `[rows, V]`, each float32 `[rows, 1]`."""

    return merged(*normalizers_of_blocks(x))


def normalizers_of_blocks(x: Array) -> tuple[Array, Array]:
    """Returns the contract's `m_b` and `l_b` of a tile's rows `[rows, V]`, each float32 `[blocks, rows, 1]`."""

    def normalizer(block: Array) -> tuple[Array, Array]:
        m = jnp.maximum(jnp.max(block, axis=-1, keepdims=True), LOWEST)
        return m, row_sum(exp_difference(block, m))

    return _map_blocks(normalizer, x.astype(ACCUMULATOR), fill=-jnp.inf)


def merged(m_b: Array, l_b: Array) -> tuple[Array, Array]:
    """Returns `m` and `l` of a tile's rows, each `[rows, 1]`, from `m_b` and `l_b` of their blocks."""
    m = jnp.max(m_b, axis=0)
    return m, _left_to_right(lambda block: l_b[block] * exp_difference(m_b[block], m), len(m_b))


def sum_of_blocks(x: Array) -> Array:
    """Returns the float32 sums `[rows, 1]` of a tile `[rows, V]` in the order of the gradients."""
    sums = _map_blocks(row_sum, x, fill=0.0)
    return _left_to_right(lambda block: sums[block], len(sums))


def _map_blocks(reduce: Callable[[Array], PyTree[Array]], x: Array, fill: float) -> PyTree[Array]:
    """Returns `reduce` of the blocks of a tile `[rows, V]`, as `[blocks, ...]`; `fill` pads the last block."""
    size = min(x.shape[-1], SOFTMAX_BLOCK)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[-1] % size)), constant_values=fill)
    starts = jnp.arange(0, x.shape[-1], size, dtype=jnp.int32)
    return lax.map(lambda start: reduce(lax.dynamic_slice_in_dim(x, start, size, axis=1)), starts)


def _left_to_right(term: Callable[[Array], Array], count: int) -> Array:
    """Adds `term(0)`, `term(1)`, ..., `term(count - 1)` in this order."""
    zeros = jnp.zeros_like(term(jnp.int32(0)))
    # The barrier rounds a product before it is added, whatever instructions the processor has.
    return varying.fori_loop(0, count, lambda index, total: total + lax.optimization_barrier(term(index)), zeros)


def exp_difference(x: Array, m: Array) -> Array:
    """Returns the contract's `e(x, m)`: `exp(x - m)` as a power of two."""
    return jnp.exp2((x - m) * LOG2_E)


def log_softmax_tile(x: Array) -> Array:
    """Returns log-softmax, float32 `[rows, V]`, of a tile `[rows, V]`."""
    m, total = log_normalizer(x)
    # With the barrier the logarithm is taken of single numbers, whatever the width of the rows.
    return (x.astype(ACCUMULATOR) - m) - lax.optimization_barrier(jnp.log(total))


def softmax_tile(x: Array) -> Array:
    """Returns softmax, float32 `[rows, V]`, of a tile `[rows, V]`."""
    m, total = log_normalizer(x)
    return exp_difference(x.astype(ACCUMULATOR), m) * (1 / total)


def logsumexp_tile(x: Array) -> Array:
    """Returns logsumexp, float32 `[rows, 1]`, of a tile `[rows, V]`."""
    m, total = log_normalizer(x)
    return m + jnp.log(total)


def softmax(x: Array) -> Array:
    """Returns softmax, float32 `[*B, V]`, of rows `[*B, V]`."""
    return map_rows(lambda x, _: softmax_tile(x), flat_rows(x), None).reshape(x.shape)


def log_softmax(x: Array) -> Array:
    """Returns log-softmax, float32 `[*B, V]`, of rows `[*B, V]`."""
    return map_rows(lambda x, _: log_softmax_tile(x), flat_rows(x), None).reshape(x.shape)


def logsumexp(x: Array) -> Array:
    """Returns logsumexp, float32 `[*B]`, of rows `[*B, V]`."""
    return map_rows(lambda x, _: logsumexp_tile(x), flat_rows(x), None).reshape(x.shape[:-1])


def softmax_backward(y: Array, dy: Array) -> Array:
    """Returns the gradient of softmax's input, `y * (dy - sum(y * dy))` in float32, from its output `y`."""

    def tile(rows: tuple[Array, Array], _: None) -> Array:
        y, dy = rows
        return y * (dy - sum_of_blocks(lax.optimization_barrier(y * dy)))

    return map_rows(tile, (flat_rows(y), flat_rows(dy)), None).reshape(y.shape)


def log_softmax_backward(y: Array, dy: Array) -> Array:
    """Returns the gradient of log-softmax's input, `dy - exp(y) * sum(dy)` in float32, from its output `y`."""

    def tile(rows: tuple[Array, Array], _: None) -> Array:
        y, dy = rows
        return dy - lax.optimization_barrier(jnp.exp(y) * sum_of_blocks(dy))

    return map_rows(tile, (flat_rows(y), flat_rows(dy)), None).reshape(y.shape)


def logsumexp_backward(x: Array, y: Array, dy: Array) -> Array:
    """Returns the gradient of logsumexp's input, `exp(x - y) * dy` in float32, from its input and its output `y`."""

    def tile(rows: tuple[Array, Array, Array], _: None) -> Array:
        x, y, dy = rows
        return jnp.exp(x.astype(ACCUMULATOR) - y) * dy

    return map_rows(tile, (flat_rows(x), y.reshape(-1, 1), dy.reshape(-1, 1)), None).reshape(x.shape)
