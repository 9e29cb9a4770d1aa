"""Sums of a weight plus the product of each row's own adapter, for few rows: one kernel after the one of the sums.

A tile has 64 outputs of a block of 8 rows. It takes a step for each adapter that some of these rows have:

    d    = u . b, for all rows of the block, in fresh accumulators
    sums = fma(scale, d, sums), in the columns of the rows that have the adapter

and then passes the epilogue. `d` takes the instructions by which `kernel` would compute it alone, and rows without an
adapter keep their sums, so bits do not differ from separate kernels'. The adapters' products never pass device memory.

A tile is a CTA of one warpgroup with little shared memory. Its time is the latency of a few loads, so several CTAs on
each multiprocessor wait at the same time, and no warpgroup produces for the others.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, DTypeLike, Float, Float32, Int32

from detjax.contract import ACCUMULATOR
from detjax.operands.numerics import round_up
from detjax.operands.options import Epilogue
from detjax.pallas.hopper.device import SWIZZLE_BYTES
from detjax.pallas.hopper.matmul.kernel import Cta, Operands, Output, Scratch, launched, padded, scratch_types
from detjax.pallas.hopper.matmul.plan import BLOCK, MATRIX_ROWS, Plan, Problem, Schedule, addressable_rows
from detjax.pallas.hopper.mosaic.exact import fused_multiply_add
from detjax.pallas.hopper.mosaic.layouts import MATRIX, PER_COLUMN, PER_ROW, swizzled_lines


class RowsWithAdapters(NamedTuple):
    """The adapters of rows, or references to them in the kernel; see `detjax.ops.adapter_places.BlocksOfRows`.

    Attributes:
        u: the rows of the blocks times the first factors of their adapters, `[P, R]`.
        b: the second factors, `[S, N, R]`, or `[S, 2, N, R]` for gate and up.
        scales: `[S, N]`, or `[S, 2, N]`, float32.
        adapters: the adapter of each block of P, and at the end the number of blocks.
        firsts: the first block of P for each block of rows, and at the end the number of blocks of P.
        place: the row of P of each row; -1: it has no adapter.
    """

    u: Float[Array, "P R"]
    b: Float[Array, "S ..."]
    scales: Float32[Array, "S ..."]
    adapters: Int32[Array, "_"]
    firsts: Int32[Array, "_"]
    place: Int32[Array, "M"]


@dataclasses.dataclass(frozen=True)
class RowsPlan(Plan):
    """A plan with a CTA for each tile, whose sums begin with the weight's."""

    @functools.cached_property
    def clusters(self) -> int:
        """CTAs that are launched."""
        return math.prod(self.grid)

    @property
    def all_warpgroups(self) -> int:
        """Warpgroups of a CTA: none produces."""
        return self.schedule.warpgroups

    @property
    def steps(self) -> int:
        """Stages of a tile: while one is multiplied, the next one is loaded."""
        return 2

    @property
    def reserved_bytes(self) -> int:
        """Bytes of shared memory for sums."""
        return 4 * self.problem.parts * math.prod(self.staged_shape)


def serves(ranks: int, parts: int, dtype: jnp.dtype) -> bool:
    """Returns whether the kernel takes adapters of this many ranks: a step has all of them in shared memory."""
    widest = jnp.dtype(ACCUMULATOR)
    return not _plan(Problem(BLOCK, MATRIX_ROWS, ranks, parts, dtype, widest, widest)).unmet_requirements()


def add_adapters(
    sums: Sequence[Float32[Array, "M N"]],
    rows: RowsWithAdapters,
    residual: Array | None,
    *,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
) -> Float[Array, "M N"]:
    """Returns the epilogue of the sums of each part plus the product of each row's adapter, `serves` being true."""
    (m, n), parts, ranks = sums[0].shape, len(sums), rows.u.shape[1]
    residual_dtype = None if residual is None else residual.dtype
    problem = Problem(m, n, ranks, parts, rows.u.dtype, jnp.dtype(out_dtype), residual_dtype).addressable
    plan = _plan(problem)
    shape = addressable_rows(m), problem.n
    # Threads read the factors and the places themselves, so no tile may reach beyond the arrays.
    width = plan.grid[1] * plan.schedule.tile_n + plan.padded_rows - plan.rows
    arrays = [rows.u, padded(rows.b.reshape(-1, n, ranks), (len(rows.b) * parts, problem.n, ranks))]
    arrays += [] if residual is None else [padded(residual, shape)]
    arrays.append(padded(rows.scales.reshape(-1, n), (len(rows.b) * parts, width)))
    place = jnp.pad(rows.place, (0, round_up(m, BLOCK) - m), constant_values=-1)
    arrays += [rows.adapters, rows.firsts, place, *(padded(part, shape) for part in sums)]
    return _kernel(plan, epilogue)(*arrays)[0][:m, :n]


