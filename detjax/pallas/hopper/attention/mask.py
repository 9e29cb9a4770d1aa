"""Attention masks on Hopper: packed before a kernel into words of bits, one per thread and tile.

A thread holds 32 scores of a 64 x 64 tile. Their bits are one word, so a thread loads one number per tile, and a
warpgroup's loads are contiguous.
"""

from typing import Any, Final

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.hopper.mosaic.layouts import PER_THREAD, ROWS

_BITS: Final = 32


def pack_words(mask: Array, rows: int, columns: int) -> Array:
    """Packs a mask `[B, H, T, s]` into int32 words `[B, H, rows / 64, columns / 64, 128]`.

    Rows and columns beyond the mask are False. In each tile, row `16 w + 8 e + g` and column `8 n + 2 l + i` are bit
    `16 e + 2 n + i` of thread `32 w + 4 g + l`.
    """
    batch, heads, *given = mask.shape
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, rows - given[0]), (0, columns - given[1])))
    mask = mask.reshape(batch, heads, rows // ROWS, 4, 2, 8, columns // ROWS, 8, 4, 2)
    mask = mask.transpose(0, 1, 2, 6, 3, 5, 8, 4, 7, 9)
    bits = mask.reshape(batch, heads, rows // ROWS, columns // ROWS, WARPGROUP, _BITS).astype(jnp.uint32)
    words = jnp.sum(bits << lax.broadcasted_iota(jnp.uint32, bits.shape, 5), axis=5, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32)


def load_words(words: Any, request: Array, head: Array, row: Array, column: Array) -> Array:
    """Loads the words of the tile in a row and a column of tiles, from the result of `pack_words`.

    Requests may share a mask, and so may heads.
    """
    batch, heads = words.shape[:2]
    tile = words.at[request if batch > 1 else 0, head if heads > 1 else 0, row, column]
    return plgpu.load(tile, layout=PER_THREAD, optimized=False)
