"""RMS norm on Hopper GPUs (Mosaic GPU): a row stays in the registers of its threads from its only read to its write.

The kernel is bound by memory: a CTA is one warpgroup that loads all its rows before it adds, and uses few enough
registers that several CTAs overlap on a multiprocessor. The gradients are in `norm_gradient`.

Before a product that quantizes its rows in groups of columns, the kernel gives the codes as well: a warp holds whole
groups of the result. So it takes one launch, not two.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, FP8_BLOCK, LANE_GROUP, LANES
from detjax.operands.numerics import ceil_div, flat_rows, round_up
from detjax.operands.products import NormalizedRows, RowCodes
from detjax.pallas.hopper import device, norm_gradient
from detjax.pallas.hopper.device import WARP, WARPGROUP
from detjax.pallas.hopper.quantized.prologue import Prologue
from detjax.pallas.hopper.quantized.rows import E4M3, code_types, quantize_piece, quantize_piece_of_row
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS, broadcast, layout, load_weight, rounded_squares, row_sums

backward = norm_gradient.backward

BYTES_IN_FLIGHT: Final = 8192
"""Bytes of x that a CTA loads at once if there are enough rows: 4 MB over the device, its bandwidth times its
latency."""

RESIDENT_BYTES: Final = 256
"""Bytes of x that a thread holds: 64 registers, which leaves room for temporaries without spills."""

_THREADS: Final = (4, 8, 16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Rows to be normalized, of a `padded_width`."""

    rows: int
    width: int
    dtype: jnp.dtype

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The distribution of rows over threads and CTAs; no bit depends on it."""

    threads: int
    """Threads that share a row."""
    rows: int
    """Rows of a CTA."""
    weight_first: bool
    """True to load the weight together with the rows, for a shorter wait; False to load it after their sums, for fewer
    registers."""
    resident: bool = True
    """True to keep a row in registers between its sum and its product; False to read it from cache a second time."""

    def __post_init__(self) -> None:
        """Raises ValueError if the schedule fits no problem."""
        if self.threads not in _THREADS:
            raise ValueError(f"Schedule: threads is {self.threads}; accepted: {', '.join(map(str, _THREADS))}")
        at_once = WARPGROUP // self.threads
        if self.rows < 1 or (self.rows % at_once and (self.rows > at_once or self.rows & (self.rows - 1))):
            raise ValueError(
                f"Schedule: rows is {self.rows}; accepted: multiples of {at_once}, which {WARPGROUP} threads hold at "
                f"{self.threads} to a row, and powers of two below {at_once}"
            )

    @property
    def rows_at_once(self) -> int:
        """Rows that the warpgroup processes at the same time."""
        return min(self.rows, WARPGROUP // self.threads)

    @property
    def columns(self) -> int:
        """Columns of a piece of a row."""
        return LANE_GROUP * self.threads

    def check(self, problem: Problem) -> None:
        """Raises ValueError if a kernel of this schedule cannot compute the problem."""
        rows, width = problem.rows, problem.width
        if width % self.columns:
            raise ValueError(
                f"Schedule: {self.threads} threads on rows of {width}; accepted: multiples of {self.columns}"
            )
        if rows < self.rows:
            raise ValueError(f"Schedule: {self.rows} rows of a CTA; accepted: at most the {rows} rows of the problem")
        if not self.resident and self.threads != WARPGROUP:
            raise ValueError(f"Schedule: rows that are read twice with {self.threads} threads; accepted: {WARPGROUP}")
        held = max(1, self.rows * self.threads // WARPGROUP) * problem.row_bytes // self.threads
        if self.resident and held > RESIDENT_BYTES:
            raise ValueError(
                f"Schedule: {held} bytes of rows in the registers of a thread; accepted: at most {RESIDENT_BYTES}. "
                "Take more threads to a row, fewer rows, or resident=False"
            )


def default_schedule(problem: Problem) -> Schedule:
    """Returns the schedule for a problem."""
    rows, width = problem.rows, problem.width
    if width <= WARPGROUP:
        threads = width // LANE_GROUP
    elif width % 256 or width < 1024 or (width == 1024 and rows > 2 * device.multiprocessors()):
        threads = 32
    else:
        threads = 128 if width % LANES == 0 else 64
    at_once = WARPGROUP // threads
    if problem.row_bytes > RESIDENT_BYTES * threads:
        return Schedule(threads, 1, weight_first=False, resident=False)
    # Few rows are spread over as many CTAs as possible. With many rows, a CTA takes enough of them to have
    # BYTES_IN_FLIGHT.
    together = max(1, BYTES_IN_FLIGHT // (at_once * problem.row_bytes))
    while together > 1 and rows < 8 * device.multiprocessors() * at_once * together:
        together //= 2
    if rows < at_once:
        at_once = 1 << (rows.bit_length() - 1)
    # Loading the weight first pays if no other CTA would hide the wait for it, and needs registers for it.
    waits = together > 1 or rows <= 2 * device.multiprocessors() * at_once
    fits = problem.row_bytes <= RESIDENT_BYTES // 2 * threads
    return Schedule(threads, at_once * together, weight_first=waits and fits)


def padded_width(width: int, dtype: jax.typing.DTypeLike) -> int:
    """Returns the least width from `width` on that the threads of a row divide evenly and can hold."""
    if width <= WARPGROUP:
        return max(16, 1 << (width - 1).bit_length())
    resident = RESIDENT_BYTES // jnp.dtype(dtype).itemsize
    for threads in (32, 64):
        padded = round_up(width, LANE_GROUP * threads)
        if padded <= resident * threads:
            return padded
    return round_up(width, LANES)


def forward(
    x: Array,
    weight: Array,
    residual: Array | None,
    *,
    eps: float,
    weight_offset: float,
    schedule: Schedule | None = None,
) -> tuple[Array, Array | None]:
    """Returns `(y, None)` for rows `[*B, D]`, or with a residual `(y, h)`: the norm y of h = rn(x + residual).

    Without a residual h is x, and y = rn(h * rsqrt(mean(h^2) + eps) * (weight + weight_offset)).
    """
    formula = _Formula(x.shape[-1], eps, weight_offset)
    out = _forward(x, weight, residual, formula, schedule, with_codes=False)
    return out.y, out.h


def gives_codes(width: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether `forward_with_codes` takes rows of a width: whole groups, without padding."""
    return width % FP8_BLOCK == 0 and padded_width(width, dtype) == width


