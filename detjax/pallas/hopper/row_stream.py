"""Streaming of long rows through the shared memory of Hopper GPUs.

Rows are split into blocks at multiples of `SOFTMAX_BLOCK`, and blocks into parts of `PART` elements. A CTA is one
warpgroup that reads blocks in an order that its kernel chooses. The parts pass through a ring of slots in shared
memory: while the CTA reads a part, the copy engine fills the slots of earlier ones.

GPUs without a copy engine, before compute capability 9.0, have no ring: threads read each part from device memory, or
from cache, where they use it. Widths are then padded to whole chunks, since nothing fills in what a part lacks.

The ring is not swizzled: a warp reads up to `LANE_GROUP` neighbouring elements per thread, consecutive threads
consecutive ones, so each access covers consecutive banks.
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
from detjax.operands.numerics import ceil_div
from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.nvidia import has_copy_engine, shared_memory_of_cta, shared_memory_of_multiprocessor

PART: Final = 2048
"""Elements of one bulk copy, and of a slot of the ring."""

WIDTH_UNIT: Final = WARPGROUP
"""Widths are multiples of this: an element for every thread, and the unit of a bulk copy."""

UNSTREAMED_WIDTH_UNIT: Final = LANES
"""Widths are multiples of this without a ring: the elements of a chunk."""

MAX_SLOTS: Final = 32
"""Slots of the longest ring: the barriers of one group."""

RING_RESERVED: Final = 5 * 1024
"""Bytes of a CTA's shared memory that a ring leaves for CUDA's own use (1 KiB), the statistics of a row's blocks, the
scratch of reductions and the barriers. It exceeds `device.SHARED_MEMORY_RESERVED` because several CTAs share a
multiprocessor, each with its own."""

COMPILER_PARAMS: Final = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    reduction_scratch_bytes=16,  # a float32 of each warp
)


def padded(x: Array, fill: float = -math.inf) -> Array:
    """Returns `[M, V]` with V padded to a multiple of `WIDTH_UNIT`, by default with logits of probability 0."""
    missing = -x.shape[-1] % (WIDTH_UNIT if has_copy_engine() else UNSTREAMED_WIDTH_UNIT)
    return jnp.pad(x, ((0, 0), (0, missing)), constant_values=fill) if missing else x


def blocks_per_row(width: int) -> int:
    """Returns the number of blocks of a row of `width` elements."""
    return ceil_div(width, SOFTMAX_BLOCK)


def parts_per_block(width: int) -> int:
    """Returns the number of parts of each block of a row of `width` elements; the last block may leave some empty."""
    return ceil_div(min(width, SOFTMAX_BLOCK), PART)


def slots_that_fit(ctas_per_multiprocessor: int, itemsize: int) -> int:
    """Returns the slots of a ring of `itemsize`-byte elements with which this many CTAs fit on a multiprocessor."""
    shared_memory = min(shared_memory_of_multiprocessor() // ctas_per_multiprocessor, shared_memory_of_cta())
    return min((shared_memory - RING_RESERVED) // (PART * itemsize), MAX_SLOTS)


@dataclasses.dataclass(frozen=True)
class RowStream:
    """The blocks that a CTA reads in sequence, and the ring of slots that their parts pass through.

    The stream's items are blocks. Part `p` of item `t` is in slot `(t * parts_per_block + p) % slots`.
    """

    rows: Any
    """Reference to the rows `[M, V]` in device memory."""
    ring: Any
    """Reference to the slots `[slots, PART]` in shared memory; None: threads read device memory."""
    loaded: Any
    """A barrier for each slot, which completes when a part has arrived; None without slots."""
    count: Any
    """Number of items."""
    block_of: Callable[[Any], tuple[Any, Any]]
    """Returns an item's row, and its block within the row."""

    @property
    def slots(self) -> int:
        """Slots of the ring."""
        return self.ring.shape[0]

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.rows.shape[1]

    @property
    def parts_per_block(self) -> int:
        """Slots of an item; the last block of a row may leave some of them empty."""
        return parts_per_block(self.width)

    def slot(self, item: Any, part: int) -> Any:
        """Returns the slot of an item's part."""
        return lax.rem(item * self.parts_per_block + part, self.slots)

    def start(self) -> None:
        """Starts to load the first parts, one into each slot."""
        if self.ring is None:
            return
        for i in range(self.slots):
            self._load(i // self.parts_per_block, i % self.parts_per_block)

    def release(self, item: Any, part: int) -> None:
        """Lets the copy engine overwrite a part that has been read with the next one for its slot."""
        if self.ring is None:
            return
        # No `consumed` barrier: this warpgroup is the only reader, and Pallas makes its threads meet before a copy
        # starts. Their loads have ended (`barriers.await_loads`), since they have stored or exchanged what follows from
        # the numbers.
        later, part = divmod(part + self.slots, self.parts_per_block)
        self._load(item + later, part)

    def _load(self, item: Any, part: int) -> None:
        """Starts to load a part of an item, if the stream has the item and the item's block has the part."""
        slot = self.slot(item, part)
        whole_parts, rest = divmod(self.width, PART)

        def copy(row: Any, index: Any, size: int) -> None:
            plgpu.copy_gmem_to_smem(
                self.rows.at[row, pl.ds(index * PART, size)],
                self.ring.at[slot, pl.ds(0, size)],
                self.loaded.at[slot],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

        @pl.when(item < self.count)
        def _() -> None:
            row, block = self.block_of(item)
            index = block * self.parts_per_block + part
            if whole_parts:
                pl.when(index < whole_parts)(lambda: copy(row, index, PART))
            if rest:
                pl.when(index == whole_parts)(lambda: copy(row, index, rest))


@dataclasses.dataclass(frozen=True)
class StreamedBlock:
    """One item of a stream: a block of a row."""

    stream: RowStream
    item: Any
    """Index of the item in the stream."""
    row: Any
    index: Any
    """Index of the block within its row."""

    def with_size(self, fn: Callable[[int], Any]) -> Any:
        """Returns `fn(elements of this block)`, traced for whole blocks and for the row's shorter last block."""
        whole_blocks, rest = divmod(self.stream.width, SOFTMAX_BLOCK)
        if not rest:
            return fn(SOFTMAX_BLOCK)
        if not whole_blocks:
            return fn(rest)
        return lax.cond(self.index == whole_blocks, lambda: fn(rest), lambda: fn(SOFTMAX_BLOCK))

    def wait(self, size: int) -> None:
        """Waits until the block's `size` elements have arrived. Must be called exactly once for every item."""
        for part in range(ceil_div(size, PART) if self.stream.ring is not None else 0):
            plgpu.barrier_wait(self.stream.loaded.at[self.stream.slot(self.item, part)])

    def load_all(self, size: int, fill: float = -math.inf) -> list[Array]:
        """Waits for the block's `size` elements and returns them as float32 arrays `[LANES]`, the last one padded."""
        self.wait(size)
        if missing := -size % LANES:
            end = self.stream.ring.at[self.stream.slot(self.item, size // PART), pl.ds(size % PART, missing)]
            end[...] = plgpu.layout_cast(jnp.full((missing,), fill, self.stream.ring.dtype), layout(missing))
            plgpu.commit_smem()  # The copy engine overwrites these elements later.
        return [self.load(start // PART, start % PART, LANES) for start in range(0, size, LANES)]

    def load(self, part: int, start: Any, size: int) -> Array:
        """Returns `size` elements from `start` on of a part that has arrived, float32."""
        if self.stream.ring is None:
            first = self.index * SOFTMAX_BLOCK + part * PART + start
            elements = self.stream.rows.at[self.row, pl.ds(first, size)]
        else:
            elements = self.stream.ring.at[self.stream.slot(self.item, part), pl.ds(start, size)]
        return plgpu.load(elements, layout=layout(size)).astype(ACCUMULATOR)

    def release(self) -> None:
        """Lets the copy engine overwrite all parts of the block."""
        for part in range(self.stream.parts_per_block):
            self.stream.release(self.item, part)


def scratch_types(x: Array, slots: int) -> list[Any]:
    """Returns the types of a stream's ring and barriers, if it has them."""
    if not has_copy_engine():
        return []
    return [plgpu.SMEM((slots, PART), x.dtype), plgpu.Barrier(num_arrivals=1, num_barriers=slots)]


def layout(size: int) -> Any:
    """Returns the layout of `size` elements over a warpgroup: up to `LANE_GROUP` neighbours in each thread."""
    vector = next(n for n in (LANE_GROUP, 2, 1) if size % (n * WARPGROUP) == 0)
    return plgpu.Layout.WG_STRIDED(shape=(size,), vec_size=vector)


def loop(count: Any, step: Callable[[Any], None]) -> None:
    """Runs `step(i)` for i from 0 to count - 1."""
    lax.fori_loop(0, count, lambda i, _: (step(i), ())[1], ())


def fold_blocks[T](blocks: int, step: Callable[[Any, T], T], carry: T) -> T:
    """Returns the carry after `step(block, carry)` on each block in ascending order."""
    # For any usual width all blocks are unrolled, so that their loads overlap.
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


def for_each_block(
    name: str, step: Callable[..., None], out_type: Any, x: Array, *operands: Array, slots: int, grid: int
) -> Any:
    """Runs a kernel that processes every block of rows `x [M, V]` independently, and returns its results.

    Args:
        name: the kernel's name.
        step: called as `step(block, *references to operands and results)` with each `StreamedBlock`. It reads the
            block's elements and releases its parts.
        out_type: types of the results.
        x: the rows `[M, V]`.
        operands: other arrays, which stay in device memory.
        slots: slots of each CTA's ring.
        grid: CTAs; each takes every grid-th block.
    """
    rows, width = x.shape
    blocks = blocks_per_row(width)
    grid, scratch = min(grid, rows * blocks), scratch_types(x, slots)

    def body(x_gmem: Any, *refs: Any) -> None:
        arrays, (ring, loaded) = (refs[:-2], refs[-2:]) if scratch else (refs, (None, None))
        first = lax.axis_index("cta")

        def block_of(item: Any) -> tuple[Any, Any]:
            index = first + item * grid
            return lax.div(index, blocks), lax.rem(index, blocks)

        count = lax.div(rows * blocks - first + (grid - 1), grid)
        stream = RowStream(x_gmem, ring, loaded, count, block_of)
        stream.start()
        loop(count, lambda item: step(StreamedBlock(stream, item, *block_of(item)), *arrays))

    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(grid,),
        grid_names=("cta",),
        compiler_params=COMPILER_PARAMS,
        kernel_name=name,
    )(x, *operands)


def for_each_row(name: str, rows: int, body: Callable[..., None], out_type: Any, *arrays: Array) -> Any:
    """Runs `body(row, *references to arrays and results)`, which computes with scalars, for each row."""
    return plgpu.kernel(
        lambda *refs: body(lax.axis_index("row"), *refs),
        out_type=out_type,
        grid=(rows,),
        grid_names=("row",),
        compiler_params=COMPILER_PARAMS,
        kernel_name=name,
    )(*arrays)
