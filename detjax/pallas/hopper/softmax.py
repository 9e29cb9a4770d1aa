"""Softmax, log-softmax and logsumexp on Hopper GPUs (Mosaic GPU): every logit is read from device memory once.

A row does not fit into one SM's shared memory, so a cluster of CTAs holds it: each CTA keeps its blocks in SMEM, sends
their maxima and sums to its peers, merges those of the whole row itself and writes its own part of the result. Rows
that no cluster can hold are read twice. In gradients the sums of rows are computed here; the arithmetic on single
elements around them is XLA's, which has nothing to choose there.
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

from detjax.contract import ACCUMULATOR, LOG2_E, SOFTMAX_BLOCK
from detjax.pallas.hopper import device
from detjax.pallas.hopper.row_stream import (
    COMPILER_PARAMS,
    PART,
    SMEM_OF_CTA,
    SMEM_OF_SM,
    SMEM_RESERVED,
    Ring,
    blocks_of_row,
    each,
    fold_blocks,
    for_each_row,
    padded,
    parts_of_block,
    ring_types,
    stream_blocks,
)
from detjax.portable.tiles import flat_rows

MOST_CTAS: Final = 8
"""In a cluster that every Hopper GPU can place."""
MOST_SLOTS: Final = 32
"""As many barriers as one group has."""

LOWEST: Final = float(jnp.finfo(ACCUMULATOR).min)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the work is spread; no bit depends on it."""

    cluster: int
    """CTAs that hold a row together. 0: none do, and a row is read for its statistics and again to be written."""
    slots: int
    """Parts of `PART` elements that a CTA has room for."""
    grid: int
    """Clusters, or CTAs if there are none; each takes every grid-th row, or block."""
    exchange: Literal["shared", "global"] = "shared"
    """Where the CTAs of a cluster leave statistics for each other. "global", device memory, is for Pallas' interpreter,
    which has no stores into another CTA's SMEM; a device orders such loads and stores too loosely."""

    def __post_init__(self) -> None:
        if not 0 <= self.cluster <= MOST_CTAS:
            raise ValueError(f"Schedule: cluster is {self.cluster}; accepted: 0 to {MOST_CTAS}")
        if not 2 <= self.slots <= MOST_SLOTS:
            raise ValueError(f"Schedule: slots is {self.slots}; accepted: 2 to {MOST_SLOTS}")
        if self.grid < 1:
            raise ValueError(f"Schedule: grid is {self.grid}; accepted: 1 and more")


