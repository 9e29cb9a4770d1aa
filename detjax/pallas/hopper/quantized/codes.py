"""Matmul of e4m3 codes on Hopper: the matrix unit multiplies the codes as they are, and warpgroups scale each block.

This is the plain matmul's pipeline with half of its bytes: nothing is widened. After each block of 128 columns a
warpgroup adds the block's products to its sums, in the order and with the roundings of `detjax.contract`. For e4m3
operands the matrix unit keeps fewer bits of the sums within a block than for 16-bit ones, as in the kernels of other
libraries. No other kernel has these bits. So whether this one multiplies depends on the format of the weight alone: see
`serves`.

A stage has one or more blocks, with the scales of its tokens and weights. A warpgroup has up to `at_once` products in
flight. While the matrix unit multiplies one of them, or for the other warpgroup, it adds an earlier one to its sums.

- For few tokens, weights are on the matrix unit's rows. Threads load scales before the products are there, and then
  multiply only. A plan for up to `_QUANTIZED_TOKENS` may have one more warpgroup, which quantizes the tokens of each
  stage while its weights arrive: it stores codes and scales, and `quantized` orders them as `loaded` orders copies. No
  GPU has run such a plan yet, so none is chosen.
- For more than `_FEW_TOKENS`, tokens are on the rows, since in a checkpoint with blocks of 128 x 128 numbers many
  neighbouring weights share their scales. Then a thread loads few scales and multiplies few factors, and gate and up of
  Qwen3-8B take half of the time. Whether neighbours share scales is read from the scales themselves, for each tile: a
  warpgroup compares them while its first stages arrive. Both cases have the same bits.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
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
from detjax.pallas.hopper.mosaic.barriers import meet
from detjax.pallas.hopper.mosaic.layouts import MATRIX, PER_COLUMN, PER_ROW
from detjax.pallas.hopper.mosaic.products import start_product_of_codes
from detjax.pallas.hopper.quantized.promotion import (
    column_scales,
    promoted_by,
    row_scales,
    rows_share_scales,
    scaled_by,
)
from detjax.pallas.hopper.quantized.rows import E4M3, in_column_units, quantize_stage, quantized_tokens
from detjax.pallas.hopper.quantized.widening import SCALE_BYTES

_SCALE_UNIT: Final = 32
"""Scales of tokens in shared memory are a multiple: the copy engine writes to multiples of 128 bytes."""

_LOOP_REGISTERS: Final = 168
"""Registers of a consumer for sums, products and scales of tokens; the rest are for addresses and temporaries."""
_LOOP_REGISTERS_WITH_LATE_SCALES: Final = 192
"""The same for sums and products alone, where scales are loaded when products are there."""

_QUANTIZED_TOKENS: Final = 8
"""Tokens of a tile that the kernel itself may quantize. More take a warpgroup longer than their weights to arrive."""
_REGISTERS_WITH_QUANTIZER: Final = {1: (232, 176, 40), 2: (160, 152, 40)}
"""Registers per thread of a consumer, a warpgroup that quantizes and the producer, by the number of consumers."""

_FEW_TOKENS: Final = 64
"""Up to this many tokens are on the matrix unit's columns."""

_EXPERT_TILES: Final = (128, 64, 32, 16, 8)
"""Sizes of tiles of an expert's rows."""

_LINES: Final = (1, 2, 4, 8)
"""Numbers of blocks in a stage."""

