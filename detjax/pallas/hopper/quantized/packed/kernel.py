"""The matmul kernel with weights that it widens on the chip.

Without widening warpgroups, the warpgroups that multiply widen their own rows, in registers: see `fragments.py`. While
the matrix unit multiplies half of a stage, they widen the other half. Stages and barriers are as in the plain
kernel.

If a tile has few rows, one warpgroup has too little to do at a time: it waits for its loads, its numbers and its
products one after the other. Warpgroups then take the stages of a tile in turn (`takes_turns`). Each widens a whole
stage, waits for the sums, adds the stage's products, and hands the sums on through shared memory. So K is still
ascending, and only products and two copies of a few numbers follow one another.

    producer warp   --copies-->   loaded[slot]     --> the warpgroup that has the stage waits
    warpgroup w     --arrives-->  named barrier    --> warpgroup w + 1 reads the sums, and the first one after the last
    warpgroup w     --arrives-->  consumed[slot]   --> producer warp waits

With widening warpgroups, widened weights pass shared memory. Two rings of buffers lie between memory and matrix unit:

    producer warp   --copies-->   loaded[slot]     --> widening warpgroups and consumers wait
    widening group  --arrives-->  widened[place]   --> consumers wait, then issue `wgmma`
    consumer        --arrives-->  emptied[place]   --> the widening warpgroup of the place waits
    both            --arrive-->   consumed[slot]   --> producer warp waits

The ring of codes and tokens is deep, to hide the latency of memory. Widened weights take four times the space of codes,
and need two places or three. Widening warpgroups take steps in turn, so each of them meets the same slots and places
in every round, and has a whole step's time for the latency of its loads and stores.

Who writes a buffer, who reads it, and what keeps the next write from overtaking a read:

    buffer             written by          read by                   ordered by
    codes, scales,     copy engine         threads, which keep the   `loaded`; `consumed` after the products of the
    zeros [slot]                           numbers in registers      numbers, at which every thread arrives
    columns [slot]     copy engine         matrix unit               `loaded`; `consumed` after `wgmma_wait`
    rows [place]       widening threads    matrix unit               fence and `widened`; `emptied` after `wgmma_wait`
    sums [warpgroup]   a thread            the same thread of the    named barriers; it is overwritten a round later,
                                           next warpgroup            after the sums have been all around
    gathered           threads             threads of a warpgroup    two barriers of the warpgroup in `gathered`
    row operand        a thread            matrix unit               `wgmma_wait`: see `PackedPlan.operands_in_flight`

A barrier of a CTA counts 128 arrivals of each warpgroup, so each thread answers for its loads. Phases are counted by
each warpgroup for itself, so a slot always belongs to the same warpgroup where these take turns: stages are a multiple
of them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from detjax.contract import ACCUMULATOR
from detjax.operands.options import Epilogue
from detjax.pallas.hopper import device
from detjax.pallas.hopper.device import shared_registers
from detjax.pallas.hopper.matmul.kernel import Cta, Operands, Output, Scratch, launched, scratch_types
from detjax.pallas.hopper.mosaic.layouts import MATRIX
from detjax.pallas.hopper.mosaic.tiles import by_thread
from detjax.pallas.hopper.quantized.fragments import FEW_ROWS, gathered, loaded_words, widened_rows
from detjax.pallas.hopper.quantized.packed.plan import REGISTERS, PackedPlan
from detjax.pallas.hopper.quantized.turns import take_turn
from detjax.pallas.hopper.quantized.widening import widen

_PRODUCER_REGISTERS: Final = 40

_FIRST_TURN: Final = 8
"""The named barrier at which the first warpgroup waits for the sums; each of the others has the next one.