def schedule_for(x: Array | jax.ShapeDtypeStruct) -> Schedule:
    """The schedule for rows `[M, V]`."""
    rows, width = x.shape
    blocks = blocks_of_row(width)
    # Several CTAs of different clusters on one SM: one loads while another computes or writes.
    for ctas_of_sm in (4, 2, 1) if x.dtype.itemsize == 2 else (2, 1):
        free = min(SMEM_OF_SM // ctas_of_sm, SMEM_OF_CTA) - SMEM_RESERVED
        slots = min(free // (PART * x.dtype.itemsize), MOST_SLOTS)
        fitting = [
            Schedule(cluster, slots, min(rows, device.resident_clusters(cluster, ctas_of_sm)))
            for cluster in range(1, min(blocks, MOST_CTAS) + 1)
            if -(-blocks // cluster) * parts_of_block(width) <= slots
        ]
        if fitting:
            return min(fitting, key=lambda schedule: _cost(schedule, rows, blocks * parts_of_block(width)))
    return streaming_schedule(x)


def _cost(schedule: Schedule, rows: int, parts: int) -> tuple[float, int]:
    """What makes one schedule that holds rows worse than another."""
    # Clusters load together and write together: the last turn takes as long as the others, however few rows it has. A
    # turn is shorter the more CTAs share a row, until the chip is full.
    turns = -(-rows // schedule.grid)
    time = turns * max(schedule.grid, device.multiprocessors() / schedule.cluster)
    # Room for the beginning of the next row keeps memory busy while statistics are exchanged.
    free = schedule.slots - -(-parts // schedule.cluster)
    return round(time / rows, 1), -free if turns > 1 else schedule.cluster


def streaming_schedule(x: Array | jax.ShapeDtypeStruct) -> Schedule:
    """The schedule for reading rows `[M, V]` without keeping them."""
    rows, width = x.shape
    ctas_of_sm = 6
    slots = 32 * 1024 // (PART * x.dtype.itemsize)
    return Schedule(0, slots, min(rows * blocks_of_row(width), device.multiprocessors() * ctas_of_sm))


def softmax(x: Array, schedule: Schedule | None = None) -> Array:
    """`[*B, V]` float32."""
    return _normalized("softmax", x, schedule)


def log_softmax(x: Array, schedule: Schedule | None = None) -> Array:
    """`[*B, V]` float32."""
    return _normalized("log_softmax", x, schedule)


def logsumexp(x: Array, schedule: Schedule | None = None) -> Array:
    """`[*B]` float32."""
    rows = padded(flat_rows(x))
    _, _, y = row_statistics(rows, schedule or streaming_schedule(rows))
    return y.reshape(x.shape[:-1])


def softmax_backward(y: Array, dy: Array) -> Array:
    """Gradient of softmax's input, float32, from its output."""
    # Behind the barrier the products are rounded before they are added.
    return y * (dy - row_sums(lax.optimization_barrier(y * dy)))


def log_softmax_backward(y: Array, dy: Array) -> Array:
    """Gradient of log-softmax's input, float32, from its output."""
    # A maximum with the lowest number keeps the product from being contracted with the subtraction.
    return dy - jnp.maximum(jnp.exp(y) * row_sums(dy), LOWEST)


def logsumexp_backward(x: Array, y: Array, dy: Array) -> Array:
    """Gradient of logsumexp's input, float32, from its input and output."""
    return jnp.exp(x.astype(ACCUMULATOR) - y[..., None]) * dy[..., None]


def _normalized(operation: str, x: Array, schedule: Schedule | None) -> Array:
    rows = padded(flat_rows(x))
    schedule = schedule or schedule_for(rows)
    if schedule.cluster:
        y = _write_held_rows(operation, rows, schedule)
    else:
        y = _write_rows(operation, rows, schedule)
    return y[:, : x.shape[-1]].reshape(x.shape)


# --- what the bits are ------------------------------------------------------------------------------------------------


def block_statistics(chunks: list[Array]) -> tuple[Array, Array]:
    """Maximum and sum, float32 scalars, of a block that is given as arrays of `LANES` elements."""
    m = jnp.maximum(jnp.max(functools.reduce(jnp.maximum, chunks)), LOWEST)
    # Lanes are added here one after another, and in the order of LANE_GROUP and of pairs by the sum over a warpgroup's
    # threads, each of which holds LANE_GROUP of them.
    return m, jnp.sum(functools.reduce(jnp.add, [exp_difference(chunk, m) for chunk in chunks]))


def exp_difference(x: Array, m: Array) -> Array:
    """`exp(x - m)` as the contract has it."""
    return jnp.exp2((x - m) * LOG2_E)


def merged_statistics(read: Callable[[Any], tuple[Array, Array]], blocks: int) -> tuple[Array, Array]:
    """Maximum and sum of a row from those of its blocks, scalars."""
    m = fold_blocks(blocks, lambda b, m: jnp.maximum(m, read(b)[0]), jnp.float32(LOWEST))

    def add(block: Any, total: Array) -> Array:
        m_b, l_b = read(block)
        # The product is not negative, and its maximum with 0 keeps ptxas from contracting it with the addition.
        return total + jnp.maximum(l_b * exp_difference(m_b, m), 0.0)

    return m, fold_blocks(blocks, add, jnp.float32(0))


def row_constant(operation: str, total: Array) -> Array:
    """What every element of a row is multiplied by, or has subtracted, in the end."""
    return 1 / total if operation == "softmax" else jnp.log(total)


def finished(operation: str, x: Array, m: Array, constant: Array) -> Array:
    """Elements of the result."""
    return exp_difference(x, m) * constant if operation == "softmax" else (x - m) - constant


# --- rows held by a cluster -------------------------------------------------------------------------------------------


def _write_held_rows(operation: str, x: Array, schedule: Schedule) -> Array:
    """`[M, V]` float32 of rows that a cluster's SMEM can hold."""
    rows, width = x.shape
    blocks = blocks_of_row(width)
    ctas = schedule.cluster
    held = -(-blocks // ctas) * parts_of_block(width)
    if ctas > blocks or held > schedule.slots:
        raise ValueError(
            f"{operation}: a cluster of {ctas} CTAs with {schedule.slots} slots is given rows of {blocks} blocks; "
            f"accepted: at most {blocks} CTAs, and {held} slots for that many"
        )
    through_gmem = ctas > 1 and schedule.exchange == "global"

    def body(x_gmem: Any, y_gmem: Any, *refs: Any) -> None:
        if through_gmem:
            statistics, x_smem, full, arrived = refs
            meet = functools.partial(_meet_in_gmem, arrived)
        else:
            x_smem, full, statistics = refs
            meet = _meet
        first = lax.axis_index("cluster")
        cta = lax.axis_index("cta") if ctas > 1 else jnp.int32(0)
        own = lax.div(blocks - cta + (ctas - 1), ctas)
        count = lax.div(rows - first + (schedule.grid - 1), schedule.grid)

        def locate(item: Any) -> tuple[Any, Any]:
            return first + lax.div(item, own) * schedule.grid, cta + lax.rem(item, own) * ctas

        ring = Ring(x_gmem, x_smem, full, count * own, locate)
        ring.start()

        def row_step(turn: Any) -> None:
            row = first + turn * schedule.grid
            # Two sets of statistics: a peer may be one row ahead.
            place = row if through_gmem else lax.rem(turn, 2)

            def block_step(i: Any) -> None:
                item, block = turn * own + i, cta + i * ctas
                m, total = ring.by_size(block, lambda size: block_statistics(ring.chunks(item, size)))
                if ctas > 1 and not through_gmem:
                    _send(statistics.at[place, block], m, total, ctas)
                else:
                    statistics[place, block, 0] = m
                    statistics[place, block, 1] = total

            each(own, block_step)
            if ctas > 1:
                meet()
            m, total = merged_statistics(lambda b: (statistics[place, b, 0], statistics[place, b, 1]), blocks)
            constant = row_constant(operation, total)

            def write_step(i: Any) -> None:
                item, block = turn * own + i, cta + i * ctas

                def write(size: int) -> None:
                    _write_block(operation, ring, item, size, y_gmem.at[row], block, m, constant)

                ring.by_size(block, write)

            each(own, write_step)

        each(count, row_step)

    out = [jax.ShapeDtypeStruct(x.shape, ACCUMULATOR)]
    scratch = ring_types(x, schedule.slots)
    if through_gmem:
        out.append(jax.ShapeDtypeStruct((rows, blocks, 2), ACCUMULATOR))
        scratch.append(plgpu.ClusterBarrier(collective_axes=("cta",)))
    else:
        scratch.append(plgpu.SMEM((2, blocks, 2), ACCUMULATOR))
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


def _write_block(
    operation: str, ring: Ring, item: Any, size: int, y_gmem: Any, block: Any, m: Array, constant: Array
) -> None:
    """Writes a block of the result and frees its slots."""
    for part in range(ring.parts):
        if (count := min(PART, size - part * PART)) > 0:
            y = finished(operation, ring.elements(item, part, 0, count), m, constant)
            y_gmem[pl.ds(block * SOFTMAX_BLOCK + part * PART, count)] = y
        ring.release(item, part)  # also where it was left empty: a later block may be due there


def _send(place: Any, m: Array, total: Array, ctas: int) -> None:
    """Stores a block's statistics to the same place in the SMEM of every CTA of the cluster."""

    def send(_: Any, place: Any, m: Any, total: Any) -> None:
        thread = mgpu.thread_idx()
        is_peer = arith.cmpi(arith.CmpIPredicate.ult, thread, mgpu.c(ctas, thread.type))
        with mgpu.when(is_peer):
            mgpu.inline_ptx(
                "st.shared::cluster.v2.f32 [$0], {$1, $2};",
                mgpu.get_cluster_ptr(mgpu.memref_ptr(place), thread, generic=False),
                m.registers.item(),
                total.registers.item(),
                has_side_effects=True,
            )

    splat = plgpu.Layout.WG_SPLAT
    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat, splat))(send)
    inlined(place, m, total)


def _meet() -> None:
    """Returns when the whole cluster has come here, with all that its CTAs have stored visible to each."""

    def meet(_: Any) -> None:
        nvvm.cluster_arrive(aligned=True)
        nvvm.cluster_wait(aligned=True)

    inlined: Any = plgpu.inline_mgpu()(meet)
    inlined()


def _meet_in_gmem(barrier: Any) -> None:
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


# --- rows read in pieces ----------------------------------------------------------------------------------------------


def blocks_statistics(x: Array, schedule: Schedule) -> Array:
    """Maximum and sum of every block of rows `[M, V]`: `[M, blocks, 2]` float32."""

    def step(ring: Ring, item: Any, row: Any, block: Any, out: Any) -> None:
        m, total = ring.by_size(block, lambda size: block_statistics(ring.chunks(item, size)))
        for part in range(ring.parts):
            ring.release(item, part)
        out[row, block, 0] = m
        out[row, block, 1] = total

    out = jax.ShapeDtypeStruct((x.shape[0], blocks_of_row(x.shape[1]), 2), ACCUMULATOR)
    return stream_blocks("block_statistics", x, step, out, slots=schedule.slots, grid=schedule.grid)


def row_statistics(x: Array, schedule: Schedule) -> tuple[Array, Array, Array]:
    """Maximum, sum and logsumexp, each `[M]` float32, of rows `[M, V]`."""
    statistics = blocks_statistics(x, schedule)
    rows, blocks, _ = statistics.shape

    def body(row: Any, statistics: Any, m_gmem: Any, total_gmem: Any, logsumexp_gmem: Any) -> None:
        m, total = merged_statistics(lambda b: (statistics[row, b, 0], statistics[row, b, 1]), blocks)
        m_gmem[row] = m
        total_gmem[row] = total
        logsumexp_gmem[row] = m + row_constant("logsumexp", total)

    out = [jax.ShapeDtypeStruct((rows,), ACCUMULATOR)] * 3
    m, total, logsumexp = for_each_row("row_statistics", rows, body, out, statistics)
    return m, total, logsumexp


def row_sums(x: Array, schedule: Schedule | None = None) -> Array:
    """Sums `[*B, 1]` of rows `[*B, V]`, both float32, as gradients need them."""
    rows = padded(flat_rows(x), fill=0.0)
    schedule = schedule or streaming_schedule(rows)

    def step(ring: Ring, item: Any, row: Any, block: Any, out: Any) -> None:
        def of_size(size: int) -> Array:
            return jnp.sum(functools.reduce(jnp.add, ring.chunks(item, size, fill=0.0)))

        total = ring.by_size(block, of_size)
        for part in range(ring.parts):
            ring.release(item, part)
        out[row, block] = total

    def merge(row: Any, sums: Any, out: Any) -> None:
        out[row] = fold_blocks(sums.shape[1], lambda block, total: total + sums[row, block], jnp.float32(0))

    shape = rows.shape[0], blocks_of_row(rows.shape[1])
    out = jax.ShapeDtypeStruct(shape, ACCUMULATOR)
    sums = stream_blocks("block_sums", rows, step, out, slots=schedule.slots, grid=schedule.grid)
    out = jax.ShapeDtypeStruct(shape[:1], ACCUMULATOR)
    return for_each_row("row_sums", shape[0], merge, out, sums).reshape(*x.shape[:-1], 1)


def _write_rows(operation: str, x: Array, schedule: Schedule) -> Array:
    """`[M, V]` float32 of rows of any length."""
    m, total, _ = row_statistics(x, schedule)

    def step(ring: Ring, item: Any, row: Any, block: Any, m_gmem: Any, total_gmem: Any, y_gmem: Any) -> None:
        m, constant = m_gmem[row], row_constant(operation, total_gmem[row])

        def write(size: int) -> None:
            ring.wait(item, size)
            _write_block(operation, ring, item, size, y_gmem.at[row], block, m, constant)

        ring.by_size(block, write)

    out = jax.ShapeDtypeStruct(x.shape, ACCUMULATOR)
    return stream_blocks(operation, x, step, out, m, total, slots=schedule.slots, grid=schedule.grid)
