"""Matmul of plain activations and packed weights on Hopper: the matmul kernel, with weights that it widens on the chip.

The bits are the bits of `matmul` with the widened weights: the same products are added in the same order. Only how the
weights come to the matrix unit differs. Codes and scales are a quarter to a half of the bytes, which is what small
numbers of tokens wait for. A plan has one of two forms.

Without widening warpgroups, the warpgroups that multiply widen their own rows, in registers: see `fragments.py`. While
the matrix unit multiplies half of a stage, they widen the other half. Stages and barriers are as in the plain
kernel.

With widening warpgroups, widened weights pass shared memory. Two rings of buffers lie between memory and matrix unit:

    producer warp   --copies-->   loaded[slot]     --> widening warpgroups and consumers wait
    widening group  --arrives-->  widened[place]   --> consumers wait, then issue `wgmma`
    consumer        --arrives-->  emptied[place]   --> the widening warpgroup of the place waits
    both            --arrive-->   consumed[slot]   --> producer warp waits

The ring of codes and tokens is deep, to hide the latency of memory. Widened weights take four times the space of codes,
and need two places or three. Widening warpgroups take steps in turn, so each of them meets the same slots and places
in every round, and has a whole step's time for the latency of its loads and stores.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, DTypeLike

from detjax.contract import ACCUMULATOR
from detjax.operands.numerics import flat_rows, round_up
from detjax.operands.options import Epilogue
from detjax.operands.products import MatmulOperands
from detjax.operands.quantized_weight import QuantizedWeight
from detjax.pallas.hopper import device
from detjax.pallas.hopper.device import DTYPES, SWIZZLE_BYTES, shared_registers
from detjax.pallas.hopper.matmul.kernel import Cta, Operands, Scratch, padded, scratch_types
from detjax.pallas.hopper.matmul.plan import MATRIX_ROWS, Plan, Problem, Schedule
from detjax.pallas.hopper.quantized.fragments import FEW_ROWS, Fill, gathered, loaded_words, widened_rows
from detjax.pallas.hopper.quantized.widening import LINE, SCALE_BYTES, Codes, widen

MAX_TOKENS: Final = 2048
"""Most tokens for which weights are widened tile by tile. Beyond, each weight is widened once, ahead of a plain product
that reads it: this takes less than reading codes once for every tile of tokens."""

# Registers per thread of a consumer and a widening thread, by the numbers of their warpgroups. A consumer keeps 56
# in addition to its accumulators, as in `matmul.kernel`; a widening thread has addresses and a few vectors of codes.
REGISTERS: Final = {(1, 1): (232, 232), (1, 2): (208, 128), (1, 3): (168, 88), (2, 1): (184, 104)}
REGISTERS_OF_WIDENING_CONSUMERS: Final = {1: 240, 2: 232, 3: 152, 4: 104}
"""Registers per thread of a consumer that widens its own rows, by the number of consumers."""
_PRODUCER_REGISTERS: Final = 40
_OTHER_REGISTERS: Final = 56
"""Registers of a consumer that do not hold accumulators."""
_OPERAND_REGISTERS: Final = 32
"""Registers of two lines of the row operand: one in flight, and one that is being widened.