def forward_with_codes(
    x: Array, weight: Array, *, eps: float, weight_offset: float, schedule: Schedule | None = None
) -> tuple[Array, RowCodes]:
    """Returns the norm of rows, and its codes with the bits of `quantized.rows.quantized_groups`.

    The threads of a row must be whole warps, as in every default schedule of a width that `gives_codes` takes.
    """
    out = _forward(x, weight, None, _Formula(x.shape[-1], eps, weight_offset), schedule, with_codes=True)
    return out.y, RowCodes(lax.bitcast_convert_type(out.codes, E4M3), out.scales)


def _forward(
    x: Array,
    weight: Array,
    residual: Array | None,
    formula: "_Formula",
    schedule: Schedule | None,
    *,
    with_codes: bool,
) -> "_Results":
    width = x.shape[-1]
    padding = padded_width(width, x.dtype) - width

    def padded_rows(x: Array) -> Array:
        return jnp.pad(flat_rows(x), ((0, 0), (0, padding)))

    operands = (padded_rows(x), *(() if residual is None else (padded_rows(residual),)))
    problem = Problem(math.prod(x.shape[:-1]), width + padding, x.dtype)
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)
    assert not with_codes or schedule.threads >= WARP
    out = _kernel(problem, schedule, formula, operands, jnp.pad(weight, (0, padding)), with_codes)
    y, h = (None if rows is None else rows[:, :width].reshape(x.shape) for rows in out[:2])
    return out._replace(y=y, h=h)


