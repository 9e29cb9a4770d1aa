"""Softmax, log-softmax and logsumexp on Hopper GPUs (Mosaic GPU): every logit is read from device memory once.

A row does not fit into the shared memory of one multiprocessor, so a cluster of CTAs holds it: each CTA keeps its
blocks in shared memory, sends their maxima and sums to the other CTAs, merges the statistics of the whole row itself
and writes its part of the result. Rows that no cluster can hold are read twice. For gradients, a kernel computes row
sums.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final, Literal

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir.dialects import arith, nvvm

from detjax.contract import ACCUMULATOR, SOFTMAX_BLOCK
from detjax.operands.numerics import LOWEST, ceil_div, flat_rows
from detjax.pallas import softmax_formulas as formulas
from detjax.pallas.hopper import device
from detjax.pallas.hopper.device import MAX_CLUSTER
from detjax.pallas.hopper.mosaic import no_twin, primitive
from detjax.pallas.hopper.row_stream import (
    COMPILER_PARAMS,
    MAX_SLOTS,
    PART,
    RowStream,
    StreamedBlock,
    blocks_per_row,
    fold_blocks,
    for_each_block,
    for_each_row,
    loop,
    padded,
    parts_per_block,
    scratch_types,
    slots_that_fit,
)
from detjax.pallas.nvidia import has_copy_engine
from detjax.pallas.softmax_formulas import Operation, exp_difference, finished, row_constant


@dataclasses.dataclass(frozen=True)
class Problem:
    """The rows of a kernel of this module, or of another one that streams rows."""

    rows: int
    width: int
    dtype: jnp.dtype
    rewritten: bool
    """True if the result has a number for every element, so that it pays to hold rows until their sums are known."""

    @classmethod
    def for_rows(cls, x: Array | jax.ShapeDtypeStruct, *, rewritten: bool) -> "Problem":
        """Returns the problem for rows `[M, V]`."""
        rows, width = x.shape
        return cls(rows, width, jnp.dtype(x.dtype), rewritten)

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return blocks_per_row(self.width)

    def slots_held_by(self, ctas: int) -> int:
        """Returns the slots of a row in each CTA of a cluster that holds it."""
        return ceil_div(self.blocks, ctas) * parts_per_block(self.width)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The distribution of work over CTAs; no bit depends on it."""

    cluster: int
    """CTAs that hold a row together. 0: rows are read once for their statistics and again for the result."""
    slots: int
    """Parts of `PART` elements that fit into a CTA's ring."""
    grid: int
    """Number of clusters; each takes every grid-th row. Without clusters, number of CTAs; each takes every grid-th
    block."""
    exchange: Literal["shared", "global"] = "shared"
    """Memory by which the CTAs of a cluster exchange statistics. "global", device memory, is only for Pallas'
    interpreter, which cannot store to another CTA's shared memory; a device orders such loads and stores too
    loosely."""

    def __post_init__(self) -> None:
        """Raises ValueError if the schedule fits no problem."""
        if not 0 <= self.cluster <= MAX_CLUSTER:
            raise ValueError(f"Schedule: cluster is {self.cluster}; accepted: 0 to {MAX_CLUSTER}")
        if not 2 <= self.slots <= MAX_SLOTS:
            raise ValueError(f"Schedule: slots is {self.slots}; accepted: 2 to {MAX_SLOTS}")
        if self.grid < 1:
            raise ValueError(f"Schedule: grid is {self.grid}; accepted: 1 and more")
        if self.exchange not in ("shared", "global"):
            raise ValueError(f"Schedule: exchange is {self.exchange!r}; accepted: 'shared', 'global'")

    def check(self, problem: Problem) -> None:
        """Raises ValueError if a cluster of this schedule cannot hold a row of the problem."""
        if not self.cluster:
            return
        needed = problem.slots_held_by(self.cluster)
        if self.cluster > problem.blocks or needed > self.slots:
            raise ValueError(
                f"Schedule: a cluster of {self.cluster} CTAs with {self.slots} slots each for rows of {problem.blocks} "
                f"blocks; accepted: at most {problem.blocks} CTAs, and at least {needed} slots for {self.cluster} CTAs"
            )


