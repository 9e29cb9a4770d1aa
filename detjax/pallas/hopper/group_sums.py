"""Sums over the tokens of groups on Hopper GPUs (Mosaic GPU): the gradients of experts' weights and biases.

Every group has float32 sums, to which its tokens are added stage by stage. Only the device knows how many stages a
group has, so workers process tile after tile of the groups' sums, each with its group's number of stages. Groups
without stages are not visited.

A worker is a warpgroup that multiplies and a warp that loads. A multiprocessor has two, which share nothing: while one
reads and writes sums, which takes as long as the products of some hundred tokens, the other one multiplies.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, WEIGHT_GRADIENT_TOKENS
from detjax.operands.numerics import ceil_div, round_up
from detjax.pallas.hopper import device
from detjax.pallas.hopper.device import SWIZZLE_BYTES, WARPGROUP, shared_registers
from detjax.pallas.hopper.group_stages import STAGE_TOKENS, Stages
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS

_WIDTH_UNIT: Final = 64
"""Widths are padded to whole swizzled lines."""

_WORKERS: Final = 2
"""Workers of a CTA."""

_CONSUMER_REGISTERS, _, _PRODUCER_REGISTERS = shared_registers(232, 232, 40)
_MAX_ACCUMULATORS: Final = 128
"""Registers of a thread that hold sums: a tile of 128 x 128, whose stages of 32 KiB leave each worker three of them."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The tiles of a group's sums; no bit depends on it."""

    rows: int
    """Rows of a tile, a multiple of 64."""
    columns: int
    """Columns of a tile, a multiple of 64, at most 256."""

    @property
    def bytes_per_stage(self) -> int:
        """Bytes of a stage in shared memory."""
        return STAGE_TOKENS * (self.rows + self.columns) * 2

    @property
    def stages(self) -> int:
        """Stages that fit into a worker's half of shared memory."""
        return (device.SHARED_MEMORY - device.SHARED_MEMORY_RESERVED) // (_WORKERS * self.bytes_per_stage)


def default_schedule(rows: int, columns: int) -> Schedule:
    """Returns the tiles that divide sums `[rows, columns]` and load the fewest bytes per product."""
    sizes = range(_WIDTH_UNIT, 4 * _WIDTH_UNIT + 1, _WIDTH_UNIT)
    fitting = [
        Schedule(r, c)
        for r in sizes
        for c in sizes
        if not (rows % r or columns % c) and r * c <= _MAX_ACCUMULATORS * WARPGROUP
    ]
    return min(fitting, key=lambda s: (s.bytes_per_stage / (s.rows * s.columns), s.rows))


def product_sums(sums: Array, x: Array, w: Array, stages: Stages, schedule: Schedule | None = None) -> Array:
    """Returns `sums[g] + x[t].T @ w[t]` for the tokens t of group g's stages in ascending order.

    Donated sums are updated in place.

    Args:
        sums: `[G, M, N]` float32.
        x: tokens `[T, M]`, bfloat16 or float16.
        w: tokens `[T, N]` of the same dtype.
        stages: the tokens of each group.
        schedule: tiles that divide the sums padded to multiples of 64; default: `default_schedule`'s.
    """
    groups, m, n = sums.shape
    shape = round_up(m, _WIDTH_UNIT), round_up(n, _WIDTH_UNIT)
    ref = jax.new_ref(_padded(sums, (groups, *shape)))
    kernel = _product_kernel(groups, shape, x.dtype, schedule or default_schedule(*shape))
    kernel(stages.table, _padded(x, (len(x), shape[0])), _padded(w, (len(w), shape[1])), ref)
    return jax.freeze(ref)[:, :m, :n]


def _padded(array: Array, shape: tuple[int, ...]) -> Array:
    """Returns the array with zeros appended up to the shape."""
    return jnp.pad(array, [(0, target - size) for size, target in zip(array.shape, shape, strict=True)])


