"""The kernel for requests of one token: the state is read once, straight into the matrix unit's operand registers."""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from detjax.contract import ACCUMULATOR, DELTA_CHUNK, LOG2_E
from detjax.operands.linear_attention_state import DELTA_ROWS
from detjax.pallas.hopper.attention.queries_on_rows import along_rows, row_indices, splat
from detjax.pallas.hopper.delta_rule.chunk_rows import (
    await_rows,
    load_rows,
    load_token_gates,
    store_gates,
    store_rows,
)
from detjax.pallas.hopper.delta_rule.columns import load_transposed, store_first_row, store_transposed, substitute_token
from detjax.pallas.hopper.delta_rule.problem import Operands, Problem, Request, product, rounded_product
from detjax.pallas.hopper.delta_rule.substitution import COLUMNS
from detjax.pallas.hopper.mosaic.barriers import meet
from detjax.pallas.hopper.mosaic.layouts import MATRIX, PER_ROW, ROWS, UNIT, swizzled
from detjax.pallas.hopper.mosaic.tiles import fma


def scratch_types(problem: Problem) -> dict[str, Any]:
    """Returns the types of a CTA's shared memory."""

    def rows(width: int, count: int = DELTA_CHUNK) -> Any:
        return plgpu.SMEM((count, width), problem.dtype, transforms=swizzled(width))

    def numbers(*shape: int) -> Any:
        return plgpu.SMEM(shape, ACCUMULATOR)

    return {
        "k": rows(problem.width),
        "u": rows(COLUMNS),
        "token": rows(problem.width, UNIT),
        "high": rows(DELTA_CHUNK, UNIT),
        "low": rows(DELTA_CHUNK, UNIT),
        "from_state": numbers(COLUMNS, UNIT),
        "scores": numbers(DELTA_CHUNK, UNIT),
        "decays": numbers(DELTA_CHUNK),
        "weights": numbers(DELTA_CHUNK),
        "rest": numbers(COLUMNS),
    }


