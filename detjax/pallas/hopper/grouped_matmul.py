"""Matmul of rows sorted by expert on Hopper GPUs: the kernel of `matmul`, whose tiles have weights of their own.

A tile has rows of one expert. Groups of rows begin at multiples of a tile's rows, so there are tiles of 8 rows where
experts have few, and of 128 where they have many. Each row has the bits of `matmul`, since no schedule changes any, and
so has its gradient. The gradients of weights and biases are sums over an expert's tokens, see `group_sums`.
"""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, PyTree

from detjax.contract import ACCUMULATOR
from detjax.operands.numerics import parts, round_up
from detjax.operands.options import Epilogue, WeightLayout
from detjax.operands.products import NO_SUMS, Gradients, GroupedOperands, WeightSums
from detjax.operands.rounding import rounded
from detjax.pallas.hopper.group_stages import StagedSteps
from detjax.pallas.hopper.group_sums import product_sums, row_sums
from detjax.pallas.hopper.matmul import apply_epilogue as apply_epilogue
from detjax.pallas.hopper.matmul import gradient_of_sums
from detjax.pallas.hopper.matmul.kernel import Operands, product, product_keeping_sums
from detjax.pallas.hopper.matmul.plan import Schedule

_FEWEST: Final = 8
"""Rows of the smallest tile."""
_UNITS: Final = 128, 64, 32, 16, _FEWEST
"""Rows of tiles."""


def group_unit(rows: int, experts: int) -> int:
    """Returns the rows of a tile that suits groups of `rows / experts` rows.

    Tiles are up to twice as long as the mean group. A group of two tiles would read its expert's weight twice, which
    costs more than rows of padding: with 32 rows an expert, tiles of 8 take twice as long as tiles of 64 (measured on
    an H200 by `python -m benchmarks expert_schedules`, as is `_schedule`).
    """
    return next((unit for unit in _UNITS if 2 * rows >= unit * experts), _FEWEST)