A thread that widens needs a third less than `_OTHER_REGISTERS` besides.
"""
_BATCH_LINES: Final = {1: 4, 2: 4, 3: 2, 4: 1}
"""Most lines whose words a consumer loads at once, by the number of consumers."""
_SUMS_AND_WORDS: Final = {1: 152, 2: 152, 3: 80, 4: 40}
"""Registers for accumulators and words of a consumer that widens its own rows."""
_MAX_SPREAD_COLUMNS: Final = 64
"""Most columns of sums whose rows are brought in order through shared memory."""


class PackedArrays(NamedTuple):
    """The arrays of packed weights, or references to them in the kernel."""

    codes: Any
    """`[weights, N, bytes]`."""
    scales: Any
    """`[weights, N, groups]`, padded to whole units of the copy engine."""
    zeros: Any = None
    """`[weights, N, groups]`, or None."""


@dataclasses.dataclass(frozen=True)
class PackedPlan(Plan):
    """A plan whose row operand is packed weights."""

    codes: Codes
    wideners: int
    """Warpgroups that widen; 0: those that multiply do."""

    max_warpgroups: ClassVar[int] = max(REGISTERS_OF_WIDENING_CONSUMERS)

    @property
    def fill(self) -> Fill:
        """The rows of codes that fill the row operand of a warpgroup that widens its own rows."""
        is_spread = self.rows <= FEW_ROWS and self.columns <= _MAX_SPREAD_COLUMNS
        accumulators = 1 if is_spread else self.problem.parts
        # Two operands in a stage, or one of a single line. With four, the compiler waits for each product before it
        # writes the next operand.
        width = max(1, accumulators * self.schedule.lines // 2)
        batch = max(width, min(self.schedule.lines, _BATCH_LINES[self.schedule.warpgroups]))
        fill = Fill(self.codes, self.tile_k, batch * LINE, width * LINE, self.rows, is_spread)
        # Sums come first: what they leave is for words.
        for_words = _SUMS_AND_WORDS[self.schedule.warpgroups] - accumulators * self.columns // 2
        while fill.batch > fill.width and fill.words(self.problem.parts) > for_words:
            fill = dataclasses.replace(fill, batch=fill.batch // 2)
        return fill

    @property
    def operands_in_flight(self) -> int:
        """Row operands that the matrix unit may still read while the next one is widened.

        One, if a stage has several. A single operand has the same registers in the next stage, which must not be
        written while they are read: that gave wrong bits on an H200, though not in every run.
        """
        return 1 if self.accumulators * self.tile_k > self.fill.width else 0

    @property
    def accumulators(self) -> int:
        """Accumulators of a warpgroup: one for each part, or one for the spread rows of all parts."""
        return 1 if not self.wideners and self.fill.is_spread else self.problem.parts

    @property
    def registers(self) -> int | None:
        """Registers per thread of a consumer; None for numbers of warpgroups that no kernel has."""
        if not self.wideners:
            return REGISTERS_OF_WIDENING_CONSUMERS.get(self.schedule.warpgroups)
        return REGISTERS.get((self.schedule.warpgroups, self.wideners), (None,))[0]

    @property
    def extra_bytes(self) -> int:
        """Bytes of a stage's scales and zero points for each row."""
        scales = self.codes.box(self.tile_k, self.codes.scale_dtype.itemsize) * self.codes.scale_dtype.itemsize
        return scales + (self.codes.box(self.tile_k, 1) if self.codes.has_zeros else 0)

    @property
    def loads_per_stage(self) -> int:
        """Copies that fill a stage: codes, scales and zero points of each part, and tokens."""
        return self.problem.parts * (3 if self.codes.has_zeros else 2) + 1

    @property
    def bytes_per_stage(self) -> int:
        """Bytes of a stage's codes, scales, zero points and tokens in shared memory."""
        row = self.codes.row_bytes(self.tile_k) + self.extra_bytes
        return self.problem.parts * self.row_tile * row + self.columns * self.tile_k * self.problem.dtype.itemsize

    @property
    def places(self) -> int:
        """Places of widened weights: a multiple of the warpgroups that fill them in turn, at least two, if any."""
        return max(2, self.wideners) if self.wideners else 0

    @property
    def spread_bytes(self) -> int:
        """Bytes of the buffers by which warpgroups bring the sums of spread rows in order."""
        is_spread = not self.wideners and self.fill.is_spread
        return self.schedule.warpgroups * 2 * FEW_ROWS * self.columns * 4 if is_spread else 0

    @property
    def stages(self) -> int:
        """Stages of codes and tokens: as many as shared memory holds, up to 24, and a multiple of the wideners."""
        chunk = self.schedule.warpgroups * self.slots * math.prod(self.staged_shape)
        free = device.SHARED_MEMORY - device.SHARED_MEMORY_RESERVED
        free -= chunk * self.problem.out_dtype.itemsize
        free -= 0 if self.problem.residual_dtype is None else chunk * self.problem.residual_dtype.itemsize
        if self.problem.bias_dtype is not None:
            free -= 4 * self.schedule.warpgroups * self.problem.parts * self.bias_size
        rows = self.problem.parts * self.schedule.warpgroups * self.padded_rows
        free -= self.places * rows * self.tile_k * self.problem.dtype.itemsize + self.spread_bytes
        turns = max(1, self.wideners)
        return min(24, free // self.bytes_per_stage) // turns * turns

    def unmet_requirements(self) -> list[str]:
        """Returns the requirements that this plan does not meet; an empty list if the kernel can be built."""
        s, codes, k, registers = self.schedule, self.codes, self.problem.k, self.registers
        held = self.accumulators * self.padded_rows * self.columns // device.WARPGROUP + _OTHER_REGISTERS
        if not self.wideners and s.lines in (1, 2, 4):
            words = self.fill.words(self.problem.parts)
            held += words + _OPERAND_REGISTERS * self.fill.width // LINE - _OTHER_REGISTERS // 3
        requirements = {
            "weights on the rows": self.weights_on_rows,
            "clusters of one CTA": self.cluster_size == 1,
            "0 to 3 widening warpgroups, 0 or 1 for two that multiply, 0 for more": registers is not None,
            "numbers of the codes' dtype": codes.dtype == self.problem.dtype.name,
            "1, 2 or 4 lines": s.lines in (1, 2, 4),
            f"rows of codes of up to {SWIZZLE_BYTES} bytes in a stage": codes.row_bytes(self.tile_k) <= SWIZZLE_BYTES,
            "K in whole lines": k % LINE == 0,
            # The copy engine swizzles whole lines of an array.
            f"rows of codes in whole lines of {SWIZZLE_BYTES} bytes": codes.row_bytes(self.tile_k) < SWIZZLE_BYTES
            or codes.row_bytes(k) % SWIZZLE_BYTES == 0,
            "N in eights": self.problem.n % 8 == 0,
            # A stage begins with a group or lies within one.
            "groups and stages that divide each other": codes.group >= k
            or (codes.group % 8 == 0 and max(codes.group, self.tile_k) % min(codes.group, self.tile_k) == 0),
            "full rows for two warpgroups": s.warpgroups == 1 or self.rows == self.padded_rows or not self.wideners,
            "64 rows or fewer of a warpgroup that widens": self.wideners > 0 or self.rows <= MATRIX_ROWS,
            "one accumulator for operands in 256s": self.wideners > 0 or s.lines * self.accumulators <= 4,
            # The compiler allots the registers of one instruction from those with which a thread starts.
            "columns of one `wgmma` that leave registers": self.columns // 2 + 32
            <= device.registers_at_start(s.warpgroups + self.wideners + 1),
            "accumulators that leave registers": registers is not None and held <= registers,
        }
        unmet = [text for text, holds in requirements.items() if not holds] or super().unmet_requirements()
        if not unmet and self.stages < max(2, self.wideners):
            unmet.append("2 stages of codes in shared memory")
        return unmet

    def check(self) -> None:
        """Raises ValueError, with the unmet requirements, if a kernel of this plan cannot be built."""
        if unmet := self.unmet_requirements():
            raise ValueError(f"quantized_matmul: {self}; accepted: {'; '.join(unmet)}")


@dataclasses.dataclass(frozen=True)
class PackedScratch(Scratch):
    """Buffers of a CTA; `rows` are the places of widened weights, and `columns` the stages of tokens."""

    codes: Any = None
    """Stages of codes, `[stages, parts, rows, bytes]`."""
    scales: Any = None
    """Stages of scales, `[stages, parts, rows, groups]`."""
    zeros: Any = None
    """Stages of zero points."""
    widened: Any = None
    """A barrier for each place: its weights are widened."""
    emptied: Any = None
    """A barrier for each place: it may be overwritten."""
    gathered: Any = None
    """Sums of spread rows, `[warpgroups, 2, rows, columns]`."""


def codes_of(w: QuantizedWeight) -> Codes | None:
    """Returns the meaning of a weight's packed arrays, or None if the kernel does not read them."""
    if w.groups is not None or w.tables is not None or w.is_computed or w.scales.dtype.itemsize not in (2, 4):
        return None
    return Codes(w.format.numbers, w.format.group, jnp.dtype(w.scales.dtype), w.zeros is not None, w.format.dtype)


def packed_plan(operands: MatmulOperands, *, out_dtype: DTypeLike) -> PackedPlan | None:
    """Returns the plan of a product with a packed weight, or None if a plain product of widened weights serves it."""
    x, w, bias, residual = operands
    codes, m = codes_of(w), x.size // x.shape[-1]
    if codes is None or str(x.dtype) not in DTYPES or not 0 < m <= MAX_TOKENS:
        return None
    n, k = w.shape[-2:]
    problem = Problem(
        m,
        n,
        k,
        math.prod(w.shape[:-2]),
        jnp.dtype(x.dtype),
        jnp.dtype(out_dtype),
        None if residual is None else jnp.dtype(residual.dtype),
        None if bias is None else jnp.dtype(bias.dtype),
    ).addressable
    if (problem.n, problem.k) != (n, k):
        return None
    return default_plan(problem, codes)


def packed_product(operands: MatmulOperands, plan: PackedPlan, *, epilogue: Epilogue, out_dtype: DTypeLike) -> Array:
    """Returns `[*B, N]` for rows `[*B, K]`, computed by a plan of `packed_plan`.

    Raises:
        ValueError: the plan cannot be built.
    """
    plan.check()
    problem, (x, w, bias, residual) = plan.problem, operands
    flat, weights = flat_rows(x), problem.parts

    def stacked(array: Array, itemsize: int) -> Array:
        # The copy engine addresses rows of whole units of 16 bytes.
        array = array.reshape(weights, problem.n, -1)
        groups = round_up(array.shape[-1], SCALE_BYTES // itemsize)
        return padded(array, (weights, problem.n, groups))

    arrays = [
        padded(flat, (problem.m, problem.k)),
        w.codes.reshape(weights, problem.n, -1),
        stacked(w.scales, w.scales.dtype.itemsize),
    ]
    arrays += [] if w.zeros is None else [stacked(w.zeros, 1)]
    arrays += [] if bias is None else [bias.reshape(weights, problem.n)]
    arrays += [] if residual is None else [padded(flat_rows(residual), (problem.m, problem.n))]
    (y,) = _kernel(plan, epilogue)(*arrays)
    return y[: len(flat)].reshape(*x.shape[:-1], problem.n).astype(out_dtype)


def _kernel(plan: PackedPlan, epilogue: Epilogue) -> Callable[..., list[Array]]:
    """Returns the kernel `x, codes, scales, zeros?, bias?, residual? -> y`."""
    problem = plan.problem

    def body(*refs: Any, **scratch: Any) -> None:
        x, codes, scales, *rest = refs
        y = rest.pop()
        zeros = rest.pop(0) if plan.codes.has_zeros else None
        bias = rest.pop(0) if problem.bias_dtype is not None else None
        residual = rest.pop(0) if problem.residual_dtype is not None else None
        operands = Operands(x, PackedArrays(codes, scales, zeros), bias, residual)
        PackedCta(plan, epilogue, operands, (y, []), PackedScratch(**{"rows": None, **scratch})).run()

    return kernel_of_plan(plan, body, packed_scratch_types(plan), name="packed_matmul")


def kernel_of_plan(
    plan: PackedPlan, body: Callable[..., None], scratch: dict[str, Any], *, name: str
) -> Callable[..., list[Array]]:
    """Returns the kernel of a plan, with the result `y`. `scratch` has the types of its buffers and barriers."""
    problem = plan.problem
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((problem.m, problem.n), problem.out_dtype)],
        grid=(plan.clusters,),
        grid_names=("cluster",),
        cluster=(1, 1),
        cluster_names=("cm", "cn"),
        num_threads=plan.schedule.warpgroups + plan.wideners + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name=name,
    )


