"""Functions of rows and of shared weights, in plain JAX, with their gradients.

A function computes one tile: it takes arrays `[R, ...]`, and the weights broadcast with a leading axis of R, one copy
per row. So its vector-Jacobian product gives the contribution of each row to the gradient of a weight, and these are
added in the order of the contract.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from detjax.contract import ACCUMULATOR, PORTABLE_ROWS, WEIGHT_GRADIENT_TOKENS
from detjax.operands.rounding import rounded
from detjax.portable.tiles import each_row, final_sum, fold_rows, initial_sum, map_rows, row_sum, sum_of_rows

type Arrays = tuple[Array, ...]


def forward(rows: Arrays, weights: Arrays, *, function: str, **options: Any) -> PyTree[Array]:
    """Returns the results `[M, ...]` of a named function of rows `[M, ...]`, shared weights and options."""

    def tile(rows: Arrays, weights: Arrays) -> PyTree[Array]:
        return _FUNCTIONS[function](*rows, *_for_each_row(weights, len(rows[0])), **options)

    return (each_row if function in _SEALED else map_rows)(tile, rows, weights)


def backward(
    rows: Arrays,
    weights: Arrays,
    sums: tuple[Array | None, ...],
    gradients: PyTree[Array],
    *,
    function: str,
    **options: Any,
) -> tuple[Arrays, Arrays]:
    """Returns the gradients of the rows and of the weights, or a weight's next float32 sum if it has one.

    Rows are added in ascending order: `WEIGHT_GRADIENT_TOKENS` of them left to right, and then to the sum. A sum
    continues in float32 from its previous value, and is not rounded.
    """

    def tile(operands: tuple[Arrays, PyTree[Array]], weights: Arrays) -> tuple[Arrays, Arrays]:
        rows, gradients = operands
        wide = tuple(x.astype(ACCUMULATOR) for x in (*rows, *_for_each_row(weights, PORTABLE_ROWS)))

        def exact(*wide: Array) -> PyTree[Array]:
            return jax.tree.map(lambda y: y.astype(ACCUMULATOR), _FUNCTIONS[function](*wide, **options))

        parts = jax.vjp(exact, *wide)[1](jax.tree.map(lambda y: y.astype(ACCUMULATOR), gradients))
        by_row = tuple(rounded(part, x.dtype) for part, x in zip(parts, rows, strict=False))
        return by_row, parts[len(rows) :]

    by_row, terms = map_rows(tile, (rows, gradients), weights)
    if not weights:
        return by_row, ()
    starts = tuple(initial_sum(previous, weight.shape) for previous, weight in zip(sums, weights, strict=True))

    def add(carry: Arrays, rows: Arrays, _: None) -> Arrays:
        return tuple(total + sum_of_rows(part) for total, part in zip(carry, rows, strict=True))

    totals = fold_rows(add, starts, terms, None, size=WEIGHT_GRADIENT_TOKENS)
    return by_row, tuple(map(final_sum, totals, sums, weights))


def _for_each_row(weights: Arrays, count: int) -> Arrays:
    return tuple(jnp.broadcast_to(x[None], (count, *x.shape)) for x in weights)


def _l2_norm(x: Array, *, eps: float) -> Array:
    wide = _wide(x)
    return rounded(wide * lax.rsqrt(row_sum(wide * wide) + eps), x.dtype)


def _gated_rms_norm(x: Array, gate: Array, weight: Array, *, eps: float) -> Array:
    wide = _wide(x)
    normalized = wide * lax.rsqrt(row_sum(wide * wide) / x.shape[-1] + eps)
    return rounded(lax.optimization_barrier(normalized * _wide(weight)) * jax.nn.silu(_wide(gate)), x.dtype)


def _sigmoid_gated(x: Array, gate: Array) -> Array:
    sigmoid = jax.nn.sigmoid(_wide(gate))
    if gate.shape != x.shape:
        sigmoid = jnp.asarray(_spread(sigmoid, x.shape[-1]))
    return rounded(_wide(x) * sigmoid, x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _spread(x: Array, width: int) -> Array:
    """Broadcasts a column `[R, 1]` to `width` columns; its gradient is their row sum."""
    return jnp.broadcast_to(x, (x.shape[0], width))


_spread.defvjp(lambda x, width: (_spread(x, width), None), lambda width, _, gradient: (row_sum(gradient),))


def _decay_and_rate(a: Array, b: Array, log_rate: Array, bias: Array) -> tuple[Array, Array]:
    g = -jnp.exp(_wide(log_rate)) * jax.nn.softplus(_wide(a) + _wide(bias))
    return g, jax.nn.sigmoid(_wide(b))


def _layer_norm(x: Array, weight: Array, bias: Array, *, eps: float) -> Array:
    wide = _wide(x)
    # XLA may turn these quotients into products with a reciprocal; the barriers separate them from the additions.
    centered = wide - lax.optimization_barrier(row_sum(wide) / x.shape[-1])
    variance = lax.optimization_barrier(row_sum(centered * centered) / x.shape[-1])
    scaled = lax.optimization_barrier(centered * lax.rsqrt(variance + eps) * _wide(weight))
    return rounded(scaled + _wide(bias), x.dtype)


def _weighted_sum(x: Array, factors: Array) -> Array:
    terms = lax.optimization_barrier(_wide(x) * lax.stop_gradient(factors)[..., None])
    return rounded(functools.reduce(jnp.add, [terms[:, index] for index in range(terms.shape[1])]), x.dtype)


def _activated_taps(taps: Array, weight: Array) -> Array:
    """The convolution of inputs `[R, n, C]`, which end with the token's own, with weights `[R, C, 1, n]`."""
    total = jnp.zeros(taps.shape[::2], ACCUMULATOR)
    for tap in range(taps.shape[1]):
        total = total + _wide(taps[:, tap]) * _wide(weight[..., 0, tap])
    return rounded(jax.nn.silu(total), taps.dtype)


def _wide(x: Array) -> Array:
    return x.astype(ACCUMULATOR)


_FUNCTIONS: Final[Mapping[str, Callable[..., PyTree[Array]]]] = {
    "l2_norm": _l2_norm,
    "gated_rms_norm": _gated_rms_norm,
    "sigmoid_gated": _sigmoid_gated,
    "decay_and_rate": _decay_and_rate,
    "causal_convolution": _activated_taps,
    "layer_norm": _layer_norm,
    "weighted_sum": _weighted_sum,
}
_SEALED: Final = frozenset({"layer_norm", "weighted_sum"})
"""The functions whose own barriers determine the roundings, so that they need no tiles."""
