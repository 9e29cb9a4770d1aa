"""Appends keys to the pages of a KV cache whose values are columns of the keys."""

from jaxtyping import Array, Float

from detjax.contract import KV_BLOCK
from detjax.operands.kv_pages import KeyColumns, KVPages, Queries, append
from detjax.ops.checks import check_dtype, check_not_empty, check_shape
from detjax.ops.paged import check_kv, check_queries, with_counts
from detjax.runtime import compilation


@compilation.jit
def append_keys(k: Float[Array, "*T h K"], kv: KVPages, queries: Queries) -> KVPages:
    """Returns the pages with the keys written to them. No number changes, so all backends have the same bits.

    `qk_rope_append_kv` says which tokens are written, and where. Gradients and `vmap` are JAX's own, since they only
    move numbers.

    Args:
        k: keys of the new tokens, `[B, T, h, K]` or packed, `[N, h, K]`; bfloat16, float16 or float32.
        kv: pages of k's dtype with `KeyColumns` for values.
        queries: the tokens' positions in their requests; `length` is not read. New tokens must have distinct slots.

    Raises:
        TypeError: a dtype is not under contract, the pages' dtype is not k's, or there are pages of values.
        ValueError: shapes do not fit together.

    Example:
        >>> pages = jnp.zeros((1, 1, 128, 24))
        >>> queries = ops.Queries(ops.contiguous_page_table(1, 5), start=jnp.array([0]), length=jnp.array([5]))
        >>> ops.append_keys(jnp.ones((1, 5, 1, 24)), ops.KVPages(pages, ops.KeyColumns(16)), queries).k.sum()
        Array(120., dtype=float32)
    """
    check_dtype("append_keys", k=k)
    check_kv("append_keys", k, kv)
    check_not_empty("append_keys", k=k)
    if not isinstance(kv.v, KeyColumns):
        raise TypeError("append_keys: kv has pages of values; accepted: KeyColumns. Call qk_rope_append_kv")
    check_shape("append_keys", "kv.k", kv.k, (kv.num_pages, k.shape[-2], KV_BLOCK, k.shape[-1]), f"k being {k.shape}")
    check_queries("append_keys", "k", k, queries, ("start", "count"))
    if queries.first_row is not None:
        if queries.rows is None:
            raise ValueError("append_keys: queries.rows is None; accepted: what Queries.packed makes")
        k, queries = k[:, None], queries.row_by_row()
    return append(kv, k, None, with_counts(queries, k.shape[1]))
