"""Matmul of rows sorted by expert on Hopper GPUs: the kernel of `matmul` with a weight for each tile of rows.

A tile has rows of one expert, and groups of rows start at multiples of a tile's size: 8 rows where experts have few
rows, up to 128 where they have many. Each row and its gradient have the bits of `matmul`, since no schedule changes a
bit. The gradients of weights and biases are sums over an expert's tokens; see `group_sums`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int32, PyTree

from detjax.contract import ACCUMULATOR
from detjax.operands.numerics import ceil_div, parts, round_up
from detjax.operands.options import AxisName, Epilogue, WeightLayout
from detjax.operands.products import NO_SUMS, Gradients, GroupedOperands, WeightSums
from detjax.operands.rounding import rounded
from detjax.pallas.hopper.exchange import Peers
from detjax.pallas.hopper.group_stages import StagedSteps
from detjax.pallas.hopper.group_sums import product_sums, row_sums
from detjax.pallas.hopper.matmul import adapters_of_rows, add_adapters_of_rows, gradient_of_sums
from detjax.pallas.hopper.matmul import apply_epilogue as apply_epilogue
from detjax.pallas.hopper.matmul.adapters_of_rows import RowsWithAdapters as RowsWithAdapters
from detjax.pallas.hopper.matmul.first_products import FirstFactors as FirstFactors
from detjax.pallas.hopper.matmul.first_products import multiplies_first_factors as multiplies_first_factors
from detjax.pallas.hopper.matmul.first_products import sums_and_first_products as sums_and_first_products
from detjax.pallas.hopper.matmul.kernel import Operands, product, product_keeping_sums, shared_product
from detjax.pallas.hopper.matmul.plan import BLOCK as BLOCK
from detjax.pallas.hopper.matmul.plan import MATRIX_ROWS, Schedule
from detjax.runtime import compilation
from detjax.runtime.device_links import DeviceLinks

TAKES_TILES: Final = True
"""Marks a module whose products take `ExpertRows.tiles`."""

MOST_ROWS_OF_BLOCKS: Final = 256
"""Most rows with adapters that are not sorted. Blocks of more rows read factors more often than larger tiles do."""

_MIN_SHARED_ROWS: Final = 1024
"""Fewest rows for which devices write results into each other's arrays as they compute them.

Measured on two H200s, gate and up of Qwen3-30B-A3B's experts for 64, 1000 and 8192 tokens take 0.93, 0.77 and 0.71 of
the time with a separate exchange.
"""


def _schedule(tile: int, outputs: int, layout: WeightLayout) -> Schedule:
    """Returns the schedule for a tile size: small tiles stream weights, large ones keep the matrix unit busy."""
    if outputs <= 64:
        return Schedule(tile, 64 if layout == "kn" else round_up(outputs, 8), "weights")
    if tile == 128:
        return Schedule(tile, 128, "weights", warpgroups=2)
    return Schedule(tile, 64, "weights", lines=2)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels that the functions of this module call; by default Hopper's own."""

    product: Callable[..., Array] = product
    product_keeping_sums: Callable[..., tuple[Array, tuple[Array, ...]]] = product_keeping_sums
    product_sums: Callable[..., Array] = product_sums
    schedule: Callable[[int, int, WeightLayout], Any] = _schedule
    """Returns a schedule of `product` for a tile size, a number of outputs and the weights' layout."""
    tiles: tuple[int, ...] = (128, 64, 32, 16, 8)
    """Tile sizes in rows, the largest first."""


HOPPER: Final = Kernels()


def group_unit(rows: int, experts: int, kernels: Kernels = HOPPER) -> int:
    """Returns the size of tiles for groups of `rows / experts` rows on average.

    Tiles have up to twice the rows of the mean group. A group of two tiles would read its expert's weight twice, which
    costs more than padding: with 32 rows per expert, tiles of 8 take twice as long as tiles of 64 (measured on an H200
    by `python -m benchmarks expert_schedules`, as is `_schedule`).
    """
    return next((unit for unit in kernels.tiles if 2 * rows >= unit * experts), kernels.tiles[-1])


