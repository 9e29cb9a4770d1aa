"""Prefill of rows of more than 128 columns on Hopper: pages are loaded in parts, values multiplied in pieces."""

from collections.abc import Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import KV_BLOCK
from detjax.pallas.hopper.attention.prefill_kernel import Block, Kernel, Piece, Rows, Slot, Sums, Visit
from detjax.pallas.hopper.attention.prefill_schedule import FIRST_FREE, Problem, Schedule
from detjax.pallas.hopper.attention.warpgroups import TILE, arrive_for_loader
from detjax.pallas.hopper.mosaic.layouts import swizzled
from detjax.pallas.hopper.mosaic.products import start_product
from detjax.pallas.hopper.mosaic.tiles import clear_rows, store_lines


class WideKernel(Kernel):
    """Rows of more than 128 columns: pages in parts, which share one ring of slots, keys before values."""

    ring_names = ("kv",)

    @classmethod
    def scratch_types(cls, problem: Problem, schedule: Schedule) -> dict[str, Any]:
        def rows(*shape: int) -> Any:
            return plgpu.SMEM(shape, problem.dtype, transforms=swizzled(64))

        scratch = {"q": rows(TILE, problem.width), "kv": rows(schedule.stages, KV_BLOCK, problem.part_width)}
        return scratch if problem.results_in_queries else scratch | {"o": rows(TILE, problem.value_width)}

    @property
    def warpgroup(self) -> Array:
        # Opaque, so that the compiler recomputes the addresses, barriers and descriptors that depend on it for every
        # block: sums leave no registers to keep them in.
        return lax.optimization_barrier(self._warpgroup)

    @property
    def first_free(self) -> tuple[int, ...]:
        return (FIRST_FREE,)

    @property
    def key_parts(self) -> int:
        """Parts of a page of keys."""
        return self.problem.width // self.problem.part_width

    @property
    def value_parts(self) -> int:
        """Parts of a page of values."""
        return self.problem.value_width // self.problem.part_width

    @property
    def pieces(self) -> Sequence[Piece]:
        """Pieces such that the products of two, all running sums and a block's p fit into registers."""
        # 256 columns take 128 registers of a thread for sums, 2 x 32 for products of 64 and 32 for p. 192 columns take
        # 96 for sums, 64 + 32 for products of 128 and 64, and 32. Both are 224 of 240.
        width, size = self.problem.part_width, 64 if self.problem.value_width > 192 else 128
        firsts = [(part, first) for part in range(self.value_parts) for first in range(0, width, size)]
        return [Piece(part, first, min(size, width - first)) for part, first in firsts]

    def slot(self, step: Array, part: int) -> Slot:
        """Returns the slot of a part of a step's keys and values."""
        index = self.slot_after(step, part)
        return Slot(self.scratch["kv"].at[index], self.scratch["kv_loaded"].at[index], index, FIRST_FREE)

    def slot_after(self, slot: Array, distance: int) -> Array:
        """Returns the slot that is `distance` later in the ring."""
        slot = slot + distance
        return jnp.where(slot >= self.schedule.stages, slot - self.schedule.stages, slot) if distance else slot

    def key_slots(self, step: Array) -> list[Slot]:
        return [self.slot(step, part) for part in range(self.key_parts)]

    def value_slots(self, step: Array) -> list[Slot]:
        return [self.slot(step, self.key_parts + part) for part in range(self.value_parts)]

    def page_part(self, page: Any, part: int) -> Any:
        return page.at[:, self.columns(part)]

    def columns(self, part: int) -> Any:
        """Returns the columns of a part."""
        return pl.ds(part * self.problem.part_width, self.problem.part_width)

    def next_step(self, step: Array) -> Array:
        return self.slot_after(step, self.key_parts + self.value_parts)

    def initial_step(self, rows: Rows) -> Array:
        return rows.first_step

    def step_of(self, rows: Rows, block: Array, sums: Sums) -> Array:
        assert sums.step is not None
        return sums.step

    def step_after_visit(self, visit: Visit) -> Array:
        return self.next_step(visit.step)

    def step_after(self, rows: Rows, sums: Sums) -> Array:
        assert sums.step is not None
        return sums.step

    def start_scores(self, accumulator: Any, rows: Rows, slots: list[Slot]) -> None:
        """Starts the products of all parts, each once it is loaded."""
        q = self.queries(self.warpgroup)
        for part, slot in enumerate(slots):
            if part > 0:
                plgpu.barrier_wait(slot.loaded)
            plgpu.wgmma(accumulator, q.at[:, self.columns(part)], slot.content.T)

    def accumulate(self, visit: Visit, o: tuple[Array, ...], block: Block, loaded: int) -> tuple[Array, ...]:
        """Multiplies values piece by piece; while one is multiplied, the previous one is merged."""
        slots = visit.v
        merged_o, product_before = [], None
        for piece in self.pieces:
            is_next_part = piece.part > 0 and piece.first == 0
            if is_next_part and piece.part >= loaded:
                plgpu.barrier_wait(slots[piece.part].loaded)
            product = start_product(block.p, slots[piece.part].content.at[:, pl.ds(piece.first, piece.size)])
            if product_before is not None:
                plgpu.wgmma_wait(1)  # for all products but the one just started
                if is_next_part:
                    arrive_for_loader(slots[piece.part - 1].free)
                # To the compiler a product is final once it is started. The barriers keep its merge between the waits.
                sums = block.merge(o[len(merged_o)], lax.optimization_barrier(product_before))
                merged_o.append(lax.optimization_barrier(sums))
            product_before = product
        # After the merge above, which the compiler would otherwise postpone until after the wait in here.
        self.end_turn(visit)
        plgpu.wgmma_wait(0)
        arrive_for_loader(slots[-1].free)
        return (*merged_o, block.merge(o[-1], lax.optimization_barrier(product_before)))

    def clear_values(self, slots: list[Slot], rows: Any, length: Array) -> None:
        for slot in slots:
            clear_rows(slot.content.at[rows], length)
        plgpu.commit_smem()

    def stage(self, y: Array, target: Any, piece: Piece) -> None:
        store_lines(y, target.at[:, pl.ds(piece.part * self.problem.part_width + piece.first, piece.size)])