def packed_scratch_types(plan: PackedPlan) -> dict[str, Any]:
    """Returns the types of buffers and barriers, by their names in `PackedScratch`."""
    problem, warpgroups, codes = plan.problem, plan.schedule.warpgroups, plan.codes
    scratch = scratch_types(plan)
    rows = warpgroups * plan.padded_rows
    shape, transforms = (plan.places, problem.parts, rows, plan.tile_k), scratch.pop("rows").transforms
    widened = plgpu.SMEM(shape, problem.dtype, transforms=transforms) if plan.wideners else None
    shape = plan.stages, problem.parts, plan.row_tile
    transforms = codes.transforms(plan.tile_k)
    scratch["codes"] = plgpu.SMEM((*shape, codes.row_bytes(plan.tile_k)), jnp.uint8, transforms=transforms)
    size = codes.box(plan.tile_k, codes.scale_dtype.itemsize)
    scratch["scales"] = plgpu.SMEM((*shape, size), codes.scale_dtype)
    if codes.has_zeros:
        scratch["zeros"] = plgpu.SMEM((*shape, codes.box(plan.tile_k, 1)), jnp.uint8)
    if widened is None:
        scratch["consumed"] = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=plan.stages)
        if plan.spread_bytes:
            scratch["gathered"] = plgpu.SMEM((warpgroups, 2, FEW_ROWS, plan.columns), ACCUMULATOR)
        return scratch
    scratch["rows"] = widened
    # A stage is read by the consumers and by one widening warpgroup.
    scratch["consumed"] = plgpu.Barrier(num_arrivals=warpgroups + 1, num_barriers=plan.stages)
    scratch["widened"] = plgpu.Barrier(num_barriers=plan.places)
    scratch["emptied"] = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=plan.places)
    return scratch


