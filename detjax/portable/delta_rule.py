"""The gated delta rule in plain JAX: tiles of `PORTABLE_ROWS` tokens at absolute positions, one request at a time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike

from detjax.contract import ACCUMULATOR, DELTA_CHUNK, LOG2_E, PORTABLE_ROWS
from detjax.operands.linear_attention_state import DELTA_ROWS, DROPPABLE_TOKENS, DeltaState, DeltaTokens, RequestRows
from detjax.operands.numerics import ceil_div
from detjax.operands.rounding import rounded
from detjax.portable.tiles import dot
from detjax.runtime import varying


class _Rows(NamedTuple):
    """The stored rows of tokens, in float32: keys `[N, h, K]`, updates `[N, H, V]` and sums of decays `[N, H]`."""

    keys: Array
    updates: Array
    decays: Array


class _Progress(NamedTuple):
    """The loop state while a request's tiles are computed.

    Attributes:
        s: the state before chunk `chunk`.
        chunk: the chunk of the last tile.
        state: the request's next state: its rows, and the latest state that it may have to go back to.
        o: the outputs of all requests.
    """

    s: Array
    chunk: Array
    state: DeltaState
    o: Array


def forward(tokens: DeltaTokens, state: DeltaState, rows: RequestRows) -> tuple[Array, DeltaState]:
    """Returns the outputs `[N, H, V]`, zeros for padding rows, and the next state of all slots."""
    v = tokens.v
    dtype, size = v.dtype, PORTABLE_ROWS
    tokens = jax.tree.map(_with_margins, tokens)
    count, tokens, state, rows = lax.optimization_barrier((jnp.int32(rows.first.shape[0]), tokens, state, rows))

    def run_request(b: Array, carry: tuple[Array, DeltaState]) -> tuple[Array, DeltaState]:
        o, state = carry
        slot, start, end = rows.slot[b], rows.start[b], rows.start[b] + rows.tokens[b]
        at_slot = jax.tree.map(lambda x: x[slot], state)
        # A request that begins here has an empty state, whatever a previous one left in its slot.
        begins = start == 0
        at_slot = at_slot._replace(s=jnp.where(begins, 0.0, at_slot.s), chunk=jnp.where(begins, 0, at_slot.chunk))

        def run_tile(index: Array, progress: _Progress) -> _Progress:
            position = index * size
            chunk, offset = position // DELTA_CHUNK, position % DELTA_CHUNK
            s = lax.cond(progress.chunk < chunk, lambda: _folded(progress, dtype), lambda: progress.s)
            positions = position + jnp.arange(size, dtype=jnp.int32)
            present = (positions >= start) & (positions < end)
            row = rows.first[b] + position - start + size
            new = jax.tree.map(lambda x: _chosen(present, lax.dynamic_slice_in_dim(x, row, size), 0), tokens)
            earlier = _rows_of_chunk(progress.state, chunk, jnp.maximum(position, start))
            operands = s, earlier, jax.tree.map(_wide, new), offset, present
            s, earlier, new, offset, present = lax.optimization_barrier(operands)
            tile = _tile(s, earlier, new, offset, present, offset + size, dtype)
            o_new, kept = lax.optimization_barrier(tile)

            o_before = lax.dynamic_slice_in_dim(progress.o, row, size)
            o_new = _chosen(present, rounded(o_new, dtype), o_before)
            after = _with_rows(progress.state, kept, position, present)
            stays = chunk * DELTA_CHUNK <= jnp.maximum(start, end - DROPPABLE_TOKENS)
            after = after._replace(s=jnp.where(stays, s, after.s), chunk=jnp.where(stays, chunk, after.chunk))
            return _Progress(s, chunk, after, lax.dynamic_update_slice_in_dim(progress.o, o_new, row, 0))

        initial = _Progress(at_slot.s, at_slot.chunk, at_slot, o)
        last = jnp.where(end > start, (end + size - 1) // size, start // size)
        progress = varying.fori_loop(start // size, last, run_tile, initial)
        has_tokens = end > start
        state = jax.tree.map(lambda x, new: x.at[slot].set(jnp.where(has_tokens, new, x[slot])), state, progress.state)
        return progress.o, state

    o = jnp.zeros((v.shape[0] + 2 * size, *v.shape[1:]), dtype)
    o, state = varying.fori_loop(0, count, run_request, (o, state))
    return o[size:-size], state


def backward(tokens: DeltaTokens, state: DeltaState, rows: RequestRows, do: Array) -> DeltaTokens:
    """Returns the gradients of the tokens; zeros for padding rows. The state before the call is a constant."""
    v = tokens.v
    dtype, size = v.dtype, DELTA_CHUNK
    most = ceil_div(v.shape[0], size) + 1  # a request that begins inside a chunk may end inside another
    margins = jax.tree.map(lambda x: _with_margins(x, size), (tokens, do))
    operands = jnp.int32(rows.first.shape[0]), margins, state, rows
    count, (padded, do), state, rows = lax.optimization_barrier(operands)
    shape = v.shape[1], tokens.q.shape[2], v.shape[2]

    def run_request(b: Array, gradients: DeltaTokens) -> DeltaTokens:
        # Chunks are counted from the one that contains the request's first token, `offset` places after its start.
        first, length, offset = rows.first[b], rows.tokens[b], rows.start[b] % size
        chunks = jnp.where(length > 0, (offset + length + size - 1) // size, 0)
        s_first, rows_first = _constants(jax.tree.map(lambda x: x[rows.slot[b]], state), rows.start[b], dtype)

        def places(chunk: Array) -> Array:
            return chunk * size + jnp.arange(size, dtype=jnp.int32) - offset

        def row_of(chunk: Array) -> Array:
            return first + chunk * size + size - offset

        def chunk_at(chunk: Array, x: Array) -> Array:
            present = (places(chunk) >= 0) & (places(chunk) < length)
            return _wide(_chosen(present, lax.dynamic_slice_in_dim(x, row_of(chunk), size), 0))

        def run_chunk(chunk: Array, s: Array, new: DeltaTokens) -> tuple[Array, Array]:
            earlier = jax.tree.map(lambda x: jnp.where(chunk == 0, x, 0.0), rows_first)
            # Tokens after the request's last one are zeros, which change no state.
            o, kept = _tile(s, earlier, new, 0, places(chunk) >= 0, DELTA_CHUNK, dtype)
            return o, _next_state(s, kept, dtype)

        def keep_state(chunk: Array, starts: Array) -> Array:
            operands = starts[chunk], jax.tree.map(lambda x: chunk_at(chunk, x), padded)
            s, new = lax.optimization_barrier(operands)
            return starts.at[chunk + 1].set(lax.optimization_barrier(run_chunk(chunk, s, new)[1]))

        def add_chunk(turn: Array, carry: tuple[Array, DeltaTokens]) -> tuple[Array, DeltaTokens]:
            ds, gradients = carry
            chunk = chunks - 1 - turn
            new = jax.tree.map(lambda x: chunk_at(chunk, x), padded)
            operands = lax.optimization_barrier((starts[chunk], new, chunk_at(chunk, do), ds))
            s, new, do_chunk, ds = operands
            ds, dnew = lax.optimization_barrier(
                jax.vjp(lambda s, new: run_chunk(chunk, s, new), s, new)[1]((do_chunk, ds))
            )
            present = (places(chunk) >= 0) & (places(chunk) < length)
            row = row_of(chunk)

            def written(total: Array, part: Array) -> Array:
                before = lax.dynamic_slice_in_dim(total, row, size)
                return lax.dynamic_update_slice_in_dim(
                    total, _chosen(present, rounded(part, total.dtype), before), row, 0
                )

            return ds, jax.tree.map(written, gradients, DeltaTokens(*dnew))

        starts = jnp.zeros((most + 1, *shape), ACCUMULATOR).at[0].set(s_first)
        starts = varying.fori_loop(0, chunks, keep_state, starts)
        return varying.fori_loop(0, chunks, add_chunk, (jnp.zeros(shape, ACCUMULATOR), gradients))[1]

    zeros = jax.tree.map(jnp.zeros_like, padded)
    gradients = varying.fori_loop(0, count, run_request, zeros)
    return jax.tree.map(lambda x: x[size:-size], gradients)


def _constants(at_slot: DeltaState, start: Array, dtype: DTypeLike) -> tuple[Array, _Rows]:
    """Returns a request's data from earlier calls: the state before the chunk of position `start`, and its rows."""
    chunk, begins = start // DELTA_CHUNK, start == 0
    s = jnp.where(begins, 0.0, at_slot.s)
    progress = _Progress(s, jnp.where(begins, 0, at_slot.chunk), at_slot, s)
    s = lax.cond(progress.chunk < chunk, lambda: _folded(progress, dtype), lambda: s)
    return lax.stop_gradient((s, _rows_of_chunk(at_slot, chunk, start)))