def default_schedule(problem: Problem) -> Schedule:
    """Returns the schedule for a problem."""
    itemsize, holds = problem.dtype.itemsize, problem.rewritten and has_copy_engine()
    # With several CTAs of different clusters on a multiprocessor, one loads while another computes or writes.
    for ctas_per_multiprocessor in ((4, 2, 1) if itemsize == 2 else (2, 1)) if holds else ():
        slots = slots_that_fit(ctas_per_multiprocessor, itemsize)
        fitting = [
            Schedule(cluster, slots, min(problem.rows, device.resident_clusters(cluster, ctas_per_multiprocessor)))
            for cluster in range(1, min(problem.blocks, MAX_CLUSTER) + 1)
            if problem.slots_held_by(cluster) <= slots
        ]
        if fitting:
            return min(fitting, key=lambda schedule: _cost(schedule, problem))
    ctas_per_multiprocessor = 6
    slots = 32 * 1024 // (PART * itemsize)
    return Schedule(0, slots, min(problem.rows * problem.blocks, device.multiprocessors() * ctas_per_multiprocessor))


def _cost(schedule: Schedule, problem: Problem) -> tuple[float, int]:
    """Returns the relative cost of a schedule that holds rows; ties go to the second number."""
    # All clusters load at the same time and write at the same time, so the last wave takes as long as the others,
    # however few rows it has. A wave is shorter the more CTAs share a row, until the chip is full.
    waves = ceil_div(problem.rows, schedule.grid)
    time = waves * max(schedule.grid, device.multiprocessors() / schedule.cluster)
    # Free slots take the start of the next row, which keeps memory busy while statistics are exchanged.
    parts = problem.blocks * parts_per_block(problem.width)
    free = schedule.slots - ceil_div(parts, schedule.cluster)
    return round(time / problem.rows, 1), -free if waves > 1 else schedule.cluster


def softmax(x: Array, schedule: Schedule | None = None) -> Array:
    """Returns the softmax of rows `[*B, V]`: float32 `[*B, V]`."""
    return _normalized("softmax", x, schedule)


def log_softmax(x: Array, schedule: Schedule | None = None) -> Array:
    """Returns the log-softmax of rows `[*B, V]`: float32 `[*B, V]`."""
    return _normalized("log_softmax", x, schedule)


def logsumexp(x: Array, schedule: Schedule | None = None) -> Array:
    """Returns the logsumexp of rows `[*B, V]`: float32 `[*B]`."""
    rows = padded(flat_rows(x))
    *_, y = row_statistics(rows, schedule or default_schedule(Problem.for_rows(rows, rewritten=False)))
    return y.reshape(x.shape[:-1])


def softmax_backward(y: Array, dy: Array) -> Array:
    """Returns the gradient of softmax's input, float32, from its result."""
    return formulas.softmax_gradient(y, dy, row_sums)


def log_softmax_backward(y: Array, dy: Array) -> Array:
    """Returns the gradient of log-softmax's input, float32, from its result."""
    return formulas.log_softmax_gradient(y, dy, row_sums)


logsumexp_backward: Final = formulas.logsumexp_gradient


def log_softmax_statistics(x: Array) -> tuple[Array, Array]:
    """Returns the two numbers that `log_softmax` subtracts, in this order, from rows `[*B, V]`: float32 `[*B]` each."""
    rows = padded(flat_rows(x))
    m, _, constant, _ = row_statistics(rows, default_schedule(Problem.for_rows(rows, rewritten=False)))
    return m.reshape(x.shape[:-1]), constant.reshape(x.shape[:-1])


def _normalized(operation: Operation, x: Array, schedule: Schedule | None) -> Array:
    """Returns the softmax or log-softmax of rows."""
    rows = padded(flat_rows(x))
    problem = Problem.for_rows(rows, rewritten=True)
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)
    y = _hold_rows(operation, rows, schedule) if schedule.cluster else _read_rows_twice(operation, rows, schedule)
    return y[:, : x.shape[-1]].reshape(x.shape)


# --- statistics -------------------------------------------------------------------------------------------------------


def block_statistics(chunks: list[Array]) -> tuple[Array, Array]:
    """Returns maximum and sum, float32 scalars, of a block given as arrays `[LANES]` in ascending order."""
    m = jnp.maximum(jnp.max(functools.reduce(jnp.maximum, chunks)), LOWEST)
    # Adding chunks adds each lane's elements in ascending order. The sum over the warpgroup then has the contract's
    # order because each thread holds LANE_GROUP neighbours in one register each; see `rows._piece_sums`.
    return m, jnp.sum(functools.reduce(jnp.add, [exp_difference(chunk, m) for chunk in chunks]))


