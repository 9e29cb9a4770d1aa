"""Matmul with an adapter that all tokens have: one kernel adds the adapter's product to the weight's sums.

The adapter's second factor follows the weight in the pipeline: after K's stages, a tile has stages of ranks, with
its tokens times the first factor, `u`, on one side and the second factor on the other. They stay in shared memory while
the tile passes the epilogue, chunk by chunk:

    d   = u . b, of the chunk, in fresh accumulators
    acc = fma(scale, d, acc + bias)

So the float32 products of the adapter, as many numbers as the result has, never pass device memory. The sums take
the instructions of `kernel`, and `d` takes the ones by which `kernel` would compute it alone: bits do not change.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, DTypeLike

from detjax.contract import ACCUMULATOR
from detjax.operands.numerics import ceil_div, flat_rows
from detjax.operands.options import Epilogue, WeightLayout
from detjax.operands.products import AdapterOperands, MatmulOperands
from detjax.operands.quantized_weight import QuantizedWeight
from detjax.pallas.hopper.matmul.kernel import (
    Cta,
    Operands,
    Output,
    Scratch,
    launched,
    padded,
    padded_operands,
    problem_of,
    scratch_types,
)
from detjax.pallas.hopper.matmul.plan import Plan, Problem, Schedule
from detjax.pallas.hopper.matmul.tuning import candidates, default_schedule
from detjax.pallas.hopper.mosaic.exact import fused_multiply_add
from detjax.pallas.hopper.mosaic.layouts import MATRIX

RANK_UNIT: Final = 64
"""Ranks that a stage's swizzled line has: factors with a multiple of them are loaded as they are."""

_MAX_RANK: Final = 256
"""Most ranks of the kernel: all of a tile's stay in shared memory at the same time."""

_MAX_ACCUMULATORS: Final = 128
"""Registers of a thread that may hold accumulators. A chunk's products of the adapter take others."""


def multiplies_adapters(weight: Any, rank: int) -> bool:
    """Returns whether products of a weight with an adapter of `rank` ranks should call `forward_with_adapter`."""
    return not isinstance(weight, QuantizedWeight) and rank <= _MAX_RANK


def forward_with_adapter(
    operands: MatmulOperands,
    adapter: AdapterOperands,
    *,
    layout: WeightLayout,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
    keeps: bool,
    schedule: Schedule | None = None,
) -> tuple[Array, tuple[Array, ...]]:
    """Returns rows `[*B, N]`, and if `keeps`, for each part the sums that the epilogue consumed, rounded like the rows.

    Raises:
        NotImplementedError: the matrix unit does not take x's dtype.
        ValueError: the schedule does not fit.
    """
    x, w, bias, residual = operands
    u, b, scales = adapter
    flat = Operands(flat_rows(x), w, bias, None if residual is None else flat_rows(residual))
    given = problem_of(flat, "mk", layout, jnp.dtype(out_dtype), keeps=keeps)
    problem, rank = given.addressable, u.shape[-1]
    plan = _plan(problem, rank, scales is not None, schedule)
    m, n, ranks = problem.m, problem.n, plan.rank_steps * plan.tile_k
    stacked = b.reshape(problem.parts, *b.shape[-2:])
    arrays = padded_operands(flat, problem, (m, n, problem.k))
    arrays.append(padded(flat_rows(u), (m, ranks)))
    arrays.append(padded(stacked, (problem.parts, *((n, ranks) if layout == "nk" else (ranks, n)))))
    if scales is not None:
        arrays.append(padded(scales.reshape(problem.parts, -1), (problem.parts, n)))
    results = [result[: given.m, : given.n] for result in _kernel(plan, epilogue)(*arrays)]
    y, *z = (result.reshape(*x.shape[:-1], given.n) for result in results)
    return y, tuple(z)


