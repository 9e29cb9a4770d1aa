"""Matmul of rows sorted by expert on Hopper GPUs: the kernel of `matmul`, whose tiles have weights of their own.

A tile has rows of one expert. Groups of rows begin at multiples of a tile's rows, so there are tiles of 8 rows where
experts have few, and of 128 where they have many. Each row has the bits of `matmul`, since no schedule changes any.
"""

from typing import Any, Final

import jax.numpy as jnp
from jax import Array
from jaxtyping import DTypeLike

from detjax.numerics import round_up
from detjax.options import Epilogue, WeightLayout
from detjax.pallas.hopper.matmul.kernel import Operands, product
from detjax.pallas.hopper.matmul.plan import Schedule
from detjax.portable import grouped_matmul as portable

_FEWEST: Final = 8
"""Rows of the smallest tile."""
_UNITS: Final = 128, 64, 32, 16, _FEWEST
"""Rows of tiles."""


def group_unit(rows: int, experts: int) -> int:
    """Returns the rows of a tile that suits groups of `rows / experts` rows."""
    return next((unit for unit in _UNITS if rows >= 2 * unit * experts), _FEWEST)


def forward(
    x: Array,
    w: Array,
    bias: Array | None,
    group_sizes: Array,
    *,
    layout: WeightLayout,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
    unit: int,
    schedule: Schedule | None = None,
) -> Array:
    """Returns rows `[M, N]` for rows `[M, K]`; see `detjax.ops.grouped_matmul` for the operands and options.

    Args:
        schedule: how the product is computed, with tiles of `unit` tokens; default: what suits such tiles.

    Raises:
        NotImplementedError: the matrix unit does not take x's dtype.
    """
    options: dict[str, Any] = {"layout": layout, "epilogue": epilogue, "out_dtype": out_dtype}
    if unit % _FEWEST or len(x) % unit:
        return _with_room(x, w, bias, group_sizes, **options)
    tile = next(size for size in _UNITS if unit % size == 0)
    ends, tiles = jnp.cumsum(group_sizes, dtype=jnp.int32), len(x) // tile
    first = jnp.arange(tiles, dtype=jnp.int32) * tile
    expert = jnp.minimum(jnp.searchsorted(ends, first, side="right").astype(jnp.int32), len(group_sizes) - 1)
    table = jnp.append(expert, ends[-1] // tile)
    operands = Operands(x, w, bias, experts=table)
    return product(operands, schedule=schedule or _schedule(tile, gated=epilogue.gated), **options)


def _schedule(tile: int, *, gated: bool) -> Schedule:
    """The schedule of tiles of so many rows: narrow ones stream weights, wide ones keep the matrix unit busy."""
    if tile == 128:
        return Schedule(tile, 128 if gated else 256, "weights", warpgroups=2)
    return Schedule(tile, 64 if gated or tile < 64 else 128, "weights", lines=2 if tile <= 16 else 1)


def _with_room(x: Array, w: Array, bias: Array | None, group_sizes: Array, **options: Any) -> Array:
    """`forward` of groups that begin at any row, which are moved apart and back."""
    rows, unit, sizes = len(x), _FEWEST, group_sizes.astype(jnp.int32)
    ends, filled = jnp.cumsum(sizes, dtype=jnp.int32), -(-sizes // unit) * unit
    starts, room = ends - sizes, round_up(rows + len(sizes) * (unit - 1), unit)
    firsts = jnp.cumsum(filled, dtype=jnp.int32) - filled
    row = jnp.arange(rows, dtype=jnp.int32)
    expert = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
    known = jnp.minimum(expert, len(sizes) - 1)
    place = jnp.where(expert < len(sizes), firsts[known] + row - starts[known], room)
    apart = jnp.zeros((room, x.shape[1]), x.dtype).at[place].set(x, mode="drop", unique_indices=True)
    y = forward(apart, w, bias, filled, unit=unit, **options)
    return y.at[place].get(mode="fill", fill_value=0)


def backward(*arguments: Any, **options: Any) -> tuple[Array, Array, Array | None]:
    """Returns the gradients, by the portable backend's program; see `detjax.portable.grouped_matmul.backward`."""
    return portable.backward(*arguments, **options)
