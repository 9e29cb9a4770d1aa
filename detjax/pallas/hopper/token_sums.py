"""Sums of rows over tokens on Hopper GPUs (Mosaic GPU): the gradients of biases and of norms' weights.

`WEIGHT_GRADIENT_TOKENS` rows make a step. A first kernel adds the rows of each step left to right, many steps at the
same time; gradients of norms do so in the kernel that has the rows anyway. A second kernel adds the steps to the sum in
sequence. This chain is the only serial part and is bound by the latency of additions, so a CTA takes few columns and
the copy engine loads their steps ahead.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, LANE_GROUP, WEIGHT_GRADIENT_TOKENS
from detjax.operands.numerics import ceil_div, round_up
from detjax.pallas.hopper.device import WARP, WARPGROUP
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS, layout
from detjax.pallas.nvidia import has_copy_engine, shared_memory

CHAIN_COLUMNS: Final = WARPGROUP
"""Columns of a CTA of the chain: one for each thread. A warp reads 32 neighbouring words of a step, one in each
bank."""

FEW_COLUMNS: Final = 32
"""Columns of a CTA if `CHAIN_COLUMNS` does not divide a row. A thread then has `LANE_GROUP` columns, and all warps
compute the same ones: on an H200 a step takes 12 ns."""

CHAIN_STEPS: Final = 64
"""Steps of one copy."""

CHAIN_SLOTS: Final = 4
"""Slots of the chain's ring: 4 x 64 steps x 128 float32 columns are 128 KiB of shared memory."""

CHAIN_LOADS: Final = 64
"""Steps that a thread reads from shared memory before it adds them, so that no addition waits for a load; 64 registers
with one column per thread."""

COLUMN_UNIT: Final = 16
"""Rows are padded to a multiple of this many columns, and beyond 128 columns to a multiple of 128."""


def token_sums(start: Array, x: Array) -> Array:
    """Returns float32 `[D]`: `start` plus all rows of `x [M, D]`, in the contract's order."""
    count, width = x.shape
    columns = round_up(width, COLUMN_UNIT if width <= WARPGROUP else WARPGROUP)
    steps = ceil_div(count, WEIGHT_GRADIENT_TOKENS)
    rows = jnp.pad(x, ((0, steps * WEIGHT_GRADIENT_TOKENS - count), (0, columns - width)))
    step_sums = _step_sums(rows.reshape(steps, WEIGHT_GRADIENT_TOKENS, columns))
    return chain(jnp.pad(start, (0, columns - width)), step_sums)[:width]


