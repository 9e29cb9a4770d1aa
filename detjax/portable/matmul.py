"""Matmul in plain JAX: a tile of rows times the whole weight, with the epilogue on the float32 accumulator."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike

from detjax.contract import ACCUMULATOR, WEIGHT_GRADIENT_TOKENS
from detjax.operands.numerics import activated, flat_rows, parts
from detjax.operands.options import Epilogue, WeightLayout
from detjax.operands.products import NO_SUMS, Gradients, MatmulOperands, WeightSums
from detjax.operands.rounding import rounded
from detjax.portable.tiles import dot, final_sum, fold_rows, initial_sum, map_rows, sum_of_rows


def forward(operands: MatmulOperands, *, layout: WeightLayout, epilogue: Epilogue, out_dtype: DTypeLike) -> Array:
    """Returns rows `[*B, N]` for rows `[*B, K]`; see `detjax.ops.matmul` for the operands and options."""
    x, w, bias, residual = operands

    def tile(rows: tuple[Array, Array | None], shared: tuple[Array, Array | None]) -> Array:
        x, residual = rows
        y = activated(parts(pre_activation(x, *shared, layout)), epilogue)
        if residual is not None:
            y = y + residual.astype(ACCUMULATOR)
        return rounded(y, out_dtype)

    flat_residual = None if residual is None else flat_rows(residual)
    y = map_rows(tile, (flat_rows(x), flat_residual), (w, bias))
    return y.reshape(*x.shape[:-1], y.shape[-1])


def apply_epilogue(
    sums: Sequence[Array],
    biases: Sequence[Array] | None,
    residual: Array | None,
    *,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
) -> Array:
    """Returns rows `[*B, N]` with the bits of `forward`, given float32 sums `[*B, N]`: one, or those for gate and up.

    Each of the sums may have a bias, `[*B, N]` or `[N]`.
    """

    def tile(rows: tuple[Array, Array | None, Array | None], _: None) -> Array:
        z, biases, residual = rows
        y = activated(parts(z if biases is None else z + biases), epilogue)
        if residual is not None:
            y = y + residual.astype(ACCUMULATOR)
        return rounded(y, out_dtype)

    added = None if biases is None else stacked_rows([full_rows(bias, sums[0]) for bias in biases])
    rows = stacked_rows(sums), added, None if residual is None else flat_rows(residual)
    return map_rows(tile, rows, None).reshape(sums[0].shape)


def full_rows(x: Array, like: Array) -> Array:
    """Broadcasts an addend to the shape of sums, in float32."""
    return jnp.broadcast_to(x.astype(ACCUMULATOR), like.shape)


def stacked_rows(x: Sequence[Array]) -> Array:
    """Returns arrays `[*B, N]` as `[rows, parts, N]`."""
    return jnp.stack([flat_rows(part) for part in x], axis=1)


def backward(
    operands: MatmulOperands, dy: Array, sums: WeightSums = NO_SUMS, *, layout: WeightLayout, epilogue: Epilogue
) -> Gradients:
    """Returns the gradients of x, w and bias; for w and bias, their next sums if they have sums.

    With `dz` the gradient of the biased sums, evaluated at the sums rounded to x's dtype, and itself rounded to x's
    dtype before matrix products:

        dx    = dz @ w^T, each row with N ascending
        dw    = x^T @ dz, tokens added in ascending order, `WEIGHT_GRADIENT_TOKENS` in one product
        dbias = the sum of dz over the tokens, in the same steps, whose tokens are added left to right

    A sum continues in float32 from its previous value, and is not rounded.
    """
    (x, w, bias, _), (w_sum, bias_sum) = operands, sums
    flat_x = flat_rows(x)

    def accumulator_gradient(rows: tuple[Array, Array], shared: tuple[Array, Array | None]) -> Array:
        x, dy = rows
        return gradient_of_sums(pre_activation(x, *shared, layout), dy, x.dtype, epilogue)

    def weight_gradient(carry: tuple[Array, Array], rows: tuple[Array, Array], _: None) -> tuple[Array, Array]:
        x, dz = rows
        return accumulated(carry[0], x, dz, layout), carry[1] + sum_of_rows(dz.astype(ACCUMULATOR))

    dz = map_rows(accumulator_gradient, (flat_x, flat_rows(dy)), (w, bias))
    dx = map_rows(functools.partial(input_gradient, layout=layout), dz, w).reshape(x.shape)
    start = initial_sum(w_sum, w.shape), initial_sum(bias_sum, dz.shape[1:])
    dw, dbias = fold_rows(weight_gradient, start, (flat_x, dz), None, size=WEIGHT_GRADIENT_TOKENS)
    return dx, final_sum(dw, w_sum, w), None if bias is None else final_sum(dbias, bias_sum, bias)


def gradient_of_sums(z: Array, dy: Array, dtype: DTypeLike, epilogue: Epilogue) -> Array:
    """Returns the gradient of a tile's biased float32 sums; `dtype` is x's, which both are rounded to."""
    z = rounded(z, dtype).astype(ACCUMULATOR)
    (dz,) = jax.vjp(lambda z: activated(parts(z), epilogue), z)[1](dy.astype(ACCUMULATOR))
    return rounded(dz, dtype)


def input_gradient(dz: Array, w: Array, layout: WeightLayout) -> Array:
    """Returns the gradient of a tile's rows, given the gradient of their biased sums."""
    dx = [dot(dz[:, part], half, (1, 1 if layout == "kn" else 0)) for part, half in enumerate(halves(w))]
    return rounded(sum(dx[1:], dx[0]), dz.dtype)


def accumulated(total: Array, x: Array, dz: Array, layout: WeightLayout) -> Array:
    """Returns the float32 sum of a weight's gradients after one more step of rows `[tokens, K]` with gradients `dz`.

    `dz` is the gradient of the biased sums, `[tokens, parts, N]`.
    """
    pairs = [(x, dz[:, part]) if layout == "kn" else (dz[:, part], x) for part in range(dz.shape[1])]
    return total + jnp.stack([dot(*pair, (0, 0)) for pair in pairs]).reshape(total.shape)


def halves(w: Array) -> tuple[Array, ...]:
    """Returns the weight, or the gate and up projections of a stacked weight."""
    return (w,) if w.ndim == 2 else (w[0], w[1])


def pre_activation(x: Array, w: Array, bias: Array | None, layout: WeightLayout) -> Array:
    """Returns the biased sums of a tile, float32 `[rows, 1, N]`, or `[rows, 2, N]` for gate and up."""
    z = jnp.stack([dot(x, half, (1, 0 if layout == "kn" else 1)) for half in halves(w)], axis=1)
    return z if bias is None else z + bias.astype(ACCUMULATOR).reshape(1, *z.shape[1:])