def _tile(
    s: Array,
    earlier: _Rows,
    new: DeltaTokens,
    offset: Array | int,
    present: Array,
    end: Array | int,
    dtype: DTypeLike,
) -> tuple[Array, _Rows]:
    """Returns the outputs `[R, H, V]` of R tokens of a chunk, in float32 before rounding, and their rows.

    Args:
        s: the state before the chunk, `[H, K, V]`.
        earlier: the chunk's `DELTA_CHUNK` rows, with zeros for rows that do not exist yet.
        new: the tokens, float32, with zeros for padding.
        offset: the first token's place in the chunk.
        present: for each token whether it is one; the others have their rows already, or none yet.
        end: the place after the last token's.
        dtype: the dtype that numbers are rounded to.
    """
    size, group = new.v.shape[0], new.v.shape[1] // new.k.shape[1]
    scale = np.float32(new.q.shape[2] ** -0.5)
    kept = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, offset, size), earlier)
    decays = _decays(earlier.decays, kept.decays, new.g, offset, present)
    keys = _put(earlier.keys, _chosen(present, new.k, kept.keys), offset)
    all_decays = _put(earlier.decays, decays, offset).T

    # Heads are the first axis from here on: [H, R, ...] for the tile's tokens, and [H, C, ...] for the chunk's.
    q, k, keys = (jnp.repeat(x.swapaxes(0, 1), group, axis=0) for x in (new.q, new.k, keys))
    v, g, beta = new.v.swapaxes(0, 1), decays.T, new.beta.T[..., None]
    held_s = _held(s, dtype)
    place = offset + jnp.arange(size, dtype=jnp.int32)[:, None]
    column = jnp.arange(DELTA_CHUNK, dtype=jnp.int32)[None]
    visible = jnp.broadcast_to((column <= place)[None], (v.shape[0], size, DELTA_CHUNK))
    between = jnp.exp2(jnp.where(visible, g[..., None] - all_decays[:, None], -jnp.inf))
    decay = jnp.exp2(g)[..., None]

    from_state = _rounded_product(decay, dot(k, held_s, (2, 1), batched=True))
    residual = beta * (v - from_state)
    scores = jnp.where((column < place)[None], dot(k, keys, (2, 2), batched=True), 0.0)
    weights = _rounded_product(_rounded_product(beta, scores), between)
    weights = lax.optimization_barrier(weights.transpose(2, 0, 1))

    def substitute(j: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        rest, updates = carry
        index = jnp.clip(j - offset, 0, size - 1)
        computed = (j >= offset) & present[index]
        u = jnp.where(computed, _held(rest[:, index], dtype), updates[j])
        return rest - weights[j][..., None] * u[:, None], updates.at[j].set(u)

    _, updates = varying.fori_loop(0, end, substitute, (lax.optimization_barrier(residual), earlier.updates))
    p = _rounded_product(scale * dot(q, keys, (2, 2), batched=True), between)
    high = _held(p, dtype)
    both = jnp.concatenate([high, _held(p - high, dtype)], axis=2)
    across = updates.swapaxes(0, 1)
    within = dot(both, jnp.concatenate([across, across], axis=1), (2, 1), batched=True)
    o = decay * _rounded_product(scale, dot(q, held_s, (2, 1), batched=True)) + within
    rows = _Rows(_chosen(present, new.k, kept.keys), lax.dynamic_slice_in_dim(updates, offset, size), decays)
    return o.swapaxes(0, 1), rows


def _decays(all_decays: Array, before: Array, g: Array, offset: Array | int, present: Array) -> Array:
    """The sums `G` of a tile's tokens, `[R, H]`, added left to right to the sum of the token before the tile."""
    initial = jnp.where(offset > 0, all_decays[jnp.maximum(offset - 1, 0)], 0.0)
    steps = lax.optimization_barrier(g * LOG2_E)

    def add(total: Array, token: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        step, kept, is_present = token
        total = jnp.where(is_present, total + step, kept)
        return total, total

    return varying.scan(add, initial, (steps, before, present))[1]


def _next_state(s: Array, rows: _Rows, dtype: DTypeLike) -> Array:
    """The state after a chunk with all its rows."""
    group = rows.updates.shape[1] // rows.keys.shape[1]
    keys = jnp.repeat(rows.keys.swapaxes(0, 1), group, axis=0)
    end = rows.decays[-1]
    faded = _held(rows.updates * jnp.exp2(end[None] - rows.decays)[..., None], dtype).swapaxes(0, 1)
    return jnp.exp2(end)[:, None, None] * s + dot(keys, faded, (1, 1), batched=True)


def _folded(progress: _Progress, dtype: DTypeLike) -> Array:
    """The state after the chunk that a request's state precedes."""
    rows = _rows_of_chunk(progress.state, progress.chunk, (progress.chunk + 1) * DELTA_CHUNK)
    s, rows = lax.optimization_barrier((progress.s, rows))
    return lax.optimization_barrier(_next_state(s, rows, dtype))


def _rows_of_chunk(state: DeltaState, chunk: Array, end: Array) -> _Rows:
    """The rows of a request's chunk in float32, with zeros from position `end` on, where rows are undefined."""
    positions = chunk * DELTA_CHUNK + jnp.arange(DELTA_CHUNK, dtype=jnp.int32)
    kept = state.keys, state.updates, state.decays
    return _Rows(*(_wide(_chosen(positions < end, x[positions % DELTA_ROWS], 0)) for x in kept))


def _with_rows(state: DeltaState, rows: _Rows, position: Array, present: Array) -> DeltaState:
    """The request's state updated with the rows of a tile's tokens."""
    # Tiles begin at multiples of PORTABLE_ROWS, which divides DELTA_ROWS, so none extends past the last row.
    place = position % DELTA_ROWS

    def written(x: Array, new: Array) -> Array:
        before = lax.dynamic_slice_in_dim(x, place, present.shape[0])
        return lax.dynamic_update_slice_in_dim(x, _chosen(present, rounded(new, x.dtype), before), place, 0)

    keys, updates, decays = map(written, (state.keys, state.updates, state.decays), rows)
    return state._replace(keys=keys, updates=updates, decays=decays)


@jax.custom_jvp
def _rounded_product(x: Array | np.float32, y: Array) -> Array:
    """The product, which no following addition can be fused with."""
    return lax.optimization_barrier(x * y)


@_rounded_product.defjvp
def _rounded_product_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (x, y), (dx, dy) = primals, tangents
    return _rounded_product(x, y), dx * y + x * dy


def _held(x: Array, dtype: DTypeLike) -> Array:
    """Numbers rounded to a dtype, in float32, with a straight-through gradient."""
    return x if jnp.dtype(dtype) == x.dtype else _straight_through(x, jnp.dtype(dtype).name)


def _straight_through(x: Array, dtype: str) -> Array:
    @jax.custom_jvp
    def held(x: Array) -> Array:
        return _wide(rounded(x, dtype))

    held.defjvp(lambda primals, tangents: (held(*primals), *tangents))
    return held(x)


def _put(x: Array, part: Array, offset: Array | int) -> Array:
    return lax.dynamic_update_slice_in_dim(x, part, offset, 0)


def _chosen(rows: Array, x: Array, y: Array | float) -> Array:
    """`jnp.where` with one condition per row."""
    shape = rows.shape + (1,) * (x.ndim - 1)
    return jnp.where(rows.reshape(shape), x, jnp.asarray(y, x.dtype))


def _wide(x: Array) -> Array:
    return x.astype(ACCUMULATOR)


def _with_margins(x: Array, size: int = PORTABLE_ROWS) -> Array:
    """Rows with zeros before and after them, for tiles that extend beyond a request's first or last token."""
    return jnp.pad(x, [(size, size)] + [(0, 0)] * (x.ndim - 1))
