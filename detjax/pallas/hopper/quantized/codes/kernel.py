"""The kernel that multiplies codes.

Buffers are ordered as in `matmul.kernel`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from detjax.contract import ACCUMULATOR, FP8_BLOCK
from detjax.operands.options import Epilogue
from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.hopper.matmul.kernel import Cta, Operands, Scratch, launched, scratch_types
from detjax.pallas.hopper.matmul.plan import MATRIX_ROWS
from detjax.pallas.hopper.mosaic.barriers import await_loads, meet
from detjax.pallas.hopper.mosaic.layouts import MATRIX, PER_COLUMN, PER_ROW
from detjax.pallas.hopper.mosaic.products import start_product_of_codes
from detjax.pallas.hopper.quantized.codes.plan import CodesPlan
from detjax.pallas.hopper.quantized.prologue import Prologue
from detjax.pallas.hopper.quantized.promotion import (
    column_scales,
    promoted_by,
    row_scales,
    rows_share_scales,
    scaled_by,
)


@dataclasses.dataclass(frozen=True)
class CodesScratch(Scratch):
    """Buffers of a CTA."""

    token_scales: Any = None
    """Stages of the scales of tokens, `[stages, blocks, tokens]`."""
    scales: Any = None
    """Stages of the weights' scales, `[stages, parts, weights, groups]`."""
    prepared: Any = None
    """The prologue's barrier: the codes of the tokens are in shared memory."""


def codes_kernel(plan: CodesPlan, epilogue: Epilogue, prologue: Prologue | None = None) -> Callable[..., list[Array]]:
    """Returns the kernel `x, scales of x, codes, scales, bias?, residual?, experts? -> y`.

    A prologue, which the plan must have, takes its operands in the place of x and its scales.
    """
    problem = plan.problem

    def body(*refs: Any, **scratch: Any) -> None:
        buffers = CodesScratch(**scratch)
        count = 2 if prologue is None else len(prologue.arrays)
        inputs, (codes, scales, *rest) = refs[:count], refs[count:]
        x, token_scales, prepare = None, None, None
        if prologue is None:
            x, token_scales = inputs
        else:
            prepare = functools.partial(prologue.compute, *inputs, buffers.columns, buffers.token_scales)
        y = rest.pop()
        experts = rest.pop() if problem.experts else None
        bias = rest.pop(0) if problem.bias_dtype is not None else None
        residual = rest.pop(0) if problem.residual_dtype is not None else None
        operands = Operands(x, codes, bias, residual, experts=experts)
        CodesCta(plan, epilogue, operands, (y, []), buffers, (token_scales, scales), prepare).run()

    assert plan.has_prologue == (prologue is not None)
    scratch = scratch_types(plan)
    shape = plan.column_stages, plan.scaled_blocks, plan.token_scales
    scratch["token_scales"] = plgpu.SMEM(shape, ACCUMULATOR)
    shape = plan.stages, problem.parts, plan.schedule.tile_n, plan.scale_unit
    scratch["scales"] = plgpu.SMEM(shape, plan.scale_dtype)
    if prologue is None:
        return launched(plan, body, scratch, "codes_matmul")
    scratch["prepared"] = plgpu.Barrier()
    # A sum over four warps takes a word for each thread.
    params = plgpu.CompilerParams(reduction_scratch_bytes=4 * WARPGROUP)
    return launched(plan, body, scratch, "codes_matmul_with_prologue", compiler_params=params)