def merged_statistics(read: Callable[[Any], tuple[Array, Array]], blocks: int) -> tuple[Array, Array]:
    """Returns maximum and sum of a row, scalars, from the statistics `read(block)` of its blocks."""
    m = fold_blocks(blocks, lambda block, m: jnp.maximum(m, read(block)[0]), jnp.float32(LOWEST))

    def add(block: Any, total: Array) -> Array:
        block_m, block_total = read(block)
        # The product is not negative, so the maximum keeps its value; it keeps ptxas from fusing product and addition.
        return total + jnp.maximum(block_total * exp_difference(block_m, m), 0.0)

    return m, fold_blocks(blocks, add, jnp.float32(0))


@dataclasses.dataclass(frozen=True)
class _RowWriter:
    """Writes the result of a row whose statistics are known."""

    operation: Operation
    y: Any
    """Reference to the result's rows."""
    m: Array
    constant: Array

    def write(self, block: StreamedBlock, size: int) -> None:
        """Writes the result of a block that has arrived, part by part, and releases each part."""
        y = self.y.at[block.row]
        for part in range(block.stream.parts_per_block):
            if (count := min(PART, size - part * PART)) > 0:
                elements = finished(self.operation, block.load(part, 0, count), self.m, self.constant)
                y[pl.ds(block.index * SOFTMAX_BLOCK + part * PART, count)] = elements
            block.stream.release(block.item, part)  # an empty part too: its slot may be for a part of a later block


# --- rows held by a cluster -------------------------------------------------------------------------------------------


def _hold_rows(operation: Operation, x: Array, schedule: Schedule) -> Array:
    """Returns `[M, V]` float32 for rows that the shared memory of a cluster can hold."""
    rows, width = x.shape
    ctas = schedule.cluster
    through_memory = ctas > 1 and schedule.exchange == "global"

    def body(x_gmem: Any, y_gmem: Any, *refs: Any) -> None:
        if through_memory:
            statistics, ring, loaded, arrived = refs
            exchange = _GlobalExchange(statistics, arrived)
        else:
            ring, loaded, statistics = refs
            exchange = _SharedExchange(statistics, ctas) if ctas > 1 else _Statistics(statistics)
        _ClusterCta(operation, schedule, x_gmem, y_gmem, exchange).run(ring, loaded)

    out = [jax.ShapeDtypeStruct(x.shape, ACCUMULATOR)]
    scratch = scratch_types(x, schedule.slots)
    if through_memory:
        out.append(jax.ShapeDtypeStruct((rows, blocks_per_row(width), 2), ACCUMULATOR))
        scratch.append(plgpu.ClusterBarrier(collective_axes=("cta",)))
    else:
        scratch.append(plgpu.SMEM((2, blocks_per_row(width), 2), ACCUMULATOR))
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch,
        grid=(schedule.grid,),
        grid_names=("cluster",),
        cluster=(ctas,) if ctas > 1 else (),
        cluster_names=("cta",) if ctas > 1 else (),
        compiler_params=COMPILER_PARAMS,
        kernel_name=f"{operation}_{ctas}_ctas",
    )(x)[0]


class _Statistics:
    """Maxima and sums `[sets, blocks, 2]` of the blocks of rows, in shared memory, if one CTA holds a row."""

    def __init__(self, statistics: Any) -> None:
        self.statistics = statistics

    def set_of(self, row: Any, turn: Any) -> Any:
        """Returns the set for the CTA's turn-th row.

        There are two sets because another CTA may already store the statistics of the next row while this one still
        reads. It cannot be two rows ahead: there `meet` waits for this CTA.
        """
        return lax.rem(turn, 2)

    def store(self, index: Any, block: Any, m: Array, total: Array) -> None:
        """Stores a block's statistics for all CTAs that hold the row."""
        self.statistics[index, block, 0] = m
        self.statistics[index, block, 1] = total

    def meet(self) -> None:
        """Waits until all CTAs that hold the row have stored the statistics of their blocks."""

    def read(self, index: Any, block: Any) -> tuple[Array, Array]:
        return self.statistics[index, block, 0], self.statistics[index, block, 1]


