"""Heads in the registers of a warpgroup: loading, normalizing, rotating and storing them."""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array, lax

from detjax.contract import ACCUMULATOR, LANE_GROUP
from detjax.pallas.hopper.rows import broadcast, layout, rounded_squares, row_sums


class HeadRows:
    """Rows of heads in the registers of a warpgroup, each row in pieces that its threads hold side by side."""

    def __init__(self, count: int, threads: int) -> None:
        self.columns = LANE_GROUP * threads
        self.shape = (count, self.columns)
        self.layout = layout(count, threads)

    def at(self, ref: Any, *index: Any) -> list[Any]:
        """Returns references to the pieces of rows; the index has all axes but the last."""
        return [ref.at[(*index, pl.ds(i, self.columns))] for i in range(0, ref.shape[-1], self.columns)]

    def load(self, ref: Any, *index: Any) -> list[Array]:
        """Returns the pieces of rows."""
        return [plgpu.load(piece, layout=self.layout, optimized=False) for piece in self.at(ref, *index)]

    def load_vector(self, ref: Any, *index: Any) -> list[Array]:
        """Returns the one-dimensional pieces of a vector that all rows share."""
        return [plgpu.load(part, layout=self.layout.reduce(0), optimized=False) for part in self.at(ref, *index)]

    def store(self, pieces: list[Array], ref: Any, *index: Any) -> None:
        """Stores the pieces of rows."""
        for piece, target in zip(pieces, self.at(ref, *index), strict=True):
            target[...] = piece

    def spread(self, vector: Array, axis: int = 1) -> Array:
        """Returns a piece that repeats a vector in every row or, with axis 0, in every column."""
        return broadcast(vector, self.shape, axis, self.layout)

    def normalize(self, head: list[Array], weight: list[Array], eps: float, offset: float) -> list[Array]:
        """Returns the RMS norm of rows with the weight `weight + offset`, by the operations of `norm.py`."""
        weights = [self.spread(part.astype(ACCUMULATOR) + offset) for part in weight]
        wide = [piece.astype(ACCUMULATOR) for piece in head]
        total = row_sums([rounded_squares(piece) for piece in wide])
        scale = self.spread(lax.rsqrt(total / (len(head) * self.columns) + eps), axis=0)
        return [(piece * scale * w).astype(head[0].dtype) for piece, w in zip(wide, weights, strict=True)]

    def rotate(self, head: list[Array], cos: list[Array], sin: list[Array]) -> list[Array]:
        """Returns rows with halves (a, b) as (a * cos - b * sin, b * cos + a * sin)."""
        firsts, seconds = [], []
        halves = head[: len(cos)], head[len(cos) :]
        for *pair, c, s in zip(*halves, cos, sin, strict=True):
            a, b = (half.astype(ACCUMULATOR) for half in pair)
            # Either product of a sum could be fused with it. The barrier rounds one, so that it is always the other.
            bs, as_ = lax.optimization_barrier((b * s, a * s))
            firsts.append((a * c - bs).astype(head[0].dtype))
            seconds.append((b * c + as_).astype(head[0].dtype))
        return firsts + seconds
