"""Elementwise functions and sums of squares on Hopper GPUs (Mosaic GPU): each array is read once.

XLA would split such a function at each of its barriers, and write the intermediate arrays to memory.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int32, PyTree

from detjax.contract import ACCUMULATOR, LANE_GROUP, LANES
from detjax.operands.numerics import ceil_div
from detjax.operands.rounding import rounding_by_conversion
from detjax.pallas.hopper.device import WARP, WARPGROUP
from detjax.pallas.hopper.ordered_sums import sums_in_order as sums_in_order
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS, layout, rounded_squares, row_sums

PIECE: Final = LANE_GROUP * WARPGROUP
"""Elements that a warpgroup processes at the same time."""

PIECE_LAYOUT: Final = plgpu.Layout.WG_STRIDED(shape=(PIECE,), vec_size=LANE_GROUP)
"""Layout of a piece in the registers of a warpgroup."""

PIECES: Final = 4
"""Most pieces of a CTA."""


class IndexedRows(NamedTuple):
    """Rows of an array by their numbers, for a function of elements that reads them where they lie.

    Attributes:
        array: `[P, W]`.
        number: the row of the array for each row of the function's other arrays; negative: a row of `missing`.
        missing: the number in rows that the array does not have.
        first: the first column. The function's rows may be shorter than W.
    """

    array: Float[Array, "P W"]
    number: Int32[Array, "M"]
    missing: float
    first: int = 0

    def gathered(self, shape: tuple[int, ...]) -> Array:
        """Returns the rows as an array of this shape."""
        number = self.number.reshape(-1, 1)
        rows = self.array[jnp.maximum(number[:, 0], 0), self.first : self.first + shape[-1]]
        return jnp.where(number >= 0, rows, jnp.asarray(self.missing, rows.dtype)).reshape(shape)


def map_elements(
    fn: Callable[..., PyTree[Array]],
    *arrays: Array,
    columns: Sequence[Array] = (),
    rows: Sequence[IndexedRows] = (),
    scalars: Sequence[Array] = (),
    overwritten: Mapping[int, int] = MappingProxyType({}),
) -> PyTree[Array]:
    """Returns `fn(*arrays, *columns, *rows, *scalars)`; see `detjax.ops.elements.map_elements`.

    `columns` are arrays of the last axis, which all rows share; `rows` are read by their numbers.
    """
    shape, size = arrays[0].shape, arrays[0].size
    if (columns or rows) and shape[-1] % PIECE:  # a piece has elements of several rows
        arrays = *arrays, *(jnp.broadcast_to(x, shape) for x in columns), *(x.gathered(shape) for x in rows)
        columns = rows = ()
    missing = -size % PIECE
    flat = [jnp.pad(x.reshape(-1), (0, missing)) for x in arrays]
    pieces = next(n for n in range(PIECES, 0, -1) if (size + missing) % (n * PIECE) == 0)
    tables, row_numbers = [x.array.reshape(-1) for x in rows], [x.number.reshape(-1) for x in rows]
    shapes = [jax.ShapeDtypeStruct((PIECE,), x.dtype) for x in (*flat, *columns, *tables)]
    leaves, tree = jax.tree.flatten(jax.eval_shape(fn, *shapes, *scalars))
    places = {array: jax.new_ref(flat[array]) for array in overwritten.values()}
    new = [index for index in range(len(leaves)) if index not in overwritten]
    counts = len(flat), len(columns), len(rows), len(rows), len(scalars)
    bounds = *itertools.accumulate(counts, initial=0), None

    def load(ref: Any, here: Any) -> Array:
        return plgpu.load(ref.at[here], layout=PIECE_LAYOUT, optimized=False)

    def body(*refs: Any) -> None:
        inputs, shared_by_rows, named, names, numbers, rest = (refs[i:j] for i, j in itertools.pairwise(bounds))
        outputs = {index: inputs[array] for index, array in overwritten.items()} | dict(zip(new, rest, strict=True))
        first = lax.axis_index("piece") * (pieces * PIECE)
        shared = [ref[0] for ref in numbers]
        for piece in range(pieces):
            here = pl.ds(first + piece * PIECE, PIECE)
            elements = [load(ref, here) for ref in inputs]
            if columns or rows:
                row, column = (op(first + piece * PIECE, jnp.int32(shape[-1])) for op in (lax.div, lax.rem))
                elements += [load(ref, pl.ds(column, PIECE)) for ref in shared_by_rows]
                for table, name, given in zip(named, names, rows, strict=True):
                    number = name[row]
                    start = jnp.maximum(number, 0) * given.array.shape[-1] + given.first + column
                    other = jnp.asarray(given.missing, given.array.dtype)
                    elements.append(jnp.where(number >= 0, load(table, pl.ds(start, PIECE)), other))
            # A thread reads its elements of all arrays before it writes any, so overwriting needs no barrier.
            with rounding_by_conversion():
                results = fn(*elements, *shared)
            for index, result in enumerate(jax.tree.leaves(results)):
                outputs[index][here] = result

    new_arrays = plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct((size + missing,), leaves[index].dtype) for index in new),
        grid=((size + missing) // (pieces * PIECE),),
        grid_names=("piece",),
        kernel_name="map_elements",
        compiler_params=NO_AUTO_BARRIERS,
    )(
        *(places.get(index, x) for index, x in enumerate(flat)),
        *columns,
        *tables,
        *row_numbers,
        *(jnp.reshape(x, 1) for x in scalars),
    )
    results = {index: jax.freeze(places[array]) for index, array in overwritten.items()}
    results |= zip(new, new_arrays, strict=True)
    return jax.tree.unflatten(tree, [results[index][:size].reshape(shape) for index in range(len(leaves))])


def row_squares(leaf: Array, slices: int) -> Array:
    """Returns `[slices, rows]` float32; see `detjax.ops.elements.row_squares`."""
    flat = leaf.reshape(-1)
    rows = ceil_div(flat.size, slices * LANES) * slices
    return _row_squares(jnp.pad(flat, (0, rows * LANES - flat.size)).reshape(rows, LANES)).reshape(slices, -1)


def _row_squares(rows: Array) -> Array:
    """Returns the sums `[M]` float32 of the squares of rows `[M, LANES]`."""
    count, columns = len(rows), LANE_GROUP * WARP
    together = min(WARPGROUP // WARP, 1 << (count.bit_length() - 1))
    pieces = layout(together, WARP)

    def body(ref: Any, out: Any) -> None:
        # The last CTA shifts back so that all its rows exist: two CTAs then write the same bits to some.
        here = pl.ds(jnp.minimum(lax.axis_index("tile") * together, count - together), together)
        parts = [pl.ds(start, columns) for start in range(0, LANES, columns)]
        row = [plgpu.load(ref.at[here, part], layout=pieces, optimized=False).astype(ACCUMULATOR) for part in parts]
        total = row_sums([rounded_squares(piece) for piece in row])
        # Mosaic GPU stores no vector of one element.
        out[here if together > 1 else 0] = total if together > 1 else jnp.max(total)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((count,), ACCUMULATOR),
        grid=(ceil_div(count, together),),
        grid_names=("tile",),
        kernel_name="row_squares",
        compiler_params=NO_AUTO_BARRIERS,
    )(rows)