def _product_kernel(groups: int, shape: tuple[int, int], dtype: Any, schedule: Schedule) -> Any:
    """Returns the kernel of `table, x, w, sums`, which updates the sums in place."""
    # The workers' rings are adjacent: worker i has the barriers and stages from i * schedule.stages on.
    barriers = _WORKERS * schedule.stages
    line = SWIZZLE_BYTES // dtype.itemsize
    transforms = (
        plgpu.TilingTransform((8, line)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(SWIZZLE_BYTES),  # pyright: ignore[reportAbstractUsage]
    )

    def operand(size: int) -> Any:
        return plgpu.SMEM((barriers, STAGE_TOKENS, size), dtype, transforms=transforms)

    def body(table: Any, x: Any, w: Any, sums: Any, **scratch: Any) -> None:
        cta = _Cta(groups, shape, schedule, (table, x, w, sums), **scratch)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == _WORKERS)
        def _producer() -> None:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

            # One loading warp for each worker: their tiles have different numbers of stages, so a common warp would let
            # one worker wait for the other.
            @plgpu.warp_map
            def _(warp: Array) -> None:
                pl.when(warp < _WORKERS)(lambda: cta.produce(warp))

        @pl.when(warpgroup < _WORKERS)
        def _consumer() -> None:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            cta.consume(warpgroup)

    return plgpu.kernel(
        body,
        out_type=[],
        grid=(device.multiprocessors(),),
        grid_names=("cta",),
        num_threads=_WORKERS + 1,
        thread_name="warpgroup",
        scratch_types={
            "rows": operand(schedule.rows),
            "columns": operand(schedule.columns),
            # The copy engine arrives for each of the two operands, the worker's warpgroup once it has multiplied.
            "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=barriers),
            "consumed": plgpu.Barrier(num_arrivals=1, num_barriers=barriers),
        },
        kernel_name="group_sums",
    )


class _Tile(NamedTuple):
    """A tile of one group's sums."""

    group: Array
    row: Array
    column: Array
    first: Array
    """The first stage of the group."""
    stages: Array
    """Its number of stages."""


@dataclasses.dataclass(frozen=True)
class _Cta:
    groups: int
    shape: tuple[int, int]
    schedule: Schedule
    operands: tuple[Any, Any, Any, Any]
    """The table, both arrays of tokens and the sums, in device memory."""
    rows: Any
    """Stages of x in shared memory, the first worker's first."""
    columns: Any
    """Stages of w."""
    loaded: Any
    """A barrier for each stage: its copies have arrived."""
    consumed: Any
    """A barrier for each stage: it may be overwritten."""

    def each_tile(self, worker: Array, visit: Callable[[_Tile, Array], None]) -> Array:
        """Calls `visit(tile, stages before it)` for every tile of a worker, and returns the number of all its
        stages."""
        table, tiles_of_row = self.operands[0], self.shape[1] // self.schedule.columns
        tiles = self.shape[0] // self.schedule.rows * tiles_of_row
        workers = _WORKERS * device.multiprocessors()
        begin = lax.axis_index("cta") * _WORKERS + worker
        count = lax.div(jnp.maximum(table[0] * tiles - begin + (workers - 1), 0), jnp.int32(workers))

        def step(index: Array, before: Array) -> Array:
            index = begin + index * workers
            group, first, number = Stages.at(table, self.groups, lax.div(index, jnp.int32(tiles)))
            index = lax.rem(index, jnp.int32(tiles))
            row, column = lax.div(index, jnp.int32(tiles_of_row)), lax.rem(index, jnp.int32(tiles_of_row))
            visit(_Tile(group, row * self.schedule.rows, column * self.schedule.columns, first, number), before)
            return before + number

        return lax.fori_loop(0, count, step, jnp.int32(0))

    def slot(self, worker: Array, stage: Array) -> Array:
        """Returns the slot of a worker's stage in shared memory; stages are counted over all its tiles."""
        return worker * self.schedule.stages + lax.rem(stage, jnp.int32(self.schedule.stages))

    def produce(self, worker: Array) -> None:
        """Loads the stages of a worker's tiles, and waits until they are consumed."""
        _, x, w, _ = self.operands

        def visit(tile: _Tile, before: Array) -> None:
            @pl.loop(0, tile.stages)
            def _(stage: Array) -> None:
                slot = self.slot(worker, before + stage)

                @pl.when(before + stage >= self.schedule.stages)
                def _() -> None:
                    plgpu.barrier_wait(self.consumed.at[slot])

                tokens, loaded = pl.ds((tile.first + stage) * STAGE_TOKENS, STAGE_TOKENS), self.loaded.at[slot]
                rows, columns = pl.ds(tile.row, self.schedule.rows), pl.ds(tile.column, self.schedule.columns)
                plgpu.copy_gmem_to_smem(x.at[tokens, rows], self.rows.at[slot], loaded)
                plgpu.copy_gmem_to_smem(w.at[tokens, columns], self.columns.at[slot], loaded)

        stages = self.each_tile(worker, visit)

        @pl.loop(jnp.maximum(stages - self.schedule.stages, 0), stages)
        def _(stage: Array) -> None:
            plgpu.barrier_wait(self.consumed.at[self.slot(worker, stage)])

    def consume(self, worker: Array) -> None:
        """Adds the stages of a worker's tiles to their sums."""
        shape, sums = (self.schedule.rows, self.schedule.columns), self.operands[3]

        def visit(tile: _Tile, before: Array) -> None:
            # No other worker has this tile, so its sums are read and written in place without synchronization.
            place = sums.at[tile.group, pl.ds(tile.row, shape[0]), pl.ds(tile.column, shape[1])]

            def add(total: Any) -> Array:
                total[...] = plgpu.load(place, layout=plgpu.Layout.WGMMA, optimized=False)

                @pl.loop(0, tile.stages)
                def _(stage: Array) -> None:
                    slot = self.slot(worker, before + stage)
                    plgpu.barrier_wait(self.loaded.at[slot])
                    plgpu.wgmma(total, self.rows.at[slot].T, self.columns.at[slot])
                    # This stage's product stays in flight; the previous one is done, so its stage is free.
                    plgpu.wgmma_wait(1)

                    @pl.when(stage >= 1)
                    def _() -> None:
                        plgpu.barrier_arrive(self.consumed.at[self.slot(worker, before + stage - 1)])

                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(self.consumed.at[self.slot(worker, before + tile.stages - 1)])
                return total[...]

            accumulator = plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
            place[...] = pl.run_scoped(add, accumulator)

        self.each_tile(worker, visit)