def _plan(problem: Problem) -> RowsPlan:
    """Returns the plan of a problem: tiles of 64 outputs, or of all if there are fewer, and one step for an adapter."""
    line = math.gcd(SWIZZLE_BYTES // problem.dtype.itemsize, problem.k)
    return RowsPlan(problem, Schedule(BLOCK, min(MATRIX_ROWS, problem.n), "weights", lines=problem.k // line))


def _kernel(plan: RowsPlan, epilogue: Epilogue) -> Callable[..., list[Array]]:
    """Returns the kernel `u, b, residual?, scales, adapters, firsts, place, *sums -> y`."""
    problem = plan.problem

    def body(*refs: Any, **scratch: Any) -> None:
        u, b, *rest = refs
        y = rest.pop()
        residual = rest.pop(0) if problem.residual_dtype is not None else None
        scales, adapters, firsts, place, *sums = rest
        rows = RowsWithAdapters(u, b, scales, adapters, firsts, place)
        RowsCta(plan, epilogue, rows, sums, residual, y, RowsScratch(**scratch)).run()

    scratch = scratch_types(plan)
    transforms = swizzled_lines(plan.staged_line(jnp.dtype(ACCUMULATOR)), 4)
    scratch["sums"] = plgpu.SMEM((1, problem.parts, *plan.staged_shape), ACCUMULATOR, transforms=transforms)
    scratch["sums_loaded"] = plgpu.Barrier(num_arrivals=problem.parts)
    return launched(plan, body, scratch, "adapters_of_rows")


@dataclasses.dataclass(frozen=True)
class RowsScratch(Scratch):
    """Buffers and barriers, also of sums."""

    sums: Any = None
    """Sums of a tile, `[1, parts, ...]`."""
    sums_loaded: Any = None
    """The barrier of the sums."""


class RowsCta(Cta):
    """A CTA that takes as many steps as the rows of its tile have adapters."""

    plan: RowsPlan  # pyright: ignore[reportIncompatibleVariableOverride]
    scratch: RowsScratch  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        plan: RowsPlan,
        epilogue: Epilogue,
        rows: RowsWithAdapters,
        sums: list[Any],
        residual: Any,
        y: Any,
        scratch: RowsScratch,
    ) -> None:
        # A block of u has its adapter's factors, as a tile of tokens has its expert's weights.
        operands = Operands(rows.u, rows.b, residual=residual, experts=rows.adapters)
        super().__init__(plan, epilogue, operands, (y, []), scratch)
        self.rows, self.sums = rows, sums
        self.m, self.n = self.origin(0)
        block = lax.div(self.m, jnp.int32(BLOCK))
        self.first, self.end = rows.firsts[block], rows.firsts[block + 1]

    def run(self) -> None:
        """Computes the tile."""
        output = RowsOutput(self)
        output.prefetch()
        for stage in range(self.plan.stages):
            self.load(self.first + stage)
        places: Any = self.rows.place.at[pl.ds(self.m, BLOCK)]
        place = plgpu.load(places, layout=PER_COLUMN, optimized=False)
        block = lax.shift_right_arithmetic(place, jnp.int32(BLOCK.bit_length() - 1))
        z = lax.fori_loop(self.first, self.end, functools.partial(self.add, block), output.loaded())
        output.store(z)
        # Shared memory must outlive the reads of copies out of it; the kernel's end waits for their writes.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def load(self, block: Array) -> None:
        """Starts the copies of a block's step, if it is one of the tile's."""

        @pl.when(block < self.end)
        def _() -> None:
            self.load_stage(block * BLOCK, self.n, jnp.int32(0), self.slot(block - self.first))

    def add(self, block_of_row: Array, block: Array, sums: list[Array]) -> list[Array]:
        """Adds the products of a block's adapter to the sums of the rows that have it."""
        plan = self.plan
        along = pl.ds(self.n, plan.padded_rows)
        refs: list[Any] = [self.rows.scales.at[self.weight(block * BLOCK, part), along] for part in range(len(sums))]
        scales = [plgpu.load(ref, layout=PER_ROW, optimized=False) for ref in refs]
        products, shape = self.products(self.slot(block - self.first)), (plan.padded_rows, BLOCK)
        # The matrix unit has read the stage for all warps.
        plgpu.commit_smem()
        self.load(block + plan.stages)
        is_own = lax.broadcast_in_dim(block_of_row, shape, [1]) == block
        return [
            jnp.where(is_own, fused_multiply_add(lax.broadcast_in_dim(scale, shape, [0]), d, z, layout=MATRIX), z)
            for scale, d, z in zip(scales, products, sums, strict=True)
        ]

    def products(self, slot: Array) -> tuple[Array, ...]:
        """Returns the products of a stage, `[outputs, rows]` float32 for each part."""
        plan, warpgroup = self.plan, lax.axis_index("warpgroup")

        def multiply(*totals: Any) -> tuple[Array, ...]:
            plgpu.barrier_wait(self.scratch.loaded.at[slot])
            for part, total in enumerate(totals):
                self.multiply(total, part, slot, warpgroup)
            plgpu.wgmma_wait(0)
            return tuple(total[...] for total in totals)

        accumulator = plgpu.ACC((plan.padded_rows, BLOCK), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        return pl.run_scoped(multiply, *[accumulator] * plan.problem.parts)


class RowsOutput(Output):
    """A tile of the result, which begins with sums."""

    scratch: RowsScratch  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, cta: RowsCta) -> None:
        super().__init__(cta, cta.m, cta.n, ())
        self.sums_in_memory = cta.sums

    def prefetch(self) -> None:
        """Starts the loads of the sums and of the residual."""
        super().prefetch()
        for part, array in enumerate(self.sums_in_memory):
            target = self._staged(self.scratch.sums, 0, part)
            plgpu.copy_gmem_to_smem(self._in_memory(array, 0), target, self.scratch.sums_loaded)

    def loaded(self) -> list[Array]:
        """Returns the sums of each part, `[outputs, rows]`."""
        plgpu.barrier_wait(self.scratch.sums_loaded)
        return [self._loaded_chunk(self.scratch.sums, 0, part) for part in range(self.plan.problem.parts)]
