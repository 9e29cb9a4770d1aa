"""The kernel for requests of any number of tokens: one warpgroup loads a request's chunks, another computes them.

The two share a ring of `_SLOTS` chunks. The loader waits for `consumed[slot]`, starts the copies, waits for its own
threads' copies, fences them for the matrix unit, and arrives at `loaded[slot]`. The computing warpgroup waits for
`loaded[slot]` and arrives at `consumed[slot]` after its last read of the chunk. It reuses the slot's `u` and `v` for
the new updates and the outputs.
"""

from typing import Any, Final, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from detjax.contract import ACCUMULATOR, DELTA_CHUNK
from detjax.operands.linear_attention_state import DELTA_ROWS
from detjax.pallas.hopper.attention.queries_on_rows import along_rows, row_indices, splat
from detjax.pallas.hopper.delta_rule.chunk_rows import (
    await_rows,
    load_gates,
    load_rows,
    store_gates,
    store_rows,
)
from detjax.pallas.hopper.delta_rule.problem import Operands, Problem, Request, product, rounded_product
from detjax.pallas.hopper.delta_rule.substitution import COLUMNS, substitute
from detjax.pallas.hopper.mosaic.barriers import meet
from detjax.pallas.hopper.mosaic.layouts import MATRIX, PER_COLUMN, PER_ROW, ROWS, swizzled
from detjax.pallas.hopper.mosaic.tiles import fma, mask_columns

WARPGROUPS: Final = 2
"""Warpgroups of a CTA: one that computes, and one that loads."""

_SLOTS = 2
"""Chunks in shared memory: one is loaded while the previous one is computed. With keys of 128 columns a chunk takes
48.5 KiB and everything else 84, so a third one would not fit into 227."""
_PADDED = 72
"""Stride in elements of float32 rows that threads exchange. A row then starts 8 banks after the previous one, so
that 4 rows of 8 numbers, which half a warp accesses at once, use all 32 banks. With 64, all rows would start in one."""
_WIDE_LINE = 32
"""Elements of a swizzled float32 line."""


class Results(NamedTuple):
    """The arrays that the kernel writes: outputs `[N, H, V]` and sums of decays `[N, H]`."""

    o: Any
    decays: Any


