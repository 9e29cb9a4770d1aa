"""Matmul of e4m3 codes on Hopper: the matrix unit multiplies the codes as they are, and warpgroups scale each block.

This is the plain matmul's pipeline with half of its bytes: nothing is widened. After each block of 128 columns a
warpgroup adds the block's products to its sums, in the order and with the roundings of `detjax.contract`. For e4m3
operands the matrix unit keeps fewer bits of the sums within a block than for 16-bit ones, as in the kernels of other
libraries. No other kernel has these bits. So whether this one multiplies depends on the format of the weight alone: see
`serves`.

Weights are on the matrix unit's rows. A stage has several blocks, with the scales of its tokens and weights. Threads
load these before the products are there, and then multiply only.
"""

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

from detjax.contract import ACCUMULATOR, FP8_BLOCK
from detjax.operands.numerics import ceil_div, round_up
from detjax.operands.options import Epilogue
from detjax.operands.products import GroupedOperands, MatmulOperands
from detjax.operands.quantized_weight import QuantizedWeight, scales_of
from detjax.pallas.hopper import device
from detjax.pallas.hopper import grouped_matmul as grouped
from detjax.pallas.hopper.matmul.kernel import Cta, Operands, Scratch, launched, padded, scratch_types
from detjax.pallas.hopper.matmul.plan import MATRIX_ROWS, Plan, Problem, Schedule
from detjax.pallas.hopper.mosaic import with_twin
from detjax.pallas.hopper.mosaic.barriers import meet
from detjax.pallas.hopper.mosaic.layouts import MATRIX, PER_COLUMN
from detjax.pallas.hopper.quantized.promotion import promoted_by, row_scales, scaled
from detjax.pallas.hopper.quantized.rows import E4M3, quantized_tokens
from detjax.pallas.hopper.quantized.widening import SCALE_BYTES

_SCALE_UNIT: Final = 32
"""Scales of tokens in shared memory are a multiple: the copy engine writes to multiples of 128 bytes."""

_LOOP_REGISTERS: Final = 168
"""Registers of a consumer for sums, products and scales of tokens; the rest are for addresses and temporaries."""

_EXPERT_TILES: Final = (64, 32, 16, 8)
"""Sizes of tiles of an expert's rows."""

_LINES: Final = (1, 2, 4, 8)
"""Numbers of blocks in a stage."""

_MIN_PRODUCT_CYCLES: Final = 20.0
"""Estimated cycles of an instruction of the matrix unit with few columns: it reads 64 rows of 32 bytes."""
_CYCLES_OF_A_STAGE: Final = 120.0
"""Estimated cycles in which a warpgroup waits for a stage and for its last product."""
_CYCLES_PER_TILE: Final = 3000.0
_BYTES_RECEIVED_PER_CYCLE: Final = 58.0
_MEMORY_BANDWIDTH: Final = 4.6e12
_CLOCK: Final = 1.7e9