def forward(  # noqa: PLR0913
    operands: GroupedOperands,
    *,
    layout: WeightLayout,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
    unit: int,
    tiles: Array | None = None,
    schedule: Any = None,
    kernels: Kernels = HOPPER,
) -> Array:
    """Returns rows `[M, N]` for rows `[M, K]`; see `detjax.ops.grouped_matmul` for the operands and options.

    Args:
        tiles: the experts of tiles of `unit` rows, if known; see `ExpertRows.tiles`.
        schedule: a schedule with tiles of `unit` tokens; default: the kernels' own for this tile size.
        kernels: the kernels.

    Raises:
        NotImplementedError: the matrix unit does not take x's dtype.
    """
    x, w, bias, group_sizes, _ = operands
    outputs = w.shape[-2 if layout == "nk" else -1]

    def multiply(x: Array, experts: Array, tile: int) -> Array:
        chosen = schedule or kernels.schedule(tile, outputs, layout)
        options: dict[str, Any] = {"layout": layout, "epilogue": epilogue, "out_dtype": out_dtype}
        return kernels.product(Operands(x, w, bias, experts=experts), schedule=chosen, **options)

    return _in_tiles(multiply, x, group_sizes, unit, kernels.tiles, tiles)


def shared_forward(
    operands: GroupedOperands,
    axis_name: AxisName,
    links: DeviceLinks,
    *,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
    unit: int,
    tiles: Array | None = None,
) -> Array | None:
    """Returns rows `[M, devices * N]` for weights with the layout "nk", or None if the kernel should not write them.

    See `detjax.ops.grouped_matmul.shared_grouped_matmul`.

    Raises:
        NotImplementedError: the matrix unit does not take x's dtype.
    """
    x, w, bias, group_sizes, _ = operands
    smallest = HOPPER.tiles[-1]
    if not compilation.is_chained() or len(x) < _MIN_SHARED_ROWS or unit % smallest or len(x) % unit:
        return None

    def multiply(x: Array, experts: Array, tile: int) -> Array | None:
        options: dict[str, Any] = {"epilogue": epilogue, "out_dtype": out_dtype}
        given = Operands(x, w, bias, experts=experts, peers=Peers.over(axis_name, links))
        return shared_product(given, layout="nk", schedule=_schedule(tile, w.shape[-2], "nk"), **options)

    return _in_tiles(multiply, x, group_sizes, unit, HOPPER.tiles, tiles)


def serves_blocks(rows: int) -> bool:
    """Returns whether this many rows with adapters should be computed in blocks, and not sorted."""
    return rows <= MOST_ROWS_OF_BLOCKS


def product_of_blocks(
    x: Float[Array, "M K"], w: Float[Array, "S R K"], experts: Int32[Array, "_"], blocks: Int32[Array, "P"]
) -> Float[Array, "_ R"]:
    """Returns rows `[P * BLOCK, R]` for blocks of `BLOCK` rows, each with one of the weights.

    Args:
        x: the rows.
        w: weights of few outputs, such as the first factors of adapters.
        experts: the weight of each block, and at the end the number of blocks that have one.
        blocks: the number of each block in x. Several weights may have the same block.
    """
    # A block gets up to four multiprocessors, as many as the tiles of large products often leave idle: a single one can
    # receive some 40 KB in a microsecond, and an adapter's factor has up to ten times as much. With four lines of K in
    # a stage, they wait a quarter as often.
    schedule = Schedule(BLOCK, min(MATRIX_ROWS, round_up(ceil_div(w.shape[1], 4), 8)), lines=4)
    operands = Operands(x, w, experts=experts, blocks=blocks)
    return product(operands, layout="nk", epilogue=Epilogue(), out_dtype=x.dtype, schedule=schedule)