def scratch_types(problem: Problem) -> dict[str, Any]:
    """Returns the types of a CTA's shared memory and barriers."""

    def rows(*shape: int) -> Any:
        return plgpu.SMEM(shape, problem.dtype, transforms=swizzled(shape[-1]))

    wide = (
        plgpu.TilingTransform((8, _WIDE_LINE)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(4 * _WIDE_LINE),  # pyright: ignore[reportAbstractUsage]
    )
    return {
        "s": plgpu.SMEM((problem.width, COLUMNS), ACCUMULATOR, transforms=wide),
        "held_s": rows(problem.width, COLUMNS),
        "q": rows(_SLOTS, DELTA_CHUNK, problem.width),
        "k": rows(_SLOTS, DELTA_CHUNK, problem.width),
        "v": rows(_SLOTS, DELTA_CHUNK, COLUMNS),
        "u": rows(_SLOTS, DELTA_CHUNK, COLUMNS),
        "decays": plgpu.SMEM((_SLOTS, DELTA_CHUNK), ACCUMULATOR),
        "rates": plgpu.SMEM((_SLOTS, DELTA_CHUNK), ACCUMULATOR),
        "weights": plgpu.SMEM((DELTA_CHUNK, _PADDED), ACCUMULATOR),
        "rest": plgpu.SMEM((DELTA_CHUNK, _PADDED), ACCUMULATOR),
        "s_loaded": plgpu.Barrier(),
        "loaded": plgpu.Barrier(num_barriers=_SLOTS),
        "consumed": plgpu.Barrier(num_barriers=_SLOTS),
    }


class Tiles:
    """A CTA: `COLUMNS` value columns of a head of one request, from its first chunk to its last.

    A chunk is always a tile of 64 tokens: rows of earlier calls come from the state, and rows of later ones are zeros.
    So prefill, decode and a verify step run the same instructions for a token.
    """

    def __init__(self, problem: Problem, operands: Operands, results: Results, scratch: dict[str, Any]) -> None:
        self.problem, self.operands, self.results, self.scratch = problem, operands, results, scratch
        self.number, self.head, self.slice = problem.place(lax.axis_index("cta"))
        self.key_head = problem.key_head(self.head)
        self.columns = pl.ds(self.slice * COLUMNS, COLUMNS)

    def run(self) -> None:
        """Runs the warpgroup's role, if the request has tokens."""
        request = Request.at(self.operands.requests, self.number)
        last = lax.div(request.end - 1, jnp.int32(DELTA_CHUNK))
        is_computing = lax.axis_index("warpgroup") == 0

        @pl.when(request.tokens > 0)
        def _() -> None:
            lax.cond(is_computing, lambda: self.compute_request(request, last), lambda: self.load(request, last))

    # --- the loading warpgroup ----------------------------------------------------------------------------------------

    def load(self, request: Request, last: Array) -> None:
        """Loads the request's chunks, each as soon as its slot is free."""

        @pl.loop(request.stored, last + 1)
        def _(chunk: Array) -> None:
            slot = self.slot(request, chunk)
            pl.when(chunk >= request.stored + _SLOTS)(lambda: plgpu.barrier_wait(self.scratch["consumed"].at[slot]))
            self.load_chunk(request, chunk, slot)
            # Each thread waits for its own copies; the fence and barrier then make all of them visible to the matrix
            # unit.
            await_rows()
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.scratch["loaded"].at[slot])

    def load_chunk(self, request: Request, chunk: Array, slot: Array) -> None:
        """Starts to load the rows of a chunk."""
        operands, state = self.operands, self.operands.state
        q, k, v, u, decays, rates = (self.scratch[name].at[slot] for name in ("q", "k", "v", "u", "decays", "rates"))
        begin, end = _places(request, chunk)
        place = lax.rem(chunk * DELTA_CHUNK, jnp.int32(DELTA_ROWS))
        first = request.first + chunk * DELTA_CHUNK - request.start
        kept_keys, kept_updates = state.keys.at[request.slot, :, self.key_head], self.updates(request)
        new_q, new_k = (x.at[:, self.key_head] for x in (operands.q, operands.k))
        new_v = operands.v.at[:, self.head, self.columns]
        load_rows(kept_keys, new_k, k, place, first, begin, end)
        load_rows(kept_updates, new_v, u, place, first, begin, begin)

        @pl.when(begin < end)
        def _() -> None:
            load_rows(kept_keys, new_q, q, place, first, 0, end)
            load_rows(kept_updates, new_v, v, place, first, 0, end)

        kept_decays = state.decays.at[request.slot, :, self.head]
        g, beta = (x.at[:, self.head] for x in (operands.g, operands.beta))
        load_gates(kept_decays, g, beta, decays, rates, place, first, begin, end)

    # --- the computing warpgroup --------------------------------------------------------------------------------------

    def compute_request(self, request: Request, last: Array) -> None:
        """Computes the request's chunks."""
        scratch, chunks = self.scratch, self.operands.state.chunk
        state, begins = self.operands.state.s.at[request.slot, self.head, :, self.columns], request.start == 0

        @pl.when((self.head == 0) & (self.slice == 0))
        def _() -> None:
            chunks[request.slot] = request.next_stored

        @pl.when(begins)
        def _() -> None:
            for part in self.parts:
                scratch["s"].at[part][...] = splat(0.0, (ROWS, COLUMNS))

        @pl.when(~begins)
        def _() -> None:
            plgpu.copy_gmem_to_smem(state, scratch["s"], scratch["s_loaded"])
            plgpu.barrier_wait(scratch["s_loaded"])

        for part in self.parts:
            scratch["held_s"].at[part][...] = plgpu.load(scratch["s"].at[part], layout=MATRIX).astype(
                self.problem.dtype
            )
        plgpu.commit_smem()

        @pl.loop(request.stored, last + 1)
        def _(chunk: Array) -> None:
            @pl.when((chunk == request.next_stored) & (begins | (chunk > request.stored)))
            def _() -> None:
                plgpu.copy_smem_to_gmem(scratch["s"], state)
                plgpu.wait_smem_to_gmem(0)

            slot = self.slot(request, chunk)
            plgpu.barrier_wait(scratch["loaded"].at[slot])
            begin, end = _places(request, chunk)
            pl.when(begin < end)(lambda: self.compute_tokens(request, chunk, slot))
            pl.when(chunk < last)(lambda: self.advance(slot))
            pl.when(chunk + _SLOTS <= last)(lambda: plgpu.barrier_arrive(scratch["consumed"].at[slot]))

    @property
    def parts(self) -> list[Any]:
        """The key columns, in parts of as many as the matrix unit has rows."""
        return [pl.ds(first, ROWS) for first in range(0, self.problem.width, ROWS)]

    def slot(self, request: Request, chunk: Array) -> Array:
        """Returns a chunk's slot in shared memory."""
        return lax.rem(chunk - request.stored, jnp.int32(_SLOTS))

    def updates(self, request: Request) -> Any:
        """Returns the CTA's part of the request's updates in memory."""
        return self.operands.state.updates.at[request.slot, :, self.head, self.columns]

    def numbers(self, name: str, slot: Array, layout: Any = PER_ROW) -> Array:
        """Returns a number for each of the chunk's tokens from shared memory."""
        return plgpu.load(self.scratch[name].at[slot], layout=layout, optimized=False)

    def rows(self, name: str, slot: Array) -> Array:
        """Returns the chunk's rows `[DELTA_CHUNK, COLUMNS]` from shared memory, in float32."""
        return plgpu.load(self.scratch[name].at[slot], layout=MATRIX, optimized=False).astype(ACCUMULATOR)

    def compute_tokens(self, request: Request, chunk: Array, slot: Array) -> None:
        """Computes the updates and outputs of a chunk's tokens."""
        scratch, dtype, shape = self.scratch, self.problem.dtype, (DELTA_CHUNK, COLUMNS)
        q, k, v, u = (scratch[name].at[slot] for name in ("q", "k", "v", "u"))
        weights, updates = (scratch[name].at[:, pl.ds(0, ROWS)] for name in ("weights", "rest"))
        begin, end = _places(request, chunk)
        decay = along_rows(jnp.exp2(self.numbers("decays", slot)), shape)
        rate = along_rows(self.numbers("rates", slot), shape)
        between = self.between(slot)

        from_state = rounded_product(decay, product((k, scratch["held_s"])))
        rest = rate * (self.rows("v", slot) - from_state)
        is_kept = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX) < begin
        updates[...] = jnp.where(is_kept, self.rows("u", slot), rest)
        weights[...] = (rate * product((k, k.T))) * between
        # The substitution reads rows that other threads have just written.
        meet()
        substitute(updates, weights, begin, end, dtype=dtype)

        u[...] = plgpu.load(updates, layout=MATRIX, optimized=False).astype(dtype)
        scale = np.float32(self.problem.width**-0.5)
        p = rounded_product(scale * product((q, k.T)), between)
        high = p.astype(dtype)
        low = (p - high.astype(ACCUMULATOR)).astype(dtype)
        from_state = scale * product((q, scratch["held_s"]))
        plgpu.commit_smem()  # `wgmma` reads u through the asynchronous proxy
        within = product((high, u), (low, u))
        v[...] = fma(decay, from_state, within).astype(dtype)
        meet()

        first = request.first + chunk * DELTA_CHUNK - request.start
        store_rows(v, self.results.o.at[:, self.head, self.columns], first, begin, end)
        # The ring keeps the last DELTA_ROWS tokens; rows before `oldest` would be overwritten anyway.
        oldest = jnp.maximum(begin, request.end - DELTA_ROWS - chunk * DELTA_CHUNK)
        place = lax.rem(chunk * DELTA_CHUNK, jnp.int32(DELTA_ROWS))
        store_rows(u, self.updates(request), place, oldest, end)

        @pl.when(self.slice == 0)
        def _() -> None:
            store_gates(scratch["decays"].at[slot], self.results.decays.at[:, self.head], first, begin, end)

        # `advance` overwrites v, which the stores above still read.
        meet()

    def between(self, slot: Array) -> Array:
        """Returns the factor by which each column's token has decayed at each row's token; 0 for later tokens."""
        shape = (DELTA_CHUNK, DELTA_CHUNK)
        later = along_rows(self.numbers("decays", slot), shape)
        earlier = lax.broadcast_in_dim(self.numbers("decays", slot, PER_COLUMN), shape, [1])
        return jnp.exp2(mask_columns(later - earlier, row_indices() + 1))

    def advance(self, slot: Array) -> None:
        """Advances the state past a complete chunk."""
        scratch, dtype, shape = self.scratch, self.problem.dtype, (DELTA_CHUNK, COLUMNS)
        k, decayed = (scratch[name].at[slot] for name in ("k", "v"))
        end = scratch["decays"][slot, DELTA_CHUNK - 1]
        until_end = along_rows(jnp.exp2(end - self.numbers("decays", slot)), shape)
        decayed[...] = (self.rows("u", slot) * until_end).astype(dtype)
        plgpu.commit_smem()
        decay = along_rows(jnp.exp2(splat(end, (ROWS,))), shape)
        for part in self.parts:
            added = product((k.at[:, part].T, decayed))
            s = fma(decay, plgpu.load(scratch["s"].at[part], layout=MATRIX), added)
            scratch["s"].at[part][...] = s
            scratch["held_s"].at[part][...] = s.astype(dtype)
        plgpu.commit_smem()


def _places(request: Request, chunk: Array) -> tuple[Array, Array]:
    """Returns the first place of a chunk with a token of the call, and the end of these places."""
    begin, end = (
        jnp.clip(x - chunk * DELTA_CHUNK, 0, DELTA_CHUNK).astype(jnp.int32) for x in (request.start, request.end)
    )
    return begin, end