class _SharedExchange(_Statistics):
    """Statistics that each CTA of a cluster stores to the shared memory of all of them."""

    def __init__(self, statistics: Any, ctas: int) -> None:
        super().__init__(statistics)
        self.ctas = ctas

    def store(self, index: Any, block: Any, m: Array, total: Array) -> None:
        _store_in_all_ctas(self.statistics.at[index, block], m, total, ctas=self.ctas)

    def meet(self) -> None:
        _meet()


class _GlobalExchange(_Statistics):
    """Statistics `[rows, blocks, 2]` in device memory, which Pallas' interpreter can model; see `Schedule.exchange`."""

    def __init__(self, statistics: Any, arrived: Any) -> None:
        super().__init__(statistics)
        self.arrived = arrived

    def set_of(self, row: Any, turn: Any) -> Any:
        return row

    def meet(self) -> None:
        plgpu.barrier_arrive(self.arrived)
        plgpu.barrier_wait(self.arrived)


_SPLAT: Final = plgpu.Layout.WG_SPLAT


@primitive(twin=no_twin("_store_in_all_ctas"), args=(plgpu.RefType(), _SPLAT, _SPLAT))
def _store_in_all_ctas(pair: Any, m: Any, total: Any, *, ctas: int) -> None:
    """Stores a block's maximum and sum at the same place in the shared memory of every CTA of the cluster.

    One thread stores for each CTA. All CTAs push their statistics, so that after the barrier each of them merges a row
    from its own shared memory, without loads over the cluster's network.
    """
    thread = mgpu.thread_idx()
    has_cta = arith.cmpi(arith.CmpIPredicate.ult, thread, mgpu.c(ctas, thread.type))
    with mgpu.when(has_cta):
        mgpu.inline_ptx(
            "st.shared::cluster.v2.f32 [$0], {$1, $2};",
            mgpu.get_cluster_ptr(mgpu.memref_ptr(pair), thread, generic=False),
            m.registers.item(),
            total.registers.item(),
            has_side_effects=True,
        )


@primitive(twin=no_twin("_meet"))
def _meet() -> None:
    """Waits for all CTAs of the cluster, and makes their stores visible to one another.

    It is also the last access to another CTA's memory: what follows reads the CTA's own, so a CTA may exit early.
    """
    # By default the arrival releases the thread's stores, and the wait acquires the other CTAs' stores.
    nvvm.cluster_arrive(aligned=True)
    nvvm.cluster_wait(aligned=True)


class _ClusterCta:
    """One CTA of a cluster that holds rows, with every `cluster`-th block of a row."""

    def __init__(self, operation: Operation, schedule: Schedule, x: Any, y: Any, statistics: _Statistics) -> None:
        self.operation: Operation = operation
        self.schedule = schedule
        self.x, self.y = x, y
        self.statistics = statistics
        self.ctas, self.blocks = schedule.cluster, blocks_per_row(x.shape[1])
        self.first = lax.axis_index("cluster")
        self.cta = lax.axis_index("cta") if self.ctas > 1 else jnp.int32(0)
        self.blocks_held = lax.div(self.blocks - self.cta + (self.ctas - 1), self.ctas)

    def run(self, ring: Any, loaded: Any) -> None:
        """Normalizes every grid-th row, starting at the cluster's index."""
        count = lax.div(self.x.shape[0] - self.first + (self.schedule.grid - 1), self.schedule.grid)
        stream = RowStream(self.x, ring, loaded, count * self.blocks_held, self.block_of)
        stream.start()
        loop(count, functools.partial(self.normalize_row, stream))

    def block_of(self, item: Any) -> tuple[Any, Any]:
        """Returns the row of an item of the stream, and its block within the row."""
        row = self.first + lax.div(item, self.blocks_held) * self.schedule.grid
        return row, self.cta + lax.rem(item, self.blocks_held) * self.ctas

    def normalize_row(self, stream: RowStream, turn: Any) -> None:
        """Normalizes this CTA's blocks of its turn-th row."""
        row = self.first + turn * self.schedule.grid
        index = self.statistics.set_of(row, turn)

        def own_block(i: Any) -> StreamedBlock:
            return StreamedBlock(stream, turn * self.blocks_held + i, row, self.cta + i * self.ctas)

        # Blocks are not released here: they stay in the ring until `write_block` has written them.
        def reduce_block(i: Any) -> None:
            block = own_block(i)
            m, total = block.with_size(lambda size: block_statistics(block.load_all(size)))
            self.statistics.store(index, block.index, m, total)

        loop(self.blocks_held, reduce_block)
        self.statistics.meet()
        m, total = merged_statistics(lambda block: self.statistics.read(index, block), self.blocks)
        writer = _RowWriter(self.operation, self.y, m, row_constant(self.operation, total))

        def write_block(i: Any) -> None:
            block = own_block(i)
            block.with_size(lambda size: writer.write(block, size))

        loop(self.blocks_held, write_block)


