"""The arithmetic of one chunk of the gated delta rule in VMEM, by the formulas of `detjax.contract`.

Where the contract has an fma, the compiler may fuse a product and a sum or not. It decides once for each place of a
chunk, because the kernel is the same for every call.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, DELTA_CHUNK
from detjax.operands.rounding import rounded
from detjax.pallas.tpu.delta_rule.copies import Buffers
from detjax.pallas.tpu.delta_rule.problem import Problem, Schedule
from detjax.pallas.tpu.delta_rule.units import UNITS, for_each, in_unit, rows_of, tokens_of
from detjax.pallas.tpu.device import LANES, SUBLANES


class Chunk(NamedTuple):
    """The visit's chunk, heads first; C is `DELTA_CHUNK`.

    All arrays except `scores` are float32, so that a unit of 8 tokens fills whole registers: registers of narrower
    dtypes have more rows.

    Attributes:
        q: `[h, C, K]`; undefined at places without tokens of the call, which affect no other place.
        keys: `[h, C, K]`, zeros after the last token.
        rest: values, then residuals, then outputs, `[H, C, V]`.
        from_state: products of queries with the state, before its decay, `[H, C, V]`.
        updates: `[H, C, V]`, zeros after the last token.
        weights: weights of earlier updates in a later one, `[H, C, 2 C]`, in the first C columns.
        scores: weights of updates in outputs, in two terms, `[H, C, 2 C]`.
        gates: sums of decays, and rates, `[tiles, C, LANES]`, with a lane for each head.
        decays: the transpose of `gates`, with all places twice, `[tiles, LANES, 2 C]`.
    """

    q: Any
    keys: Any
    rest: Any
    from_state: Any
    updates: Any
    weights: Any
    scores: Any
    gates: Any
    decays: Any

    @classmethod
    def scratch(cls, problem: Problem, tiles: int) -> "Chunk":
        """Returns the types of a chunk's scratch memory."""
        keys = pltpu.VMEM((problem.key_heads, DELTA_CHUNK, problem.key_width), ACCUMULATOR)
        values = pltpu.VMEM((problem.heads, DELTA_CHUNK, problem.value_width), ACCUMULATOR)
        square = problem.heads, DELTA_CHUNK, 2 * DELTA_CHUNK
        weights, scores = pltpu.VMEM(square, ACCUMULATOR), pltpu.VMEM(square, problem.dtype)
        gates = pltpu.VMEM((tiles, DELTA_CHUNK, LANES), ACCUMULATOR)
        decays = pltpu.VMEM((tiles, LANES, 2 * DELTA_CHUNK), ACCUMULATOR)
        return cls(keys, keys, values, values, values, weights, scores, gates, decays)


