"""The state of linear attention layers: a fixed size per request, whatever its number of tokens.

A request has a *slot* in each layer's arrays, given by `Queries.slots`. A request that begins at position 0 ignores the
content of its slot, so slots need not be cleared between requests.

Up to `DROPPABLE_TOKENS` of the last tokens of a call can be dropped: the next call then begins at a smaller position.
This lets speculative decoding discard rejected drafts.
"""

import dataclasses
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Float32, Int, Int32

from detjax.contract import ACCUMULATOR, DELTA_CHUNK
from detjax.operands.kv_pages import Queries
from detjax.operands.numerics import unique_scatter_indices

DROPPABLE_TOKENS: Final = 16
"""Maximum number of a call's last tokens that the next call may drop. No bit depends on this number."""

DELTA_ROWS: Final = DELTA_CHUNK + DROPPABLE_TOKENS
"""Rows of a request's slot: the current chunk, and the tokens after it that may be dropped."""


def oldest_start(oldest: Int32[Array, "B"], start: Int[Array, "B"], end: Int[Array, "B"]) -> Int32[Array, "B"]:
    """Returns the smallest position, other than 0, at which each request's next call may begin.

    It is limited by the chunk to which the delta rule's state has advanced, and by the convolution's last inputs.

    Args:
        oldest: this position before the last call.
        start: the position of the call's first token, at least `oldest`, or 0.
        end: the position after its last token.
    """
    droppable = end - DROPPABLE_TOKENS
    chunk = jnp.maximum(start, droppable) // DELTA_CHUNK * DELTA_CHUNK
    after = jnp.maximum(jnp.maximum(jnp.where(start == 0, 0, oldest), droppable), chunk)
    return jnp.where(end > start, after, oldest).astype(jnp.int32)


class DeltaState(NamedTuple):
    """The state of a gated delta rule layer for each request.

    The row of the token at position `i` is at `i % DELTA_ROWS`. `contract` has the formulas.

    Attributes:
        s: the state before chunk `chunk`, float32.
        keys: the normalized keys of the tokens from this chunk on.
        updates: their updates `u`.
        decays: their sums `G` within their chunks.
        chunk: the index of the chunk.

    Example:
        >>> state = ops.DeltaState.empty(
        ...     slots=4, key_heads=1, value_heads=2, key_dim=16, value_dim=8, dtype="bfloat16"
        ... )
        >>> state.s.shape, state.s.dtype, state.keys.dtype
        ((4, 2, 16, 8), dtype('float32'), dtype(bfloat16))
    """

    s: Float32[Array, "R H K V"]
    keys: Float[Array, "R rows h K"]
    updates: Float[Array, "R rows H V"]
    decays: Float32[Array, "R rows H"]
    chunk: Int32[Array, "R"]

    @classmethod
    def empty(
        cls, slots: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, dtype: DTypeLike
    ) -> "DeltaState":
        """Returns the state of requests without tokens."""
        return cls(
            jnp.zeros((slots, value_heads, key_dim, value_dim), ACCUMULATOR),
            jnp.zeros((slots, DELTA_ROWS, key_heads, key_dim), dtype),
            jnp.zeros((slots, DELTA_ROWS, value_heads, value_dim), dtype),
            jnp.zeros((slots, DELTA_ROWS, value_heads), ACCUMULATOR),
            jnp.zeros(slots, jnp.int32),
        )


class DeltaTokens(NamedTuple):
    """The gated delta rule's arrays of tokens, or their gradients.

    Attributes:
        q: normalized queries `[N, h, K]`.
        k: normalized keys `[N, h, K]`.
        v: values `[N, H, V]`.
        g: logarithms of decays, float32 `[N, H]`.
        beta: rates, float32 `[N, H]`.
    """

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array


class DeltaNetState(NamedTuple):
    """The state of a gated delta net layer for each request.

    Attributes:
        inputs: the last inputs of its convolution; see `empty_inputs`.
        rule: the state of the delta rule.
    """

    inputs: Float[Array, "R rows C"]
    rule: DeltaState