@dataclasses.dataclass(frozen=True)
class AdaptedPlan(Plan):
    """A plan whose tiles also have stages of ranks."""

    rank: int = 0
    """Ranks of the adapter."""
    is_scaled: bool = True
    """True if the adapter's product has a factor for each output."""

    @functools.cached_property
    def rank_steps(self) -> int:
        """Stages of a tile with ranks, which follow K's."""
        return ceil_div(self.rank, self.tile_k)

    @property
    def steps(self) -> int:
        """Stages of a tile."""
        return self.k_steps + self.rank_steps

    @property
    def reserved_bytes(self) -> int:
        """Bytes of shared memory for factors of outputs."""
        return 4 * self.schedule.warpgroups * self.problem.parts * self.bias_size if self.is_scaled else 0

    @property
    def chunk(self) -> int:
        """Columns of the accumulator that pass the epilogue together."""
        # With gate and up, the adapter's products of 64 columns would leave an activation too few registers.
        is_large = self.problem.parts > 1 and not self.weights_on_rows
        return math.gcd(self.columns, 32) if is_large else super().chunk

    def unmet_requirements(self) -> list[str]:
        """Returns the requirements that this plan does not meet; an empty list if the kernel can be built."""
        if unmet := super().unmet_requirements():
            return unmet
        if self.problem.parts * self.padded_rows * self.columns > _MAX_ACCUMULATORS * 128:
            unmet.append(f"up to {_MAX_ACCUMULATORS} accumulators a thread, next to an adapter")
        if self.stages < min(2, self.k_steps) + self.rank_steps:
            unmet.append(f"{min(2, self.k_steps) + self.rank_steps} stages in shared memory, which keeps the ranks'")
        return unmet


def _plan(problem: Problem, rank: int, is_scaled: bool, schedule: Schedule | None) -> AdaptedPlan:
    """Returns the plan of a given schedule, of the plain product's, or of the best candidate that fits."""
    plan = AdaptedPlan(problem, schedule or default_schedule(problem), rank, is_scaled)
    unmet = plan.unmet_requirements()
    if not unmet:
        return plan
    if schedule is not None:
        raise ValueError(f"matmul: {schedule} for {problem} with an adapter; accepted: {'; '.join(unmet)}")
    return _best_plan(problem, rank, is_scaled)


@functools.cache
def _best_plan(problem: Problem, rank: int, is_scaled: bool) -> AdaptedPlan:
    plans = (AdaptedPlan(problem, schedule, rank, is_scaled) for schedule in candidates(problem))
    return next(plan for plan in plans if not plan.unmet_requirements())


def _kernel(plan: AdaptedPlan, epilogue: Epilogue) -> Callable[..., list[Array]]:
    """Returns the kernel `x, w, bias?, residual?, u, b, scales? -> y, *z`; z are the kept sums of each part."""
    problem, schedule = plan.problem, plan.schedule

    def body(*refs: Any, **scratch: Any) -> None:
        x, w, *rest = refs
        z = [rest.pop() for _ in range(problem.kept_sums)][::-1]
        y = rest.pop()
        scales = rest.pop() if plan.is_scaled else None
        b, u = rest.pop(), rest.pop()
        bias = rest.pop(0) if problem.bias_dtype is not None else None
        residual = rest.pop(0) if problem.residual_dtype is not None else None
        operands = Operands(x, w, bias, residual)
        adapter = AdapterOperands(u, b, scales)
        AdaptedCta(plan, epilogue, operands, (y, z), AdaptedScratch(**scratch), adapter).run()

    scratch = scratch_types(plan)
    if plan.is_scaled:
        scratch["scales"] = plgpu.SMEM((schedule.warpgroups, problem.parts, plan.bias_size), ACCUMULATOR)
        scratch["scales_loaded"] = plgpu.Barrier(num_arrivals=problem.parts, num_barriers=schedule.warpgroups)
    return launched(plan, body, scratch, "matmul_with_adapter", results=1 + problem.kept_sums)


@dataclasses.dataclass(frozen=True)
class AdaptedScratch(Scratch):
    """Buffers and barriers, also of an adapter's factors of outputs."""

    scales: Any = None
    """Factors, `[warpgroups, parts, elements]`."""
    scales_loaded: Any = None
    """Barriers of the factors, one for each warpgroup."""