@dataclasses.dataclass(frozen=True, eq=False)
class Steps:
    """The steps of a visit, in the order of their definitions, with references to VMEM."""

    problem: Problem
    schedule: Schedule
    buffers: Buffers
    chunk: Chunk

    def arrange(self, visit: Array, low: Array, high: Array) -> None:
        """Moves the buffers' rows to the chunk, heads first, with zeros after the last token."""
        buffers, chunk, index = self.buffers, self.chunk, lax.rem(visit, 2)

        def arrange_unit(unit: Array) -> None:
            tokens, rows = tokens_of(unit), rows_of(unit)

            def choose(x: Array | None, earlier: Array) -> Array:
                """Returns rows of earlier tokens and of the call's tokens, heads first."""
                place = unit * SUBLANES + lax.broadcasted_iota(jnp.int32, earlier.shape, 0)
                zeros = jnp.zeros(earlier.shape, ACCUMULATOR)
                new = zeros if x is None else jnp.where((place >= low) & (place < high), _wide(x), zeros)
                return jnp.swapaxes(jnp.where(place < low, _wide(earlier), new), 0, 1)

            @pl.when(unit * SUBLANES < high)
            def fill() -> None:
                chunk.keys[:, rows, :] = choose(buffers.k[index, tokens], buffers.keys[index, tokens])
                chunk.updates[:, rows, :] = choose(None, buffers.updates[index, tokens])

            @pl.when(unit * SUBLANES >= high)
            def clear() -> None:
                for x in (chunk.keys, chunk.updates):
                    x[:, rows, :] = jnp.zeros((x.shape[0], SUBLANES, x.shape[2]), ACCUMULATOR)

            @pl.when(in_unit(unit, low, high))
            def fill_queries() -> None:
                chunk.q[:, rows, :] = jnp.swapaxes(_wide(buffers.q[index, tokens]), 0, 1)
                chunk.rest[:, rows, :] = jnp.swapaxes(_wide(buffers.v[index, tokens]), 0, 1)

        for_each(UNITS, arrange_unit)

    def add_decays(self, gates: Any, sums: Any, low: Array, high: Array) -> None:
        """Adds the decays of the call's tokens left to right, and writes the sums."""
        chunk, heads = self.chunk, self.problem.heads
        for tile in range(chunk.gates.shape[0]):
            chunk.gates[tile] = gates[0, tile]
            lane = tile * LANES + lax.broadcasted_iota(jnp.int32, (1, LANES), 1)

            def add(place: Array, _: None, tile: int = tile, lane: Array = lane) -> None:
                before = chunk.gates[tile, pl.ds(jnp.maximum(place - 1, 0), 1), :]
                step = chunk.gates[tile, pl.ds(place, 1), :]
                total = jnp.where(place > 0, before, 0.0) + step
                chunk.gates[tile, pl.ds(place, 1), :] = jnp.where(lane < heads, total, step)

            lax.fori_loop(low, high, add, None)
            total = chunk.gates[tile]
            sums[0, tile] = total
            chunk.decays[tile] = jnp.concatenate([total, total], axis=0).T

    def meet_state(self, key_head: Array, state: Any) -> None:
        """Computes everything that needs no updates, for the value heads that share a key head."""
        chunk, dtype = self.chunk, self.problem.dtype
        q, k = (rounded(x[key_head], dtype) for x in (chunk.q, chunk.keys))
        both = jnp.concatenate([q, k], axis=0)
        # Keys are concatenated twice, so that the two terms of scores are adjacent.
        products = _dot(both, jnp.concatenate([k, k], axis=0), (1, 1))
        shape = DELTA_CHUNK, 2 * DELTA_CHUNK
        place, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        column = jnp.where(lane < DELTA_CHUNK, lane, lane - DELTA_CHUNK)
        for member in range(self.problem.group):
            head = key_head * self.problem.group + member
            decays, rates = self.column(head), self.column(self.problem.heads + head)
            others = chunk.decays[lax.div(head, LANES), pl.ds(lax.rem(head, LANES), 1), :]
            between = jnp.exp2(jnp.where(column <= place, decays - others, -jnp.inf))
            from_state = _dot(both, rounded(state[head], dtype), (1, 0))
            chunk.from_state[head] = self.problem.scale * from_state[:DELTA_CHUNK]
            faded = _across(jnp.exp2(decays), from_state) * from_state[DELTA_CHUNK:]
            # The selection keeps the compiler from fusing the product with the subtraction below.
            faded = jnp.where(faded == 0, 0.0, faded)
            chunk.rest[head] = _across(rates, faded) * (chunk.rest[head] - faded)
            chunk.weights[head] = jnp.where(column < place, rates * products[DELTA_CHUNK:] * between, 0.0)
            p = jnp.where(column <= place, self.problem.scale * products[:DELTA_CHUNK] * between, 0.0)
            high = _held(p, dtype)
            chunk.scores[head] = rounded(jnp.where(lane < DELTA_CHUNK, high, p - high), dtype)

    def substitute(self, low: Array, high: Array) -> None:
        """Computes the updates of the call's tokens in ascending order, each from all earlier ones."""
        heads = self.schedule.heads

        def run_unit(unit: Array) -> None:
            def run_heads(index: Array) -> None:
                self.substitute_unit(unit, pl.ds(index * heads, heads), low, high)

            pl.when(in_unit(unit, low, high))(lambda: for_each(self.problem.heads // heads, run_heads))

        for_each(UNITS, run_unit)

    def substitute_unit(self, unit: Array, heads: Any, low: Array, high: Array) -> None:
        """Computes the updates of one unit and some heads, whose sums stay in registers."""
        updates, rows = self.chunk.updates, rows_of(unit)
        weights = self.chunk.weights[heads, rows, :]
        flat = weights.reshape(-1, weights.shape[2])

        def subtract(place: Array, u: Array, rest: Array) -> Array:
            weight = _lane(flat, place).reshape(weights.shape)
            return rest - _across(weight, rest) * u

        def subtract_earlier(place: Array, rest: Array) -> Array:
            return subtract(place, updates[heads, pl.ds(place, 1), :], rest)

        rest = lax.fori_loop(0, unit * SUBLANES, subtract_earlier, self.chunk.rest[heads, rows, :])
        kept = updates[heads, rows, :]
        for row in range(SUBLANES):
            place = unit * SUBLANES + row
            u = _held(rest[:, row : row + 1], self.problem.dtype)
            u = jnp.where((place >= low) & (place < high), u, kept[:, row : row + 1])
            updates[heads, pl.ds(place, 1), :] = u
            rest = subtract(place, u, rest)

    def add_updates(self, head: Array) -> None:
        """Computes the outputs of a head."""
        u = rounded(self.chunk.updates[head], self.problem.dtype)
        within = _dot(self.chunk.scores[head], jnp.concatenate([u, u], axis=0), (1, 0))
        decay = _across(jnp.exp2(self.column(head)), within)
        self.chunk.rest[head] = decay * self.chunk.from_state[head] + within

    def collect(self, visit: Array, low: Array, high: Array) -> None:
        """Moves outputs and rows to the buffers, tokens first."""
        buffers, chunk, place = self.buffers, self.chunk, lax.rem(visit, 2)

        def collect_unit(unit: Array) -> None:
            for x, buffer in (
                (chunk.rest, buffers.o),
                (chunk.keys, buffers.keys.at[place]),
                (chunk.updates, buffers.updates.at[place]),
            ):
                y = jnp.swapaxes(x[:, rows_of(unit), :], 0, 1)
                buffer[tokens_of(unit)] = rounded(y, buffer.dtype)

        for_each(UNITS, lambda unit: pl.when(in_unit(unit, low, high))(lambda: collect_unit(unit)))

    def fold(self, key_head: Array, state: Any) -> None:
        """Advances the state from before the chunk to after it."""
        chunk, dtype = self.chunk, self.problem.dtype
        keys = rounded(chunk.keys[key_head], dtype)
        for member in range(self.problem.group):
            head = key_head * self.problem.group + member
            decays = self.column(head)
            end = decays[DELTA_CHUNK - 1 :]
            u = chunk.updates[head]
            faded = rounded(u * _across(jnp.exp2(end - decays), u), dtype)
            added = _dot(keys, faded, (0, 0))
            state[head] = _across(jnp.exp2(end), added) * state[head] + added

    def column(self, head: Array) -> Array:
        """Returns a lane of the gates in every lane, `[DELTA_CHUNK, LANES]`."""
        return _lane(self.chunk.gates[lax.div(head, LANES)], lax.rem(head, LANES))


def _dot(x: Array, y: Array, axes: tuple[int, int]) -> Array:
    """Returns float32 products of x and y over an axis of each."""
    # With the default precision the matrix unit rounds float32 operands to bfloat16.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    contracted = (axes[0],), (axes[1],)
    return lax.dot_general(x, y, (contracted, ((), ())), precision=precision, preferred_element_type=ACCUMULATOR)


def _lane(x: Array, lane: Array) -> Array:
    """Returns one lane of registers `[rows, LANES]`, in every lane."""
    index = jnp.full(x.shape, lane, jnp.int32)
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")


def _across(x: Array, like: Array) -> Array:
    """Returns registers `[..., LANES]`, the same in all lanes, with the number of columns of `like`."""
    times = like.shape[-1] // x.shape[-1]
    return x if times == 1 else jnp.concatenate([x] * times, axis=-1)


def _held(x: Array, dtype: Any) -> Array:
    """Returns numbers rounded to a dtype, in float32."""
    return _wide(rounded(x, dtype))


def _wide(x: Array) -> Array:
    return x.astype(ACCUMULATOR)
