"""Matmul of quantized activations and e4m3 weights on Hopper: the kernel of packed weights, with scales for each block.

float16 holds e4m3 numbers exactly. So weights are widened on the chip without their scales, and the codes of
activations come as float16 numbers. A stage is a block of K, whose products the matrix unit adds in a fresh
accumulator. The warpgroup then adds them to its sums, in the order and with the roundings of `detjax.contract`:

    in groups:  acc = fma(P_b, rn(s_x * s_w), acc)
    by rows:    acc = rn(acc + P_b), and at the end rn(s_x * rn(s_w * acc))

A stage brings the scales of its group along.

A plan has one of three forms:

- "widened": widened weights pass shared memory, and each warpgroup that multiplies adds its blocks to its sums.
- "sent": the products pass shared memory, which are less for few tokens. The widening warpgroups take blocks in turn,
  widen their weights in registers (`exact_rows`) and multiply them, and one warpgroup adds all blocks in order.
- "own": each warpgroup that multiplies widens its own rows in registers. While the matrix unit multiplies for one,
  another converts codes or adds to its sums.

Buffers are ordered as in `packed.kernel`. In addition, `token_scales` are a stage's, and `products` a place's: a
multiplier stores them, and `widened` and `emptied` order them like widened weights, since threads store and load them.
Scales are loaded before the stage is released, also those that are used later.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Final, Literal

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, DTypeLike

from detjax.contract import ACCUMULATOR, FP8_BLOCK
from detjax.operands.numerics import round_up
from detjax.operands.options import Epilogue
from detjax.operands.products import MatmulOperands
from detjax.operands.quantized_weight import QuantizedWeight, scales_of
from detjax.pallas.hopper import device
from detjax.pallas.hopper.matmul.kernel import Operands, launched, padded
from detjax.pallas.hopper.matmul.plan import MATRIX_ROWS, Problem, Schedule
from detjax.pallas.hopper.mosaic.layouts import MATRIX, PER_COLUMN
from detjax.pallas.hopper.mosaic.products import start_product_of_rows
from detjax.pallas.hopper.quantized.exact_rows import ExactFill, exact_rows
from detjax.pallas.hopper.quantized.fragments import FEW_ROWS, gathered
from detjax.pallas.hopper.quantized.packed.kernel import (
    PackedArrays,
    PackedCta,
    PackedScratch,
    packed_scratch_types,
)
from detjax.pallas.hopper.quantized.packed.plan import REGISTERS, PackedPlan
from detjax.pallas.hopper.quantized.packed.tuning import estimated_seconds
from detjax.pallas.hopper.quantized.promotion import promoted, promoted_by, row_scales, scaled
from detjax.pallas.hopper.quantized.rows import quantized_tokens
from detjax.pallas.hopper.quantized.widening import LINE, SCALE_BYTES, Codes, widen_exactly

type Form = Literal["widened", "sent", "own"]

FORMS: Final[tuple[Form, ...]] = "widened", "sent", "own"

_LOOP_REGISTERS: Final = 56
"""Registers of a consumer in its loop that hold neither sums nor products."""
_OWN_LOOP_REGISTERS: Final = 24
"""The same of a consumer that widens its own rows; it also has row operands and scales in registers."""

_MAX_SENT_COLUMNS: Final = 32
"""Most columns of products that pass shared memory."""

_COLUMN_UNIT: Final = 32
"""Scales of tokens in shared memory are a multiple: the copy engine writes to multiples of 128 bytes."""

_CYCLES_PER_BLOCK: Final = 100.0
"""Estimated cycles in which a warpgroup waits for a block's products and adds them to its sums, at least."""
_CYCLES_PER_PRODUCT: Final = 1100.0
"""Cycles in which a multiplier loads, converts and awaits a block, without its products; fitted to an H200's times."""
_CYCLES_OF_WAITING: Final = 350.0
"""The same for a single multiplying warpgroup, which awaits a block and adds it; fitted to the same times."""
_CYCLES_PER_OPERAND: Final = 200.0
"""Estimated cycles in which a warpgroup loads and converts a block's codes."""
_MIN_REGISTER_CYCLES: Final = 18.0
"""Estimated cycles of an instruction of the matrix unit with few columns, if rows come from registers."""
_CYCLES_PER_TILE: Final = 3000.0
_BYTES_RECEIVED_PER_CYCLE: Final = 58.0
_MEMORY_BANDWIDTH: Final = 4.6e12
_CLOCK: Final = 1.7e9