class PackedCta(Cta):
    """One CTA: a producer warp, warpgroups that widen, and warpgroups that multiply and store."""

    plan: PackedPlan
    scratch: PackedScratch

    def run(self) -> None:
        """Runs the warpgroup's role: consumers come first, then wideners, then the producer."""
        consumers, wideners = self.plan.schedule.warpgroups, self.plan.wideners
        consumer, widener = REGISTERS[consumers, wideners] if wideners else (self.plan.registers, 0)
        assert consumer is not None
        shared_registers(*(consumer,) * consumers, *(widener,) * wideners, _PRODUCER_REGISTERS)
        initial = device.registers_at_start(consumers + wideners + 1)

        def set_registers(count: int) -> None:
            if count != initial:
                plgpu.set_max_registers(count, action="increase" if count > initial else "decrease")

        @pl.when(self.warpgroup == consumers + wideners)
        def _producer() -> None:
            set_registers(_PRODUCER_REGISTERS)

            @plgpu.warp_map
            def _(warp: Array) -> None:
                pl.when(warp == 0)(self.produce)

        if wideners:

            @pl.when((self.warpgroup >= consumers) & (self.warpgroup < consumers + wideners))
            def _widener() -> None:
                set_registers(widener)
                self.widen_stages(self.warpgroup - consumers)

        @pl.when(self.warpgroup < consumers)
        def _consumer() -> None:
            set_registers(consumer)
            self.consume()

    def place(self, step: Array) -> Array:
        """Returns the place of the widened weights of a step."""
        return lax.rem(step, jnp.int32(self.plan.places))

    def first_group(self, k_step: Array) -> Array:
        """Returns the group of the first column of a step of K."""
        return lax.div(k_step * self.plan.tile_k, jnp.int32(self.plan.codes.group))

    # --- the producer ---------------------------------------------------------------------------------------------

    def load_stage(self, m: Array, n: Array, k_step: Array, slot: Array) -> None:
        """Starts the copies of one step of K: codes, scales and zero points of each part, and tokens."""
        plan, loaded, w = self.plan, self.scratch.loaded.at[slot], self.operands.w
        codes, outputs = plan.codes, pl.ds(n, plan.row_tile)
        row_bytes = codes.row_bytes(plan.tile_k)
        codes_of_k = pl.ds(k_step * row_bytes, row_bytes)
        group = self.first_group(k_step)
        for part in range(plan.problem.parts):
            index = self.weight(m, part)
            copies = [(w.codes, codes_of_k, self.scratch.codes)]
            for source, target in ((w.scales, self.scratch.scales), (w.zeros, self.scratch.zeros)):
                if source is not None:
                    unit = codes.unit(source.dtype.itemsize)
                    copies.append((source, pl.ds(group - lax.rem(group, jnp.int32(unit)), target.shape[-1]), target))
            for source, columns, target in copies:
                plgpu.copy_gmem_to_smem(source.at[index, outputs, columns], target.at[slot, part], loaded)
        tokens = self.operands.x.at[pl.ds(m, plan.columns), pl.ds(k_step * plan.tile_k, plan.tile_k)]
        plgpu.copy_gmem_to_smem(tokens, self.scratch.columns.at[slot, 0], loaded)

    # --- a widening warpgroup -------------------------------------------------------------------------------------

    def widen_stages(self, number: Array) -> None:
        """Widens the steps that leave the remainder `number`, when divided by the wideners."""
        plan, scratch = self.plan, self.scratch
        steps = self.tiles * plan.k_steps

        @pl.loop(0, lax.div(steps - number + (plan.wideners - 1), jnp.int32(plan.wideners)))
        def _(turn: Array) -> None:
            step = turn * plan.wideners + number
            slot, place = self.slot(step), self.place(step)
            plgpu.barrier_wait(scratch.loaded.at[slot])

            @pl.when(step >= plan.places)
            def _() -> None:
                plgpu.barrier_wait(scratch.emptied.at[place])

            for part in range(plan.problem.parts):
                self.widen_part(part, slot, place, step)
            # The matrix unit reads through another proxy: the fence makes the stores of all threads visible to it.
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.widened.at[place])
            plgpu.barrier_arrive(scratch.consumed.at[slot])

        # No barrier is left with an arrival that nobody has waited for.
        @pl.loop(jnp.maximum(steps - plan.places, 0), steps)
        def _(step: Array) -> None:
            @pl.when(lax.rem(step, jnp.int32(plan.wideners)) == number)
            def _() -> None:
                plgpu.barrier_wait(scratch.emptied.at[self.place(step)])

    def widen_part(self, part: int, slot: Array, place: Array, step: Array) -> None:
        """Widens a step's weights of one part."""
        scratch, group = self.scratch, self.first_group(lax.rem(step, jnp.int32(self.plan.k_steps)))
        zeros = None if scratch.zeros is None else scratch.zeros.at[slot, part]
        codes, scales = scratch.codes.at[slot, part], scratch.scales.at[slot, part]
        widen(codes, scales, scratch.rows.at[place, part], group, zeros, packing=self.plan.codes)

    # --- a consumer -----------------------------------------------------------------------------------------------

    def accumulate(self, tile: Array, start: Array | None) -> list[Array]:
        """Returns this warpgroup's accumulators, `[rows, columns]` float32 for each part."""
        assert start is None
        if not self.plan.wideners:
            return self.accumulate_own_rows(tile)
        plan, scratch, parts = self.plan, self.scratch, self.plan.problem.parts
        rows = pl.ds(lax.axis_index("warpgroup") * plan.padded_rows, plan.padded_rows)

        def release(step: Array) -> None:
            plgpu.barrier_arrive(scratch.consumed.at[self.slot(step)])
            plgpu.barrier_arrive(scratch.emptied.at[self.place(step)])

        def add_all(*sums: Any) -> tuple[Array, ...]:
            @pl.loop(0, plan.k_steps)
            def _(k_step: Array) -> None:
                step = tile * plan.k_steps + k_step
                slot, place = self.slot(step), self.place(step)
                plgpu.barrier_wait(scratch.loaded.at[slot])
                plgpu.barrier_wait(scratch.widened.at[place])
                for part in range(parts):
                    plgpu.wgmma(sums[part], scratch.rows.at[place, part, rows], scratch.columns.at[slot, 0].T)
                # See `Cta.accumulate`: this step's products stay in flight.
                plgpu.wgmma_wait(parts)
                pl.when(k_step >= 1)(lambda: release(step - 1))

            plgpu.wgmma_wait(0)
            release((tile + 1) * plan.k_steps - 1)
            return tuple(total[...] for total in sums)

        accumulator = plgpu.ACC((plan.padded_rows, plan.columns), ACCUMULATOR)  # pyright: ignore
        return list(pl.run_scoped(add_all, *[accumulator] * parts))

    def accumulate_own_rows(self, tile: Array) -> list[Array]:
        """Returns the accumulators of `accumulate`, for rows that this warpgroup widens itself."""
        plan, scratch, parts, fill = self.plan, self.scratch, self.plan.problem.parts, self.plan.fill
        first_row = lax.axis_index("warpgroup") * plan.rows

        def arrays(slot: Array, part: int) -> list[Any]:
            stages = [scratch.codes, scratch.scales, scratch.zeros]
            return [stage.at[slot, part] for stage in stages if stage is not None]

        def add_all(*sums: Any) -> tuple[Array, ...]:
            @pl.loop(0, plan.k_steps)
            def _(k_step: Array) -> None:
                step = tile * plan.k_steps + k_step
                slot, group = self.slot(step), self.first_group(k_step)
                plgpu.barrier_wait(scratch.loaded.at[slot])
                by_part = [arrays(slot, part) for part in range(parts)]
                is_first = True
                refs_by_total = [[ref for refs in by_part for ref in refs]] if fill.is_spread else by_part
                for total, refs in zip(sums, refs_by_total, strict=True):
                    words: Any = None
                    for first in range(0, plan.tile_k, fill.width):
                        if first % fill.batch == 0:
                            words = loaded_words(first_row, group, *refs, fill=fill, first=first)
                        weights = widened_rows(words, first_row, group, *refs, fill=fill, first=first)
                        tokens = scratch.columns.at[slot, 0, :, pl.ds(first, fill.width)]
                        plgpu.wgmma(total, weights, tokens.T)
                        plgpu.wgmma_wait(plan.operands_in_flight)
                        if is_first:
                            last = self.slot(step + (plan.stages - 1))
                            pl.when(k_step >= 1)(functools.partial(plgpu.barrier_arrive, scratch.consumed.at[last]))
                        is_first = False

            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch.consumed.at[self.slot((tile + 1) * plan.k_steps - 1)])
            return tuple(total[...] for total in sums)

        accumulator = plgpu.ACC((plan.padded_rows, plan.columns), ACCUMULATOR)  # pyright: ignore
        sums = pl.run_scoped(add_all, *[accumulator] * plan.accumulators)
        if not fill.is_spread:
            return list(sums)
        return list(gathered(sums[0], scratch.gathered.at[lax.axis_index("warpgroup")], parts=parts))