def forward(
    operands: GroupedOperands,
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
    x, w, bias, group_sizes, _ = operands
    outputs = w.shape[-2 if layout == "nk" else -1]

    def multiply(x: Array, experts: Array, tile: int) -> Array:
        chosen = schedule or _schedule(tile, outputs, layout)
        options: dict[str, Any] = {"layout": layout, "epilogue": epilogue, "out_dtype": out_dtype}
        return product(Operands(x, w, bias, experts=experts), schedule=chosen, **options)

    return _in_tiles(multiply, x, group_sizes, unit)


def forward_keeping_sums(
    operands: GroupedOperands, *, layout: WeightLayout, epilogue: Epilogue, unit: int
) -> tuple[Array, tuple[Array, ...]]:
    """What `forward` returns in x's dtype, and the biased sums for `backward`, `[M, N]`, or those of gate and up."""
    x, w, bias, group_sizes, _ = operands
    outputs = w.shape[-2 if layout == "nk" else -1]

    def multiply(x: Array, experts: Array, tile: int) -> tuple[Array, tuple[Array, ...]]:
        schedule = _schedule(tile, outputs, layout)
        tiles = Operands(x, w, bias, experts=experts)
        return product_keeping_sums(tiles, layout=layout, epilogue=epilogue, schedule=schedule)

    return _in_tiles(multiply, x, group_sizes, unit)


def backward(
    operands: GroupedOperands,
    dy: Array,
    sums: WeightSums = NO_SUMS,
    z: tuple[Array, ...] | None = None,
    *,
    layout: WeightLayout,
    epilogue: Epilogue,
    unit: int,
) -> Gradients:
    """Returns the gradients of x, w and bias, or the next sums of the last two; see `hopper.matmul.backward`.

    An expert's rows are added in ascending order, `WEIGHT_GRADIENT_TOKENS` of one sequence in one step. Sums of experts
    without rows stay as they are. If z was not kept, it is computed again.

    Raises:
        NotImplementedError: the matrix unit does not take x's dtype.
    """
    (x, w, bias, group_sizes, sequences), (w_sum, bias_sum) = operands, sums
    if epilogue == Epilogue():
        dz = rounded(dy, x.dtype)
    else:
        if z is None:
            z = forward_keeping_sums(operands, layout=layout, epilogue=epilogue, unit=unit)[1]
        dz = gradient_of_sums(z, dy, epilogue)

    # To contract both halves of a stacked "kn" weight at once takes a copy; "nk" halves already follow each other.
    stacked = w.reshape(len(w), -1, *w.shape[-2:])
    joined = w.reshape(len(w), -1, w.shape[-1]) if layout == "nk" else jnp.concatenate(parts(stacked), axis=2)

    turned: WeightLayout = "kn" if layout == "nk" else "nk"

    def multiply(dz: Array, experts: Array, tile: int) -> Array:
        tiles, schedule = Operands(dz, joined, experts=experts), _schedule(tile, x.shape[1], turned)
        return product(tiles, layout=turned, epilogue=Epilogue(), out_dtype=x.dtype, schedule=schedule)

    has_expert = jnp.arange(len(x), dtype=jnp.int32) < jnp.sum(group_sizes, dtype=jnp.int32)
    dx = _in_tiles(multiply, dz, group_sizes, unit)
    # Nothing was written to the tiles of rows that have no expert.
    dx = jnp.where(jnp.broadcast_to(has_expert[:, None], dx.shape), dx, jnp.zeros_like(dx))

    start = jnp.zeros(w.shape, ACCUMULATOR) if w_sum is None else w_sum
    weight_sums = [start.reshape(joined.shape)] if layout == "nk" else parts(start.reshape(stacked.shape))
    bias_start = None
    if bias is not None:
        bias_start = (jnp.zeros(bias.shape, ACCUMULATOR) if bias_sum is None else bias_sum).reshape(len(w), -1)
    steps = StagedSteps.from_sizes(group_sizes, len(x), sequences)
    weight_sums, dbias = _next_sums((weight_sums, bias_start), x, dz, steps, layout)
    dw = jnp.stack(weight_sums, axis=1).reshape(w.shape)
    dw = rounded(dw, w.dtype) if w_sum is None else dw
    if bias is None or dbias is None:
        return dx, dw, None
    dbias = dbias.reshape(bias.shape)
    return dx, dw, rounded(dbias, bias.dtype) if bias_sum is None else dbias


type _Sums = tuple[list[Array], Array | None]
"""The sums of the weights, `[E, N, K]`, or `[E, K, N]` of each part if the layout is "kn"; and those of the biases."""


def _next_sums(sums: _Sums, x: Array, dz: Array, steps: StagedSteps, layout: WeightLayout) -> _Sums:
    """The sums after the rows' steps."""

    def add_piece(index: Array, sums: _Sums) -> _Sums:
        weights, biases = sums
        rows, stages = steps.piece(index)
        # Zeros stand at the places without a row.
        x_rows, dz_rows = (array.at[rows].get(mode="fill", fill_value=0) for array in (x, dz))
        pairs = [(dz_rows, x_rows)]
        if layout == "kn":
            pairs = [(x_rows, part) for part in jnp.split(dz_rows, len(weights), axis=1)]
        weights = [product_sums(total, *pair, stages) for total, pair in zip(weights, pairs, strict=True)]
        return weights, None if biases is None else row_sums(biases, dz_rows, stages)

    return lax.fori_loop(0, steps.pieces, add_piece, sums)


def _schedule(tile: int, outputs: int, layout: WeightLayout) -> Schedule:
    """The schedule of tiles of so many rows: narrow ones stream weights, wide ones keep the matrix unit busy."""
    if outputs <= 64:
        return Schedule(tile, 64 if layout == "kn" else round_up(outputs, 8), "weights")
    if tile == 128:
        return Schedule(tile, 128, "weights", warpgroups=2)
    return Schedule(tile, 64, "weights", lines=2)


def _in_tiles[T: PyTree[Array]](
    multiply: Callable[[Array, Array, int], T], x: Array, group_sizes: Array, unit: int
) -> T:
    """What `multiply` gives for rows in groups whose sizes are multiples of `unit`.

    Args:
        multiply: a function of rows, of the expert of each tile with the number of tiles that have one behind it, and
            of the rows of a tile. Its results have as many rows.
        x: the rows. If tiles do not fit the unit, rows are moved apart and back.
        group_sizes: the rows of each expert.
        unit: see there.
    """
    if unit % _FEWEST or len(x) % unit:
        place, filled, room = _places_apart(group_sizes, len(x))
        apart = jnp.zeros((room, x.shape[1]), x.dtype).at[place].set(x, mode="drop", unique_indices=True)
        y = _in_tiles(multiply, apart, filled, _FEWEST)
        return jax.tree.map(lambda rows: rows.at[place].get(mode="fill", fill_value=0), y)
    tile = next(size for size in _UNITS if unit % size == 0)
    ends, tiles = jnp.cumsum(group_sizes, dtype=jnp.int32), len(x) // tile
    first = jnp.arange(tiles, dtype=jnp.int32) * tile
    # Unrolled, the search is one kernel; as a loop it is one for each of its steps.
    expert = jnp.searchsorted(ends, first, side="right", method="scan_unrolled").astype(jnp.int32)
    expert = jnp.minimum(expert, len(group_sizes) - 1)
    return multiply(x, jnp.append(expert, ends[-1] // tile), tile)


def _places_apart(group_sizes: Array, rows: int) -> tuple[Array, Array, int]:
    """For groups that begin at any row: each row's place in groups of whole tiles, their sizes, and all places."""
    sizes = group_sizes.astype(jnp.int32)
    ends, filled = jnp.cumsum(sizes, dtype=jnp.int32), -(-sizes // _FEWEST) * _FEWEST
    starts, room = ends - sizes, round_up(rows + len(sizes) * (_FEWEST - 1), _FEWEST)
    firsts = jnp.cumsum(filled, dtype=jnp.int32) - filled
    row = jnp.arange(rows, dtype=jnp.int32)
    expert = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
    known = jnp.minimum(expert, len(sizes) - 1)
    return jnp.where(expert < len(sizes), firsts[known] + row - starts[known], room), filled, room