@dataclasses.dataclass(frozen=True)
class ScaledPlan(PackedPlan):
    """A plan whose stages are blocks of quantized activations and weights."""

    by_rows: bool = False
    """True if rows and weights have one scale each, not one for each block."""

    sends_products: bool = False
    """True if the wideners multiply, and products pass shared memory rather than widened weights."""

    one_slot: bool = False
    """True if a warpgroup has one buffer for chunks of results, which may leave room for another stage."""

    @property
    def form(self) -> Form:
        """The form of the plan."""
        return "sent" if self.sends_products else "widened" if self.wideners else "own"

    @property
    def slots(self) -> int:
        """Buffers for chunks of results."""
        return 1 if self.one_slot else super().slots

    @property
    def exact_fill(self) -> ExactFill:
        """The rows that fill a multiplier's row operand."""
        is_spread = self.sends_products and self.rows <= FEW_ROWS
        return ExactFill(self.rows, self.tile_k, self.problem.dtype.name, is_spread)

    @property
    def products(self) -> int:
        """Arrays of products of a block: one for each part, or one for the spread rows of all parts."""
        return 1 if self.exact_fill.is_spread else self.problem.parts

    @property
    def places(self) -> int:
        """Places of widened weights, or of products."""
        return 2 * self.wideners if self.sends_products else super().places

    @property
    def stages(self) -> int:
        """Stages of codes and tokens: as many as shared memory holds, up to 24, and a multiple of the wideners."""
        if not self.sends_products:
            return super().stages
        chunk = self.slots * math.prod(self.staged_shape)
        free = device.SHARED_MEMORY - device.SHARED_MEMORY_RESERVED
        free -= chunk * self.problem.out_dtype.itemsize
        free -= 0 if self.problem.residual_dtype is None else chunk * self.problem.residual_dtype.itemsize
        free -= 0 if self.problem.bias_dtype is None else 4 * self.problem.parts * self.bias_size
        free -= 4 * self.columns * (self.places * self.products * MATRIX_ROWS + 2 * FEW_ROWS)
        return min(24, free // self.bytes_per_stage) // self.wideners * self.wideners

    @property
    def token_scales(self) -> int:
        """Scales of tokens in a stage's buffer."""
        return round_up(self.columns, _COLUMN_UNIT)

    @property
    def loads_per_stage(self) -> int:
        """Copies that fill a stage: codes and scales of each part, tokens and their scales."""
        return super().loads_per_stage + 1

    @property
    def bytes_per_stage(self) -> int:
        """Bytes of a stage in shared memory."""
        return super().bytes_per_stage + 4 * self.token_scales

    def unmet_requirements(self) -> list[str]:
        """Returns the requirements that this plan does not meet; an empty list if the kernel can be built."""
        sums = self.problem.parts * self.padded_rows * self.columns // device.WARPGROUP
        others = _LOOP_REGISTERS
        if not self.wideners:
            # Row operands of all parts, and the scales of tokens.
            others = _OWN_LOOP_REGISTERS + self.problem.parts * self.tile_k // 4
            others += 0 if self.by_rows else self.columns // 4
            # Temporaries of a gated epilogue.
            has_more = self.problem.bias_dtype is not None or self.problem.residual_dtype is not None
            others += 24 if has_more and self.problem.parts == 2 else 0
        requirements = {
            f"one warpgroup, 64 rows and {_MAX_SENT_COLUMNS} columns of products that pass shared memory": (
                not self.sends_products
                or (
                    self.schedule.warpgroups == 1
                    and 1 <= self.wideners
                    and self.rows <= MATRIX_ROWS
                    and self.columns <= _MAX_SENT_COLUMNS
                )
            ),
            "blocks of one stage": self.by_rows or self.codes.group == self.tile_k,
            "e4m3 codes": self.codes.numbers == "e4m3",
            "K in whole blocks": self.problem.k % self.tile_k == 0,
            "sums and products that leave registers": self.registers is not None
            and 2 * sums + others <= self.registers,
        }
        return [text for text, holds in requirements.items() if not holds] or super().unmet_requirements()


@dataclasses.dataclass(frozen=True)
class ScaledScratch(PackedScratch):
    """Buffers of a CTA."""

    token_scales: Any = None
    """Stages of the scales of tokens, `[stages, columns]`."""
    products: Any = None
    """Places of products of a block, `[places, products, rows, columns]`."""


def has_one_quantization(w: QuantizedWeight) -> bool:
    """Returns whether all outputs take the same codes of a row. Static scales may differ between tensors."""
    return w.format.activations != "static" or (w.source is None and w.ndim == 2)


def scaled_plan(
    operands: MatmulOperands,
    *,
    out_dtype: DTypeLike,
    form: Form | None = None,
    dtype: DTypeLike = "float16",
) -> ScaledPlan | None:
    """Returns the plan of a product `[M, K] x [..., N, K]` with quantized activations, or None if the kernel cannot.

    A block is a group of 64 or 128 columns, or `FP8_BLOCK` columns where rows have one scale. `form` asks for one form
    of plans. `dtype` is the dtype of the numbers that the matrix unit multiplies: bfloat16 or float16, which both hold
    e4m3 numbers exactly. On an H200, sums of products in float16 have the bits of bfloat16, and float16 takes fewer
    instructions.
    """
    x, w, bias, residual = operands
    by_rows, block, dtype = w.format.activations != "group", block_size(w), jnp.dtype(dtype)
    problem = problem_of_blocks(len(x), w, bias, residual, dtype=dtype, out_dtype=out_dtype)
    if problem is None or block not in (LINE, 2 * LINE):
        return None
    group = problem.k if by_rows else block
    codes = Codes("e4m3", group, stored_scales(w).dtype, has_zeros=False, dtype=dtype.name)
    return default_plan(problem, codes, by_rows, form)


def block_size(w: QuantizedWeight) -> int:
    """Returns the columns whose products are added before they are scaled: a group, or `FP8_BLOCK` of a row."""
    return w.format.group if w.format.activations == "group" else FP8_BLOCK


def problem_of_blocks(
    rows: int,
    w: QuantizedWeight,
    bias: Array | None,
    residual: Array | None,
    *,
    dtype: DTypeLike,
    out_dtype: DTypeLike,
    experts: int = 0,
) -> Problem | None:
    """Returns the problem of a product of whole blocks of K, or None if the copy engine cannot address its arrays.

    `dtype` is the dtype of the numbers that the matrix unit multiplies.
    """
    n, k = w.shape[-2:]
    problem = Problem(
        rows,
        n,
        round_up(k, block_size(w)),
        math.prod(w.shape[:-2]) // max(1, experts),
        jnp.dtype(dtype),
        jnp.dtype(out_dtype),
        None if residual is None else jnp.dtype(residual.dtype),
        None if bias is None else jnp.dtype(bias.dtype),
        experts=experts,
    ).addressable
    # The copy engine addresses rows of whole units of 16 bytes.
    return problem if rows and w.groups is None and problem.n == n and k % 16 == 0 else None


def stored_scales(w: QuantizedWeight) -> Array:
    """Returns the scales as they are stored, if they are numbers."""
    return w.scales if w.tables is None and w.scales.dtype.itemsize in (2, 4) else scales_of(w)


def scaled_product(operands: MatmulOperands, plan: ScaledPlan, *, epilogue: Epilogue, source: int = 0) -> Array:
    """Returns `[M, N]` for rows `[M, K]`, computed by a plan of `scaled_plan`.

    `source` chooses the static scale, if the checkpoint has any.

    Raises:
        ValueError: the plan cannot be built.
    """
    plan.check()
    problem, weights, (x, w, bias, residual) = plan.problem, plan.problem.parts, operands
    scales = stored_scales(w).reshape(weights, problem.n, -1)
    groups = round_up(scales.shape[-1], SCALE_BYTES // scales.dtype.itemsize)
    numbers, token_scales = quantized_tokens(x, w, plan.codes.group, problem.dtype, source=source)
    arrays = [
        padded(numbers, (problem.m, problem.k)),
        token_scales,
        # The copy engine swizzles whole lines of an array.
        padded(w.codes.reshape(weights, problem.n, -1), (weights, problem.n, problem.k)),
        padded(scales, (weights, problem.n, groups)),
    ]
    arrays += [] if bias is None else [bias.reshape(weights, problem.n)]
    arrays += [] if residual is None else [padded(residual, (problem.m, problem.n))]
    (y,) = _kernel(plan, epilogue)(*arrays)
    return y[: len(x)]


def _kernel(plan: ScaledPlan, epilogue: Epilogue) -> Callable[..., list[Array]]:
    """Returns the kernel `x, scales of x, codes, scales, bias?, residual? -> y`."""
    problem = plan.problem

    def body(*refs: Any, **scratch: Any) -> None:
        x, token_scales, codes, scales, *rest = refs
        y = rest.pop()
        bias = rest.pop(0) if problem.bias_dtype is not None else None
        residual = rest.pop(0) if problem.residual_dtype is not None else None
        operands = Operands(x, PackedArrays(codes, scales), bias, residual)
        buffers = ScaledScratch(**{"rows": None, **scratch})
        ScaledCta(plan, epilogue, operands, (y, []), buffers, token_scales=token_scales).run()

    scratch_types = packed_scratch_types(plan)
    scratch_types["token_scales"] = plgpu.SMEM((plan.stages, plan.token_scales), ACCUMULATOR)
    if plan.sends_products:
        del scratch_types["rows"]
        shape = plan.places, plan.products, MATRIX_ROWS, plan.columns
        scratch_types["products"] = plgpu.SMEM(shape, ACCUMULATOR)
        if plan.exact_fill.is_spread:
            scratch_types["gathered"] = plgpu.SMEM((1, 2, FEW_ROWS, plan.columns), ACCUMULATOR)
    return launched(plan, body, scratch_types, "scaled_matmul")


class ScaledCta(PackedCta):
    """One CTA: a producer warp, warpgroups that widen, and warpgroups that multiply, scale and store."""

    plan: ScaledPlan  # pyright: ignore[reportIncompatibleVariableOverride]
    scratch: ScaledScratch  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, *args: Any, token_scales: Any) -> None:
        super().__init__(*args)
        self.token_scales = token_scales

    def load_stage(self, m: Array, n: Array, k_step: Array, slot: Array) -> None:
        """Starts the copies of a block: codes and scales of each part, tokens and their scales."""
        super().load_stage(m, n, k_step, slot)
        columns = pl.ds(0, self.plan.columns)
        source = self.token_scales.at[self.first_group(k_step), pl.ds(m, self.plan.columns)]
        target = self.scratch.token_scales.at[slot, columns]
        plgpu.copy_gmem_to_smem(source, target, self.scratch.loaded.at[slot])

    def widen_part(self, part: int, slot: Array, place: Array, step: Array) -> None:
        """Widens a block's weights of one part, without scales; multiplies them, too, if the plan sends products."""
        del step
        plan, scratch = self.plan, self.scratch
        if not plan.sends_products:
            widen_exactly(scratch.codes.at[slot, part], scratch.rows.at[place, part])
            return
        fill = plan.exact_fill
        if fill.is_spread and part:
            return  # the first part's instructions multiply all
        parts = range(plan.problem.parts) if fill.is_spread else (part,)
        weights = exact_rows(*[scratch.codes.at[slot, one] for one in parts], fill=fill)

        def multiply(product: Any) -> Array:
            plgpu.wgmma(product, weights, scratch.columns.at[slot, 0].T)
            return product[...]

        accumulator = plgpu.ACC((MATRIX_ROWS, plan.columns), ACCUMULATOR)  # pyright: ignore[reportPrivateImportUsage]
        scratch.products[place, part] = pl.run_scoped(multiply, accumulator)

    def accumulate(self, tile: Array, start: Array | None) -> list[Array]:
        """Returns this warpgroup's sums, `[rows, columns]` float32 for each part."""
        assert start is None
        plan, scratch, parts = self.plan, self.scratch, self.plan.problem.parts
        is_spread = plan.sends_products and plan.exact_fill.is_spread
        count = plan.products if plan.sends_products else parts
        shape = plan.padded_rows, plan.columns
        # Rows of the tile: without wideners, warpgroups may have fewer than the matrix unit's.
        first_row = lax.axis_index("warpgroup") * (plan.padded_rows if plan.wideners else plan.rows)
        rows = pl.ds(first_row, plan.padded_rows)

        def scales(k_step: Array, slot: Array, part: int) -> tuple[Any, ...]:
            unit = jnp.int32(plan.codes.unit(plan.codes.scale_dtype.itemsize))
            group = lax.rem(self.first_group(k_step), unit)
            sources = range(parts) if is_spread else (part,)
            weight_scales = [scratch.scales.at[slot, source] for source in sources]
            return scratch.token_scales.at[slot], group, first_row, *weight_scales

        def products(slot: Array, place: Array) -> tuple[Array, ...]:
            if plan.sends_products:
                arrays = [scratch.products.at[place, number] for number in range(count)]
                return tuple(plgpu.load(array, layout=MATRIX, optimized=False) for array in arrays)

            def multiply(*products: Any) -> tuple[Array, ...]:
                for part, product in enumerate(products):
                    plgpu.wgmma(product, scratch.rows.at[place, part, rows], scratch.columns.at[slot, 0].T)
                return tuple(product[...] for product in products)

            accumulator = plgpu.ACC(shape, ACCUMULATOR)  # pyright: ignore[reportPrivateImportUsage]
            return pl.run_scoped(multiply, *[accumulator] * parts)

        def add_own_block(k_step: Array, slot: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            # Codes of the next part are converted while the matrix unit multiplies, and products are added to the sums
            # while it multiplies the next part, or the other warpgroups' rows.
            own_rows = pl.ds(lax.axis_index("warpgroup") * plan.rows, plan.rows)
            operands = (
                exact_rows(scratch.codes.at[slot, part, own_rows], fill=plan.exact_fill) for part in range(parts)
            )
            started = [start_product_of_rows(operand, scratch.columns.at[slot, 0]) for operand in operands]
            tokens, rows_by_part = None, []
            if not plan.by_rows:
                # In registers before the products end, so that the stage is free then.
                columns = scratch.token_scales.at[slot, pl.ds(0, plan.columns)]
                tokens = plgpu.load(columns, layout=PER_COLUMN, optimized=False)
                places = [scales(k_step, slot, part) for part in range(parts)]
                rows_by_part = [row_scales(*place[1:]) for place in places]
                tokens, *rows_by_part = lax.optimization_barrier((tokens, *rows_by_part))
            added = []
            for part, (product, total) in enumerate(zip(started, sums, strict=True)):
                plgpu.wgmma_wait(parts - 1 - part)
                # To the compiler a product is final once it is started. The barriers keep its use between the waits.
                product = lax.optimization_barrier(product)
                if part == parts - 1:
                    release(k_step, slot)
                if tokens is None:
                    total = total + product
                else:
                    total = promoted_by(product, total, tokens, rows_by_part[part])
                added.append(lax.optimization_barrier(total))
            return tuple(added)

        def release(k_step: Array, slot: Array) -> None:
            # Threads have read the stage's codes and scales themselves, and each of them arrives. With scales by rows,
            # the last block's stage also has the scales of the whole rows.
            is_read = not plan.by_rows or k_step < plan.k_steps - 1
            pl.when(is_read)(lambda: plgpu.barrier_arrive(scratch.consumed.at[slot]))

        def add_block(k_step: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            step = tile * plan.k_steps + k_step
            slot, place = self.slot(step), self.place(step) if plan.wideners else jnp.int32(0)
            plgpu.barrier_wait(scratch.loaded.at[slot])
            if not plan.wideners:
                return add_own_block(k_step, slot, sums)
            plgpu.barrier_wait(scratch.widened.at[place])
            block_products = products(slot, place)
            plgpu.barrier_arrive(scratch.emptied.at[place])
            if plan.by_rows:
                sums = tuple(total + product for total, product in zip(sums, block_products, strict=True))
            else:
                pairs = enumerate(zip(block_products, sums, strict=True))
                sums = tuple(promoted(*pair, *scales(k_step, slot, part), is_spread=is_spread) for part, pair in pairs)
            release(k_step, slot)
            return sums

        zeros = plgpu.layout_cast(jnp.zeros(shape, ACCUMULATOR), MATRIX)
        sums = lax.fori_loop(0, plan.k_steps, add_block, (zeros,) * count)
        if plan.by_rows:
            last = jnp.int32(plan.k_steps - 1)
            slot = self.slot(tile * plan.k_steps + last)
            sums = tuple(
                scaled(total, *scales(last, slot, part), is_spread=is_spread) for part, total in enumerate(sums)
            )
            plgpu.barrier_arrive(scratch.consumed.at[slot])
        return list(gathered(sums[0], scratch.gathered.at[0], parts=parts) if is_spread else sums)


# --- the choice of a plan ---------------------------------------------------------------------------------------------


@functools.cache
def default_plan(problem: Problem, codes: Codes, by_rows: bool, form: Form | None = None) -> ScaledPlan | None:
    """Returns the plan of the lowest estimated time, or None if none fits; see `scaled_plan`."""
    block = FP8_BLOCK if by_rows else codes.group
    tokens = round_up(min(problem.m, 128), 8)
    tiles_m = {8} if tokens == 8 else {tokens, *(size for size in (16, 32, 48, 64, 96, 128) if size < tokens)}
    threads: dict[Form, list[tuple[int, int]]] = {
        "widened": [*REGISTERS],
        "sent": [(1, wideners) for warpgroups, wideners in REGISTERS if warpgroups == 1],
        "own": [(warpgroups, 0) for warpgroups in (1, 2, 3)],
    }
    plans = [
        ScaledPlan(
            problem,
            Schedule(tile_m, tile_n, warpgroups=warpgroups, lines=block // LINE, panel=1 if problem.m <= 512 else 8),
            codes,
            wideners,
            by_rows=by_rows,
            sends_products=name == "sent",
        )
        for name in ((form,) if form else FORMS)
        for warpgroups, wideners in threads[name]
        for tile_n in ((64 * warpgroups,) if warpgroups > 1 else (16, 24, 32, 40, 48, 56, 64))
        for tile_m in sorted(tiles_m)
        # Tiles that share weights would convert them again.
        if name != "sent" or tile_m == tokens
    ]
    fitting = [plan for plan in plans if not plan.unmet_requirements()]
    # Among equals, wideners that are ahead keep the matrix unit busy.
    return min(fitting, key=lambda plan: (_estimated_seconds(plan), -plan.wideners), default=None)


def _estimated_seconds(plan: ScaledPlan) -> float:
    """Returns the estimated seconds of a plan on an H200; only for ranking, and not yet fitted to measured times."""
    tiles = math.ceil(math.prod(plan.grid) / plan.clusters)
    if plan.sends_products:
        products = plan.products * plan.tile_k / 16 * max(plan.columns / 2, _MIN_REGISTER_CYCLES)
        multiplier = products + plan.products * _CYCLES_PER_PRODUCT
        arrival = plan.bytes_per_stage / _BYTES_RECEIVED_PER_CYCLE
        step = max(products, multiplier / plan.wideners, plan.products * _CYCLES_PER_BLOCK, arrival)
        memory = plan.problem.parts * plan.problem.n * plan.problem.k / _MEMORY_BANDWIDTH
        return max(memory, tiles * (plan.k_steps * step + _CYCLES_PER_TILE) / _CLOCK)
    if not plan.wideners:
        p, warpgroups = plan.problem, plan.schedule.warpgroups
        products = p.parts * plan.tile_k / 16 * max(plan.columns / 2, _MIN_REGISTER_CYCLES)
        alone = products + _CYCLES_PER_BLOCK + p.parts * (_CYCLES_PER_OPERAND + 1.2 * plan.columns)
        step = max(warpgroups * products, alone, plan.bytes_per_stage / _BYTES_RECEIVED_PER_CYCLE)
        memory = (p.parts * p.n * p.k + 2 * p.m * p.k + p.m * p.n * p.out_dtype.itemsize) / _MEMORY_BANDWIDTH
        return max(memory, tiles * (plan.k_steps * step + _CYCLES_PER_TILE) / _CLOCK)
    if plan.schedule.warpgroups == 2:  # one multiplies while the other adds
        return estimated_seconds(plan)
    products = plan.problem.parts * plan.padded_rows / MATRIX_ROWS * plan.tile_k / 16 * max(plan.columns / 2, 26)
    waiting = tiles * plan.k_steps * (products + _CYCLES_OF_WAITING) / _CLOCK
    return max(estimated_seconds(plan), waiting)
