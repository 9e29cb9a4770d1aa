"""Layouts of arrays in the registers of a warpgroup, and of matrices in shared memory."""

import math
from typing import Any, Final

import jax.experimental.pallas.mosaic_gpu as plgpu

from detjax.pallas.hopper.device import SWIZZLE_BYTES, WARPGROUP

ROWS: Final = 64
"""Rows of a tile: those that the matrix unit multiplies for a warpgroup."""
UNIT: Final = 8
"""The fewest columns that the matrix unit multiplies; the number of columns is a multiple of it."""

MATRIX: Final = plgpu.Layout.WGMMA
"""A tile as the matrix unit leaves it."""
PER_ROW: Final = plgpu.Layout.WGMMA.reduce(1)
"""A number for each row of a tile, held by the threads that hold part of the row."""
PER_COLUMN: Final = plgpu.Layout.WGMMA.reduce(0)
"""A number for each column of a tile, held by the threads that hold part of the column."""
PER_THREAD: Final = plgpu.Layout.WG_STRIDED(shape=(WARPGROUP,), vec_size=1)
"""A number for each thread of the warpgroup."""
NUMBER: Final = plgpu.Layout.WG_SPLAT
"""A number that all threads hold."""


def line(width: int) -> int:
    """Elements of a swizzled line of shared memory, for rows of `width` 2-byte elements."""
    return math.gcd(width, SWIZZLE_BYTES // 2)


def swizzled(width: int) -> tuple[Any, ...]:
    """How rows of `width` 2-byte elements lie in shared memory for the matrix unit."""
    tiling = plgpu.TilingTransform((8, line(width)))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(2 * line(width))  # pyright: ignore[reportAbstractUsage]


def swizzled_lines(line: int, itemsize: int) -> tuple[Any, ...]:
    """Tiles of 8 lines of `line` elements, swizzled if a line is long enough to have banks to spread over."""
    tiling = plgpu.TilingTransform((8, line))  # pyright: ignore[reportAbstractUsage]
    size = line * itemsize
    if size < 32:
        return (tiling,)
    return tiling, plgpu.SwizzleTransform(size)  # pyright: ignore[reportAbstractUsage]
