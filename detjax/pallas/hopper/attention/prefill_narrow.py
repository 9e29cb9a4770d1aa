"""Prefill of rows of at most 128 columns on Hopper: pages are loaded and multiplied as a whole."""

from collections.abc import Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, KV_BLOCK
from detjax.pallas.hopper.attention.prefill_kernel import Block, Kernel, Piece, Rows, Slot, Sums, Visit
from detjax.pallas.hopper.attention.prefill_schedule import FIRST_FREE, Problem, Schedule
from detjax.pallas.hopper.attention.queries_on_rows import clear_tail
from detjax.pallas.hopper.attention.warpgroups import TILE, arrive_for_loader
from detjax.pallas.hopper.mosaic.layouts import swizzled


class NarrowKernel(Kernel):
    """Rows of at most 128 columns: whole pages, a ring of slots for keys and one for values."""

    ring_names = "k", "v"

    @classmethod
    def scratch_types(cls, problem: Problem, schedule: Schedule) -> dict[str, Any]:
        def rows(width: int, *shape: int) -> Any:
            return plgpu.SMEM((*shape, width), problem.dtype, transforms=swizzled(width))

        return {
            "q": rows(problem.width, TILE),
            "k": rows(problem.width, schedule.stages, KV_BLOCK),
            "v": rows(problem.value_width, schedule.stages, KV_BLOCK),
            "o": rows(problem.value_width, TILE),
        }

    @property
    def first_free(self) -> tuple[int, ...]:
        return FIRST_FREE, FIRST_FREE + self.schedule.stages

    @property
    def pieces(self) -> Sequence[Piece]:
        return [Piece(0, 0, self.problem.value_width)]

    def slot(self, ring: int, step: Array) -> Slot:
        """Returns the slot of the step's page in a ring."""
        name = self.ring_names[ring]
        index = lax.rem(step, jnp.int32(self.schedule.stages))
        return Slot(
            self.scratch[name].at[index], self.scratch[f"{name}_loaded"].at[index], index, self.first_free[ring]
        )

    def key_slots(self, step: Array) -> list[Slot]:
        return [self.slot(0, step)]

    def value_slots(self, step: Array) -> list[Slot]:
        return [self.slot(1, step)]

    def page_part(self, page: Any, part: int) -> Any:
        return page

    def next_step(self, step: Array) -> Array:
        return step + 1

    def initial_step(self, rows: Rows) -> None:
        return None

    def step_of(self, rows: Rows, block: Array, sums: Sums) -> Array:
        return rows.first_step + (block - rows.item.first)

    def step_after_visit(self, visit: Visit) -> None:
        return None

    def step_after(self, rows: Rows, sums: Sums) -> Array:
        return rows.first_step + (rows.item.end - rows.item.first)

    def start_scores(self, accumulator: Any, rows: Rows, slots: list[Slot]) -> None:
        plgpu.wgmma(accumulator, rows.q, slots[0].content.T)

    def accumulate(self, visit: Visit, o: tuple[Array, ...], block: Block, loaded: int) -> tuple[Array, ...]:
        def multiply(accumulator: Any) -> Array:
            plgpu.wgmma(accumulator, block.p, visit.v[0].content)
            # Before the result is read, so that the other warpgroup's products can follow at once.
            self.end_turn(visit)
            return accumulator[...]

        product = pl.run_scoped(multiply, plgpu.ACC(o[0].shape, ACCUMULATOR))  # pyright: ignore
        arrive_for_loader(visit.v[0].free)
        return (block.merge(o[0], product),)

    def clear_values(self, slots: list[Slot], rows: Any, length: Array) -> None:
        clear_tail(slots[0].content.at[rows], length)

    def stage(self, y: Array, target: Any, piece: Piece) -> None:
        target[...] = y