def empty_inputs(slots: int, taps: int, channels: int, dtype: DTypeLike) -> Float[Array, "R rows C"]:
    """Returns the last inputs of a causal convolution for requests without tokens.

    The input at position `i` is at `i % rows`; there are `taps - 1 + DROPPABLE_TOKENS` rows.

    Example:
        >>> ops.empty_inputs(slots=2, taps=4, channels=8, dtype="float32").shape[2]
        8
    """
    return jnp.zeros((slots, taps - 1 + DROPPABLE_TOKENS, channels), dtype)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class TokenLimits:
    """Upper bounds on the tokens of requests in a call, from the shapes of its arrays. No bit depends on them.

    Attributes:
        decodes: number of leading requests with at most one token.
        others: maximum number of tokens of any other request.
    """

    decodes: int
    others: int


class RequestRows(NamedTuple):
    """The rows of each request in a call, for operations whose rows depend on one another.

    Request `b` has `tokens[b]` tokens, in the flat rows from `first[b]` on, at positions from `start[b]` on.

    Attributes:
        first: the flat row of each request's first token.
        start: the absolute position of this token.
        tokens: the number of tokens of the request in this call; may be 0.
        slot: the slot of each request's state.
        most: upper bounds on the tokens of requests.
    """

    first: Int32[Array, "B"]
    start: Int32[Array, "B"]
    tokens: Int32[Array, "B"]
    slot: Int32[Array, "B"]
    most: TokenLimits

    @classmethod
    def from_queries(cls, shape: tuple[int, ...], queries: Queries) -> "RequestRows":
        """Returns the rows of queries whose tokens have the shape `[B, T]`, or `[N]` if they are packed.

        Tokens after `queries.length` are dropped.
        """
        start, length = (jnp.asarray(x, jnp.int32) for x in (queries.start, queries.length))
        requests = start.shape[0]
        if queries.first_row is None:
            first = jnp.arange(requests, dtype=jnp.int32) * shape[1]
            count = jnp.full(requests, shape[1], jnp.int32) if queries.count is None else queries.count
            most = TokenLimits(requests if shape[1] == 1 else 0, shape[1])
        else:
            decodes = queries.num_decodes
            prefills = decodes + jnp.asarray(queries.first_row, jnp.int32)
            first = jnp.concatenate([jnp.arange(decodes, dtype=jnp.int32), prefills])
            assert queries.count is not None and queries.decode_queries == 1
            count, most = queries.count, TokenLimits(decodes, shape[0] - decodes)
        count = jnp.clip(length - start, 0, jnp.asarray(count, jnp.int32))
        slots = jnp.arange(requests, dtype=jnp.int32) if queries.slots is None else queries.slots
        return cls(first, start, count, jnp.asarray(slots, jnp.int32), most)

    def part(self, requests: slice) -> "RequestRows":
        """Returns the rows of some of the requests."""
        first, start, tokens, slot = (x[requests] for x in self[:4])
        return RequestRows(first, start, tokens, slot, self.most)

    def by_row(self, rows: int) -> tuple[Int32[Array, "N"], Int32[Array, "N"], Int[Array, "N"]]:
        """Returns for each flat row its request, its offset in the request's tokens, and 1 for tokens, 0 for padding.

        For padding rows the request is undefined.
        """
        row = jnp.arange(rows, dtype=jnp.int32)
        inside = (row[:, None] >= self.first[None]) & (row[:, None] < (self.first + self.tokens)[None])
        request = jnp.argmax(inside, axis=1).astype(jnp.int32)
        return request, row - self.first[request], jnp.any(inside, axis=1).astype(jnp.int32)


def with_last_inputs(inputs: Array, x: Array, rows: RequestRows) -> Float[Array, "R rows C"]:
    """Writes a call's inputs `x`, `[N, C]`, to the last inputs: the latest of each request, as many as there is
    room."""
    slots, room = inputs.shape[:2]
    request, offset, present = rows.by_row(x.shape[0])
    kept = (present > 0) & (offset >= rows.tokens[request] - room)
    place = rows.slot[request] * room + (rows.start[request] + offset) % room
    flat = inputs.reshape(slots * room, -1)
    flat = flat.at[unique_scatter_indices(kept, place, slots * room)].set(x, mode="drop", unique_indices=True)
    return flat.reshape(inputs.shape)
