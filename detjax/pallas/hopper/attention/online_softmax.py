r"""The contract's arithmetic of attention, shared by prefill, decode, merges and gradients.

A block of 128 keys gives a query the scores $s$, its maximum $m_b$, probabilities $p$, their sum $l_b$ and the product
$O_b = p V$. Blocks are merged from left to right into the running $m$, $l$ and $O$:

$$m' = \max(m, m_b), \quad a = 2^{m - m'}, \quad b = 2^{m_b - m'}, \quad
O' = \mathrm{fma}(O, a, O_b b), \quad l' = \mathrm{fma}(l, a, l_b b)$$

Every fused multiply-add is written as one, and every product that the contract rounds stands where no compiler can fuse
it. If the compiler were free to choose for `x * y + z`, bits would depend on the surrounding code, and so on the
schedule. Addends of `fma` are safe: an instruction that is already fused takes in no other product.
"""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from detjax.contract import ACCUMULATOR, LOWEST_MAXIMUM
from detjax.operands.options import Masking
from detjax.operands.rounding import log2_scale, soft_cap_exponent
from detjax.pallas.hopper.attention.queries_on_rows import along_rows, splat
from detjax.pallas.hopper.mosaic.layouts import PER_ROW, ROWS
from detjax.pallas.hopper.mosaic.tiles import fma

type Spread = Callable[[Array, tuple[int, ...]], Array]
"""Repeats one number per query over a tile of the given shape."""


def exponent_scale(masking: Masking) -> float:
    """Returns the contract's `c`, by which shaped scores become exponents of 2."""
    is_shaped = masking.soft_cap is not None or masking.alibi_slopes is not None
    return float(log2_scale(1.0 if is_shaped else masking.scale))


def shaped_scores(s: Array, masking: Masking, slopes: Array | None, distances: Callable[[], Array]) -> Array:
    """Applies soft cap and ALiBi to scores.

    Args:
        s: products of queries and keys.
        masking: scale and soft cap.
        slopes: ALiBi slope of each element's head, or None.
        distances: returns the float32 distance of each element's key from its query.
    """
    if masking.soft_cap is None and slopes is None:
        return s
    s = s * np.float32(masking.scale)
    if masking.soft_cap is not None:
        s = np.float32(masking.soft_cap) * soft_cap_tanh(s, masking.soft_cap)
    if slopes is not None:
        s = fma(slopes, distances(), s)
    return s


def soft_cap_tanh(s: Array, soft_cap: float) -> Array:
    """Returns `tanh(s / soft_cap)` by the contract's formula; the hardware's tanh is accurate to three digits only."""
    e = jnp.exp2(s * soft_cap_exponent(soft_cap))
    # A quotient ends in a product, which ptxas would fuse with the subtraction even past an optimization barrier. It is
    # positive, so the maximum with 0 changes nothing, but it is an instruction between the two.
    return 1.0 - jnp.maximum(2.0 / (1.0 + e), 0.0)


def visible_keys(
    masking: Masking, keys: Array, positions: Array, kv_length: Array, layout: Any = PER_ROW
) -> tuple[Array, ...]:
    """Returns the end of the keys of a block that each query sees and, with a window, the first of them.

    Args:
        masking: whether attention is causal, and its window.
        keys: position of the block's first key.
        positions: positions of the queries, int32.
        kv_length: number of the request's keys.
        layout: the layout of `positions`.
    """
    end = plgpu.layout_cast(jnp.full(positions.shape, kv_length, jnp.int32), layout) - keys
    if masking.causal:
        end = jnp.minimum(end, positions + 1 - keys)
    if masking.window is None:
        return (end,)
    # A window of 2^31 tokens would overflow int32.
    return end, positions - (min(masking.window, 1 << 30) - 1) - keys


def exponentials(s: Array, c: float, maxima: Array, spread: Spread = along_rows) -> tuple[Array, Array]:
    """Returns the contract's `p` and `m_b` from a block's scores (-inf where masked) and each query's maximum."""
    # The scaled maximum is a rounded product, whatever uses it.
    m = jnp.maximum(lax.optimization_barrier(maxima * c), LOWEST_MAXIMUM)
    return jnp.exp2(fma(s, splat(c, s.shape), spread(-m, s.shape))), m


def initial_statistics(sinks: Array | None, queries: int = ROWS, layout: Any = PER_ROW) -> tuple[Array, Array]:
    """Returns `m` and `l` before the first block; a sink is a key without a value before all others."""
    if sinks is None:
        return splat(LOWEST_MAXIMUM, (queries,), layout), splat(0.0, (queries,), layout)
    m = jnp.maximum(lax.optimization_barrier(sinks * float(log2_scale(1.0))), LOWEST_MAXIMUM)
    return m, splat(1.0, (queries,), layout)


def rescaling(m: Array, m_b: Array) -> tuple[Array, Array, Array]:
    """Returns the maximum of both, and the factors that rescale the running sums and the block's to it."""
    m_new = jnp.maximum(m, m_b)
    return m_new, jnp.exp2(m - m_new), jnp.exp2(m_b - m_new)


def merged(x: Array, a: Array, x_b: Array, b: Array, layout: Any = None) -> Array:
    """Returns `fma(x, a, rn(x_b * b))`, where rn rounds."""
    return fma(x, a, x_b * b, layout=layout)


def normalized(o: Array, total: Array, dtype: Any, spread: Spread = along_rows) -> Array:
    """Returns the rows `o / total`, zeros for a row that saw no key."""
    reciprocal = 1.0 / jnp.where(total == 0.0, 1.0, total)
    y = (o * spread(reciprocal, o.shape)).astype(dtype)
    # The contract writes every zero as +0, including negative numbers that round to zero.
    return jnp.where(y.astype(ACCUMULATOR) == 0.0, 0.0, y.astype(ACCUMULATOR)).astype(dtype)


def log2_normalizers(m: Array, total: Array) -> Array:
    """Returns `m + log2(l)` of each row, 0 for a row that saw no key."""
    is_empty = total == 0.0
    return jnp.where(is_empty, 0.0, m + jnp.log2(jnp.where(is_empty, 1.0, total)))