# --- the choice of a plan ---------------------------------------------------------------------------------------------

_CLOCK: Final = 1.7e9
_MEMORY_BANDWIDTH: Final = 4.6e12
_BYTES_RECEIVED_PER_CYCLE: Final = 58.0
_WIDENED_PER_CYCLE: Final = {1: 14.0, 2: 24.0, 3: 30.0}
"""Estimated numbers that one, two or three warpgroups widen per cycle."""
_CYCLES_OF_A_LINE: Final = {"int4": 90.0, "e2m1": 105.0, "e4m3": 119.0}
"""Cycles in which a consumer widens a line of the rows that fill one place of every warp."""
_OWN_SHARE: Final = {1: 0.85, 2: 0.6, 3: 0.6, 4: 0.6}
"""The part of the cycles of widening and multiplying in all consumers that remains, by their number."""
_CYCLES_OF_A_STAGE: Final = {1: 170.0, 2: 400.0, 3: 600.0, 4: 900.0}
"""Cycles of a stage in addition, by the number of consumers."""
_FEW_STAGES: Final = 3
_FACTOR_OF_FEW_STAGES: Final = 1.2
"""The factor of a step's cycles with fewer stages than that, which hide less of the latency of memory; a guess."""
_SHARED_BYTES_PER_CYCLE: Final = 110.0
_MIN_WGMMA_CYCLES: Final = 26.0
_CYCLES_PER_STEP: Final = 12.0
_CYCLES_PER_TILE: Final = 5000.0