The compiler uses those up to the number of warpgroups, at most 5.
"""


class PackedArrays(NamedTuple):
    """The arrays of packed weights, or references to them in the kernel."""

    codes: Any
    """`[weights, N, bytes]`."""
    scales: Any
    """`[weights, N, groups]`, padded to whole units of the copy engine."""
    zeros: Any = None
    """`[weights, N, groups]`, or None."""


@dataclasses.dataclass(frozen=True)
class PackedScratch(Scratch):
    """Buffers of a CTA; `rows` are the places of widened weights, and `columns` the stages of tokens."""

    codes: Any = None
    """Stages of codes, `[stages, parts, rows, bytes]`."""
    scales: Any = None
    """Stages of scales, `[stages, parts, rows, groups]`."""
    zeros: Any = None
    """Zero points, in the same shape."""
    widened: Any = None
    """A barrier for each place: its weights are widened."""
    emptied: Any = None
    """A barrier for each place: it may be overwritten."""
    gathered: Any = None
    """Sums of spread rows, `[warpgroups, 2, rows, columns]`."""
    sums: Any = None
    """The sums that each warpgroup takes over, `[warpgroups, ...]`, in the shape of `store_by_thread`."""


def packed_kernel(plan: PackedPlan, epilogue: Epilogue) -> Callable[..., list[Array]]:
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

    return launched(plan, body, packed_scratch_types(plan), "packed_matmul")


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
        scratch["consumed"] = plgpu.Barrier(num_arrivals=plan.row_shares, num_barriers=plan.stages)
        if plan.takes_turns:
            scratch["sums"] = plgpu.SMEM((warpgroups, *by_thread(plan.columns)), ACCUMULATOR)
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

    def arrays(self, slot: Array, part: int) -> list[Any]:
        """Returns a part's codes of a stage, with their scales and zero points."""
        arrays = self.scratch.codes, self.scratch.scales, self.scratch.zeros
        return [array.at[slot, part] for array in arrays if array is not None]

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

            group = self.first_group(lax.rem(step, jnp.int32(plan.k_steps)))
            for part in range(plan.problem.parts):
                zeros = None if scratch.zeros is None else scratch.zeros.at[slot, part]
                codes, scales = scratch.codes.at[slot, part], scratch.scales.at[slot, part]
                widen(codes, scales, scratch.rows.at[place, part], group, zeros, packing=plan.codes)
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

    # --- a consumer -----------------------------------------------------------------------------------------------

    def first_row(self) -> Array | int:
        """Returns the first row of a tile that this warpgroup computes."""
        return jnp.int32(0) if self.plan.takes_turns else super().first_row()

    def compute(self, tile: Array, output: Output) -> None:
        """Computes this warpgroup's part of a tile; of one computed in turns, the last warpgroup has the sums."""
        if not self.plan.takes_turns:
            super().compute(tile, output)
            return
        is_last = self.warpgroup == self.plan.schedule.warpgroups - 1
        pl.when(is_last)(output.prefetch)
        sums = self.accumulate_in_turns(tile)
        pl.when(is_last)(lambda: output.store(self.in_order(sums)))

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

        def add_all(*sums: Any) -> tuple[Array, ...]:
            @pl.loop(0, plan.k_steps)
            def _(k_step: Array) -> None:
                step = tile * plan.k_steps + k_step
                slot, group = self.slot(step), self.first_group(k_step)
                plgpu.barrier_wait(scratch.loaded.at[slot])
                by_part = [self.arrays(slot, part) for part in range(parts)]
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
                            pl.when(k_step >= 1)(functools.partial(self.release, last))
                        is_first = False

            plgpu.wgmma_wait(0)
            self.release(self.slot((tile + 1) * plan.k_steps - 1))
            return tuple(total[...] for total in sums)

        accumulator = plgpu.ACC((plan.padded_rows, plan.columns), ACCUMULATOR)  # pyright: ignore
        sums = pl.run_scoped(add_all, *[accumulator] * plan.accumulators)
        return self.in_order(sums)

    def accumulate_in_turns(self, tile: Array) -> list[Array]:
        """Returns the accumulator of a tile, which is complete in the last warpgroup.

        The first stage of a tile waits for the turn, too, so that no warpgroup is more than a round ahead.
        """
        plan, scratch, fill = self.plan, self.scratch, self.plan.fill
        warpgroups, first_row = plan.schedule.warpgroups, jnp.int32(0)
        following = lax.rem(self.warpgroup + 1, jnp.int32(warpgroups))
        last_step = self.tiles * plan.k_steps - 1

        def add_stage(number: Array, _: Array) -> Array:
            k_step = number * warpgroups + self.warpgroup
            step = tile * plan.k_steps + k_step
            slot, group = self.slot(step), self.first_group(k_step)
            plgpu.barrier_wait(scratch.loaded.at[slot])
            refs = [ref for part in range(plan.problem.parts) for ref in self.arrays(slot, part)]
            words = loaded_words(first_row, group, *refs, fill=fill, first=0)
            weights = widened_rows(words, first_row, group, *refs, fill=fill, first=0)
            sums = take_turn(
                weights,
                scratch.columns.at[slot, 0],
                scratch.sums.at[self.warpgroup],
                # Nobody reads the sums that are overwritten: since then they have been handed on all around.
                scratch.sums.at[following],
                _FIRST_TURN + self.warpgroup,
                _FIRST_TURN + following,
                *(condition.astype(jnp.int32) for condition in (step > 0, k_step > 0, step < last_step)),
            )
            self.release(slot)
            return sums

        zeros = plgpu.layout_cast(jnp.zeros((plan.padded_rows, plan.columns), ACCUMULATOR), MATRIX)
        return [lax.fori_loop(0, plan.k_steps // warpgroups, add_stage, zeros)]

    def in_order(self, sums: Sequence[Array]) -> list[Array]:
        """Returns the accumulators of each part, whose rows are in order."""
        if not self.plan.fill.is_spread:
            return list(sums)
        buffer = self.scratch.gathered.at[lax.axis_index("warpgroup")]
        return list(gathered(sums[0], buffer, parts=self.plan.problem.parts))

    def release(self, slot: Array) -> None:
        """Lets the copy engine overwrite a stage that this warpgroup has read.

        All threads have waited for their products. Their own loads are complete, too, since the products took the
        numbers. But a thread knows this of itself alone, so each of them arrives.
        """
        plgpu.barrier_arrive(self.scratch.consumed.at[slot])
