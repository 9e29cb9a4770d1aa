"""A mask of attention's scores on Hopper: packed to bits before a kernel, in words as its threads need them.

Of a tile of 64 x 64 scores each of a warpgroup's threads holds 32. Their bits are one word, so that a thread loads one
number for a tile, and a warpgroup's loads lie side by side.
"""

from typing import Any, Final

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir.dialects import arith

from detjax.contract import ACCUMULATOR
from detjax.pallas.hopper.attention.queries_on_rows import MATRIX, ROWS, element, scores_seen

_THREADS: Final = 128
_BITS: Final = 32
_WORDS: Final = plgpu.Layout.WG_STRIDED(shape=(_THREADS,), vec_size=1)
"""A word for each thread."""


def words_of(mask: Array, rows: int, columns: int) -> Array:
    """Words `[B, H, rows / 64, columns / 64, 128]`, int32, of a mask `[B, H, T, s]`; what it lacks of them is False.

    In each tile, row `16 w + 8 e + g` and column `8 n + 2 l + i` are bit `16 e + 2 n + i` of thread `32 w + 4 g + l`.
    """
    batch, heads, *given = mask.shape
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, rows - given[0]), (0, columns - given[1])))
    mask = mask.reshape(batch, heads, rows // ROWS, 4, 2, 8, columns // ROWS, 8, 4, 2)
    mask = mask.transpose(0, 1, 2, 6, 3, 5, 8, 4, 7, 9)
    bits = mask.reshape(batch, heads, rows // ROWS, columns // ROWS, _THREADS, _BITS).astype(jnp.uint32)
    words = jnp.sum(bits << lax.broadcasted_iota(jnp.uint32, bits.shape, 5), axis=5, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32)


def tile_words(words: Any, request: Array, head: Array, row: Array, column: Array) -> Array:
    """The words of a tile, one for each thread.

    Args:
        words: in memory, as `words_of` makes them of a mask that may be the same for all requests, or heads.
        request: of the batch.
        head: of the queries.
        row: of tiles.
        column: of tiles.
    """
    batch, heads = words.shape[:2]
    tile = words.at[request if batch > 1 else 0, head if heads > 1 else 0, row, column]
    return plgpu.load(tile, layout=_WORDS, optimized=False)


def bits_kept(s: Array, *words: Array) -> Array:
    """Scores with -inf where their bit is 0; each of the words is of `ROWS` columns."""

    def kept(_: Any, s: Any, *words: Any) -> Any:
        of_columns = [element(word.registers.item()) for word in words]
        int32 = of_columns[0].type

        def is_seen(group: int, half: int, offset: int) -> Any:
            part, group = divmod(group, 8)
            bit = 16 * half + 2 * group + offset
            mask = mgpu.c(int(np.uint32(1 << bit).view(np.int32)), int32)
            return arith.cmpi(arith.CmpIPredicate.ne, arith.andi(of_columns[part], mask), mgpu.c(0, int32))

        return scores_seen(s, is_seen)

    result = plgpu.ShapeDtypeStruct(s.shape, ACCUMULATOR, layout=MATRIX)
    inlined: Any = plgpu.inline_mgpu(arg_types=(MATRIX, *(_WORDS,) * len(words)), return_type=result)(kept)
    return inlined(s, *words)