def row_sums(sums: Array, x: Array, stages: Stages) -> Array:
    """Returns `sums[g]` plus the rows of group g's stages: each step's left to right, then the steps in order.

    Args:
        sums: `[G, D]` float32.
        x: tokens `[T, D]`.
        stages: the tokens of each group.
    """
    (groups, columns), width = sums.shape, max(sums.shape[1], WARPGROUP)
    layout = plgpu.Layout.WG_STRIDED(shape=(WARPGROUP,), vec_size=1)

    def body(table: Any, start: Any, x: Any, out: Any) -> None:
        group, first, number = Stages.at(table, groups, lax.axis_index("group"))
        # The last CTA of a group shifts back to a whole warpgroup: two CTAs then write the same bits to some columns.
        across = pl.ds(jnp.minimum(lax.axis_index("column") * WARPGROUP, width - WARPGROUP), WARPGROUP)

        def add(stage: Array, total: Array) -> Array:
            token = (first + stage) * STAGE_TOKENS
            # All loads of a stage are issued before the first addition needs one.
            rows = [
                plgpu.load(x.at[token + row, across], layout=layout, optimized=False) for row in range(STAGE_TOKENS)
            ]
            wide = [row.astype(ACCUMULATOR) for row in rows]
            steps = [wide[i : i + WEIGHT_GRADIENT_TOKENS] for i in range(0, STAGE_TOKENS, WEIGHT_GRADIENT_TOKENS)]
            return functools.reduce(jnp.add, [functools.reduce(jnp.add, step) for step in steps], total)

        total = plgpu.load(start.at[group, across], layout=layout, optimized=False)
        out[group, across] = lax.fori_loop(0, number, add, total)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((groups, width), ACCUMULATOR),
        grid=(groups, ceil_div(width, WARPGROUP)),
        grid_names=("group", "column"),
        kernel_name="group_row_sums",
        compiler_params=NO_AUTO_BARRIERS,
    )(stages.table, _padded(sums, (groups, width)), _padded(x, (len(x), width)))[:, :columns]
