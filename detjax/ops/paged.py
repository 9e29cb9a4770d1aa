"""Argument checks of the operations over paged keys and values."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from detjax.operands.kv_pages import KeyColumns, KVPages, QuantizedPages, Queries
from detjax.ops.checks import check_dtype, check_integers, check_not_empty, check_shape
from detjax.ops.quantized_kv import check_quantized


def check_kv(operation: str, like: Array, kv: KVPages) -> None:
    """Raises unless there are pages whose keys and values have `like`'s dtype or are quantized in the same way.

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: there are no pages, or codes and scales do not fit together.
    """
    if isinstance(kv.v, KeyColumns):
        if isinstance(kv.k, QuantizedPages):
            raise TypeError(
                f"{operation}: kv.k is quantized ({kv.k.kind}) and the values are its columns; accepted: pages of "
                "numbers if values are columns of the keys"
            )
        check_dtype(operation, like=like, **{"kv.k": kv.k})
        check_not_empty(operation, **{"kv.k": kv.k})
        return
    both = {"kv.k": kv.k, "kv.v": kv.v}
    kinds = {x.kind if isinstance(x, QuantizedPages) else str(x.dtype) for x in both.values()}
    for argument, pages in both.items():
        if isinstance(pages, QuantizedPages):
            check_quantized(operation, argument, pages)
        else:
            check_dtype(operation, like=like, **{argument: pages})
    if len(kinds) > 1:
        raise TypeError(
            f"{operation}: one of kv.k and kv.v is {kinds.pop()} and the other {kinds.pop()}; accepted: both of one "
            "dtype, or both quantized in the same way. Quantize the other with quantize_kv."
        )
    arrays = {argument: x.codes if isinstance(x, QuantizedPages) else x for argument, x in both.items()}
    check_not_empty(operation, **arrays)


def check_queries(operation: str, name: str, x: Array, queries: Queries, needed: tuple[str, ...]) -> None:
    """Raises unless the integers of `queries` fit the array `x`, `[B, T, N, K]` or packed, `[N, N, K]`.

    `needed` names the fields of `queries` that the operation reads, in addition to the page table and, for packed
    queries, `count`.

    Raises:
        TypeError: an array does not hold integers.
        ValueError: an array is missing or its shape does not fit.
    """
    packed, table = queries.first_row is not None, queries.page_table
    if x.ndim != (3 if packed else 4):
        expected = "3 axes if queries.first_row is given" if packed else "4 axes if queries.first_row is None"
        raise ValueError(f"{operation}: {name} has shape {x.shape}; accepted: {expected}")
    if packed and queries.count is None:
        raise ValueError(f"{operation}: queries.count is None; accepted: integers, because the queries are packed")
    fields = dict.fromkeys((*needed, "count")) if packed else needed
    given = {f"queries.{field}": getattr(queries, field) for field in fields}
    integers = {field: array for field, array in given.items() if array is not None}
    check_integers(operation, **{"queries.page_table": table}, **integers)
    check_not_empty(operation, **{"queries.page_table": table})
    batch = table.shape[0] if packed else x.shape[0]
    why = f"queries.page_table being {table.shape}" if packed else f"{name} being {x.shape}"
    check_shape(operation, "queries.page_table", table, (batch, table.shape[1]), why)
    for field, array in integers.items():
        check_shape(operation, field, array, (batch,), why)
    if queries.first_row is not None:
        _check_packing(operation, name, x, queries.first_row, table)


def check_requests(operation: str, name: str, x: Array, queries: Queries, *, axes: int) -> None:
    """Raises unless the integers of `queries` fit tokens `x`, `[B, T, ...]` or packed, `[N, ...]`, with `axes` axes
    each.

    Raises:
        TypeError: an array does not hold integers.
        ValueError: an array is missing or its shape does not fit.
    """
    by_token = x.reshape(*x.shape[: x.ndim - axes], -1, 1)
    check_queries(operation, name, by_token, queries, ("start", "length"))
    if queries.slots is not None:
        check_integers(operation, **{"queries.slots": queries.slots})
        check_shape(operation, "queries.slots", queries.slots, queries.start.shape, "queries.start's shape")


def _check_packing(operation: str, name: str, x: Array, first_row: Array, page_table: Array) -> None:
    requests = page_table.shape[0]
    check_integers(operation, **{"queries.first_row": first_row})
    fewest = max(requests - x.shape[0], 0)
    if first_row.ndim != 1 or not fewest <= first_row.shape[0] <= requests:
        raise ValueError(
            f"{operation}: queries.first_row has shape {first_row.shape}; accepted: from ({fewest},) to ({requests},), "
            f"queries.page_table being {page_table.shape} and {name} {x.shape}"
        )


def with_counts(queries: Queries, tokens: int) -> Queries:
    """Returns rectangular queries of `tokens` tokens each, with int32 arrays and counts."""
    count = queries.count
    count = jnp.full(queries.start.shape, tokens, jnp.int32) if count is None else jnp.asarray(count, jnp.int32)
    table, start = (jnp.asarray(x, jnp.int32) for x in (queries.page_table, queries.start))
    return dataclasses.replace(queries, page_table=table, start=start, count=count)
