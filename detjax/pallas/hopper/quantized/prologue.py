"""The first part of a product's kernel, in which each CTA quantizes a single row for itself.

A kernel that only quantizes a row, or normalizes it first, takes longer to start and to end than to compute. So every
CTA of the product computes all of the row's codes, while the copy engine loads the weights of its first stages. The
codes stay in the CTA's shared memory, where the matrix unit reads them for all of its tiles:

    producer warp   --copies weights-->  loaded[slot]
    warpgroup 0     --arrives-->         prepared       --> each warpgroup that multiplies waits for it once

On an H200, in layers of Qwen3-8B's shape, a row takes 72.9 us with separate kernels and 68.5 us with both norms in the
products that follow them. With the codes of the attention output as well, it is 1.5 us less, but with the 12,288 codes
of the MLP 4.8 us more: their computation takes longer than the first weights. So do several rows. Codes that all CTAs
write to device memory, and that their copy engines load from there, were slower than a separate kernel: each access
takes microseconds while the weights are being loaded.
"""

import dataclasses
from collections.abc import Callable
from typing import Final

from jax import Array

from detjax.contract import FP8_BLOCK
from detjax.pallas.hopper.quantized.rows import quantize_row

MOST_GROUPS: Final = 32
"""Most groups of a row that a product quantizes itself."""


@dataclasses.dataclass(frozen=True)
class Prologue:
    """The computation of a row's codes by one warpgroup.

    Attributes:
        arrays: its operands.
        compute: called with references to these and to the stages of codes and of scales in shared memory, which it
            fills; see `rows.quantize_piece_of_row`.
    """

    arrays: tuple[Array, ...]
    compute: Callable[..., None]


def quantizing(x: Array) -> Prologue | None:
    """Returns a prologue that quantizes rows `[1, K]`, or None if a separate kernel is faster."""
    rows, k = x.shape
    if rows > 1 or k % FP8_BLOCK or k > MOST_GROUPS * FP8_BLOCK:
        return None
    return Prologue((x,), quantize_row)
