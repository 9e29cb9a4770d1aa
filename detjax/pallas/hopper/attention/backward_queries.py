"""The gradient of attention's queries on Hopper."""

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
from detjax.pallas.hopper.attention.queries_on_rows import along_rows, clear_tail, indices, row_indices
from detjax.pallas.hopper.attention.warpgroups import TILE, WARPGROUPS, launch, pass_turn, take_turn
from detjax.pallas.hopper.mosaic.layouts import MATRIX, PER_ROW, ROWS, swizzled
from detjax.pallas.hopper.mosaic.tiles import mask_columns, row_sums


class _QueryRows(NamedTuple):
    """A warpgroup's query rows.

    Attributes:
        rows: their slice in memory.
        q: the queries in shared memory.
        do: the output's gradients in shared memory.
        delta: row sums of `do * o`.
        normalizers: log2 of the rows' normalizers.
        slopes: ALiBi slope at every element of a tile, or None.
    """

    rows: Any
    q: Any
    do: Any
    delta: Array
    normalizers: Array
    slopes: Array | None


class _QueryGradient(Kernel):
    """A CTA that computes the gradient of 128 query rows of one head. It visits keys in tiles of `ROWS`."""

    def __init__(
        self, problem: Problem, schedule: Schedule, masking: Masking, operands: Operands, scratch: dict[str, Any]
    ) -> None:
        super().__init__(problem, schedule, masking, operands, scratch)
        # Heads of a tile are neighbours, so that heads that share keys run at the same time.
        tile, self.head = lax.div(self.cta, problem.heads), lax.rem(self.cta, problem.heads)
        assert operands.tiles is not None
        self.request, self.first_row, self.offset, self.count = (x[tile] for x in operands.tiles)
        self.length, start = operands.kv_length[self.request], operands.q_start[self.request]
        self.position = start + self.offset + self.row_in_tile(self.warpgroup)
        end, self.first = self.length, jnp.int32(0)
        if masking.causal:
            end = lax.min(end, start + self.offset + self.count)
        if masking.window is not None:
            self.first = quotient(start + self.offset - (masking.window - 1), ROWS)
        # In units of ROWS keys: half a page, as two products of a whole one exceed the registers.
        self.end = lax.min(quotient(end, ROWS, up=True), jnp.int32(problem.blocks * (KV_BLOCK // ROWS)))
        self.first = lax.min(self.first, self.end)
        self.is_stored = self.warpgroup * ROWS < self.count

    def row_in_tile(self, warpgroup: Array | int) -> Array:
        """Returns a warpgroup's first row in the tile; both warpgroups have the same rows of a tile of 64."""
        return lax.min(jnp.int32(warpgroup * ROWS), self.count - ROWS)

    def row(self, warpgroup: Array | int) -> Array:
        """Returns a warpgroup's first row in the arrays of all requests."""
        return self.first_row + self.row_in_tile(warpgroup)

    def run(self, dq_gmem: Any, delta_gmem: Any) -> None:
        """Runs the warpgroup's role, unless the tile is padding."""
        pl.when(self.count > 0)(lambda: self.run_roles(lambda: self.multiply(dq_gmem, delta_gmem), self.load))

    def load(self) -> None:
        """Loads queries and gradients of the output, then keys and values in tiles of `ROWS`."""
        operands = self.operands
        kv_head = lax.div(self.head, self.problem.group)
        for warpgroup in range(WARPGROUPS):
            source, target = pl.ds(self.row(warpgroup), ROWS), pl.ds(warpgroup * ROWS, ROWS)
            loaded = self.scratch["rows_loaded"].at[warpgroup]
            plgpu.copy_gmem_to_smem(operands.q.at[source, self.head], self.scratch["q"].at[target], loaded)
            plgpu.copy_gmem_to_smem(operands.do.at[source, self.head], self.scratch["do"].at[target], loaded)

        @pl.loop(self.first, self.end)
        def _(step: Array) -> None:
            slot = lax.rem(step - self.first, self.stages)
            parts = KV_BLOCK // ROWS
            page = operands.page_table[self.request, lax.div(step, parts)]
            keys = pl.ds(lax.rem(step, parts) * ROWS, ROWS)
            self.await_free(slot)
            for name, pages in (("k", operands.k_pages), ("v", operands.v_pages)):
                loaded = self.scratch[f"{name}_loaded"].at[slot]
                plgpu.copy_gmem_to_smem(pages.at[page, kv_head, keys], self.scratch[name].at[slot], loaded)

    def multiply(self, dq_gmem: Any, delta_gmem: Any) -> None:
        """Computes the warpgroup's rows of `delta` and `dq`."""
        rows = self.load_rows(delta_gmem)
        sums = SUMS((ROWS, self.problem.width), ACCUMULATOR)
        dq = pl.run_scoped(functools.partial(self.visit_keys, rows), sums)
        rows.q[...] = (dq * np.float32(self.masking.scale)).astype(self.problem.dtype)
        plgpu.commit_smem()
        pl.when(self.is_stored)(lambda: plgpu.copy_smem_to_gmem(rows.q, dq_gmem.at[rows.rows, self.head]))

    def load_rows(self, delta_gmem: Any) -> _QueryRows:
        """Waits for the warpgroup's rows, and stores their `delta`."""
        operands = self.operands
        row = self.row(self.warpgroup)
        rows = pl.ds(row, ROWS)
        delta = self.row_products(operands.o.at[rows, self.head], operands.do.at[rows, self.head])
        delta_gmem[self.head, rows] = delta
        normalizers = plgpu.load(operands.normalizers.at[self.head, rows], layout=PER_ROW, optimized=False)
        slopes = self.head_slope(self.head)
        q, do = self.scratch["q"].at[self.rows], self.scratch["do"].at[self.rows]
        plgpu.barrier_wait(self.scratch["rows_loaded"].at[self.warpgroup])
        return _QueryRows(rows, q, do, delta, normalizers, slopes)

    def row_products(self, x: Any, y: Any) -> Array:
        """Returns row sums of `x * y`, summed in pieces of columns that are added left to right."""
        total = None
        width = self.problem.value_width
        for first in range(0, width, ROWS):
            part = pl.ds(first, min(ROWS, width - first))
            a, b = (plgpu.load(z.at[:, part], layout=MATRIX, optimized=False).astype(ACCUMULATOR) for z in (x, y))
            # The product of two 16-bit numbers is exact, so it makes no difference whether it is fused with the sum.
            piece = row_sums(a * b)
            total = piece if total is None else total + piece
        assert total is not None
        return total

    def visit_keys(self, rows: _QueryRows, dq: Any) -> Array:
        """Adds all tiles of keys to an accumulator, and returns it."""

        def visit_all(first: Array, end: Array, is_masked: bool) -> None:
            pl.loop(first, end)(lambda step: self.visit(rows, step, dq, is_masked=is_masked))

        # Keys that every row of the warpgroup sees need no mask.
        open_end = quotient(self.length, ROWS)
        if self.masking.causal:
            open_end = lax.min(open_end, quotient(self.position + 1, ROWS))
        open_end = lax.max(lax.min(open_end, self.end), self.first)
        open_first = self.first
        if self.masking.window is not None:
            open_first = quotient(self.position + (ROWS - self.masking.window), ROWS, up=True)
            open_first = lax.max(lax.min(open_first, open_end), self.first)
            visit_all(self.first, open_first, True)
        visit_all(open_first, open_end, False)
        visit_all(open_end, self.end, True)
        return dq[...]

    def visit(self, rows: _QueryRows, step: Array, dq: Any, *, is_masked: bool) -> None:
        """Adds a tile of keys to the gradient."""
        slot = lax.rem(step - self.first, self.stages)
        k, v = self.scratch["k"].at[slot], self.scratch["v"].at[slot]
        tile_row = lax.div(self.offset + self.row_in_tile(self.warpgroup), jnp.int32(ROWS))
        words = self.mask_words(self.request, self.head, tile_row, step)
        plgpu.barrier_wait(self.scratch["k_loaded"].at[slot])
        keys = step * ROWS
        if is_masked:
            # Here rather than before the product, as a phase of a barrier is awaited once.
            plgpu.barrier_wait(self.scratch["v_loaded"].at[slot])

            @pl.when(keys + ROWS > self.length)
            def _() -> None:
                # Both warpgroups write the same zeros, so neither waits for the other.
                clear_tail(k, self.length - keys)
                clear_tail(v, self.length - keys)

        by_position = functools.partial(self.mask_by_position, keys) if is_masked else None
        tile = Tile(
            lambda: along_rows(rows.normalizers, SQUARE),
            lambda: along_rows(rows.delta, SQUARE),
            lambda: (indices(1, SQUARE) + (keys - self.position)) - indices(0, SQUARE),
            combined_mask(by_position, words),
        )

        def multiply(s_sum: Any, dp_sum: Any) -> Array:
            take_turn(self.warpgroup)
            plgpu.wgmma(s_sum, rows.q, k.T)
            if not is_masked:
                plgpu.barrier_wait(self.scratch["v_loaded"].at[slot])
            plgpu.wgmma(dp_sum, rows.do, v.T)
            pass_turn(self.warpgroup)
            # Exponentiates while the second product runs.
            p, cap_slope = self.probabilities(plgpu.wgmma_accumulator_load(s_sum, wait_n=1), tile, rows.slopes)
            return self.score_gradients(p, dp_sum[...], tile, cap_slope)

        ds = pl.run_scoped(multiply, SUMS(SQUARE, ACCUMULATOR), SUMS(SQUARE, ACCUMULATOR))
        plgpu.wgmma(dq, ds, k)
        plgpu.wgmma_wait(0)  # the products read the slot until then
        self.free(slot)

    def mask_by_position(self, keys: Array, s: Array) -> Array:
        """Sets scores to -inf where the length, causality or the window hides a key."""
        # In columns of the tile, for each row.
        position = row_indices() + (self.position - keys)
        end = everywhere(self.length - keys)
        if self.masking.causal:
            end = jnp.minimum(end, position + 1)
        if self.masking.window is None:
            return mask_columns(s, end)
        return mask_columns(s, end, position - (self.masking.window - 1))


def query_gradient(problem: Problem, schedule: Schedule, masking: Masking, operands: Operands) -> tuple[Array, Array]:
    """Returns `dq` `[N, H, K]` and `delta` `[H, N]` float32; only rows of tiles are written."""

    def rows(count: tuple[int, ...], width: int) -> Any:
        return plgpu.SMEM((*count, width), problem.dtype, transforms=swizzled(width))

    scratch: dict[str, Any] = {"q": rows((TILE,), problem.width), "do": rows((TILE,), problem.value_width)}
    for name, width in problem.widths.items():
        scratch[name] = rows((schedule.stages, ROWS), width)
        scratch[f"{name}_loaded"] = plgpu.Barrier(num_barriers=schedule.stages)
    scratch["rows_loaded"] = plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS)

    def body(operands: Operands, results: list[Any], scratch: dict[str, Any]) -> None:
        dq, delta = results
        _QueryGradient(problem, schedule, masking, operands, scratch).run(dq, delta)

    q, normalizers = operands.q, operands.normalizers
    out_type = jax.ShapeDtypeStruct(q.shape, problem.dtype), jax.ShapeDtypeStruct(normalizers.shape, ACCUMULATOR)
    ctas = problem.tiles * problem.heads
    dq, delta = launch("attention_backward_queries", body, operands, out_type, ctas, scratch)
    return dq, delta
