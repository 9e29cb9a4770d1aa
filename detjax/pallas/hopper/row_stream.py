"""Blocks of long rows on their way through the shared memory of Hopper GPUs.

Rows are cut at multiples of `SOFTMAX_BLOCK`. A CTA is one warpgroup that takes block after block, in an order that its
kernel chooses, while the copy engine fills the SMEM that earlier blocks have left.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, LANE_GROUP, LANES, SOFTMAX_BLOCK

PART: Final = 2048
"""Elements that one bulk copy brings: the unit in which SMEM passes from one block to another."""

WARPGROUP: Final = 128
ROW_UNIT: Final = WARPGROUP
"""Widths are multiples of this: a register of every thread, and what a bulk copy moves at once."""

COMPILER_PARAMS: Final = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    reduction_scratch_bytes=16,  # a float32 of each warp
)

SMEM_OF_SM: Final = 228 * 1024
SMEM_OF_CTA: Final = 227 * 1024
SMEM_RESERVED: Final = 5 * 1024
"""Of a CTA's SMEM, at most: what CUDA keeps, statistics of a row's blocks, scratch of reductions, barriers."""


def padded(x: Array, fill: float = -math.inf) -> Array:
    """`[M, V]` with V brought to a multiple of `ROW_UNIT`, by logits of probability 0 unless told otherwise."""
    missing = -x.shape[-1] % ROW_UNIT
    return jnp.pad(x, ((0, 0), (0, missing)), constant_values=fill) if missing else x


def blocks_of_row(width: int) -> int:
    """Blocks of a row of `width` elements."""
    return -(-width // SOFTMAX_BLOCK)


def parts_of_block(width: int) -> int:
    """Parts that a block of such a row takes room for."""
    return -(-min(width, SOFTMAX_BLOCK) // PART)


@dataclasses.dataclass(frozen=True)
class Ring:
    """The blocks that a CTA takes one after another, and the slots of SMEM that their parts pass through.

    Item `t` is the block `locate(t)`, a pair of row and block. Its parts are in the slots `t * parts + p` modulo their
    number.
    """

    x_gmem: Any
    x_smem: Any
    full: Any
    count: Any
    locate: Callable[[Any], tuple[Any, Any]]

    @property
    def slots(self) -> int:
        return self.x_smem.shape[0]

    @property
    def width(self) -> int:
        return self.x_gmem.shape[1]

    @property
    def parts(self) -> int:
        """Slots of an item; the last block of a row may leave some of them empty."""
        return parts_of_block(self.width)

    def slot(self, item: Any, part: int) -> Any:
        return lax.rem(item * self.parts + part, self.slots)

    def start(self) -> None:
        """Begins to load as many parts as there are slots."""
        for i in range(self.slots):
            self._fetch(i // self.parts, i % self.parts)

    def release(self, item: Any, part: int) -> None:
        """Lets the part's slot be overwritten, by the one that is next in it."""
        later, part = divmod(part + self.slots, self.parts)
        self._fetch(item + later, part)

    def _fetch(self, item: Any, part: int) -> None:
        slot = self.slot(item, part)
        whole, rest = divmod(self.width, PART)

        def copy(row: Any, index: Any, size: int) -> None:
            plgpu.copy_gmem_to_smem(
                self.x_gmem.at[row, pl.ds(index * PART, size)],
                self.x_smem.at[slot, pl.ds(0, size)],
                self.full.at[slot],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

        @pl.when(item < self.count)
        def _() -> None:
            row, block = self.locate(item)
            index = block * self.parts + part
            if whole:
                pl.when(index < whole)(lambda: copy(row, index, PART))
            if rest:
                pl.when(index == whole)(lambda: copy(row, index, rest))

    def by_size(self, block: Any, fn: Callable[[int], Any]) -> Any:
        """`fn(number of elements)` of a row's block: of the usual number, or of what the last block has."""
        whole, rest = divmod(self.width, SOFTMAX_BLOCK)
        if not rest:
            return fn(SOFTMAX_BLOCK)
        if not whole:
            return fn(rest)
        return lax.cond(block == whole, lambda: fn(rest), lambda: fn(SOFTMAX_BLOCK))

    def wait(self, item: Any, size: int) -> None:
        """Returns when the item's `size` elements have arrived; once for every item."""
        for part in range(-(-size // PART)):
            plgpu.barrier_wait(self.full.at[self.slot(item, part)])

    def chunks(self, item: Any, size: int, fill: float = -math.inf) -> list[Array]:
        """The item's `size` elements, once they are there, as float32 arrays of `LANES`, the last one filled up."""
        self.wait(item, size)
        if missing := -size % LANES:
            end = self.x_smem.at[self.slot(item, size // PART), pl.ds(size % PART, missing)]
            end[...] = plgpu.layout_cast(jnp.full((missing,), fill, self.x_smem.dtype), layout(missing))
            plgpu.commit_smem()  # what the copy engine overwrites later
        return [self.elements(item, start // PART, start % PART, LANES) for start in range(0, size, LANES)]

    def elements(self, item: Any, part: int, start: Any, size: int) -> Array:
        """`size` elements from `start` on of one part of an item that has arrived, float32."""
        elements = self.x_smem.at[self.slot(item, part), pl.ds(start, size)]
        return plgpu.load(elements, layout=layout(size)).astype(ACCUMULATOR)


def ring_types(x: Array, slots: int) -> list[Any]:
    """The scratch of a ring: its SMEM and its barriers."""
    return [plgpu.SMEM((slots, PART), x.dtype), plgpu.Barrier(num_arrivals=1, num_barriers=slots)]


def layout(size: int) -> Any:
    """How a warpgroup's threads hold `size` elements: up to `LANE_GROUP` neighbours each, then the next thread's."""
    vector = next(n for n in (LANE_GROUP, 2, 1) if size % (n * WARPGROUP) == 0)
    return plgpu.Layout.WG_STRIDED(shape=(size,), vec_size=vector)


def each(count: Any, step: Callable[[Any], None]) -> None:
    """Runs `step(i)` for i from 0 to count - 1."""
    lax.fori_loop(0, count, lambda i, _: (step(i), ())[1], ())


def fold_blocks[T](blocks: int, step: Callable[[Any, T], T], carry: T) -> T:
    """The carry after `step(block, carry)` on each block in ascending order."""
    # What a row of any usual width has is unrolled, so that its loads do not wait for one another.
    unrolled = 64

    def steps(index: Any, carry: T) -> T:
        for i in range(unrolled):
            carry = step(index * unrolled + i, carry)
        return carry

    whole = blocks // unrolled
    if whole > 1:
        carry = lax.fori_loop(0, whole, steps, carry)
    for block in range(whole * unrolled if whole > 1 else 0, blocks):
        carry = step(block, carry)
    return carry


def stream_blocks(
    name: str, x: Array, step: Callable[..., None], out_type: Any, *more: Array, slots: int, grid: int
) -> Any:
    """Runs `step(ring, item, row, block, *refs of more and of out_type)` on every block of rows `[M, V]`, in any order.

    The step takes the elements from the ring and releases the item's parts.
    """
    rows, width = x.shape
    blocks = blocks_of_row(width)
    grid = min(grid, rows * blocks)

    def body(x_gmem: Any, *refs: Any) -> None:
        arrays, (x_smem, full) = refs[:-2], refs[-2:]
        first = lax.axis_index("cta")

        def locate(item: Any) -> tuple[Any, Any]:
            index = first + item * grid
            return lax.div(index, blocks), lax.rem(index, blocks)

        ring = Ring(x_gmem, x_smem, full, lax.div(rows * blocks - first + (grid - 1), grid), locate)
        ring.start()
        each(ring.count, lambda item: step(ring, item, *locate(item), *arrays))

    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=ring_types(x, slots),
        grid=(grid,),
        grid_names=("cta",),
        compiler_params=COMPILER_PARAMS,
        kernel_name=name,
    )(x, *more)


def for_each_row(name: str, rows: int, body: Callable[..., None], out_type: Any, *arrays: Array) -> Any:
    """Runs `body(row, *refs of arrays and of out_type)`, arithmetic on scalars, for each row."""
    return plgpu.kernel(
        lambda *refs: body(lax.axis_index("row"), *refs),
        out_type=out_type,
        grid=(rows,),
        grid_names=("row",),
        compiler_params=COMPILER_PARAMS,
        kernel_name=name,
    )(*arrays)
