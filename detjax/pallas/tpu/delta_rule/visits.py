"""The visits of the kernel: the chunks of each request's tokens in a call, in order."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from detjax.contract import DELTA_CHUNK
from detjax.operands.linear_attention_state import DELTA_ROWS, DROPPABLE_TOKENS, RequestRows
from detjax.operands.numerics import ceil_div
from detjax.pallas.tpu.device import SMEM_LIMIT
from detjax.runtime import backends


class Visits(NamedTuple):
    """Integers `[visits]` that describe each visit. The scalar core reads them before it starts the visit's copies.

    The *place* of a token is its position within its chunk. The arrays are padded with visits without tokens.

    Attributes:
        slot: the slot of the request's state.
        row: the flat row of place 0, which may be negative.
        chunk: the chunk.
        low: the place of the chunk's first token in this call; earlier tokens have rows in the state.
        high: the place after its last token in this call.
        loads: 1 if the state before the chunk is loaded from the slot.
        clears: 1 if that state is zero.
        folds: 1 if the next visit needs the state after the chunk.
        keeps_rows: 1 if the slot keeps rows of the chunk's tokens.
        keeps_state: 1 if the slot keeps the state before the chunk.
        buffer: which of two buffers has the state; the previous request's may still be copied to memory.
    """

    slot: Any
    row: Any
    chunk: Any
    low: Any
    high: Any
    loads: Any
    clears: Any
    folds: Any
    keeps_rows: Any
    keeps_state: Any
    buffer: Any

    @classmethod
    def from_rows(cls, rows: RequestRows, chunks: Array, tokens: int) -> "tuple[Visits, Array]":
        """Returns the visits of a call, and their number.

        Args:
            rows: the tokens' requests and positions.
            chunks: for each request the chunk before which its stored state stands.
            tokens: rows of the call. The length of the arrays depends only on it and on the number of requests.

        Raises:
            NotImplementedError: the integers don't fit into scalar memory.
        """
        requests = rows.first.shape[0]
        # A request of T tokens has at most (T + 62) // 64 + 1 chunks with tokens, and one before them.
        count = min(2 * tokens, ceil_div(tokens, DELTA_CHUNK) + 3 * requests)
        if len(cls._fields) * count > SMEM_LIMIT:
            raise NotImplementedError(
                f"gated_delta_rule: {tokens} tokens of {requests} requests are {count} visits of chunks on "
                f"{backends.device_name()}; accepted by the backend 'tpu': {SMEM_LIMIT // len(cls._fields)}. Call it "
                "for fewer tokens."
            )
        start, end, present = rows.start, rows.start + rows.tokens, rows.tokens > 0
        first = start // DELTA_CHUNK
        kept = kept_chunks(rows)
        before = jnp.where(start == 0, 0, chunks)
        behind = (before < first).astype(jnp.int32)
        number = jnp.where(present, (end - 1) // DELTA_CHUNK - first + 1 + behind, 0)
        visited = jnp.cumsum(number)

        index = jnp.arange(count, dtype=jnp.int32)
        request = jnp.minimum(jnp.searchsorted(visited, index, side="right").astype(jnp.int32), requests - 1)
        within = index - (visited - number)[request]
        exists = index < visited[-1]
        chunk = jnp.where(within < behind[request], before[request], first[request] + within - behind[request])
        position = chunk * DELTA_CHUNK
        low, high = (jnp.clip(x[request] - position, 0, DELTA_CHUNK) for x in (start, end))
        begins, empty = within == 0, start[request] == 0
        stays = (before == kept) & (start > 0)
        visits = cls(
            slot=rows.slot[request],
            row=rows.first[request] + position - start[request],
            chunk=chunk,
            low=low,
            high=high,
            loads=begins & ~empty,
            clears=begins & empty,
            folds=within + 1 < number[request],
            keeps_rows=chunk >= kept[request],
            keeps_state=(chunk == kept[request]) & ~stays[request],
            buffer=jnp.cumsum(present.astype(jnp.int32))[request] % 2,
        )
        return cls(*(jnp.where(exists, x.astype(jnp.int32), 0) for x in visits)), visited[-1]

    @property
    def positions(self) -> Array:
        """Positions `[visits, DELTA_CHUNK]` of the chunks' places."""
        return self.chunk[:, None] * DELTA_CHUNK + _places()

    @property
    def earlier(self) -> Array:
        """True at places with tokens of earlier calls, `[visits, DELTA_CHUNK]`."""
        return _places() < self.low[:, None]

    @property
    def present(self) -> Array:
        """True at places with tokens of this call, `[visits, DELTA_CHUNK]`."""
        return (_places() >= self.low[:, None]) & (_places() < self.high[:, None])

    @property
    def rows(self) -> Array:
        """Flat rows of the places' tokens, `[visits, DELTA_CHUNK]`."""
        return self.row[:, None] + _places()

    @property
    def rows_of_slots(self) -> Array:
        """Indices of the places' tokens in an array of all slots' rows, `[visits, DELTA_CHUNK]`."""
        return self.slot[:, None] * DELTA_ROWS + self.positions % DELTA_ROWS


def kept_chunks(rows: RequestRows) -> Array:
    """Returns the chunk before which each request's state stands after a call: no token before it may be dropped."""
    return jnp.maximum(rows.start, rows.start + rows.tokens - DROPPABLE_TOKENS) // DELTA_CHUNK


def _places() -> Array:
    return jnp.arange(DELTA_CHUNK, dtype=jnp.int32)[None]