@dataclasses.dataclass(frozen=True)
class CodesPlan(Plan):
    """A plan of a product of codes, whose stages have whole blocks and their scales."""

    scale_dtype: jnp.dtype
    """Dtype of the weight's scales."""
    by_rows: bool = False
    """True if rows and weights have one scale each, not one for each block."""

    @property
    def scale_unit(self) -> int:
        """Scales of a row of weights that are loaded together: a stage's, and as many as the copy engine addresses."""
        return max(SCALE_BYTES // self.scale_dtype.itemsize, self.scaled_blocks)

    @property
    def token_scales(self) -> int:
        """Scales of tokens in a block's buffer."""
        return round_up(self.columns, _SCALE_UNIT)

    @property
    def scaled_blocks(self) -> int:
        """Blocks of a stage that have scales of their own."""
        return 1 if self.by_rows else self.schedule.lines

    @property
    def loads_per_stage(self) -> int:
        """Copies that fill a stage: codes of both operands, the scales of each part, and the tokens' of each block."""
        return super().loads_per_stage + self.problem.parts + self.scaled_blocks

    @property
    def bytes_per_stage(self) -> int:
        """Bytes of a stage in shared memory."""
        scales = self.problem.parts * self.row_tile * self.scale_unit * self.scale_dtype.itemsize
        return super().bytes_per_stage + scales + self.scaled_blocks * self.token_scales * 4

    @property
    def registers_of_a_product(self) -> int:
        """Registers of a thread for the products of a block and part, and for its sums."""
        return self.padded_rows * self.columns // device.WARPGROUP

    @property
    def at_once(self) -> int:
        """Products of blocks and parts that a warpgroup starts before it adds any to its sums."""
        free = _LOOP_REGISTERS - self.problem.parts * self.registers_of_a_product
        with_scales = self.registers_of_a_product + self.columns // 4
        return max(1, min(free // with_scales, self.schedule.lines * self.problem.parts))

    def unmet_requirements(self) -> list[str]:
        """Returns the requirements that this plan does not meet; an empty list if the kernel can be built."""
        held = (self.problem.parts + 1) * self.registers_of_a_product + self.columns // 4
        requirements = {
            "weights on the rows": self.weights_on_rows,
            "e4m3 codes": self.problem.dtype == E4M3,
            "K in whole stages": self.problem.k % self.tile_k == 0 and self.line == FP8_BLOCK,
            "64 rows or fewer for each warpgroup": self.rows <= MATRIX_ROWS,
            "stages that divide a unit of scales": self.scale_unit % self.scaled_blocks == 0,
            "sums, products and scales that leave registers": held <= _LOOP_REGISTERS,
        }
        return [text for text, holds in requirements.items() if not holds] or super().unmet_requirements()


@dataclasses.dataclass(frozen=True)
class CodesScratch(Scratch):
    """Buffers of a CTA."""

    token_scales: Any = None
    """Stages of the scales of tokens, `[stages, blocks, columns]`."""
    scales: Any = None
    """Stages of the weights' scales, `[stages, parts, rows, groups]`."""


def serves(w: QuantizedWeight) -> bool:
    """Returns whether this kernel computes all products of a weight with quantized activations.

    Scales belong to groups of 128 columns, or to rows. No number of rows, epilogue or dtype of a result may matter:
    products of other kernels have other bits.
    """
    return w.format.activations != "group" or w.format.group == FP8_BLOCK


def codes_plan(operands: MatmulOperands, *, out_dtype: DTypeLike) -> CodesPlan:
    """Returns the plan of a product `[M, K] x [..., N, K]` with a weight that the kernel `serves`."""
    x, w, bias, residual = operands
    return _plan_of_rows(len(x), w, bias, residual, out_dtype=out_dtype)


def _plan_of_rows(
    rows: int,
    w: QuantizedWeight,
    bias: Array | None,
    residual: Array | None = None,
    *,
    out_dtype: DTypeLike,
    experts: int = 0,
    tile: int | None = None,
) -> CodesPlan:
    """Returns the plan of a number of rows.

    Raises:
        RuntimeError: none fits, which is an error in `candidates`.
    """
    assert serves(w)
    n, k = w.shape[-2:]
    problem = Problem(
        rows,
        n,
        round_up(k, FP8_BLOCK),
        math.prod(w.shape[:-2]) // max(1, experts),
        E4M3,
        jnp.dtype(out_dtype),
        None if residual is None else jnp.dtype(residual.dtype),
        None if bias is None else jnp.dtype(bias.dtype),
        experts=experts,
    ).addressable
    plan = _default_plan(problem, stored_scales(w).dtype, w.format.activations != "group", tile)
    if plan is None:
        tiles = "" if tile is None else f" in tiles of {tile} tokens"
        raise RuntimeError(f"quantized_matmul: no plan multiplies the codes of {problem}{tiles}, which is an error")
    return plan


def stored_scales(w: QuantizedWeight) -> Array:
    """Returns the scales as they are stored, if they are numbers."""
    return w.scales if w.tables is None and w.scales.dtype.itemsize in (2, 4) else scales_of(w)


@functools.cache
def _default_plan(
    problem: Problem, scale_dtype: jnp.dtype, by_rows: bool, tile_m: int | None = None
) -> CodesPlan | None:
    """Returns the plan of the lowest estimated time, or None if none fits."""
    return min(candidates(problem, scale_dtype, by_rows, tile_m), key=estimated_seconds, default=None)


def candidates(problem: Problem, scale_dtype: jnp.dtype, by_rows: bool, tile_m: int | None = None) -> list[CodesPlan]:
    """Returns the plans worth trying, which can all be built; `tile_m` asks for tiles of this many tokens."""
    tokens = round_up(min(problem.m, 128), 8)
    tiles_m = {8} if tokens == 8 else {tokens, *(size for size in (16, 32, 48, 64, 96, 128) if size < tokens)}
    tiles_m = tiles_m if tile_m is None else {tile_m}
    blocks, panel = problem.k // FP8_BLOCK, 1 if problem.m <= 512 else 8
    schedules = (
        Schedule(tile_m, rows * warpgroups, warpgroups=warpgroups, lines=lines, panel=panel)
        for warpgroups in (1, 2)
        for rows in range(8, MATRIX_ROWS + 8, 8)
        for tile_m in sorted(tiles_m)
        for lines in _LINES
        if blocks % lines == 0
    )
    plans = (CodesPlan(problem, schedule, scale_dtype, by_rows) for schedule in schedules)
    return [plan for plan in plans if not plan.unmet_requirements()]


def estimated_seconds(plan: CodesPlan) -> float:
    """Returns the estimated seconds of a plan on an H200; only for ranking, and not fitted to measured times."""
    p, s = plan.problem, plan.schedule
    jobs = s.lines * p.parts
    products = jobs * FP8_BLOCK // 32 * max(plan.columns / 2, _MIN_PRODUCT_CYCLES)
    additions = jobs * 2.5 * plan.registers_of_a_product
    alone = products + additions + _CYCLES_OF_A_STAGE * ceil_div(jobs, plan.at_once)
    # A tile with few weights leaves the rest of the matrix unit's 64 rows empty.
    missing = p.parts * s.warpgroups * (plan.padded_rows - plan.rows) * plan.tile_k
    arrival = (plan.bytes_per_stage - missing) / _BYTES_RECEIVED_PER_CYCLE
    waves = ceil_div(math.prod(plan.grid), plan.clusters)
    step = max(s.warpgroups * products, alone, arrival)
    memory = (p.parts * p.n * p.k + 2 * p.m * p.k + p.m * p.n * p.out_dtype.itemsize) / _MEMORY_BANDWIDTH
    on_chip = waves * (plan.k_steps * step + _CYCLES_PER_TILE) / _CLOCK
    return max(on_chip, memory) + 0.15 * min(on_chip, memory)


def codes_product(operands: MatmulOperands, plan: CodesPlan, *, epilogue: Epilogue, source: int = 0) -> Array:
    """Returns `[M, N]` for rows `[M, K]`, computed by a plan of `codes_plan`.

    `source` chooses the static scale, if the checkpoint has any.

    Raises:
        ValueError: the plan cannot be built.
    """
    if unmet := plan.unmet_requirements():
        raise ValueError(f"quantized_matmul: {plan}; accepted: {'; '.join(unmet)}")
    x, w, bias, residual = operands
    return _product(Operands(x, w, bias, residual), plan, epilogue, source)


def grouped_codes_product(
    operands: GroupedOperands, *, epilogue: Epilogue, out_dtype: DTypeLike, unit: int, source: int = 0
) -> Array:
    """Returns rows `[M, N]` for rows `[M, K]` that are sorted by expert, of a weight that the kernel `serves`.

    See `detjax.ops.grouped_matmul` for the operands, and `codes_product` for `source`.
    """

    def multiply(tiles: Operands, *, schedule: int, **_: Any) -> Array:
        options: dict[str, Any] = {"tile": schedule, "out_dtype": out_dtype, "experts": len(tiles.w)}
        return _product(tiles, _plan_of_rows(len(tiles.x), tiles.w, tiles.bias, **options), epilogue, source)

    kernels = grouped.Kernels(product=multiply, schedule=lambda tile, *_: tile, tiles=_EXPERT_TILES)
    options: dict[str, Any] = {"epilogue": epilogue, "out_dtype": out_dtype, "unit": unit}
    return grouped.forward(operands, layout="nk", kernels=kernels, **options)


def _product(operands: Operands, plan: CodesPlan, epilogue: Epilogue, source: int) -> Array:
    """Returns the product of rows, which are quantized first, with a weight or with the experts' weights."""
    x, w, bias, residual = operands[:4]
    problem, weights, n = plan.problem, plan.problem.parts * max(1, plan.problem.experts), w.shape[-2]
    static = None if w.input_scales is None else w.input_scales[..., source]
    if static is not None and operands.experts is not None:
        static = jnp.repeat(static[operands.experts[:-1]], plan.schedule.tile_m)[:, None]
    codes, token_scales = quantized_tokens(x, w, static)
    scales = stored_scales(w).reshape(weights, n, -1)
    groups = round_up(scales.shape[-1], plan.scale_unit)
    weight_codes = lax.bitcast_convert_type(w.codes, E4M3).reshape(weights, n, -1)
    arrays = [
        padded(codes, (problem.m, problem.k)),
        token_scales,
        padded(weight_codes, (weights, problem.n, problem.k)),
        padded(scales, (weights, problem.n, groups)),
    ]
    arrays += [] if bias is None else [padded(bias.reshape(weights, n), (weights, problem.n))]
    arrays += [] if residual is None else [padded(residual, (problem.m, problem.n))]
    arrays += [] if operands.experts is None else [operands.experts]
    (y,) = _kernel(plan, epilogue)(*arrays)
    return y[: len(x), :n]


def _kernel(plan: CodesPlan, epilogue: Epilogue) -> Callable[..., list[Array]]:
    """Returns the kernel `x, scales of x, codes, scales, bias?, residual?, experts? -> y`."""
    problem = plan.problem

    def body(*refs: Any, **scratch: Any) -> None:
        x, token_scales, codes, scales, *rest = refs
        y = rest.pop()
        experts = rest.pop() if problem.experts else None
        bias = rest.pop(0) if problem.bias_dtype is not None else None
        residual = rest.pop(0) if problem.residual_dtype is not None else None
        operands = Operands(x, codes, bias, residual, experts=experts)
        CodesCta(plan, epilogue, operands, (y, []), CodesScratch(**scratch), (token_scales, scales)).run()

    scratch = scratch_types(plan)
    shape = plan.stages, plan.scaled_blocks, plan.token_scales
    scratch["token_scales"] = plgpu.SMEM(shape, ACCUMULATOR)
    shape = plan.stages, problem.parts, plan.row_tile, plan.scale_unit
    scratch["scales"] = plgpu.SMEM(shape, plan.scale_dtype)
    return launched(plan, body, scratch, "codes_matmul")


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
    ) -> None:
        super().__init__(plan, epilogue, operands, results, scratch)
        self.token_scales, self.scales = scales

    def group(self, k_step: Array, block: int) -> Array:
        """Returns the group of a stage's block: its number among the scales of a row."""
        return jnp.int32(0) if self.plan.by_rows else k_step * self.plan.schedule.lines + block

    def load_stage(self, m: Array, n: Array, k_step: Array, slot: Array) -> None:
        """Starts the copies of a stage: codes of both operands, and their scales."""
        super().load_stage(m, n, k_step, slot)
        plan, scratch, loaded = self.plan, self.scratch, self.scratch.loaded.at[slot]
        unit = jnp.int32(plan.scale_unit)
        groups = pl.ds(lax.div(self.group(k_step, 0), unit) * unit, plan.scale_unit)
        for part in range(plan.problem.parts):
            source = self.scales.at[self.weight(m, part), pl.ds(n, plan.row_tile), groups]
            plgpu.copy_gmem_to_smem(source, scratch.scales.at[slot, part], loaded)
        for block in range(plan.scaled_blocks):
            source = self.token_scales.at[self.group(k_step, block), pl.ds(m, plan.columns)]
            target = scratch.token_scales.at[slot, block, pl.ds(0, plan.columns)]
            plgpu.copy_gmem_to_smem(source, target, loaded)

    def accumulate(self, tile: Array, start: Array | None) -> list[Array]:
        """Returns this warpgroup's sums, `[rows, columns]` float32 for each part."""
        assert start is None
        plan, scratch, parts = self.plan, self.scratch, self.plan.problem.parts
        warpgroup = lax.axis_index("warpgroup")
        first_row = warpgroup * plan.rows
        rows = pl.ds(warpgroup * plan.padded_rows, plan.padded_rows)
        jobs = [(block, part) for block in range(plan.schedule.lines) for part in range(parts)]

        def operands(slot: Array, block: int, part: int) -> tuple[Any, Any]:
            columns_of_k = pl.ds(block * FP8_BLOCK, FP8_BLOCK)
            weights = scratch.rows.at[slot, part, rows, columns_of_k]
            return weights, scratch.columns.at[slot, 0, :, columns_of_k]

        def scales(k_step: Array, slot: Array, block: int, part: int) -> tuple[Array, Array]:
            columns = scratch.token_scales.at[slot, block, pl.ds(0, plan.columns)]
            tokens = plgpu.load(columns, layout=PER_COLUMN, optimized=False)
            group = lax.rem(self.group(k_step, block), jnp.int32(plan.scale_unit))
            return tokens, row_scales(group, first_row, scratch.scales.at[slot, part])

        def add_stage(k_step: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            slot, totals = self.slot(tile * plan.steps + k_step), list(sums)
            plgpu.barrier_wait(scratch.loaded.at[slot])
            for first in range(0, len(jobs), plan.at_once):
                some = jobs[first : first + plan.at_once]
                factors: list[Any] = [()] * len(some)
                if not plan.by_rows:
                    # In registers before the products are started: the compiler would load them after.
                    factors = lax.optimization_barrier([scales(k_step, slot, *job) for job in some])
                products = products_of_codes([operands(slot, *job) for job in some])
                for (_, part), product, factor in zip(some, products, factors, strict=True):
                    total = totals[part]
                    totals[part] = promoted_by(product, total, *factor) if factor else total + product
            # With scales by rows, the last stage also has the scales of the whole rows.
            pl.when(not plan.by_rows or k_step < plan.k_steps - 1)(lambda: self.release(slot))
            return tuple(totals)

        zeros = plgpu.layout_cast(jnp.zeros((plan.padded_rows, plan.columns), ACCUMULATOR), MATRIX)
        sums = lax.fori_loop(0, plan.k_steps, add_stage, (zeros,) * parts)
        if plan.by_rows:
            slot = self.slot((tile + 1) * plan.steps - 1)
            places = scratch.token_scales.at[slot, 0], jnp.int32(0), first_row
            sums = [scaled(total, *places, scratch.scales.at[slot, part]) for part, total in enumerate(sums)]
            self.release(slot)
        return list(sums)

    def release(self, slot: Array) -> None:
        """Lets the copy engine overwrite a stage, whose scales the threads of the warpgroup have read themselves."""
        if self.plan.cluster_size > 1:
            meet()  # one thread arrives for all
        plgpu.barrier_arrive(self.scratch.consumed.at[slot])


def _plain_products_of_codes(operands: Sequence[tuple[Any, Any]]) -> tuple[Array, ...]:
    # The interpreter multiplies no e4m3 numbers. These sums round otherwise than the matrix unit's.
    return tuple(
        jnp.dot(rows[...].astype(ACCUMULATOR), columns[...].astype(ACCUMULATOR).T, precision="highest")
        for rows, columns in operands
    )


@with_twin(_plain_products_of_codes)
def products_of_codes(operands: Sequence[tuple[Any, Any]]) -> tuple[Array, ...]:
    """Returns the products `rows @ columns.T` of a block, float32, of pairs of e4m3 codes in shared memory.

    Args:
        operands: references to `[64, 128]` and `[columns, 128]`, swizzled in lines of 128 bytes.
    """

    def multiply(*products: Any) -> tuple[Array, ...]:
        for product, (rows, columns) in zip(products, operands, strict=True):
            plgpu.wgmma(product, rows, columns.T)
        plgpu.wgmma_wait(0)
        return tuple(product[...] for product in products)

    shapes = [(rows.shape[0], columns.shape[0]) for rows, columns in operands]
    return pl.run_scoped(multiply, *[plgpu.ACC(shape, ACCUMULATOR) for shape in shapes])  # pyright: ignore
