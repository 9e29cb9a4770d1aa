"""RMS norm in plain JAX, which adds the squares of a row in one fixed order, in float32."""

from jax import lax
from jaxtyping import Array

from detjax.contract import ACCUMULATOR, WEIGHT_GRADIENT_TOKENS
from detjax.operands.numerics import flat_rows
from detjax.operands.rounding import rounded
from detjax.portable.tiles import final_sum, fold_rows, initial_sum, map_rows, row_sum, sum_of_rows


def forward(
    x: Array, weight: Array, residual: Array | None, *, eps: float, weight_offset: float
) -> tuple[Array, Array | None]:
    """Returns the norm of rows `[*B, D]`, and with a residual also `h = rn(x + residual)`, which is normalized."""

    def tile(rows: tuple[Array, Array | None], weight: Array) -> tuple[Array, Array | None]:
        x, residual = rows
        if residual is not None:
            x = rounded(x.astype(ACCUMULATOR) + residual.astype(ACCUMULATOR), x.dtype)
        y = _normalized(x, eps)[0] * (weight.astype(ACCUMULATOR)[None] + weight_offset)
        return rounded(y, x.dtype), None if residual is None else x

    flat_residual = None if residual is None else flat_rows(residual)
    y, h = map_rows(tile, (flat_rows(x), flat_residual), weight)
    return y.reshape(x.shape), None if h is None else h.reshape(x.shape)


def backward(
    h: Array,
    weight: Array,
    dy: Array,
    dh: Array | None,
    weight_sum: Array | None = None,
    *,
    eps: float,
    weight_offset: float,
) -> tuple[Array, Array]:
    """Returns the gradients of the normalized rows `h` and of the weight, or its next float32 sum if it has one.

    With `n = h * s` and `s = 1 / sqrt(mean(h^2) + eps)`, a row has the gradient

        s * (g - n * mean(g * n)) + dh,  where g = dy * (weight + weight_offset)

    and the weight has the sum of `dy * n` over the rows in ascending order: `WEIGHT_GRADIENT_TOKENS` of them are added
    left to right, and then to the sum. A sum continues in float32 from its previous value, and is not rounded. `dh` is
    the gradient of `h` as a residual, or None.
    """

    def tile(rows: tuple[Array, Array, Array | None], weight: Array) -> tuple[Array, Array]:
        h, dy, dh = rows
        normalized, scale = _normalized(h, eps)
        weighted = dy.astype(ACCUMULATOR) * (weight.astype(ACCUMULATOR)[None] + weight_offset)
        through = scale * (weighted - normalized * (row_sum(weighted * normalized) / h.shape[-1]))
        total = through if dh is None else through + dh.astype(ACCUMULATOR)
        return rounded(total, h.dtype), dy.astype(ACCUMULATOR) * normalized

    flat = flat_rows(h), flat_rows(dy), None if dh is None else flat_rows(dh)
    total, weight_terms = map_rows(tile, flat, weight)
    start = initial_sum(weight_sum, weight.shape)
    dweight = fold_rows(
        lambda carry, rows, _: carry + sum_of_rows(rows), start, weight_terms, None, size=WEIGHT_GRADIENT_TOKENS
    )
    return total.reshape(h.shape), final_sum(dweight, weight_sum, weight)


def _normalized(x: Array, eps: float) -> tuple[Array, Array]:
    """Divides the rows of a tile by their root mean square, in float32; also returns the factors, `[rows, 1]`."""
    x = x.astype(ACCUMULATOR)
    scale = lax.rsqrt(row_sum(x * x) / x.shape[-1] + eps)
    return x * scale, scale