class Decode:
    """A CTA: `COLUMNS` value columns of a head for the single token of a request.

    Value columns, or the chunk's tokens, are on the matrix unit's rows, and the token's key and query are two of its 8
    columns: the products of `tiles.Tiles` with their factors swapped. With the token on the rows, 63 of 64 rows would
    be padding, and the state would have to pass through shared memory.

    The order of barriers: rows and state are loaded; products with the state and with the chunk's keys are stored in
    shared memory, since a number for each matrix row has another layout than a product's column; a barrier; weights,
    rest and scores are computed from them; a barrier; the substitution; a barrier; the product with the updates; a
    barrier; the output.
    """

    def __init__(self, problem: Problem, operands: Operands, o: Any, scratch: dict[str, Any]) -> None:
        self.problem, self.operands, self.o, self.scratch = problem, operands, o, scratch
        self.number, self.head, self.slice = problem.place(lax.axis_index("cta"))
        self.key_head = problem.key_head(self.head)
        self.columns = pl.ds(self.slice * COLUMNS, COLUMNS)

    @property
    def parts(self) -> list[Any]:
        """The key columns, in parts whose states take few registers."""
        return [pl.ds(first, ROWS) for first in range(0, self.problem.width, ROWS)]

    def run(self) -> None:
        """Computes the token if the request has one."""
        request = Request.at(self.operands.requests, self.number)
        pl.when(request.tokens > 0)(lambda: self.compute(request))

    def compute(self, request: Request) -> None:
        """Computes the token."""
        operands, scratch, dtype, state = self.operands, self.scratch, self.problem.dtype, self.operands.state
        slot, row, position = request.slot, request.first, request.start
        chunk, token = lax.div(position, jnp.int32(DELTA_CHUNK)), lax.rem(position, jnp.int32(DELTA_CHUNK))
        begins, is_behind = position == 0, request.stored < chunk
        s_memory = state.s.at[slot, self.head, :, self.columns]

        # Loads do not block a warp until their numbers are used, so all of the state's are issued before anything
        # waits.
        k, q = (x.at[:, self.key_head] for x in (operands.k, operands.q))
        load_rows(k, q, scratch["token"], row, row - 1, 1, 2)
        loaded_chunk = jnp.where(is_behind, request.stored, chunk)
        earlier = jnp.where(is_behind, DELTA_CHUNK, token)
        self.load(slot, row, loaded_chunk, earlier)
        g, rate = operands.g[row, self.head], operands.beta[row, self.head]
        v = plgpu.load(operands.v.at[row, self.head, self.columns], layout=PER_ROW, optimized=False)
        s = tuple(load_transposed(s_memory.at[part]) for part in self.parts)
        self.load_decays(slot, g, loaded_chunk, earlier)

        def advance() -> tuple[Array, ...]:
            rounded_s = self.advance(s, s_memory)
            self.load(slot, row, chunk, token)
            self.load_decays(slot, g, chunk, token)
            return rounded_s

        rounded_s = lax.cond(is_behind, advance, lambda: tuple(jnp.where(begins, 0.0, x).astype(dtype) for x in s))

        @pl.when(begins)
        def _() -> None:
            # The slot may still hold the state of another request.
            for part in self.parts:
                store_transposed(splat(0.0, (COLUMNS, ROWS)), s_memory.at[part])

        await_rows()
        plgpu.commit_smem()

        columns = [scratch["token"].at[:, part].T for part in self.parts]
        scratch["from_state"][...] = product(*zip(rounded_s, columns, strict=True))
        scratch["scores"][...] = product((scratch["k"], scratch["token"].T))
        decays = self.numbers("decays")
        meet()

        total = splat(scratch["decays"][token], (ROWS,))
        decay = jnp.exp2(total)
        between = jnp.exp2(jnp.where(row_indices() <= token, total - decays, -jnp.inf))
        scale = np.float32(self.problem.width**-0.5)
        scratch["weights"][...] = (rate * self.column("scores", 0)) * between
        from_state = rounded_product(decay, self.column("from_state", 0))
        scratch["rest"][...] = rate * (v.astype(ACCUMULATOR) - from_state)
        p = rounded_product(scale * self.column("scores", 1), between)
        # p is multiplied in two terms of the operands' dtype, as the contract has it. Only row 0 of the 8 is written:
        # the others give columns of the product that nobody reads.
        high = p.astype(dtype)
        store_first_row(high, scratch["high"])
        store_first_row((p - high.astype(ACCUMULATOR)).astype(dtype), scratch["low"])
        from_state = scale * self.column("from_state", 1)
        meet()

        substitute_token(scratch["rest"], scratch["weights"], scratch["u"], token)
        plgpu.commit_smem()
        scratch["from_state"][...] = product((scratch["u"].T, scratch["high"].T), (scratch["u"].T, scratch["low"].T))
        self.store_rows(slot, chunk, token)
        meet()
        o = fma(decay, from_state, self.column("from_state", 0))
        self.o.at[row, self.head, self.columns][...] = o.astype(dtype)

    def numbers(self, name: str) -> Array:
        """Returns numbers from shared memory, one for each row of the matrix unit."""
        return plgpu.load(self.scratch[name], layout=PER_ROW, optimized=False)

    def column(self, name: str, column: int) -> Array:
        """Returns a column of sums from shared memory."""
        return plgpu.load(self.scratch[name].at[:, column], layout=PER_ROW, optimized=False)

    def load(self, slot: Array, row: Array, chunk: Array, begin: Array) -> None:
        """Starts to load the rows of a chunk's first `begin` tokens, followed by the key of the token in a flat row.

        With a `begin` of `DELTA_CHUNK`, the token is not in this chunk.
        """
        operands, scratch, state = self.operands, self.scratch, self.operands.state
        place = lax.rem(chunk * DELTA_CHUNK, jnp.int32(DELTA_ROWS))
        keys, k = state.keys.at[slot, :, self.key_head], operands.k.at[:, self.key_head]
        updates, v = state.updates.at[slot, :, self.head, self.columns], operands.v.at[:, self.head, self.columns]
        load_rows(keys, k, scratch["k"], place, row - begin, begin, begin + 1)
        load_rows(updates, v, scratch["u"], place, row - begin, begin, begin)

    def load_decays(self, slot: Array, g: Array, chunk: Array, begin: Array) -> None:
        """Loads a chunk's sums of decays into shared memory; see `load`."""
        place = lax.rem(chunk * DELTA_CHUNK, jnp.int32(DELTA_ROWS))
        # `load_token_gates` adds the product to a sum, with which it must not be fused.
        step = rounded_product(g, LOG2_E)
        load_token_gates(self.operands.state.decays.at[slot, :, self.head], step, self.scratch["decays"], place, begin)

    def advance(self, s: tuple[Array, ...], target: Any) -> tuple[Array, ...]:
        """Stores the state after a complete chunk at `target`, and returns it rounded to the operands' dtype.

        `s` is the state before the chunk, `[COLUMNS, ROWS]` for each of `parts`.
        """
        scratch = self.scratch
        await_rows()
        plgpu.commit_smem()
        end = scratch["decays"][DELTA_CHUNK - 1]
        faded = along_rows(jnp.exp2(end - self.numbers("decays")), (DELTA_CHUNK, COLUMNS))
        u = plgpu.load(scratch["u"], layout=MATRIX, optimized=False).astype(ACCUMULATOR)
        scratch["u"][...] = (u * faded).astype(self.problem.dtype)
        plgpu.commit_smem()
        decay = along_rows(jnp.exp2(splat(end, (ROWS,))), (COLUMNS, ROWS))
        rounded_s = []
        for x, part in zip(s, self.parts, strict=True):
            x = fma(decay, x, product((scratch["u"].T, scratch["k"].at[:, part])))
            store_transposed(x, target.at[part])
            rounded_s.append(x.astype(self.problem.dtype))
        # All products have read the chunk's rows before the next chunk's overwrite them.
        meet()
        return tuple(rounded_s)

    def store_rows(self, slot: Array, chunk: Array, token: Array) -> None:
        """Stores the token's rows, at places of the rings that no CTA reads in this call."""
        state, scratch = self.operands.state, self.scratch
        place = lax.rem(chunk * DELTA_CHUNK, jnp.int32(DELTA_ROWS))
        updates = state.updates.at[slot, :, self.head, self.columns]
        store_rows(scratch["u"], updates, place, token, token + 1)

        @pl.when(self.slice == 0)
        def _() -> None:
            first = lax.rem(place + token, jnp.int32(DELTA_ROWS)) - token
            store_gates(scratch["decays"], state.decays.at[slot, :, self.head], first, token, token + 1)
            is_first = lax.rem(self.head, jnp.int32(self.problem.group)) == 0
            keys = state.keys.at[slot, :, self.key_head]
            pl.when(is_first)(lambda: store_rows(scratch["k"], keys, place, token, token + 1))

            @pl.when(self.head == 0)
            def _() -> None:
                state.chunk[slot] = chunk