def add_adapters_of_blocks(
    sums: Sequence[Array],
    rows: RowsWithAdapters,
    residual: Array | None,
    *,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
) -> Array:
    """Returns rows `[M, N]` from the sums of each part and the product of each row's adapter, for few rows."""
    options: dict[str, Any] = {"epilogue": epilogue, "out_dtype": out_dtype}
    if adapters_of_rows.serves(rows.u.shape[1], len(sums), rows.u.dtype):
        return adapters_of_rows.add_adapters(sums, rows, residual, **options)
    b = rows.b.reshape(len(rows.b), -1, rows.b.shape[-1])
    plain: dict[str, Any] = {"layout": "nk", "epilogue": Epilogue(), "out_dtype": ACCUMULATOR}
    plain["schedule"] = _schedule(BLOCK, b.shape[1], "nk")
    products = product(Operands(rows.u, b, experts=rows.adapters), **plain)
    slot = jnp.where(rows.place < 0, -1, rows.adapters[rows.place // BLOCK])
    return add_adapters_of_rows(sums, products, rows.place, rows.scales.reshape(len(b), -1), slot, residual, **options)


def forward_keeping_sums(
    operands: GroupedOperands,
    *,
    layout: WeightLayout,
    epilogue: Epilogue,
    unit: int,
    tiles: Array | None = None,
    kernels: Kernels = HOPPER,
) -> tuple[Array, tuple[Array, ...]]:
    """Returns the result of `forward` in x's dtype, and the biased sums `[M, N]` of each part, for `backward`."""
    x, w, bias, group_sizes, _ = operands
    outputs = w.shape[-2 if layout == "nk" else -1]

    def multiply(x: Array, experts: Array, tile: int) -> tuple[Array, tuple[Array, ...]]:
        schedule = kernels.schedule(tile, outputs, layout)
        tiles = Operands(x, w, bias, experts=experts)
        return kernels.product_keeping_sums(tiles, layout=layout, epilogue=epilogue, schedule=schedule)

    return _in_tiles(multiply, x, group_sizes, unit, kernels.tiles, tiles)


def backward(  # noqa: PLR0913
    operands: GroupedOperands,
    dy: Array,
    sums: WeightSums = NO_SUMS,
    z: tuple[Array, ...] | None = None,
    *,
    layout: WeightLayout,
    epilogue: Epilogue,
    unit: int,
    kernels: Kernels = HOPPER,
) -> Gradients:
    """Returns the gradients of x, w and bias, or the next sums of the last two; see `hopper.matmul.backward`.

    An expert's rows are added in ascending order, `WEIGHT_GRADIENT_TOKENS` of one sequence in a step. Sums of experts
    without rows do not change. If z was not kept, it is recomputed.

    Raises:
        NotImplementedError: the matrix unit does not take x's dtype.
    """
    (x, w, bias, group_sizes, sequences), (w_sum, bias_sum) = operands, sums
    if epilogue == Epilogue():
        dz = rounded(dy, x.dtype)
    else:
        if z is None:
            z = forward_keeping_sums(operands, layout=layout, epilogue=epilogue, unit=unit, kernels=kernels)[1]
        dz = gradient_of_sums(z, dy, epilogue)

    # The halves of a stacked "nk" weight are already contiguous along N; contracting "kn" halves at once takes a copy.
    stacked = w.reshape(len(w), -1, *w.shape[-2:])
    joined = w.reshape(len(w), -1, w.shape[-1]) if layout == "nk" else jnp.concatenate(parts(stacked), axis=2)

    transposed: WeightLayout = "kn" if layout == "nk" else "nk"

    def multiply(dz: Array, experts: Array, tile: int) -> Array:
        tiles, schedule = Operands(dz, joined, experts=experts), kernels.schedule(tile, x.shape[1], transposed)
        return kernels.product(tiles, layout=transposed, epilogue=Epilogue(), out_dtype=x.dtype, schedule=schedule)

    has_expert = jnp.arange(len(x), dtype=jnp.int32) < jnp.sum(group_sizes, dtype=jnp.int32)
    dx = _in_tiles(multiply, dz, group_sizes, unit, kernels.tiles)
    # The kernel does not write tiles of rows without an expert, so their memory is undefined.
    dx = jnp.where(jnp.broadcast_to(has_expert[:, None], dx.shape), dx, jnp.zeros_like(dx))

    start = jnp.zeros(w.shape, ACCUMULATOR) if w_sum is None else w_sum
    weight_sums = [start.reshape(joined.shape)] if layout == "nk" else parts(start.reshape(stacked.shape))
    bias_start = None
    if bias is not None:
        bias_start = (jnp.zeros(bias.shape, ACCUMULATOR) if bias_sum is None else bias_sum).reshape(len(w), -1)
    steps = StagedSteps.from_sizes(group_sizes, len(x), sequences)
    weight_sums, dbias = _next_sums((weight_sums, bias_start), x, dz, steps, layout, kernels)
    dw = jnp.stack(weight_sums, axis=1).reshape(w.shape)
    dw = rounded(dw, w.dtype) if w_sum is None else dw
    if bias is None or dbias is None:
        return dx, dw, None
    dbias = dbias.reshape(bias.shape)
    return dx, dw, rounded(dbias, bias.dtype) if bias_sum is None else dbias


type _Sums = tuple[list[Array], Array | None]
"""The sums of the weights, `[E, N, K]`, or `[E, K, N]` of each part if the layout is "kn"; and of the biases."""


def _next_sums(sums: _Sums, x: Array, dz: Array, steps: StagedSteps, layout: WeightLayout, kernels: Kernels) -> _Sums:
    """Returns the sums after all steps."""

    def add_piece(index: Array, sums: _Sums) -> _Sums:
        weights, biases = sums
        rows, stages = steps.piece(index)
        # Padding has zeros, which change no sum.
        x_rows, dz_rows = (array.at[rows].get(mode="fill", fill_value=0) for array in (x, dz))
        pairs = [(dz_rows, x_rows)]
        if layout == "kn":
            pairs = [(x_rows, part) for part in jnp.split(dz_rows, len(weights), axis=1)]
        weights = [kernels.product_sums(total, *pair, stages) for total, pair in zip(weights, pairs, strict=True)]
        return weights, None if biases is None else row_sums(biases, dz_rows, stages)

    return lax.fori_loop(0, steps.pieces, add_piece, sums)


def _in_tiles[T: PyTree[Array]](
    multiply: Callable[[Array, Array, int], T],
    x: Array,
    group_sizes: Array,
    unit: int,
    sizes: tuple[int, ...],
    known: Array | None = None,
) -> T:
    """Returns `multiply(rows, experts, tile)`, in which `experts` is as in `Operands` and `tile` is the tile size.

    The sizes of groups are multiples of `unit`. If no tile size divides `unit`, groups are padded to whole tiles and
    the padding is removed from the results. The experts of tiles of `unit` rows may be known.
    """
    smallest = sizes[-1]
    if unit % smallest or len(x) % unit:
        place, padded_sizes, padded_rows = _padded_groups(group_sizes, len(x), smallest)
        padded = jnp.zeros((padded_rows, x.shape[1]), x.dtype).at[place].set(x, mode="drop", unique_indices=True)
        y = _in_tiles(multiply, padded, padded_sizes, smallest, sizes)
        return jax.tree.map(lambda rows: rows.at[place].get(mode="fill", fill_value=0), y)
    tile = next(size for size in sizes if unit % size == 0)
    if known is not None and tile == unit:
        return multiply(x, known, tile)
    ends, tiles = jnp.cumsum(group_sizes, dtype=jnp.int32), len(x) // tile
    first = jnp.arange(tiles, dtype=jnp.int32) * tile
    # Unrolled, the search is one kernel; as a loop it would launch one kernel per step.
    expert = jnp.searchsorted(ends, first, side="right", method="scan_unrolled").astype(jnp.int32)
    expert = jnp.minimum(expert, len(group_sizes) - 1)
    return multiply(x, jnp.append(expert, ends[-1] // tile), tile)


def _padded_groups(group_sizes: Array, rows: int, tile: int) -> tuple[Array, Array, int]:
    """Returns each row's place among groups padded to whole tiles, the padded sizes, and an upper bound of all rows."""
    sizes = group_sizes.astype(jnp.int32)
    ends, padded = jnp.cumsum(sizes, dtype=jnp.int32), -(-sizes // tile) * tile
    starts, padded_rows = ends - sizes, round_up(rows + len(sizes) * (tile - 1), tile)
    firsts = jnp.cumsum(padded, dtype=jnp.int32) - padded
    row = jnp.arange(rows, dtype=jnp.int32)
    expert = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
    known = jnp.minimum(expert, len(sizes) - 1)
    return jnp.where(expert < len(sizes), firsts[known] + row - starts[known], padded_rows), padded, padded_rows
