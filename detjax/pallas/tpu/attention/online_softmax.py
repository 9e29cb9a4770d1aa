"""The arithmetic of attention on one tile of rows and one block of keys, and the merging of blocks.

The formulas and the order of additions follow the section on attention in `detjax.contract`. The compiler may fuse a
product and a sum, as in `s * c - m_b`, and nothing here can forbid it. It decides once for all rows, because each step
is compiled once.
"""

import functools
import math
from typing import Any, NamedTuple

import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from detjax.contract import ACCUMULATOR, KEY_GROUPS, KEY_LANES, KV_BLOCK, LOWEST_MAXIMUM
from detjax.operands.options import Masking
from detjax.operands.rounding import log2_scale, rounded, soft_cap_exponent
from detjax.pallas.tpu.rows import lanes_ahead


class State(NamedTuple):
    """References to the running results of a tile, for some key heads.

    Attributes:
        accumulator: weighted sums of values, float32 `[heads, rows, V]`.
        total: sums of probabilities, float32 `[heads, rows, S]`, valid only in the first lane.
        maximum: maxima of the scores in the log2 domain, float32 `[heads, rows, S]`, the same in all lanes.
    """

    accumulator: Any
    total: Any
    maximum: Any

    @classmethod
    def scratch(cls, heads: int, rows: int, value_width: int) -> "State":
        """Returns the types of the state's scratch memory.

        Sums and maxima have a lane for each key, so that merging needs no broadcast from single columns.
        """
        return cls(*(pltpu.VMEM((heads, rows, width), ACCUMULATOR) for width in (value_width, KV_BLOCK, KV_BLOCK)))

    def clear(self, sinks: Any) -> None:
        """Initializes the state before the first block.

        Args:
            sinks: a reference to the heads' sinks, float32 `[1, rows, heads]`, or None. A sink is a key without a value
                that precedes all other keys.
        """
        self.accumulator[...] = jnp.zeros(self.accumulator.shape, ACCUMULATOR)
        if sinks is None:
            self.total[...] = jnp.zeros(self.total.shape, ACCUMULATOR)
            self.maximum[...] = jnp.full(self.maximum.shape, LOWEST_MAXIMUM, ACCUMULATOR)
            return
        self.total[...] = jnp.ones(self.total.shape, ACCUMULATOR)
        for head in range(self.maximum.shape[0]):
            m = jnp.maximum(sinks[0, :, head : head + 1] * log2_scale(1.0), LOWEST_MAXIMUM)
            self.maximum[head] = jnp.broadcast_to(m, self.maximum.shape[1:])

    def clear_rows(self, place: tuple[int, Any]) -> None:
        """Initializes the rows at `place`, a head and rows, before the first block of a span."""
        for part, start in zip(self, (0.0, 0.0, LOWEST_MAXIMUM), strict=True):
            part[place] = jnp.full_like(part[place], start)

    def merge_block(self, place: tuple[int, Any], p: Array, m_b: Array, o_b: Array) -> None:
        """Merges one block with probabilities p `[rows, S]` relative to `m_b`; see `merge`."""
        self.merge(place, block_sum(p), m_b, o_b)

    def merge(self, place: tuple[int, Any], total_b: Array, m_b: Array, o_b: Array) -> None:
        """Merges one block or span into the rows at `place`.

        Args:
            place: a head and rows.
            total_b: the sums of its probabilities relative to `m_b`, `[rows, S]`, valid in the first lane.
            m_b: its maxima `[rows, 1]` or, repeated in all lanes, `[rows, S]`.
            o_b: its weighted sums of values `[rows, V]`.
        """
        m = self.maximum[place]
        m_new = jnp.maximum(m, m_b)
        a, b = jnp.exp2(m - m_new), jnp.exp2(m_b - m_new)
        self.accumulator[place] = self.accumulator[place] * _columns(a, o_b) + o_b * _columns(b, o_b)
        self.total[place] = self.total[place] * a + total_b * b
        self.maximum[place] = m_new

    def store(self, head: int, o: Any, log2_normalizers: Any) -> None:
        """Writes the results of a head. Rows that saw no key get zeros.

        Args:
            head: the head's index in the state.
            o: a reference to outputs `[1, heads, rows, V]`.
            log2_normalizers: a reference to the log2 of the rows' normalizers, `[1, heads, 1, rows]`, or None.
        """
        empty = self.total[head, :, :1] == 0
        divisor = jnp.where(empty, 1.0, self.total[head, :, :1])
        result = jnp.where(empty, 0.0, self.accumulator[head] * (1.0 / divisor))
        # The contract writes zeros as +0, also where a negative number rounds to zero.
        result = rounded(result, o.dtype).astype(ACCUMULATOR)
        o[0, head] = jnp.where(result == 0, 0.0, result).astype(o.dtype)
        if log2_normalizers is not None:
            normalizers = jnp.where(empty, 0.0, self.maximum[head] + jnp.log2(divisor))
            log2_normalizers[0, head] = normalizers.T[:1]


def scores(q: Array, k: Array, slope: Array | None, distance: Array, masking: Masking) -> tuple[Array, np.float32]:
    """Returns the scores s, `[rows, S]`, before masking, and the factor c of the exponents `s * c`.

    Args:
        q: queries `[rows, K]`.
        k: keys `[S, K]`.
        slope: ALiBi's slope of each row's head, `[rows, 1]`, or None.
        distance: key positions minus query positions, `[rows, S]`.
        masking: scale and soft cap.
    """
    s, c = dot(q, k, 1), log2_scale(masking.scale)
    if masking.soft_cap is not None or slope is not None:
        s, c = s * np.float32(masking.scale), log2_scale(1.0)
    if masking.soft_cap is not None:
        s = np.float32(masking.soft_cap) * (1.0 - 2.0 / (1.0 + jnp.exp2(s * soft_cap_exponent(masking.soft_cap))))
    if slope is not None:
        s = s + slope * distance.astype(ACCUMULATOR)
    return s, c


def exponentials(s: Array, c: np.float32) -> tuple[Array, Array]:
    """Returns probabilities `[rows, S]` relative to the block's maxima, and these maxima `[rows, 1]`."""
    m_b = jnp.maximum(jnp.max(s, axis=-1, keepdims=True) * c, LOWEST_MAXIMUM)
    return jnp.exp2(s * c - m_b), m_b


def dot(x: Array, y: Array, axis: int) -> Array:
    """Returns float32 products of the rows of x with y, over the given axis of y."""
    # With the default precision the matrix unit rounds float32 operands to bfloat16.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, y, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=ACCUMULATOR)


def block_sum(p: Array) -> Array:
    """Returns sums of `[rows, S]` in the order of `contract.KEY_LANES`, in the first lane; other lanes are undefined.

    Each addition adds whole registers to registers rotated by some lanes.
    """
    half, group = KV_BLOCK // 2, 2 * KEY_LANES
    rotated = lanes_ahead(p, KEY_LANES), lanes_ahead(p, half), lanes_ahead(p, half + KEY_LANES)
    p = functools.reduce(jnp.add, [p, *rotated])
    p = functools.reduce(jnp.add, [p, *(lanes_ahead(p, index * group) for index in range(1, KEY_GROUPS))])
    for step in range(int(math.log2(KEY_LANES))):
        p = p + lanes_ahead(p, 1 << step)
    return p


def _columns(x: Array, like: Array) -> Array:
    """Returns `[rows, S]`, the same in all lanes, with the number of columns of `like`."""
    return x if x.shape == like.shape else jnp.broadcast_to(x[:, :1], like.shape)