@functools.cache
def default_plan(problem: Problem, codes: Codes) -> PackedPlan | None:
    """Returns the plan of the lowest estimated time, or None if none fits."""
    return min(candidates(problem, codes), key=estimated_seconds, default=None)


def candidates(problem: Problem, codes: Codes) -> list[PackedPlan]:
    """Returns the plans worth trying, of warpgroups that widen their own rows."""
    tokens = round_up(min(problem.m, 256), 8)
    tiles_m = {8} if tokens == 8 else {tokens, *(size for size in (16, 32, 64, 96, 128, 192) if size < tokens)}
    plans = [
        PackedPlan(
            problem, Schedule(tile_m, rows * warpgroups, warpgroups=warpgroups, lines=lines, panel=panel), codes, 0
        )
        for warpgroups in REGISTERS_OF_WIDENING_CONSUMERS
        for rows in range(8, MATRIX_ROWS + 8, 8)
        for tile_m in sorted(tiles_m)
        for lines in (1, 2, 4)
        for panel in ((1,) if problem.m <= 512 else (8,))
    ]
    return [plan for plan in plans if not plan.unmet_requirements()]


def estimated_seconds(plan: PackedPlan) -> float:
    """Returns the estimated seconds of a plan on an H200, only for ranking.

    Constants of plans without wideners were fitted to measured times. Most estimates agree with these within 15 %.
    """
    p, s = plan.problem, plan.schedule
    weights = p.parts * plan.row_tile * plan.tile_k
    received = plan.bytes_per_stage / _BYTES_RECEIVED_PER_CYCLE
    if plan.wideners:
        matrix_rows = p.parts * s.warpgroups * plan.padded_rows
        wgmma = matrix_rows / MATRIX_ROWS * plan.tile_k / 16 * max(plan.columns / 2, _MIN_WGMMA_CYCLES)
        # Copied, read and stored by the wideners, and read by the matrix unit with padded rows.
        shared = 2 * plan.bytes_per_stage + 2 * weights + 2 * matrix_rows * plan.tile_k
        widened = weights / _WIDENED_PER_CYCLE[plan.wideners]
        step = max(wgmma, received, widened, shared / _SHARED_BYTES_PER_CYCLE) + _CYCLES_PER_STEP
    else:
        # A warp of each of the four schedulers has the same work, also for rows beyond the tile.
        places = 1 if plan.fill.is_spread and p.parts == 1 else 2
        line = places * _CYCLES_OF_A_LINE[plan.codes.numbers] + LINE / 16 * max(plan.columns / 2, _MIN_WGMMA_CYCLES)
        work = s.warpgroups * plan.accumulators * s.lines * line
        step = max(received, work * _OWN_SHARE[s.warpgroups] + _CYCLES_OF_A_STAGE[s.warpgroups])
        if plan.stages < _FEW_STAGES:
            step *= _FACTOR_OF_FEW_STAGES
    waves = pl.cdiv(math.prod(plan.grid), plan.clusters)
    on_chip = waves * (plan.k_steps * step + _CYCLES_PER_TILE) / _CLOCK
    row = plan.codes.row_bytes(p.k) + plan.extra_bytes * plan.k_steps
    memory = (p.parts * p.n * row + 2 * p.m * p.k + p.m * p.n * p.out_dtype.itemsize) / _MEMORY_BANDWIDTH
    return max(on_chip, memory) + 0.15 * min(on_chip, memory)