# --- rows read twice --------------------------------------------------------------------------------------------------


def blocks_statistics(x: Array, schedule: Schedule) -> Array:
    """Returns maximum and sum of every block of rows `[M, V]`: float32 `[M, blocks, 2]`."""

    def step(block: StreamedBlock, out: Any) -> None:
        m, total = block.with_size(lambda size: block_statistics(block.load_all(size)))
        block.release()
        out[block.row, block.index, 0] = m
        out[block.row, block.index, 1] = total

    out = jax.ShapeDtypeStruct((x.shape[0], blocks_per_row(x.shape[1]), 2), ACCUMULATOR)
    return for_each_block("block_statistics", step, out, x, slots=schedule.slots, grid=schedule.grid)


def row_statistics(x: Array, schedule: Schedule) -> tuple[Array, Array, Array, Array]:
    """Returns maximum, sum, the sum's logarithm and logsumexp of rows `[M, V]`: float32 `[M]` each."""
    return merged_rows(blocks_statistics(x, schedule))


def merged_rows(statistics: Array) -> tuple[Array, Array, Array, Array]:
    """Returns the result of `row_statistics` from maximum and sum of every block of rows, float32 `[M, blocks, 2]`."""
    rows, blocks, _ = statistics.shape

    def body(row: Any, statistics: Any, m_gmem: Any, total_gmem: Any, log_gmem: Any, logsumexp_gmem: Any) -> None:
        m, total = merged_statistics(lambda block: (statistics[row, block, 0], statistics[row, block, 1]), blocks)
        m_gmem[row] = m
        total_gmem[row] = total
        log = row_constant("logsumexp", total)
        log_gmem[row] = log
        logsumexp_gmem[row] = m + log

    out = [jax.ShapeDtypeStruct((rows,), ACCUMULATOR)] * 4
    m, total, log, logsumexp = for_each_row("row_statistics", rows, body, out, statistics)
    return m, total, log, logsumexp


def row_sums(x: Array, schedule: Schedule | None = None) -> Array:
    """Returns the sums `[*B, 1]` of rows `[*B, V]`, both float32, for gradients: blocks are added left to right."""
    rows = padded(flat_rows(x), fill=0.0)
    schedule = schedule or default_schedule(Problem.for_rows(rows, rewritten=False))

    def step(block: StreamedBlock, out: Any) -> None:
        total = block.with_size(lambda size: jnp.sum(functools.reduce(jnp.add, block.load_all(size, fill=0.0))))
        block.release()
        out[block.row, block.index] = total

    def merge(row: Any, sums: Any, out: Any) -> None:
        out[row] = fold_blocks(sums.shape[1], lambda block, total: total + sums[row, block], jnp.float32(0))

    shape = rows.shape[0], blocks_per_row(rows.shape[1])
    out = jax.ShapeDtypeStruct(shape, ACCUMULATOR)
    sums = for_each_block("block_sums", step, out, rows, slots=schedule.slots, grid=schedule.grid)
    out = jax.ShapeDtypeStruct(shape[:1], ACCUMULATOR)
    return for_each_row("row_sums", shape[0], merge, out, sums).reshape(*x.shape[:-1], 1)


def _read_rows_twice(operation: Operation, x: Array, schedule: Schedule) -> Array:
    """Returns `[M, V]` float32 for rows of any length: one kernel computes the statistics, another the result."""
    m, total, *_ = row_statistics(x, schedule)

    def step(block: StreamedBlock, m_gmem: Any, total_gmem: Any, y_gmem: Any) -> None:
        m, constant = m_gmem[block.row], row_constant(operation, total_gmem[block.row])
        writer = _RowWriter(operation, y_gmem, m, constant)

        def write(size: int) -> None:
            block.wait(size)
            writer.write(block, size)

        block.with_size(write)

    out = jax.ShapeDtypeStruct(x.shape, ACCUMULATOR)
    return for_each_block(operation, step, out, x, m, total, slots=schedule.slots, grid=schedule.grid)
