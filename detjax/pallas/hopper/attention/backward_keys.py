"""The gradients of attention's keys and values on Hopper."""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from detjax.contract import ACCUMULATOR, KV_BLOCK
from detjax.operands.options import Masking
from detjax.pallas.hopper.attention.backward_kernel import (
    SQUARE,
    SUMS,
    Kernel,
    Operands,
    Tile,
    combined_mask,
    everywhere,
    quotient,
)
from detjax.pallas.hopper.attention.backward_schedule import Problem, Schedule
from detjax.pallas.hopper.attention.queries_on_columns import along_columns
from detjax.pallas.hopper.attention.queries_on_rows import clear_tail, indices, row_indices, splat
from detjax.pallas.hopper.attention.warpgroups import launch, pass_turn, take_turn
from detjax.pallas.hopper.mosaic.layouts import MATRIX, PER_COLUMN, ROWS, swizzled
from detjax.pallas.hopper.mosaic.tiles import mask_columns


class _Head(NamedTuple):
    """A query head whose rows a warpgroup adds to the gradients of its keys.

    Attributes:
        number: the head's number in the group.
        keys: position of the warpgroup's first key.
        first_step: the step of the head's first rows.
        slopes: ALiBi slope at every element of a tile, or None.
    """

    number: Array
    keys: Array
    k: Any
    v: Any
    first_step: Array
    slopes: Array | None