def _step_sums(x: Array) -> Array:
    """Returns the sum of each step's rows, `[steps, D]` float32, for `[steps, tokens, D]`."""
    steps, tokens, width = x.shape
    threads = math.gcd(WARP, width // LANE_GROUP)
    columns = LANE_GROUP * threads
    together = min(WARPGROUP // threads, 1 << (steps.bit_length() - 1))
    pieces = layout(together, threads)

    def body(ref: Any, out: Any) -> None:
        # The last CTA shifts back so that all its steps exist: two CTAs then write the same bits to some.
        first = jnp.minimum(lax.axis_index("step") * together, steps - together)
        here, across = pl.ds(first, together), pl.ds(lax.axis_index("column") * columns, columns)
        rows = [plgpu.load(ref.at[here, token, across], layout=pieces, optimized=False) for token in range(tokens)]
        out[here, across] = functools.reduce(jnp.add, [row.astype(ACCUMULATOR) for row in rows])

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((steps, width), ACCUMULATOR),
        grid=(ceil_div(steps, together), width // columns),
        grid_names=("step", "column"),
        kernel_name="token_sums_of_steps",
        compiler_params=NO_AUTO_BARRIERS,
    )(x)


def chain(start: Array, step_sums: Array) -> Array:
    """Returns `start [D]` plus the rows of `step_sums [steps, D]`, added in order."""
    return chains([start], [step_sums])[0]


def chains(starts: Sequence[Array], step_sums: Sequence[Array]) -> tuple[Array, ...]:
    """Returns `chain` of several sums of one width, computed at the same time."""
    width = starts[0].size
    if width % CHAIN_COLUMNS == 0:
        columns, piece = CHAIN_COLUMNS, plgpu.Layout.WG_STRIDED(shape=(CHAIN_COLUMNS,), vec_size=1)
    else:
        columns = math.gcd(FEW_COLUMNS, width)
        piece = layout(1, columns // LANE_GROUP).reduce(0)
    copies = [ceil_div(len(steps), CHAIN_STEPS) for steps in step_sums]
    slots = min(CHAIN_SLOTS, min(copies))
    if not has_copy_engine() or slots * CHAIN_STEPS * columns * 4 > shared_memory():
        return _unstreamed_chains(starts, step_sums, columns, piece)

    def body(*refs: Any) -> None:
        start_refs, steps_refs, out_refs = (refs[i : i + len(copies)] for i in range(0, 3 * len(copies), len(copies)))
        ring, loaded = refs[-2:]
        across = pl.ds(lax.axis_index("column") * columns, columns)

        def run(group: int) -> None:
            def load(copy: Any) -> None:
                slot = lax.rem(copy, jnp.int32(slots))
                source = steps_refs[group].at[pl.ds(copy * CHAIN_STEPS, CHAIN_STEPS), across]
                plgpu.copy_gmem_to_smem(source, ring.at[slot], loaded.at[slot])

            def add(copy: Array, total: Array) -> Array:
                slot = lax.rem(copy, jnp.int32(slots))
                plgpu.barrier_wait(loaded.at[slot])
                for first in range(0, CHAIN_STEPS, CHAIN_LOADS):
                    places = [ring.at[slot, first + step] for step in range(CHAIN_LOADS)]
                    rows = [plgpu.load(place, layout=piece, optimized=False) for place in places]
                    total = functools.reduce(jnp.add, rows, total)
                # Automatic barriers are off, so this one keeps the copy engine from overwriting a slot that a thread
                # has yet to read.
                plgpu.commit_smem()
                pl.when(copy + slots < copies[group])(lambda: load(copy + slots))
                return total

            for copy in range(slots):
                load(jnp.int32(copy))
            first = plgpu.load(start_refs[group].at[across], layout=piece, optimized=False)
            # Beyond the last step the copy engine fills in zeros, which change no sum.
            out_refs[group][across] = lax.fori_loop(0, copies[group], add, first)

        for group in range(len(copies)):
            pl.when(lax.axis_index("group") == group)(functools.partial(run, group))

    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((width,), ACCUMULATOR)] * len(copies),
        scratch_types=[
            plgpu.SMEM((slots, CHAIN_STEPS, columns), ACCUMULATOR),
            plgpu.Barrier(num_arrivals=1, num_barriers=slots),
        ],
        grid=(len(copies), width // columns),
        grid_names=("group", "column"),
        kernel_name="token_sums",
        compiler_params=NO_AUTO_BARRIERS,
    )(*starts, *step_sums)


def _unstreamed_chains(
    starts: Sequence[Array], step_sums: Sequence[Array], columns: int, piece: Any
) -> tuple[Array, ...]:
    """Returns `chains`; threads read steps from device memory, `CHAIN_LOADS` at a time.

    GPUs without a copy engine need it, and GPUs whose shared memory does not hold the ring.
    """
    width, groups = starts[0].size, len(starts)
    # The zeros of additional steps change no sum.
    padded = [jnp.pad(steps, ((0, -len(steps) % CHAIN_LOADS), (0, 0))) for steps in step_sums]

    def body(*refs: Any) -> None:
        across = pl.ds(lax.axis_index("column") * columns, columns)

        def run(group: int) -> None:
            start, steps, out = refs[group], refs[groups + group], refs[2 * groups + group]

            def add(index: Array, total: Array) -> Array:
                places = [steps.at[index * CHAIN_LOADS + step, across] for step in range(CHAIN_LOADS)]
                rows = [plgpu.load(place, layout=piece, optimized=False) for place in places]
                return functools.reduce(jnp.add, rows, total)

            first = plgpu.load(start.at[across], layout=piece, optimized=False)
            out[across] = lax.fori_loop(0, len(padded[group]) // CHAIN_LOADS, add, first)

        for group in range(groups):
            pl.when(lax.axis_index("group") == group)(functools.partial(run, group))

    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((width,), ACCUMULATOR)] * groups,
        grid=(groups, width // columns),
        grid_names=("group", "column"),
        kernel_name="token_sums",
        compiler_params=NO_AUTO_BARRIERS,
    )(*starts, *padded)
