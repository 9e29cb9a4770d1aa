"""The parts that the kernels of the gated delta rule share: shapes, operands, and the contract's arithmetic."""

import dataclasses
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from detjax.contract import ACCUMULATOR, DELTA_CHUNK
from detjax.operands.linear_attention_state import DROPPABLE_TOKENS, RequestRows
from detjax.operands.numerics import LOWEST
from detjax.pallas.hopper.delta_rule.substitution import COLUMNS


@dataclasses.dataclass(frozen=True)
class Problem:
    """The shapes of a call and the dtype of queries, keys and values; `heads` are value heads, `width` is a key's."""

    requests: int
    key_heads: int
    heads: int
    width: int
    value_width: int
    dtype: jnp.dtype

    @property
    def slices(self) -> int:
        """CTAs that share the value columns of a head."""
        return self.value_width // COLUMNS

    @property
    def ctas(self) -> int:
        """CTAs of a kernel."""
        return self.requests * self.heads * self.slices

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.heads // self.key_heads

    def key_head(self, head: Array) -> Array:
        """Returns the key head of a value head."""
        return lax.div(head, jnp.int32(self.group))

    def place(self, cta: Array) -> tuple[Array, Array, Array]:
        """Returns the request, the head and the slice of a CTA."""
        unit = lax.div(cta, jnp.int32(self.slices))
        request, head = lax.div(unit, jnp.int32(self.heads)), lax.rem(unit, jnp.int32(self.heads))
        return request, head, lax.rem(cta, jnp.int32(self.slices))


class Operands(NamedTuple):
    """Arrays in memory.

    Attributes:
        q: queries `[N, h, K]`.
        k: keys `[N, h, K]`.
        v: values `[N, H, V]`.
        g: logarithms of decays `[N, H]`.
        beta: rates `[N, H]`.
        requests: the fields of each request, `[len(Request._fields), B]`; see `Request`.
        state: the state of all slots, a `DeltaState` of references that the kernels update in place.
    """

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    requests: Any
    state: Any


class Request(NamedTuple):
    """A request's tokens in this call, and its stored state.

    Attributes:
        first: the flat row of its first token in this call.
        start: that token's position.
        tokens: its tokens in this call.
        slot: its slot.
        stored: the chunk before which the stored state stands. CTAs overwrite it while others still need it, so it is
            read before the kernel starts.
    """

    first: Array
    start: Array
    tokens: Array
    slot: Array
    stored: Array

    @classmethod
    def all_of(cls, rows: RequestRows, chunks: Array) -> Array:
        """Returns the array that `at` reads, for all requests, given the chunks of all slots."""
        return jnp.stack(cls(rows.first, rows.start, rows.tokens, rows.slot, chunks[rows.slot]))

    @classmethod
    def at(cls, requests: Any, number: Array) -> "Request":
        """Reads the request with this number, in a kernel."""
        request = cls(*(requests[field, number] for field in range(len(cls._fields))))
        return request._replace(stored=jnp.where(request.start == 0, 0, request.stored))

    @property
    def end(self) -> Array:
        """The position after its last token."""
        return self.start + self.tokens

    @property
    def next_stored(self) -> Array:
        """The chunk before which the next state stands: the last one that the next call may return to."""
        oldest = jnp.maximum(self.start, jnp.minimum(self.end - 1, self.end - DROPPABLE_TOKENS))
        return lax.div(oldest, jnp.int32(DELTA_CHUNK))


def product(*pairs: tuple[Any, Any]) -> Array:
    """Returns the sum of matrix products, in one fresh accumulator."""

    def multiply(accumulator: Any) -> Array:
        for a, b in pairs:
            plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    shape = pairs[0][0].shape[0], pairs[0][1].shape[1]
    return pl.run_scoped(multiply, plgpu.ACC(shape, ACCUMULATOR))  # pyright: ignore


def rounded_product(x: Array, y: Array | np.float32) -> Array:
    """Returns the rounded product: the maximum keeps the value, and the product from being fused with an addition."""
    return jnp.maximum(x * y, LOWEST)