class CodesCta(Cta):
    """One CTA: a producer warp, and warpgroups that multiply, scale and store."""

    plan: CodesPlan
    scratch: CodesScratch

    def __init__(
        self,
        plan: CodesPlan,
        epilogue: Epilogue,
        operands: Operands,
        results: tuple[Any, list[Any]],
        scratch: CodesScratch,
        scales: tuple[Any, Any],
        prepare: Callable[[], None] | None,
    ) -> None:
        super().__init__(plan, epilogue, operands, results, scratch)
        self.token_scales, self.scales = scales
        self.prepare = prepare

    def consume(self) -> None:
        """Computes this warpgroup's part of each tile, after the codes of the tokens if there is a prologue."""
        if self.prepare is not None:
            pl.when(self.warpgroup == 0)(functools.partial(self.run_prologue, self.prepare))
            plgpu.barrier_wait(self.scratch.prepared)
        super().consume()

    def run_prologue(self, prepare: Callable[[], None]) -> None:
        """Computes the codes of the tokens, and tells all warpgroups."""
        prepare()
        plgpu.commit_smem()  # the matrix unit reads through another proxy
        plgpu.barrier_arrive(self.scratch.prepared)

    def group(self, k_step: Array, block: int) -> Array:
        """Returns the group of a stage's block: its number among the scales of a row."""
        return jnp.int32(0) if self.plan.by_rows else k_step * self.plan.schedule.lines + block

    def load_stage(self, m: Array, n: Array, k_step: Array, slot: Array) -> None:
        """Starts the copies of a stage: codes of both operands and their scales, or after a prologue of the weights."""
        plan, scratch, loaded = self.plan, self.scratch, self.scratch.loaded.at[slot]
        self.load_rows(m, n, k_step, slot)
        unit = jnp.int32(plan.scale_unit)
        groups = pl.ds(lax.div(self.group(k_step, 0), unit) * unit, plan.scale_unit)
        for part in range(plan.problem.parts):
            source = self.scales.at[self.weight(m, part), pl.ds(n, plan.schedule.tile_n), groups]
            plgpu.copy_gmem_to_smem(source, scratch.scales.at[slot, part], loaded)
        if plan.has_prologue:
            return
        self.load_columns(m, n, k_step, slot)
        for block in range(plan.scaled_blocks):
            source = self.token_scales.at[self.group(k_step, block), pl.ds(m, plan.schedule.tile_m)]
            target = scratch.token_scales.at[slot, block, pl.ds(0, plan.schedule.tile_m)]
            plgpu.copy_gmem_to_smem(source, target, loaded)

    def accumulate(self, tile: Array, start: Array | None) -> list[Array]:
        """Returns this warpgroup's sums, `[rows, columns]` float32 for each part."""
        assert start is None
        plan = self.plan
        if plan.weights_on_rows or plan.by_rows:
            return list(self.sums(tile, 1))
        unit = plan.sharing_weights
        m, n = self.origin(tile)
        shared = [
            rows_share_scales(n, self.scales.at[self.weight(m, part)], rows=plan.schedule.tile_n, unit=unit)
            for part in range(plan.problem.parts)
        ]
        is_shared = functools.reduce(lambda x, y: x * y, shared) > 0
        return list(lax.cond(is_shared, lambda: self.sums(tile, unit), lambda: self.sums(tile, 1)))

    def sums(self, tile: Array, unit: int) -> tuple[Array, ...]:
        """Returns the sums of each part; `unit` neighbouring weights share their scales."""
        plan, scratch, parts = self.plan, self.scratch, self.plan.problem.parts
        jobs = [(block, part) for block in range(plan.schedule.lines) for part in range(parts)]

        def add_stage(k_step: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            slot, totals = self.slot(tile * plan.steps + k_step), list(sums)
            token_slot = k_step if plan.has_prologue else slot
            plgpu.barrier_wait(scratch.loaded.at[slot])
            in_flight: list[tuple[int, int, Array, Any]] = []
            loaded: list[tuple[Array, Array]] = []

            def scales(block: int, part: int) -> tuple[Array, Array]:
                group = lax.rem(self.group(k_step, block), jnp.int32(plan.scale_unit))
                loaded.append(self.scales_of(slot, token_slot, block, part, group, unit))
                return loaded[-1]

            def add_first() -> None:
                block, part, product, factors = in_flight.pop(0)
                plgpu.wgmma_wait(len(in_flight))
                # To the compiler a product is final once it is started. The barriers keep its use after the wait.
                product, total = lax.optimization_barrier(product), totals[part]
                factors = scales(block, part) if factors is None else factors
                total = total + product if plan.by_rows else promoted_by(product, total, *factors)
                totals[part] = lax.optimization_barrier(total)

            for block, part in jobs:
                factors: Any = () if plan.by_rows else None
                if plan.weights_on_rows and not plan.by_rows:
                    # In registers before the product is started: the compiler would load them after.
                    factors = lax.optimization_barrier(scales(block, part))
                in_flight.append((block, part, self.started(slot, token_slot, block, part), factors))
                if len(in_flight) == plan.at_once:
                    add_first()
            while in_flight:
                add_first()
            # With scales by rows, the last stage also has the scales of the whole rows.
            pl.when(not plan.by_rows or k_step < plan.k_steps - 1)(lambda: self.release(slot, loaded))
            return tuple(totals)

        zeros = plgpu.layout_cast(jnp.zeros((plan.padded_rows, plan.columns), ACCUMULATOR), MATRIX)
        sums = lax.fori_loop(0, plan.k_steps, add_stage, (zeros,) * parts)
        if plan.by_rows:
            slot = self.slot((tile + 1) * plan.steps - 1)
            scales = [self.scales_of(slot, slot, 0, part, jnp.int32(0), 1) for part in range(parts)]
            by_columns_first = not plan.weights_on_rows
            sums = [
                scaled_by(total, *factors, by_columns_first=by_columns_first)
                for total, factors in zip(sums, scales, strict=True)
            ]
            self.release(slot, scales)
        return tuple(sums)

    def started(self, slot: Array, token_slot: Array, block: int, part: int) -> Array:
        """Starts the products of this warpgroup's rows with a block of a part."""
        plan, scratch = self.plan, self.scratch
        rows = pl.ds(lax.axis_index("warpgroup") * plan.padded_rows, plan.padded_rows)
        row_part, column_part = (part, 0) if plan.weights_on_rows else (0, part)
        inner = pl.ds(block * FP8_BLOCK, FP8_BLOCK)
        # Only tokens on the columns have places of their own, after a prologue.
        column_slot = token_slot if plan.weights_on_rows else slot
        return start_product_of_codes(
            scratch.rows.at[slot, row_part, rows, inner], scratch.columns.at[column_slot, column_part, :, inner]
        )

    def scales_of(
        self, slot: Array, token_slot: Array, block: int, part: int, group: Array, unit: int
    ) -> tuple[Array, Array]:
        """Returns the scales of a tile's columns and of this warpgroup's rows, for a block of a stage."""
        plan, scratch = self.plan, self.scratch
        tokens, weights = scratch.token_scales.at[token_slot, block], scratch.scales.at[slot, part]
        first_row = lax.axis_index("warpgroup") * plan.rows
        if plan.weights_on_rows:
            by_column = plgpu.load(tokens.at[pl.ds(0, plan.columns)], layout=PER_COLUMN, optimized=False)
            return by_column, row_scales(group, first_row, weights)
        by_row = plgpu.load(tokens.at[pl.ds(first_row, MATRIX_ROWS)], layout=PER_ROW, optimized=False)
        return column_scales(group, weights, unit=unit), by_row

    def release(self, slot: Array, scales: Sequence[tuple[Array, Array]]) -> None:
        """Lets the copy engine overwrite a stage, from which the threads have loaded scales of columns and rows."""
        if scales:
            await_loads(*itertools.chain(*scales), layouts=(PER_COLUMN, PER_ROW) * len(scales))
        if self.plan.cluster_size > 1:
            meet()  # one thread arrives for all
        plgpu.barrier_arrive(self.scratch.consumed.at[slot])
