"""Matrix products on Hopper GPUs: the operation's forward and backward pass, as products of one kernel.

`kernel.py` has the kernel, `plan.py` its schedules and `tuning.py` the choice of a schedule.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike

from detjax.contract import ACCUMULATOR
from detjax.numerics import activated, flat_rows, parts
from detjax.options import Epilogue, WeightLayout
from detjax.pallas.hopper.matmul.kernel import Operands, product
from detjax.pallas.hopper.token_sums import token_sums
from detjax.rounding import rounded


def forward(
    x: Array,
    w: Array,
    bias: Array | None,
    residual: Array | None,
    *,
    layout: WeightLayout,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
) -> Array:
    """`[*B, N]` of rows `[*B, K]`; see `detjax.ops.matmul` for the arguments.

    Raises:
        NotImplementedError: the matrix unit does not take x's dtype.
    """
    flat_residual = None if residual is None else flat_rows(residual)
    operands = Operands(flat_rows(x), w, bias, flat_residual)
    y = product(operands, layout=layout, epilogue=epilogue, out_dtype=out_dtype)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def backward(
    x: Array,
    w: Array,
    bias: Array | None,
    dy: Array,
    w_sum: Array | None = None,
    bias_sum: Array | None = None,
    *,
    layout: WeightLayout,
    epilogue: Epilogue,
) -> tuple[Array, Array, Array | None]:
    """Gradients of x, w and bias; instead of those of w and bias, their next sums if they have sums.

    With z = x @ w + bias and y = epilogue(z), dz is the gradient of z, rounded to x's dtype. Then

        dx[m, k]    = sum over n ascending (gate's, then up's) of dz[m, n] * w[k, n]
        dw[k, n]    = sum over tokens m ascending of x[m, k] * dz[m, n]
        dbias[n]    = sum over tokens m ascending of dz[m, n], see `token_sums`

    each in one float32 accumulator that is rounded once. A sum goes on in float32 where it ended, and is not rounded.

    Raises:
        NotImplementedError: the matrix unit does not take x's dtype.
    """
    flat_x = flat_rows(x)
    halves = [w] if w.ndim == 2 else [w[0], w[1]]
    dz = _accumulator_gradient(flat_x, halves, bias, flat_rows(dy), layout=layout, epilogue=epilogue)

    # To contract both halves of a stacked "kn" weight at once takes a copy; "nk" halves already follow each other.
    joined = w.reshape(-1, w.shape[-1]) if layout == "nk" else jnp.concatenate(halves, axis=1)
    dx = _plain(dz, joined, layout="kn" if layout == "nk" else "nk", out_dtype=x.dtype)

    def over_tokens(x: Array, w: Array, start: Array | None) -> Array:
        out_dtype = x.dtype if start is None else start.dtype
        operands = Operands(x, w, start=start)
        return product(operands, token_layout="km", layout="kn", epilogue=Epilogue(), out_dtype=out_dtype)

    if layout == "nk":
        dw = over_tokens(dz, flat_x, None if w_sum is None else w_sum.reshape(joined.shape))
    else:
        parts_of_dz = jnp.split(dz, len(halves), axis=1)
        sums = [None] * len(halves) if w_sum is None else list(w_sum.reshape(len(halves), *halves[0].shape))
        dw = jnp.stack([over_tokens(flat_x, *pair) for pair in zip(parts_of_dz, sums, strict=True)])
    dbias = None
    if bias is not None:
        start = jnp.zeros(bias.size, ACCUMULATOR) if bias_sum is None else bias_sum.reshape(-1)
        dbias = token_sums(start, dz).reshape(bias.shape)
        dbias = rounded(dbias, bias.dtype) if bias_sum is None else dbias
    return dx.reshape(x.shape), dw.reshape(w.shape), dbias


def _plain(x: Array, w: Array, **options: object) -> Array:
    """`x @ w` without an epilogue."""
    return product(Operands(x, w), epilogue=Epilogue(), **options)  # pyright: ignore[reportArgumentType]


def _accumulator_gradient(
    x: Array, halves: list[Array], bias: Array | None, dy: Array, *, layout: WeightLayout, epilogue: Epilogue
) -> Array:
    """The gradient of the biased sums, `[M, N]` of x's dtype, or `[M, 2 N]` for gate and up."""
    if epilogue == Epilogue():
        return rounded(dy, x.dtype)
    z = jnp.stack([_plain(x, half, layout=layout, out_dtype=ACCUMULATOR) for half in halves], axis=1)
    if bias is not None:
        z = z + bias.astype(ACCUMULATOR).reshape(1, *z.shape[1:])
    (dz,) = jax.vjp(lambda z: activated(parts(z), epilogue), z)[1](dy.astype(ACCUMULATOR))
    return rounded(dz, x.dtype).reshape(dz.shape[0], -1)
