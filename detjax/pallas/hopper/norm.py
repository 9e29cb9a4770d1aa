"""RMS norm on Hopper GPUs (Mosaic GPU): a row stays in the registers of its threads from its only read to its write.

The speed is that of memory: a CTA is one warpgroup that loads all it needs before it adds, and registers are few enough
that several CTAs of an SM overlap. Gradients are the portable backend's.
"""

import dataclasses
import math
from typing import Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, LANE_GROUP, LANES
from detjax.pallas.hopper import device
from detjax.pallas.hopper.rows import WARPGROUP, layout, row_sums, squares, widened
from detjax.portable import norm as portable
from detjax.portable.tiles import flat_rows

# Row sums in the same order, arithmetic on single elements, and tiles of one shape: XLA has nothing to choose here.
backward = portable.backward

BYTES_IN_FLIGHT: Final = 8192
"""Of x, per CTA, where there are rows enough: 4 MB over the device, what its bandwidth times its latency asks for."""
RESIDENT_BYTES: Final = 256
"""Of x, per thread, that fit into registers beside the residual and the arithmetic."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How rows are spread over threads and CTAs; no bit depends on it."""

    threads: int
    """Threads that share a row."""
    rows: int
    """Rows of a CTA."""
    weight_first: bool
    """Whether the weight is loaded with the row or when the row's sum is known: a shorter wait, or fewer registers."""
    resident: bool = True
    """Whether the row stays in registers between its sum and its product, or is read again from cache."""

    def __post_init__(self) -> None:
        if self.threads not in (4, 8, 16, 32, 64, 128):
            raise ValueError(f"Schedule: threads is {self.threads}; accepted: 4, 8, 16, 32, 64, 128")
        at_once = WARPGROUP // self.threads
        if self.rows < 1 or (self.rows % at_once and (self.rows > at_once or self.rows & (self.rows - 1))):
            raise ValueError(
                f"Schedule: rows is {self.rows}; accepted: multiples of {at_once}, which {WARPGROUP} threads hold at "
                f"{self.threads} to a row, and powers of two below"
            )

    def check(self, rows: int, width: int, dtype: jax.typing.DTypeLike) -> None:
        """Returns if `[rows, width]` of this dtype can be worked on so."""
        columns = LANE_GROUP * self.threads
        if width % columns:
            raise ValueError(f"Schedule: {self.threads} threads on rows of {width}; accepted: multiples of {columns}")
        if rows < self.rows:
            raise ValueError(f"Schedule: {self.rows} rows of a CTA; accepted: at most the {rows} there are")
        if not self.resident and self.threads != WARPGROUP:
            raise ValueError(f"Schedule: rows that are read twice with {self.threads} threads; accepted: {WARPGROUP}")
        held = max(1, self.rows * self.threads // WARPGROUP) * width * jnp.dtype(dtype).itemsize // self.threads
        if self.resident and held > RESIDENT_BYTES:
            raise ValueError(
                f"Schedule: {held} bytes of rows in the registers of a thread; accepted: at most {RESIDENT_BYTES}. "
                "Take more threads to a row, fewer rows, or resident=False"
            )


def schedule(rows: int, width: int, dtype: jax.typing.DTypeLike) -> Schedule:
    """The schedule for `[rows, width]`, the width being one of `padded_width`."""
    itemsize = jnp.dtype(dtype).itemsize
    if width <= WARPGROUP:
        threads = width // LANE_GROUP
    elif width % 256 or width < 1024 or (width == 1024 and rows > 2 * device.multiprocessors()):
        threads = 32
    else:
        threads = 128 if width % LANES == 0 else 64
    at_once = WARPGROUP // threads
    if width * itemsize > RESIDENT_BYTES * threads:
        return Schedule(threads, 1, weight_first=False, resident=False)
    # Few rows go one warpgroup each; many go together until enough bytes are on their way.
    together = max(1, BYTES_IN_FLIGHT // (at_once * width * itemsize))
    while together > 1 and rows < 8 * device.multiprocessors() * at_once * together:
        together //= 2
    if rows < at_once:
        at_once = 1 << (rows.bit_length() - 1)
    # A wait that no other CTA fills, and registers enough.
    waits = together > 1 or rows <= 2 * device.multiprocessors() * at_once
    fits = width * itemsize <= RESIDENT_BYTES // 2 * threads
    return Schedule(threads, at_once * together, weight_first=waits and fits)


def padded_width(width: int, dtype: jax.typing.DTypeLike) -> int:
    """The least width from `width` on that the threads of a row divide evenly and can hold."""
    if width <= WARPGROUP:
        return max(16, 1 << (width - 1).bit_length())
    resident = RESIDENT_BYTES // jnp.dtype(dtype).itemsize
    for threads in (32, 64):
        padded = -(-width // (LANE_GROUP * threads)) * (LANE_GROUP * threads)
        if padded <= resident * threads:
            return padded
    return -(-width // LANES) * LANES


def forward(
    x: Array,
    weight: Array,
    residual: Array | None,
    *,
    eps: float,
    weight_offset: float,
    schedule: Schedule | None = None,
) -> tuple[Array, Array | None]:
    """`(y, None)`, or `(y, h)` with `h = rn(x + residual)` where there is a residual; y is the norm of h then."""
    width = x.shape[-1]
    padding = padded_width(width, x.dtype) - width

    def rows_of(x: Array) -> Array:
        return jnp.pad(flat_rows(x), ((0, 0), (0, padding)))

    operands = (rows_of(x), *(() if residual is None else (rows_of(residual),)))
    if schedule is None:
        schedule = _schedule(math.prod(x.shape[:-1]), width + padding, x.dtype)
    out = _kernel(operands, jnp.pad(weight, (0, padding)), width, eps, weight_offset, schedule)
    y, *h = (rows[:, :width].reshape(x.shape) for rows in out)
    return y, h[0] if h else None


_schedule = schedule


def _kernel(
    operands: tuple[Array, ...], weight: Array, width: int, eps: float, weight_offset: float, schedule: Schedule
) -> tuple[Array, ...]:
    """The norm of `[M, D]`, and the sum of the operands where there are two. Columns from `width` on are zeros."""
    (M, D), dtype = operands[0].shape, operands[0].dtype
    schedule.check(M, D, dtype)
    at_once, columns = min(schedule.rows, WARPGROUP // schedule.threads), LANE_GROUP * schedule.threads
    in_rows = layout(at_once, schedule.threads)
    pieces = D // columns

    def body(*refs):
        *operand_refs, weight_ref, y_ref = refs[: len(operands) + 2]
        h_ref = refs[-1] if len(operands) > 1 else None
        # The last CTA moves up to whole rows: two CTAs then write the same bits to some.
        first = jnp.minimum(lax.axis_index("tile") * schedule.rows, M - schedule.rows)

        def at(ref, row, piece):
            return ref.at[pl.ds(first + row, at_once), pl.ds(piece * columns, columns)]

        def loaded(row, piece) -> Array:
            """A piece of the rows that are normalized, in their dtype."""
            parts = [plgpu.load(at(ref, row, piece), layout=in_rows, optimized=False) for ref in operand_refs]
            if len(parts) == 1:
                return parts[0]
            return (parts[0].astype(ACCUMULATOR) + parts[1].astype(ACCUMULATOR)).astype(dtype)

        def square(h: Array) -> Array:
            return squares(h.astype(ACCUMULATOR))

        def weight_of(piece) -> Array:
            part = weight_ref.at[pl.ds(piece * columns, columns)]
            w = plgpu.load(part, layout=in_rows.reduce(0), optimized=False).astype(ACCUMULATOR) + weight_offset
            return widened(w, (at_once, columns), 1, in_rows)

        def scale_of(total: Array) -> Array:
            return widened(lax.rsqrt(total / width + eps), (at_once, columns), 0, in_rows)

        def write(row, piece, h: Array, scale: Array, w: Array) -> None:
            at(y_ref, row, piece)[...] = (h.astype(ACCUMULATOR) * scale * w).astype(dtype)

        if schedule.resident:
            rows = range(0, schedule.rows, at_once)
            h = [[loaded(row, piece) for piece in range(pieces)] for row in rows]
            weights = [weight_of(piece) for piece in range(pieces)] if schedule.weight_first else None
            for row, held in zip(rows, h, strict=True):
                if h_ref is not None:
                    for piece in range(pieces):
                        at(h_ref, row, piece)[...] = held[piece]
                scale = scale_of(row_sums([square(piece) for piece in held]))
                for piece in range(pieces):
                    write(row, piece, held[piece], scale, weights[piece] if weights else weight_of(piece))
            return

        together = math.gcd(pieces, 8)

        def add(step, total: Array) -> Array:
            held = [loaded(0, step * together + i) for i in range(together)]
            for i, h in enumerate(held):
                if h_ref is not None:
                    at(h_ref, 0, step * together + i)[...] = h
                total = total + square(h)
            return total

        def multiply(step, scale: Array) -> Array:
            held = [loaded(0, step * together + i) for i in range(together)]
            for i, h in enumerate(held):
                write(0, step * together + i, h, scale, weight_of(step * together + i))
            return scale

        nothing = plgpu.layout_cast(jnp.zeros((at_once, columns), ACCUMULATOR), in_rows)
        total = lax.fori_loop(0, pieces // together, add, nothing)
        lax.fori_loop(0, pieces // together, multiply, scale_of(row_sums([total])))

    out = jax.ShapeDtypeStruct((M, D), dtype)
    return plgpu.kernel(
        body,
        out_type=(out,) * len(operands),
        grid=(-(-M // schedule.rows),),
        grid_names=("tile",),
        kernel_name="rms_norm",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # No memory is both read and written, but for the last CTAs' common rows.
            unsafe_no_auto_barriers=True,
        ),
    )(*operands, weight)
