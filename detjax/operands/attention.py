"""The arrays of attention, as the operation passes them to the backends."""

from typing import NamedTuple

from jaxtyping import Array

from detjax.operands.kv_pages import KVPages, Queries


class AttentionOperands(NamedTuple):
    """The arrays that `ops.attention` takes, or their gradients.

    Attributes:
        q: queries `[B, T, H, K]`, or packed, `[N, H, K]`.
        kv: pages of keys and values.
        queries: where the queries stand in their requests.
        sinks: a logit per head, `[H]`.
        mask: `[B or 1, H or 1, T, s]`; packed queries have none.
    """

    q: Array
    kv: KVPages
    queries: Queries
    sinks: Array | None = None
    mask: Array | None = None
