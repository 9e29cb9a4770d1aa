"""Layouts of arrays in the registers of a warpgroup, and of matrices in shared memory."""

import math
from typing import Any, Final

import jax.experimental.pallas.mosaic_gpu as plgpu

from detjax.pallas.hopper.device import SWIZZLE_BYTES, WARPGROUP

ROWS: Final = 64
"""Rows of a tile, which the matrix unit multiplies for a warpgroup."""
UNIT: Final = 8
"""The matrix unit's unit of columns."""

MATRIX: Final = plgpu.Layout.WGMMA
"""A tile as the matrix unit leaves it: thread `32 w + 4 g + l` has columns `8 n + 2 l` and `8 n + 2 l + 1` of rows
`16 w + g` and `16 w + g + 8`."""
PER_ROW: Final = plgpu.Layout.WGMMA.reduce(1)
"""One number per row of a tile, in the threads that hold part of the row."""
PER_COLUMN: Final = plgpu.Layout.WGMMA.reduce(0)
"""One number per column of a tile, in the threads that hold part of the column."""
PER_THREAD: Final = plgpu.Layout.WG_STRIDED(shape=(WARPGROUP,), vec_size=1)
"""One number per thread of the warpgroup."""
NUMBER: Final = plgpu.Layout.WG_SPLAT
"""One number that all threads hold."""


def line(width: int) -> int:
    """Returns the elements of a swizzled line of shared memory, for rows of `width` 2-byte elements."""
    return math.gcd(width, SWIZZLE_BYTES // 2)


def swizzled(width: int) -> tuple[Any, ...]:
    """Returns the transforms by which rows of `width` 2-byte elements lie in shared memory for the matrix unit."""
    # Rows as they are would have the same columns of all rows in the same banks, whenever a row is a multiple of 128
    # bytes. The swizzle spreads the 16-byte chunks of eight lines over all banks, for copies, threads and matrix unit.
    tiling = plgpu.TilingTransform((8, line(width)))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(2 * line(width))  # pyright: ignore[reportAbstractUsage]


def swizzled_lines(line: int, itemsize: int) -> tuple[Any, ...]:
    """Returns the transforms of tiles of 8 lines of `line` elements, swizzled if a line has at least 32 bytes."""
    tiling = plgpu.TilingTransform((8, line))  # pyright: ignore[reportAbstractUsage]
    size = line * itemsize
    if size < 32:
        return (tiling,)
    return tiling, plgpu.SwizzleTransform(size)  # pyright: ignore[reportAbstractUsage]