def prologue(rows: NormalizedRows) -> Prologue | None:
    """Returns a prologue that computes the codes of a row's norm, with the bits of `forward_with_codes`.

    It is None for several rows, and for a row that one warpgroup does not hold in registers.
    """
    x = flat_rows(rows.rows)
    count, width = x.shape
    problem, formula = Problem(count, width, x.dtype), _Formula(width, rows.eps, rows.weight_offset)
    if count > 1 or width % LANES or problem.row_bytes > RESIDENT_BYTES * WARPGROUP:
        return None
    schedule = Schedule(WARPGROUP, 1, weight_first=True)

    def compute(x: Any, weight: Any, codes: Any, scales: Any) -> None:
        results = _Results(None, None, codes, scales)
        _RowOfProduct(problem, schedule, formula, [x], weight, results, 0).run()

    return Prologue((x, rows.weight), compute)


@dataclasses.dataclass(frozen=True)
class _Formula:
    """The constants of the norm's formula."""

    width: int
    """Elements of a row without padding, over which the mean is taken."""
    eps: float
    weight_offset: float


class _Results(NamedTuple):
    """The arrays that the kernel writes: the norm `[M, D]`, the sum of two operands, codes and scales of the norm."""

    y: Any
    h: Any = None
    codes: Any = None
    scales: Any = None


