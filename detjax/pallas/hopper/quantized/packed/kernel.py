"""The matmul kernel with weights that it widens on the chip.

The warpgroups that multiply widen their own rows, in registers: see `fragments.py`. While the matrix unit multiplies
half of a stage, they widen the other half. Stages and barriers are as in the plain kernel.

If a tile has few rows, one warpgroup has too little to do at a time: it waits for its loads, its numbers and its
products one after the other. Warpgroups then take the stages of a tile in turn (`takes_turns`). Each widens a whole
stage, waits for the sums, adds the stage's products, and hands the sums on through shared memory. So K is still
ascending, and only products and two copies of a few numbers follow one another.

    producer warp   --copies-->   loaded[slot]     --> the warpgroup that has the stage waits
    warpgroup w     --arrives-->  named barrier    --> warpgroup w + 1 reads the sums, and the first one after the last
    warpgroup w     --arrives-->  consumed[slot]   --> producer warp waits

Who writes a buffer, who reads it, and what keeps the next write from overtaking a read:

    buffer             written by          read by                   ordered by
    codes, scales,     copy engine         threads, which keep the   `loaded`; `consumed` after the products of the
    zeros [slot]                           numbers in registers      numbers, at which every thread arrives
    columns [slot]     copy engine         matrix unit               `loaded`; `consumed` after `wgmma_wait`
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
    """Buffers of a CTA; `columns` are the stages of tokens. Rows are in registers."""

    codes: Any = None
    """Stages of codes, `[stages, parts, rows, bytes]`."""
    scales: Any = None
    """Stages of scales, `[stages, parts, rows, groups]`."""
    zeros: Any = None
    """Zero points, in the same shape."""
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
        PackedCta(plan, epilogue, operands, (y, []), PackedScratch(rows=None, **scratch)).run()

    return launched(plan, body, packed_scratch_types(plan), "packed_matmul")


def packed_scratch_types(plan: PackedPlan) -> dict[str, Any]:
    """Returns the types of buffers and barriers, by their names in `PackedScratch`."""
    warpgroups, codes = plan.schedule.warpgroups, plan.codes
    scratch = scratch_types(plan)
    del scratch["rows"]
    shape = plan.stages, plan.problem.parts, plan.row_tile
    transforms = codes.transforms(plan.tile_k)
    scratch["codes"] = plgpu.SMEM((*shape, codes.row_bytes(plan.tile_k)), jnp.uint8, transforms=transforms)
    size = codes.box(plan.tile_k, codes.scale_dtype.itemsize)
    scratch["scales"] = plgpu.SMEM((*shape, size), codes.scale_dtype)
    if codes.has_zeros:
        scratch["zeros"] = plgpu.SMEM((*shape, codes.box(plan.tile_k, 1)), jnp.uint8)
    scratch["consumed"] = plgpu.Barrier(num_arrivals=plan.row_shares, num_barriers=plan.stages)
    if plan.takes_turns:
        scratch["sums"] = plgpu.SMEM((warpgroups, *by_thread(plan.columns)), ACCUMULATOR)
    if plan.fill.is_spread:
        scratch["gathered"] = plgpu.SMEM((warpgroups, 2, FEW_ROWS, plan.columns), ACCUMULATOR)
    return scratch


class PackedCta(Cta):
    """One CTA: a producer warp, and warpgroups that widen, multiply and store."""

    plan: PackedPlan
    scratch: PackedScratch

    def run(self) -> None:
        """Runs the warpgroup's role: the last warpgroup produces, the others consume."""
        consumers = self.plan.schedule.warpgroups
        registers = REGISTERS[consumers]
        shared_registers(*(registers,) * consumers, _PRODUCER_REGISTERS)
        initial = device.registers_at_start(consumers + 1)

        @pl.when(self.warpgroup == consumers)
        def _producer() -> None:
            self.run_producer(_PRODUCER_REGISTERS)

        @pl.when(self.warpgroup < consumers)
        def _consumer() -> None:
            plgpu.set_max_registers(registers, action="increase" if registers > initial else "decrease")
            self.consume()

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
