"""Long sums in order on NVIDIA GPUs (Mosaic GPU): many runs of numbers, each added from its first number to its last.

A run is bound by the latency of its additions, about four cycles each. So a CTA has one run, all runs are added at the
same time, and the copy engine loads numbers ahead of the additions.
"""

import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from detjax.contract import ACCUMULATOR, LANE_GROUP
from detjax.pallas.hopper.mosaic import primitive
from detjax.pallas.hopper.mosaic.layouts import NUMBER
from detjax.pallas.hopper.mosaic.registers import as_index, element, index
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS
from detjax.pallas.nvidia import has_copy_engine

LINE: Final = 128
"""Numbers that a thread reads from shared memory before it adds them, so that no addition waits for a load."""
LINES: Final = 16
"""Lines of one copy."""
SLOTS: Final = 4
"""Slots of the ring of copies."""


def sums_in_order(numbers: Sequence[Array]) -> tuple[Array, ...]:
    """Returns float32 `[S]` for each array `[S, R]`; see `detjax.ops.elements.sums_in_order`."""
    # Zeros at a run's end change no sum: it begins with 0, so it is never -0.
    padded = [jnp.pad(x, ((0, 0), (0, -x.shape[1] % (LINE * LINES)))) for x in numbers]
    lines = jnp.concatenate([x.reshape(-1, LINE) for x in padded])
    copies = np.array([x.shape[1] // (LINE * LINES) for x in padded for _ in range(len(x))], np.int32)
    begins = np.cumsum(copies, dtype=np.int32) - copies
    sums = _sums_of_runs(lines, jnp.asarray(begins), jnp.asarray(copies))
    return tuple(jnp.split(sums, np.cumsum([len(x) for x in numbers])[:-1]))


def _sums_of_runs(lines: Array, begins: Array, copies: Array) -> Array:
    """Returns the sum of each run, `[runs]`, given the copies that it begins with and has."""

    def streamed(lines: Any, begins: Any, copies: Any, out: Any, ring: Any, loaded: Any) -> None:
        run = lax.axis_index("run")
        begin, count = begins[run], copies[run]

        def load(copy: Any) -> None:
            slot = lax.rem(copy, jnp.int32(SLOTS))
            source = lines.at[pl.ds((begin + copy) * LINES, LINES)]
            plgpu.copy_gmem_to_smem(source, ring.at[slot], loaded.at[slot])

        def add(copy: Array, total: Array) -> Array:
            slot = lax.rem(copy, jnp.int32(SLOTS))
            plgpu.barrier_wait(loaded.at[slot])
            total = lax.fori_loop(0, LINES, lambda line, total: add_line(total, ring, slot, line), total)
            # Automatic barriers are off, so this one keeps the copy engine from overwriting a slot that a thread has
            # yet to read.
            plgpu.commit_smem()
            pl.when(copy + SLOTS < count)(lambda: load(copy + SLOTS))
            return total

        for copy in range(SLOTS):
            pl.when(copy < count)(functools.partial(load, jnp.int32(copy)))
        out[run] = lax.fori_loop(0, count, add, jnp.float32(0))

    def unstreamed(lines: Any, begins: Any, copies: Any, out: Any) -> None:
        run = lax.axis_index("run")
        first = begins[run] * LINES
        add = lambda line, total: add_line(total, lines, first + line)  # noqa: E731
        out[run] = lax.fori_loop(0, copies[run] * LINES, add, jnp.float32(0))

    is_streamed = has_copy_engine()
    return plgpu.kernel(
        streamed if is_streamed else unstreamed,
        out_type=jax.ShapeDtypeStruct(begins.shape, ACCUMULATOR),
        scratch_types=[
            plgpu.SMEM((SLOTS, LINES, LINE), ACCUMULATOR),
            plgpu.Barrier(num_arrivals=1, num_barriers=SLOTS),
        ]
        if is_streamed
        else [],
        grid=(len(begins),),
        grid_names=("run",),
        kernel_name="sums_in_order",
        compiler_params=NO_AUTO_BARRIERS,
    )(lines, begins, copies)


def _plain_add_line(total: Array, ref: Any, *place: Array) -> Array:
    line = ref[...][place]
    return lax.fori_loop(0, LINE, lambda i, total: total + line[i], total)


@primitive(
    twin=_plain_add_line,
    args=lambda total, ref, *place: (NUMBER, plgpu.RefType(), *(NUMBER,) * len(place)),
    out=plgpu.ShapeDtypeStruct((), jnp.float32, layout=NUMBER),
)
def add_line(total: Any, ref: Any, *place: Any) -> Any:
    """Adds the numbers of a line to a total, in order. Every thread computes the same total."""
    four, first = ir.VectorType.get((LANE_GROUP,), ir.F32Type.get()), [as_index(i.registers.item()) for i in place]
    loaded = [vector.load(four, ref, [*first, index(column)]) for column in range(0, LINE, LANE_GROUP)]
    value = total.registers.item()
    for register in loaded:
        for i in range(LANE_GROUP):
            value = arith.addf(value, element(register, i))
    return type(total).splat(value, ())