class AdaptedCta(Cta):
    """A CTA whose tiles have stages of ranks."""

    plan: AdaptedPlan  # pyright: ignore[reportIncompatibleVariableOverride]
    scratch: AdaptedScratch  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        plan: AdaptedPlan,
        epilogue: Epilogue,
        operands: Operands,
        results: tuple[Any, list[Any]],
        scratch: AdaptedScratch,
        adapter: AdapterOperands,
    ) -> None:
        super().__init__(plan, epilogue, operands, results, scratch)
        self.adapter = adapter

    def load_stage(self, m: Array, n: Array, k_step: Array, slot: Array) -> None:
        """Starts the copies of one step of K or of ranks."""
        # Both fill a stage with the same number of copies and bytes.
        ranks_cta = copy.copy(self)
        ranks_cta.operands = self.operands._replace(x=self.adapter.u, w=self.adapter.b)
        first = self.plan.k_steps
        pl.when(k_step < first)(lambda: Cta.load_stage(self, m, n, k_step, slot))
        pl.when(k_step >= first)(lambda: Cta.load_stage(ranks_cta, m, n, k_step - first, slot))

    def compute(self, tile: Array, output: Output) -> None:
        """Computes this warpgroup's part of a tile, and starts to store it."""
        super().compute(tile, AdaptedOutput(self, output, tile))


class AdaptedOutput(Output):
    """A warpgroup's part of a tile of the result, whose chunks get the adapter's product."""

    plan: AdaptedPlan  # pyright: ignore[reportIncompatibleVariableOverride]
    scratch: AdaptedScratch  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, cta: AdaptedCta, output: Output, tile: Array) -> None:
        super().__init__(cta, output.m, output.n, output.arrays)
        self.scales = cta.adapter.scales
        steps = range(self.plan.k_steps, self.plan.steps)
        self.slots = [cta.slot(tile * self.plan.steps + step) for step in steps]
        """The stages of ranks."""

    def prefetch(self) -> None:
        """Starts the epilogue's loads."""
        super().prefetch()
        if self.scales is None:
            return
        size = self.plan.rows if self.plan.weights_on_rows else self.plan.columns
        for part in range(self.plan.problem.parts):
            target = self.scratch.scales.at[self.warpgroup, part, pl.ds(0, size)]
            source: Any = self.scales.at[part, pl.ds(self.n, size)]
            plgpu.copy_gmem_to_smem(source, target, self.scratch.scales_loaded.at[self.warpgroup])

    def store(self, sums: Sequence[Array]) -> None:
        """Adds the adapter's products, applies the epilogue and starts the result's copies to device memory."""
        if self.scales is not None:
            plgpu.barrier_wait(self.scratch.scales_loaded.at[self.warpgroup])
        for slot in self.slots:
            plgpu.barrier_wait(self.scratch.loaded.at[slot])
        super().store(sums)

    def _add_bias(self, z: Array, part: int, chunk: int) -> Array:
        """Returns a chunk of one part's sums plus its bias, plus the adapter's product."""
        plan, z = self.plan, super()._add_bias(z, part, chunk)
        products = self._products(part, chunk)
        if (part, chunk) == (plan.problem.parts - 1, plan.chunks - 1):
            for slot in self.slots:  # all products with these stages are done
                plgpu.barrier_arrive(self.scratch.consumed.at[slot])
        if self.scales is None:
            return z + products
        first, size = chunk * plan.chunk, self._width(chunk)
        along = pl.ds(0, plan.padded_rows) if plan.weights_on_rows else pl.ds(first, size)
        scales = self.scratch.scales[self.warpgroup, part, along]
        scales = lax.broadcast_in_dim(scales, z.shape, [0 if plan.weights_on_rows else 1])
        return fused_multiply_add(scales, products, z, layout=MATRIX)

    def _products(self, part: int, chunk: int) -> Array:
        """Returns the adapter's product of a chunk, `[rows, columns]` float32."""
        plan, first, size = self.plan, chunk * self.plan.chunk, self._width(chunk)
        row_part, column_part = (part, 0) if plan.weights_on_rows else (0, part)
        rows_of_warpgroup = pl.ds(self.warpgroup * plan.padded_rows, plan.padded_rows)

        def multiply(total: Any) -> Array:
            for slot in self.slots:
                rows = self.scratch.rows.at[slot, row_part]
                a = rows.at[rows_of_warpgroup] if plan.rows_contiguous_in_k else rows.at[:, rows_of_warpgroup].T
                columns = self.scratch.columns.at[slot, column_part]
                if plan.columns_contiguous_in_k:
                    b = columns.at[pl.ds(first, size)].T
                else:
                    b = columns.at[:, pl.ds(first, size)]
                plgpu.wgmma(total, a, b)
            plgpu.wgmma_wait(0)
            return total[...]

        accumulator = plgpu.ACC((plan.padded_rows, size), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        return pl.run_scoped(multiply, accumulator)