def _kernel(
    problem: Problem,
    schedule: Schedule,
    formula: _Formula,
    operands: tuple[Array, ...],
    weight: Array,
    with_codes: bool,
) -> _Results:
    """Returns the norm of the operand, or of the sum of two operands. Padding columns are zeros."""

    def body(*refs: Any) -> None:
        *inputs, weight_ref = refs[: len(operands) + 1]
        # The last CTA shifts back so that all its rows exist: two CTAs then write the same bits to some rows.
        first = jnp.minimum(lax.axis_index("tile") * schedule.rows, problem.rows - schedule.rows)
        _Rows(problem, schedule, formula, inputs, weight_ref, named(refs[len(operands) + 1 :]), first).run()

    def named(arrays: Sequence[Any]) -> _Results:
        y, *rest = arrays
        return _Results(y, rest.pop(0) if len(operands) > 1 else None, *rest)

    out = jax.ShapeDtypeStruct((problem.rows, problem.width), problem.dtype)
    types = (out,) * len(operands)
    types += code_types(problem.rows, problem.width // FP8_BLOCK) if with_codes else ()
    arrays = plgpu.kernel(
        body,
        out_type=types,
        grid=(ceil_div(problem.rows, schedule.rows),),
        grid_names=("tile",),
        kernel_name="rms_norm",
        compiler_params=NO_AUTO_BARRIERS,
    )(*operands, weight)
    return named(arrays)


class _Rows:
    """A warpgroup that normalizes `schedule.rows` rows from `first` on, piece by piece."""

    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        formula: _Formula,
        inputs: list[Any],
        weight: Any,
        results: _Results,
        first: Array | int,
    ) -> None:
        self.schedule, self.formula, self.first = schedule, formula, first
        self.inputs, self.weight, self.results = inputs, weight, results
        self.dtype = problem.dtype
        self.shape = schedule.rows_at_once, schedule.columns
        self.layout = layout(schedule.rows_at_once, schedule.threads)
        self.pieces = problem.width // schedule.columns

    def run(self) -> None:
        """Writes the results."""
        if self.schedule.resident:
            self.normalize_resident_rows()
        else:
            self.normalize_row_read_twice()

    def normalize_resident_rows(self) -> None:
        """Loads all rows, then sums and scales them in registers."""
        rows = range(0, self.schedule.rows, self.schedule.rows_at_once)
        pieces = range(self.pieces)
        # Every load is issued before the first sum waits for one, so the CTA has all its bytes in flight at once.
        loaded = [[self.load(row, piece) for piece in pieces] for row in rows]
        weights = [self.load_weight(piece) for piece in pieces] if self.schedule.weight_first else None
        for row, row_pieces in zip(rows, loaded, strict=True):
            for piece in pieces:
                self.store_sum(row, piece, row_pieces[piece])
            scale = self.scale(row_sums([self.square(part) for part in row_pieces]))
            for piece in pieces:
                weight = weights[piece] if weights else self.load_weight(piece)
                self.store_norm(row, piece, self.scaled(row_pieces[piece], scale, weight))

    def normalize_row_read_twice(self) -> None:
        """Sums a row in one pass over it and scales it in another."""
        # The second pass reads from cache. Eight pieces at a time are in flight.
        together = math.gcd(self.pieces, 8)

        def add(step: Array, total: Array) -> Array:
            parts = [self.load(0, step * together + i) for i in range(together)]
            for i, part in enumerate(parts):
                self.store_sum(0, step * together + i, part)
                total = total + self.square(part)
            return total

        def multiply(step: Array, scale: Array) -> Array:
            parts = [self.load(0, step * together + i) for i in range(together)]
            for i, part in enumerate(parts):
                self.store_norm(0, step * together + i, self.scaled(part, scale, self.load_weight(step * together + i)))
            return scale

        zeros = plgpu.layout_cast(jnp.zeros(self.shape, ACCUMULATOR), self.layout)
        total = lax.fori_loop(0, self.pieces // together, add, zeros)
        lax.fori_loop(0, self.pieces // together, multiply, self.scale(row_sums([total])))

    def at(self, ref: Any, row: int, piece: Any) -> Any:
        """Returns a reference to a piece of `rows_at_once` rows in device memory."""
        rows, columns = self.shape
        return ref.at[pl.ds(self.first + row, rows), pl.ds(piece * columns, columns)]

    def store_sum(self, row: int, piece: Any, value: Array) -> None:
        if self.results.h is not None:
            self.at(self.results.h, row, piece)[...] = value

    def store_norm(self, row: int, piece: Any, value: Array) -> None:
        """Stores a piece of the norm, and its codes and scales if these are results."""
        y, _, codes, scales = self.results
        self.at(y, row, piece)[...] = value
        if codes is not None:
            place = jnp.int32(self.first + row), piece * self.shape[1]
            quantize_piece(value, codes, scales, *place, layout=self.layout)

    def load(self, row: int, piece: Any) -> Array:
        """Returns a piece of the normalized rows: of the only input, or of the rounded sum of both."""
        parts = [plgpu.load(self.at(ref, row, piece), layout=self.layout, optimized=False) for ref in self.inputs]
        if len(parts) == 1:
            return parts[0]
        return (parts[0].astype(ACCUMULATOR) + parts[1].astype(ACCUMULATOR)).astype(self.dtype)

    def load_weight(self, piece: Any) -> Array:
        """Returns a piece of the weight plus its offset, repeated in every row."""
        _, columns = self.shape
        part = self.weight.at[pl.ds(piece * columns, columns)]
        return load_weight(part, self.formula.weight_offset, self.shape, self.layout)

    def square(self, part: Array) -> Array:
        return rounded_squares(part.astype(ACCUMULATOR))

    def scale(self, total: Array) -> Array:
        """Returns the factor of each row from the sum of its squares, repeated in every column."""
        factor = lax.rsqrt(total / self.formula.width + self.formula.eps)
        return broadcast(factor, self.shape, 0, self.layout)

    def scaled(self, part: Array, scale: Array, weight: Array) -> Array:
        return (part.astype(ACCUMULATOR) * scale * weight).astype(self.dtype)


class _RowOfProduct(_Rows):
    """A warpgroup that stores the codes and scales of a row's norm in a product's shared memory."""

    def store_norm(self, row: int, piece: Any, value: Array) -> None:
        """Stores the codes and scales of a piece of the norm."""
        _, _, codes, scales = self.results
        quantize_piece_of_row(value, codes, scales, jnp.int32(piece * self.shape[1]), layout=self.layout)
