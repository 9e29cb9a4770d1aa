"""What attention's kernels do to a tile of query rows and one block of keys, on the registers of a warpgroup.

The contract's arithmetic, once for prefill, decode and merging. Every fused multiply-add is written as one, and every
product that is rounded stands where no compiler can fuse it: what a kernel's surroundings make of `x * y + z` would
otherwise be a matter of its schedule.
"""

from collections.abc import Callable
from typing import Any, Final

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxlib.mlir.dialects import math as math_dialect

from detjax.contract import ACCUMULATOR, KV_BLOCK, LOG2_E, LOWEST_MAXIMUM, Masking, log2_scale

ROWS: Final = 64
"""Query rows of a warpgroup's tile: those of the matrix unit."""

MATRIX: Final = plgpu.Layout.WGMMA
VECTOR: Final = plgpu.Layout.WGMMA.reduce(1)
"""One number for each row of a tile, held by the threads that hold the row."""


def columns(width: int, most: int) -> list[tuple[int, int]]:
    """First column and number of columns of the pieces in which values are multiplied: a piece's products live beside
    all running sums, and only so many registers are there."""
    if width <= most:
        return [(0, width)]
    return [(first, min(64, width - first)) for first in range(0, width, 64)]


def fma(x: Array, y: Array, z: Array, layout: Any = None) -> Array:
    """`x * y + z`, rounded once."""
    layout = layout or (MATRIX if x.ndim == 2 else VECTOR)

    def fused(_: Any, x: Any, y: Any, z: Any) -> Any:
        return x._pointwise(math_dialect.fma, y, z)

    result = plgpu.ShapeDtypeStruct(x.shape, ACCUMULATOR, layout=layout)
    inlined: Any = plgpu.inline_mgpu(arg_types=(layout,) * 3, return_type=result)(fused)
    return inlined(x, y, z)


def row_sums(p: Array) -> Array:
    """Sums of the rows of `[ROWS, KV_BLOCK]`, in the contract's order."""

    def reduced(_: Any, p: Any) -> Any:
        # Two partial sums to a row, of even and of odd groups of columns: 8 // 2 elements to a register // 2 rows.
        return p.reduce("add", 1, None, acc_ilp=8)

    result = plgpu.ShapeDtypeStruct(p.shape[:1], ACCUMULATOR, layout=VECTOR)
    inlined: Any = plgpu.inline_mgpu(arg_types=(MATRIX,), return_type=result)(reduced)
    return inlined(p)


def along_rows(x: Array, shape: tuple[int, ...]) -> Array:
    """A number per row at every column."""
    return lax.broadcast_in_dim(x, shape, [0])


def splat(value: Any, shape: tuple[int, ...]) -> Array:
    """The same number everywhere, in the layout that a tile or its rows have."""
    filled = jnp.full(shape, value, ACCUMULATOR)
    return plgpu.layout_cast(filled, MATRIX if len(shape) == 2 else VECTOR)


def indices(axis: int, shape: tuple[int, ...] = (ROWS, KV_BLOCK)) -> Array:
    """Row or column of each element of a tile."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=MATRIX)


def exponent_scale(masking: Masking) -> float:
    """`c` of the contract: what shaped scores are multiplied by to become exponents of 2."""
    is_shaped = masking.soft_cap is not None or masking.alibi_slopes is not None
    return float(log2_scale(1.0 if is_shaped else masking.scale))


def shaped_scores(s: Array, masking: Masking, slopes: Array | None, distance: Callable[[], Array]) -> Array:
    """Scores with soft cap and ALiBi.

    Args:
        s: products of queries and keys.
        slopes: of each element's head, or of all.
        distance: of each key from its query, int32.
    """
    if masking.soft_cap is None and slopes is None:
        return s
    s = s * np.float32(masking.scale)
    if masking.soft_cap is not None:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)); the hardware's own is good to three digits only.
        e = jnp.exp2(s * np.float32(2 * LOG2_E / masking.soft_cap))
        # The maximum with 0 changes nothing, and keeps the quotient from being fused with the subtraction.
        s = np.float32(masking.soft_cap) * (1.0 - jnp.maximum(2.0 / (1.0 + e), 0.0))
    if slopes is not None:
        s = fma(slopes, distance().astype(ACCUMULATOR), s)
    return s


def visible(masking: Masking, keys: Array, positions: Array, kv_length: Array) -> Array:
    """Which keys each row sees."""
    seen = keys < kv_length
    if masking.causal:
        seen = seen & (keys <= positions)
    if masking.window is not None:
        seen = seen & (keys > positions - masking.window)
    return seen


def block_softmax(s: Array, c: float) -> tuple[Array, Array, Array]:
    """`p`, `m_b` and `l_b` of the contract, from a block's scores; masked ones are -inf."""
    m = jnp.maximum(lax.optimization_barrier(s.max(axis=1) * c), LOWEST_MAXIMUM)
    p = jnp.exp2(fma(s, splat(c, s.shape), along_rows(-m, s.shape)))
    return p, m, row_sums(p)


def initial_statistics(sinks: Array | None) -> tuple[Array, Array]:
    """`m` and `l` before the first block: a sink is a key without a value that comes before all others."""
    if sinks is None:
        return splat(LOWEST_MAXIMUM, (ROWS,)), splat(0.0, (ROWS,))
    return jnp.maximum(lax.optimization_barrier(sinks * float(log2_scale(1.0))), LOWEST_MAXIMUM), splat(1.0, (ROWS,))


def rescaling(m: Array, m_b: Array) -> tuple[Array, Array, Array]:
    """The maximum of both, and the factors that bring the running sums and the block's to it."""
    m_new = jnp.maximum(m, m_b)
    return m_new, jnp.exp2(m - m_new), jnp.exp2(m_b - m_new)


def merged(x: Array, a: Array, x_b: Array, b: Array, layout: Any = None) -> Array:
    """`fma(x, a, rn(x_b * b))`."""
    return fma(x, a, x_b * b, layout)


def finished(
    o: Array, total: Array, dtype: Any, spread: Callable[[Array, tuple[int, ...]], Array] = along_rows
) -> Array:
    """Rows of the result; zeros for a row that saw no key."""
    reciprocal = 1.0 / jnp.where(total == 0.0, 1.0, total)
    y = (o * spread(reciprocal, o.shape)).astype(dtype)
    # A zero is +0, whatever was rounded to it.
    return jnp.where(y.astype(ACCUMULATOR) == 0.0, 0.0, y.astype(ACCUMULATOR)).astype(dtype)


def log2_normalizers(m: Array, total: Array) -> Array:
    """`m + log2(l)` of each row; 0 for a row that saw no key."""
    empty = total == 0.0
    return jnp.where(empty, 0.0, m + jnp.log2(jnp.where(empty, 1.0, total)))