class _KeyGradients(Kernel):
    """A CTA that computes the gradients of a page of one KV head. It visits query rows in blocks of `ROWS`."""

    def __init__(
        self, problem: Problem, schedule: Schedule, masking: Masking, operands: Operands, scratch: dict[str, Any]
    ) -> None:
        super().__init__(problem, schedule, masking, operands, scratch)
        self.item, self.kv_head = lax.div(self.cta, problem.kv_heads), lax.rem(self.cta, problem.kv_heads)
        assert operands.pages is not None
        self.pages = operands.pages
        self.request, self.is_needed = self.pages.request[self.item], self.pages.rows[self.item] > 0
        self.length, self.start = operands.kv_length[self.request], operands.q_start[self.request]
        self.keys = self.pages.block[self.item] * KV_BLOCK
        # In units of ROWS query rows of the request.
        self.end_in_window, self.first = None, jnp.int32(0)
        if masking.window is not None:
            last = lax.min(self.keys + KV_BLOCK, self.length) - 1
            self.end_in_window = lax.min(self.end, quotient(last + masking.window - self.start, ROWS, up=True))
        if masking.causal:
            self.first = lax.min(quotient(self.keys - self.start, ROWS), self.end)

    @property
    def end(self) -> Array:
        """The end of the query rows that see the page, in units of `ROWS`.

        Without a window that is the request's end: a constant, or loaded wherever it is used, for lack of registers.
        """
        if self.end_in_window is not None:
            return self.end_in_window
        if self.problem.rows is not None:
            return jnp.int32(self.problem.rows // ROWS)
        return lax.div(self.pages.rows[self.item], jnp.int32(ROWS))

    @property
    def page(self) -> Array:
        """The page id, loaded wherever it is used, for lack of registers."""
        return self.pages.page[self.item]

    def run(self, gradients: dict[str, Any], totals: dict[str, Any]) -> None:
        """Runs the warpgroup's role, unless the page is padding.

        Args:
            gradients: `dk` ("k") and `dv` ("v") in memory.
            totals: running sums over the heads of a group, in memory.
        """
        pl.when(self.is_needed)(lambda: self.run_roles(lambda: self.multiply(gradients, totals), self.load))

    def load(self) -> None:
        """Loads the page, then the rows that see it, for each query head of the group."""
        operands, page, first_row = self.operands, self.page, self.pages.row[self.item]
        for name, pages in (("k", operands.k_pages), ("v", operands.v_pages)):
            source = pages.at[page, self.kv_head]
            plgpu.copy_gmem_to_smem(source, self.scratch[name], self.scratch["page_loaded"])

        def load_head(index: Array, step: Array) -> Array:
            head = self.kv_head * self.problem.group + index
            return lax.fori_loop(self.first, self.end, functools.partial(self.load_rows, first_row, head), step)

        lax.fori_loop(0, self.problem.group, load_head, jnp.int32(0))

    def load_rows(self, first_row: Array, head: Array, block: Array, step: Array) -> Array:
        """Loads a block of query rows, and returns the next step."""
        operands = self.operands
        slot = lax.rem(step, self.stages)
        rows = pl.ds(first_row + block * ROWS, ROWS)
        self.await_free(slot)
        for name, source, name_of_numbers, numbers in (
            ("q", operands.q, "normalizers", operands.normalizers),
            ("do", operands.do, "delta", operands.delta),
        ):
            loaded = self.scratch[f"{name}_loaded"].at[slot]
            plgpu.copy_gmem_to_smem(source.at[rows, head], self.scratch[name].at[slot], loaded)
            plgpu.copy_gmem_to_smem(numbers.at[head, rows], self.scratch[name_of_numbers].at[slot], loaded)
        return step + 1

    def multiply(self, gradients: dict[str, Any], totals: dict[str, Any]) -> None:
        """Computes the gradients of the warpgroup's keys and values."""
        plgpu.barrier_wait(self.scratch["page_loaded"])
        count = self.length - (self.keys + self.warpgroup * ROWS)

        @pl.when(count < ROWS)
        def _() -> None:
            for name in "kv":
                clear_tail(self.scratch[name].at[self.rows], count)

        if self.problem.group == 1:
            for name, x in self.multiply_head(tuple(gradients), jnp.int32(0)).items():
                self.write(name, x, gradients[name])
            return

        @pl.loop(0, self.problem.group)
        def _(index: Array) -> None:
            for name, x in self.multiply_head(tuple(gradients), index).items():
                self.add_to_total(totals[name], x, index)

        # After the loop, so that no address of this is in registers together with the sums.
        for name, totals_of_name in totals.items():
            self.write(name, self.load_total(self.total(totals_of_name)), gradients[name])

    def multiply_head(self, names: tuple[str, ...], index: Array) -> dict[str, Array]:
        """Returns the sums of one query head for the named gradients."""
        keys = self.keys + self.warpgroup * ROWS
        k, v = self.scratch["k"].at[self.rows], self.scratch["v"].at[self.rows]
        first_step = index * (self.end - self.first)
        head = _Head(index, keys, k, v, first_step, self.head_slope(self.kv_head * self.problem.group + index))
        accumulators = {name: SUMS((ROWS, self.problem.widths[name]), ACCUMULATOR) for name in names}
        return pl.run_scoped(functools.partial(self.visit_rows, head), **accumulators)

    def visit_rows(self, head: _Head, **sums: Any) -> dict[str, Array]:
        """Adds all blocks of query rows to accumulators, and returns these."""

        def visit_all(first: Array, end: Array, is_masked: bool) -> None:
            pl.loop(first, end)(lambda block: self.visit(head, block, sums, is_masked=is_masked))

        # Rows that see all of the warpgroup's keys need no mask.
        open_first, open_end = self.first, self.end
        if self.masking.causal:
            open_first = quotient(head.keys + (ROWS - 1) - self.start, ROWS, up=True)
        if self.masking.window is not None:
            open_end = quotient(head.keys + self.masking.window - self.start, ROWS)
        open_first = lax.select(head.keys + ROWS <= self.length, open_first, self.end)
        open_first = lax.min(lax.max(open_first, self.first), self.end)
        open_end = lax.min(lax.max(open_end, open_first), self.end)
        visit_all(self.first, open_first, True)
        visit_all(open_first, open_end, False)
        if self.masking.window is not None:
            visit_all(open_end, self.end, True)
        return {name: x[...] for name, x in sums.items()}

    def visit(self, head: _Head, block: Array, sums: dict[str, Any], *, is_masked: bool) -> None:
        """Adds a block of query rows to the gradients."""
        slot = lax.rem(head.first_step + (block - self.first), self.stages)
        q, do = self.scratch["q"].at[slot], self.scratch["do"].at[slot]
        position = self.start + block * ROWS
        query_head = self.kv_head * self.problem.group + head.number
        words = self.mask_words(self.request, query_head, lax.div(head.keys, jnp.int32(ROWS)), block)
        by_position = functools.partial(self.mask_by_position, head.keys, position) if is_masked else None
        tile = Tile(
            lambda: self.numbers_of_queries("normalizers", slot),
            lambda: self.numbers_of_queries("delta", slot),
            lambda: (indices(0, SQUARE) + (head.keys - position)) - indices(1, SQUARE),
            combined_mask(by_position, words),
        )
        plgpu.barrier_wait(self.scratch["q_loaded"].at[slot])
        # A pass for values alone needs no gradients of scores, and so no `do` before its own product.
        if "k" in sums:
            p, ds = self.probabilities_and_score_gradients(head, slot, tile)
            if "v" in sums:
                plgpu.wgmma(sums["v"], p, do)
            plgpu.wgmma(sums["k"], ds, q)
        else:
            p = self.probabilities_alone(head, slot, tile)
            plgpu.barrier_wait(self.scratch["do_loaded"].at[slot])
            plgpu.wgmma(sums["v"], p, do)
        plgpu.wgmma_wait(0)  # the products read the slot until then
        self.free(slot)

    def numbers_of_queries(self, name: str, slot: Array) -> Array:
        """Loads numbers of the queries in a slot, at every element of a tile."""
        numbers = plgpu.load(self.scratch[name].at[slot], layout=PER_COLUMN, optimized=False)
        return along_columns(numbers, SQUARE)

    def mask_by_position(self, keys: Array, position: Array, s: Array) -> Array:
        """Sets scores to -inf where the length, causality or the window hides a key."""
        # In columns of the tile, for each row: the queries that see a key begin with the key's own position if causal.
        key = row_indices() + (keys - position)
        end = everywhere(ROWS) if self.masking.window is None else key + self.masking.window
        end = jnp.where(key < self.length - position, end, 0)
        return mask_columns(s, end, key if self.masking.causal else None)

    def probabilities_alone(self, head: _Head, slot: Array, tile: Tile) -> Array:
        """Returns a tile's transposed probabilities, rounded."""
        q = self.scratch["q"].at[slot]

        def multiply(s_sum: Any) -> Array:
            take_turn(self.warpgroup)
            plgpu.wgmma(s_sum, head.k, q.T)
            pass_turn(self.warpgroup)
            return self.probabilities(s_sum[...], tile, head.slopes)[0].astype(self.problem.dtype)

        return pl.run_scoped(multiply, SUMS(SQUARE, ACCUMULATOR))

    def probabilities_and_score_gradients(self, head: _Head, slot: Array, tile: Tile) -> tuple[Array, Array]:
        """Returns a tile's transposed probabilities and the gradients of its scores, rounded."""
        q, do = self.scratch["q"].at[slot], self.scratch["do"].at[slot]

        def multiply(s_sum: Any, dp_sum: Any) -> tuple[Array, Array]:
            take_turn(self.warpgroup)
            plgpu.wgmma(s_sum, head.k, q.T)
            plgpu.barrier_wait(self.scratch["do_loaded"].at[slot])
            plgpu.wgmma(dp_sum, head.v, do.T)
            pass_turn(self.warpgroup)
            # Exponentiates while the second product runs.
            p, cap_slope = self.probabilities(plgpu.wgmma_accumulator_load(s_sum, wait_n=1), tile, head.slopes)
            return p.astype(self.problem.dtype), self.score_gradients(p, dp_sum[...], tile, cap_slope)

        return pl.run_scoped(multiply, SUMS(SQUARE, ACCUMULATOR), SUMS(SQUARE, ACCUMULATOR))

    def total(self, totals: Any) -> Any:
        """Returns a warpgroup's running sum over heads, where each thread reads only its own writes."""
        return totals.at[self.cta, self.rows]

    def load_total(self, total: Any) -> Array:
        """Loads the running sum over heads."""
        return plgpu.load(total, layout=MATRIX, optimized=False)

    def add_to_total(self, totals: Any, x: Array, index: Array) -> None:
        """Adds a head's sums to the running sum over heads."""
        # The contract begins each head at zeros, and registers have no room for a head's sums and the running ones.
        total = self.total(totals)
        previous = lax.cond(index > 0, lambda: self.load_total(total), lambda: splat(0.0, x.shape))
        total[...] = previous + x

    def write(self, name: str, x: Array, target: Any) -> None:
        """Writes the gradients of the warpgroup's keys or values."""
        # Keys and values are no longer needed, so the result is staged in their memory.
        staged = self.scratch[name].at[self.rows]
        y = x * np.float32(self.masking.scale) if name == "k" else x
        staged[...] = y.astype(self.problem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, target.at[self.page, self.kv_head, self.rows])


def key_gradients(
    problem: Problem, schedule: Schedule, masking: Masking, names: str, operands: Operands
) -> dict[str, Array]:
    """Returns `dk` ("k") and `dv` ("v") as named, in the pools' shapes; only the operands' pages are written."""

    def rows(count: tuple[int, ...], width: int) -> Any:
        return plgpu.SMEM((*count, width), problem.dtype, transforms=swizzled(width))

    widths = problem.widths
    scratch: dict[str, Any] = {name: rows((KV_BLOCK,), width) for name, width in widths.items()}
    for name, width in (("q", problem.width), ("do", problem.value_width)):
        scratch[name] = rows((schedule.stages, ROWS), width)
        scratch[f"{name}_loaded"] = plgpu.Barrier(num_arrivals=2, num_barriers=schedule.stages)
    for name in ("normalizers", "delta"):
        scratch[name] = plgpu.SMEM((schedule.stages, ROWS), ACCUMULATOR)
    scratch["page_loaded"] = plgpu.Barrier(num_arrivals=2)

    items = problem.pages * problem.kv_heads
    pages = operands.k_pages.shape[0]
    out_type = [
        jax.ShapeDtypeStruct((pages, problem.kv_heads, KV_BLOCK, widths[name]), problem.dtype) for name in names
    ]
    if problem.group > 1:
        # Running sums over heads.
        out_type += [jax.ShapeDtypeStruct((items, KV_BLOCK, widths[name]), ACCUMULATOR) for name in names]

    def body(operands: Operands, results: list[Any], scratch: dict[str, Any]) -> None:
        gradients = dict(zip(names, results, strict=False))
        totals = dict(zip(names, results[len(names) :], strict=False))
        _KeyGradients(problem, schedule, masking, operands, scratch).run(gradients, totals)

    results = launch(f"attention_backward_{names}", body, operands, tuple(out_type), items, scratch)
    return dict(zip(names, results, strict=False))