_MIN_PRODUCT_CYCLES: Final = 20.0
"""Estimated cycles of an instruction of the matrix unit with few columns: it reads 64 rows of 32 bytes."""
_CYCLES_OF_A_STAGE: Final = 120.0
"""Estimated cycles in which a warpgroup waits for a stage and for its last product."""
_CYCLES_PER_TILE: Final = 3000.0
_CYCLES_OF_A_BLOCK: Final = {1: 250.0, 2: 200.0}
"""Cycles of a block with tokens on the rows, by the number of warpgroups; fitted to an H200's times."""
_CYCLES_PER_COLUMN: Final = 2.1
"""Cycles of such a block in addition, for each warpgroup and column; fitted to the same times."""
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
    quantizes: bool = False
    """True if a warpgroup quantizes the tokens of each stage, rather than a kernel before this one."""

    @property
    def scale_unit(self) -> int:
        """Scales of a row of weights that are loaded together: a stage's, and as many as the copy engine addresses."""
        return max(SCALE_BYTES // self.scale_dtype.itemsize, self.scaled_blocks)

    @property
    def token_scales(self) -> int:
        """Scales of tokens in a block's buffer."""
        return round_up(self.schedule.tile_m, _SCALE_UNIT)

    @property
    def sharing_weights(self) -> int:
        """Neighbouring weights of a tile that share scales if all weights in a block of the checkpoint do."""
        return math.gcd(self.schedule.tile_n, FP8_BLOCK)

    @property
    def scaled_blocks(self) -> int:
        """Blocks of a stage that have scales of their own."""
        return 1 if self.by_rows else self.schedule.lines

    @property
    def loads_per_stage(self) -> int:
        """Copies that fill a stage: codes of both operands, the scales of each part, and the tokens' of each block."""
        copies = super().loads_per_stage + self.problem.parts + self.scaled_blocks
        return copies - (self.column_parts + self.scaled_blocks if self.quantizes else 0)

    @property
    def all_warpgroups(self) -> int:
        """Warpgroups of a CTA: some multiply, one produces, and one may quantize."""
        return super().all_warpgroups + self.quantizes

    @property
    def bytes_per_stage(self) -> int:
        """Bytes of a stage in shared memory."""
        scales = self.problem.parts * self.schedule.tile_n * self.scale_unit * self.scale_dtype.itemsize
        return super().bytes_per_stage + scales + self.scaled_blocks * self.token_scales * 4

    @property
    def registers_of_a_product(self) -> int:
        """Registers of a thread for the products of a block and part, and as many for their sums."""
        return self.padded_rows * self.columns // device.WARPGROUP

    @property
    def at_once(self) -> int:
        """Products of blocks and parts that a warpgroup has in flight."""
        sums = self.registers_of_sums
        jobs, product = self.schedule.lines * self.problem.parts, self.registers_of_a_product
        if not self.weights_on_rows:
            return min(2, jobs, (_LOOP_REGISTERS_WITH_LATE_SCALES - sums) // product)
        return max(1, min(jobs, (_LOOP_REGISTERS - sums) // (product + self.columns // 4)))

    @property
    def registers_of_sums(self) -> int:
        """Registers of a thread for the sums of all parts."""
        return self.problem.parts * self.registers_of_a_product

    def unmet_requirements(self) -> list[str]:
        """Returns the requirements that this plan does not meet; an empty list if the kernel can be built."""
        held = self.registers_of_sums + self.registers_of_a_product + self.columns // 4
        requirements = {
            "whole tiles of the matrix unit's rows, if these are tokens": self.weights_on_rows
            or self.rows == MATRIX_ROWS,
            "e4m3 codes": self.problem.dtype == E4M3,
            "K in whole stages": self.problem.k % self.tile_k == 0 and self.line == FP8_BLOCK,
            "64 rows or fewer for each warpgroup": self.rows <= MATRIX_ROWS,
            f"scales by group and tiles of {_QUANTIZED_TOKENS} tokens on the columns, if these are quantized here": (
                not self.quantizes or (not self.by_rows and self.weights_on_rows and self.columns == _QUANTIZED_TOKENS)
            ),
            "stages that divide a unit of scales": self.scale_unit % self.scaled_blocks == 0,
            "sums, products and scales that leave registers": (
                held <= _LOOP_REGISTERS if self.weights_on_rows else self.at_once >= self.problem.parts
            ),
        }
        return [text for text, holds in requirements.items() if not holds] or super().unmet_requirements()


@dataclasses.dataclass(frozen=True)
class CodesScratch(Scratch):
    """Buffers of a CTA."""

    token_scales: Any = None
    """Stages of the scales of tokens, `[stages, blocks, tokens]`."""
    scales: Any = None
    """Stages of the weights' scales, `[stages, parts, weights, groups]`."""
    quantized: Any = None
    """Barriers: the tokens of a stage are quantized."""


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
    is_few = problem.m <= _FEW_TOKENS if tile_m is None else tile_m < MATRIX_ROWS
    schedules = _schedules_for_few_tokens(problem, tile_m) if is_few else _schedules_for_many_tokens(problem, tile_m)
    blocks = problem.k // FP8_BLOCK
    plans = (CodesPlan(problem, one, scale_dtype, by_rows) for one in schedules if blocks % one.lines == 0)
    return [plan for plan in plans if not plan.unmet_requirements()]


def _schedules_for_few_tokens(problem: Problem, tile_m: int | None) -> Iterator[Schedule]:
    """Yields schedules with weights on the rows."""
    tokens = round_up(problem.m, 8)
    tiles_m = {8} if tokens == 8 else {tokens, *(size for size in (16, 32, 48) if size < tokens)}
    for warpgroups, tile in itertools.product((1, 2), sorted(tiles_m) if tile_m is None else [tile_m]):
        for rows, lines in itertools.product(range(8, MATRIX_ROWS + 8, 8), _LINES):
            yield Schedule(tile, rows * warpgroups, warpgroups=warpgroups, lines=lines)


def _schedules_for_many_tokens(problem: Problem, tile_m: int | None) -> Iterator[Schedule]:
    """Yields schedules with tokens on the rows. Tiles of tokens that run at the same time share weights in L2."""
    tiles_n = [size for size in (32, 48, 64, 96, 112, 128, 192) if size <= problem.n] or [problem.n]
    for warpgroups, tile_n, lines in itertools.product((1, 2), tiles_n, (1, 2)):
        tile = warpgroups * MATRIX_ROWS
        if tile_m in (None, tile):
            tiles = ceil_div(problem.m, tile)
            # Gate and up of 256 tokens do not fit in L2: two CTAs that load them together take 44 us, alone 60 (H200).
            is_shared = problem.parts == 2 and not problem.experts and tiles % 2 == 0 and tile_n % 16 == 0
            yield Schedule(
                tile,
                tile_n,
                "tokens",
                warpgroups=warpgroups,
                cluster_m=2 if is_shared else 1,
                lines=lines,
                panel=min(8, tiles // 2 if is_shared else tiles),
            )


def quantizing(plan: CodesPlan) -> list[CodesPlan]:
    """Returns the plan with one more warpgroup, which quantizes the tokens; an empty list if it cannot have one."""
    other = dataclasses.replace(plan, quantizes=True)
    return [] if other.unmet_requirements() else [other]


def estimated_seconds(plan: CodesPlan) -> float:
    """Returns the estimated seconds of a plan on an H200, only for ranking."""
    p, s = plan.problem, plan.schedule
    jobs, waves = s.lines * p.parts, ceil_div(math.prod(plan.grid), plan.clusters)
    memory = (p.parts * p.n * p.k + 2 * p.m * p.k + p.m * p.n * p.out_dtype.itemsize) / _MEMORY_BANDWIDTH
    if not plan.weights_on_rows:
        step = jobs * (_CYCLES_OF_A_BLOCK[s.warpgroups] + _CYCLES_PER_COLUMN * s.warpgroups * plan.columns)
        # Without a second product in flight, the matrix unit waits for additions.
        step *= 1.0 if plan.at_once > 1 else 1.1
        on_chip = waves * (plan.k_steps * step + _CYCLES_PER_TILE) / _CLOCK
        return max(on_chip, memory) + 0.15 * min(on_chip, memory)
    products = jobs * FP8_BLOCK // 32 * max(plan.columns / 2, _MIN_PRODUCT_CYCLES)
    additions = jobs * 2.5 * plan.registers_of_a_product
    alone = products + additions + _CYCLES_OF_A_STAGE * ceil_div(jobs, plan.at_once)
    # A tile with few weights leaves the rest of the matrix unit's 64 rows empty.
    missing = p.parts * s.warpgroups * (plan.padded_rows - plan.rows) * plan.tile_k
    arrival = (plan.bytes_per_stage - missing) / _BYTES_RECEIVED_PER_CYCLE
    step = max(s.warpgroups * products, alone, arrival)
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
    weight_codes = lax.bitcast_convert_type(w.codes, E4M3).reshape(weights, n, -1)
    scales = stored_scales(w).reshape(weights, n, -1)
    groups = round_up(scales.shape[-1], plan.scale_unit)
    arrays = [
        padded(weight_codes, (weights, problem.n, problem.k)),
        padded(scales, (weights, problem.n, groups)),
    ]
    static = None if w.input_scales is None else w.input_scales[..., source]
    if static is not None and operands.experts is not None:
        static = jnp.repeat(static[operands.experts[:-1]], plan.schedule.tile_m)[:, None]
    if plan.quantizes:
        arrays = [in_column_units(x), *arrays]
    else:
        codes, token_scales = quantized_tokens(x, w, static)
        arrays = [padded(codes, (problem.m, problem.k)), token_scales, *arrays]
    arrays += [] if bias is None else [padded(bias.reshape(weights, n), (weights, problem.n))]
    arrays += [] if residual is None else [padded(residual, (problem.m, problem.n))]
    arrays += [] if operands.experts is None else [operands.experts]
    (y,) = _kernel(plan, epilogue)(*arrays)
    return y[: len(x), :n]


def _kernel(plan: CodesPlan, epilogue: Epilogue) -> Callable[..., list[Array]]:
    """Returns the kernel `x, scales of x?, codes, scales, bias?, residual?, experts? -> y`."""
    problem = plan.problem

    def body(*refs: Any, **scratch: Any) -> None:
        x, *rest = refs
        token_scales = None if plan.quantizes else rest.pop(0)
        codes, scales, *rest = rest
        y = rest.pop()
        experts = rest.pop() if problem.experts else None
        bias = rest.pop(0) if problem.bias_dtype is not None else None
        residual = rest.pop(0) if problem.residual_dtype is not None else None
        operands = Operands(x, codes, bias, residual, experts=experts)
        CodesCta(plan, epilogue, operands, (y, []), CodesScratch(**scratch), (token_scales, scales)).run()

    scratch = scratch_types(plan)
    shape = plan.stages, plan.scaled_blocks, plan.token_scales
    scratch["token_scales"] = plgpu.SMEM(shape, ACCUMULATOR)
    shape = plan.stages, problem.parts, plan.schedule.tile_n, plan.scale_unit
    scratch["scales"] = plgpu.SMEM(shape, plan.scale_dtype)
    if plan.quantizes:
        scratch["quantized"] = plgpu.Barrier(num_barriers=plan.stages)
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

    def run(self) -> None:
        """Runs the warpgroup's role: consumers come first, then the producer, then the one that quantizes."""
        if not self.plan.quantizes:
            super().run()
            return
        warpgroups = self.plan.schedule.warpgroups
        consumer, quantizer, producer = _REGISTERS_WITH_QUANTIZER[warpgroups]
        device.shared_registers(*(consumer,) * warpgroups, quantizer, producer)

        @pl.when(self.warpgroup == warpgroups)
        def _producer() -> None:
            plgpu.set_max_registers(producer, action="decrease")

            @plgpu.warp_map
            def _(warp: Array) -> None:
                pl.when(warp == 0)(self.produce)

        @pl.when(self.warpgroup == warpgroups + 1)
        def _quantizer() -> None:
            plgpu.set_max_registers(quantizer, action="increase")
            self.quantize()

        @pl.when(self.warpgroup < warpgroups)
        def _consumer() -> None:
            plgpu.set_max_registers(consumer, action="increase")
            self.consume()

    def quantize(self) -> None:
        """Quantizes the tokens of all stages in order, ahead of the consumers."""
        plan, scratch, x = self.plan, self.scratch, self.operands.x
        tokens = min(plan.columns, x.shape[0])

        @pl.loop(0, self.tiles)
        def _(tile: Array) -> None:
            m, _ = self.origin(tile)

            @pl.loop(0, plan.steps)
            def _(k_step: Array) -> None:
                step = tile * plan.steps + k_step
                slot = self.slot(step)
                pl.when(step >= plan.stages)(lambda: plgpu.barrier_wait(scratch.consumed.at[slot]))
                codes, scales = scratch.columns.at[slot, 0], scratch.token_scales.at[slot]
                quantize_stage(x, codes, scales, m, self.group(k_step, 0), tokens=tokens)
                # The matrix unit reads through another proxy: the fence makes the stores of all threads visible to it.
                plgpu.commit_smem()
                plgpu.barrier_arrive(scratch.quantized.at[slot])

        steps = self.tiles * plan.steps

        # No barrier is left with an arrival that this warpgroup has not seen.
        @pl.loop(jnp.maximum(steps - plan.stages, 0), steps)
        def _(step: Array) -> None:
            plgpu.barrier_wait(scratch.consumed.at[self.slot(step)])

    def group(self, k_step: Array, block: int) -> Array:
        """Returns the group of a stage's block: its number among the scales of a row."""
        return jnp.int32(0) if self.plan.by_rows else k_step * self.plan.schedule.lines + block

    def load_stage(self, m: Array, n: Array, k_step: Array, slot: Array) -> None:
        """Starts the copies of a stage: codes of both operands, and their scales."""
        plan, scratch, loaded = self.plan, self.scratch, self.scratch.loaded.at[slot]
        self.load_rows(m, n, k_step, slot)
        unit = jnp.int32(plan.scale_unit)
        groups = pl.ds(lax.div(self.group(k_step, 0), unit) * unit, plan.scale_unit)
        for part in range(plan.problem.parts):
            source = self.scales.at[self.weight(m, part), pl.ds(n, plan.schedule.tile_n), groups]
            plgpu.copy_gmem_to_smem(source, scratch.scales.at[slot, part], loaded)
        if plan.quantizes:
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
            plgpu.barrier_wait(scratch.loaded.at[slot])
            if plan.quantizes:
                plgpu.barrier_wait(scratch.quantized.at[slot])
            in_flight: list[tuple[int, int, Array, Any]] = []

            def scales(block: int, part: int) -> tuple[Array, Array]:
                group = lax.rem(self.group(k_step, block), jnp.int32(plan.scale_unit))
                return self.scales_of(slot, block, part, group, unit)

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
                in_flight.append((block, part, self.started(slot, block, part), factors))
                if len(in_flight) == plan.at_once:
                    add_first()
            while in_flight:
                add_first()
            # With scales by rows, the last stage also has the scales of the whole rows.
            pl.when(not plan.by_rows or k_step < plan.k_steps - 1)(lambda: self.release(slot))
            return tuple(totals)

        zeros = plgpu.layout_cast(jnp.zeros((plan.padded_rows, plan.columns), ACCUMULATOR), MATRIX)
        sums = lax.fori_loop(0, plan.k_steps, add_stage, (zeros,) * parts)
        if plan.by_rows:
            slot = self.slot((tile + 1) * plan.steps - 1)
            scales = [self.scales_of(slot, 0, part, jnp.int32(0), 1) for part in range(parts)]
            by_columns_first = not plan.weights_on_rows
            sums = [
                scaled_by(total, *factors, by_columns_first=by_columns_first)
                for total, factors in zip(sums, scales, strict=True)
            ]
            self.release(slot)
        return tuple(sums)

    def started(self, slot: Array, block: int, part: int) -> Array:
        """Starts the products of this warpgroup's rows with a block of a part."""
        plan, scratch = self.plan, self.scratch
        rows = pl.ds(lax.axis_index("warpgroup") * plan.padded_rows, plan.padded_rows)
        row_part, column_part = (part, 0) if plan.weights_on_rows else (0, part)
        inner = pl.ds(block * FP8_BLOCK, FP8_BLOCK)
        return start_product_of_codes(
            scratch.rows.at[slot, row_part, rows, inner], scratch.columns.at[slot, column_part, :, inner]
        )

    def scales_of(self, slot: Array, block: int, part: int, group: Array, unit: int) -> tuple[Array, Array]:
        """Returns the scales of a tile's columns and of this warpgroup's rows, for a block of a stage."""
        plan, tokens, weights = self.plan, self.scratch.token_scales.at[slot, block], self.scratch.scales.at[slot, part]
        first_row = lax.axis_index("warpgroup") * plan.rows
        if plan.weights_on_rows:
            by_column = plgpu.load(tokens.at[pl.ds(0, plan.columns)], layout=PER_COLUMN, optimized=False)
            return by_column, row_scales(group, first_row, weights)
        by_row = plgpu.load(tokens.at[pl.ds(first_row, MATRIX_ROWS)], layout=PER_ROW, optimized=False)
        return column_scales(group, weights, unit=unit), by_row

    def release(self, slot: Array) -> None:
        """Lets the copy engine overwrite a stage, whose scales the threads of the warpgroup have read themselves."""
        if self.plan.cluster_size > 1:
            meet()  # one thread arrives for all
        plgpu.barrier_arrive(self.scratch.consumed.at[slot])
