"""The arrays of attention, as passed to the backends."""

from typing import NamedTuple

from jaxtyping import Array

from detjax.operands.kv_pages import KVPages, Queries


class AttentionOperands(NamedTuple):
    """The arrays of `ops.attention`, or their gradients.

    Attributes:
        q: queries `[B, T, H, K]`, or packed, `[N, H, K]`.
        kv: pages of keys and values.
        queries: the queries' positions in their requests.
        sinks: a logit per head, `[H]`.
        mask: `[B or 1, H or 1, T, s]`; None for packed queries.
    """

    q: Array
    kv: KVPages
    queries: Queries
    sinks: Array | None = None
    mask: Array | None = None
