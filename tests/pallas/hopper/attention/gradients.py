"""Gradients of attention for the last queries of requests, in rectangular and in packed calls."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import detjax
from detjax import ops
from detjax.operands.kv_pages import KVPages, Queries
from tests.support.attention_requests import Requests


def output_gradients(requests: Requests, counts: Sequence[int]) -> list[np.ndarray]:
    """Random gradients of the output of each request's last tokens."""
    random = np.random.default_rng(9)
    return [random.standard_normal((count, *requests.q.shape[2:])).astype(requests.q.dtype) for count in counts]


def last_queries(requests: Requests, counts: Sequence[int]) -> list[np.ndarray]:
    return [q[n - count : n] for q, n, count in zip(requests.q, requests.lengths, counts, strict=True)]


def gradients(requests: Requests, q: Any, queries: Queries, do: Any, backend: str = "hopper") -> Any:
    """Returns the output, and the gradients of queries, page pools and sinks."""
    masking = requests.masking
    options: Any = {name: getattr(masking, name) for name in ("scale", "causal", "window", "soft_cap", "alibi_slopes")}

    @detjax.jit
    def pulled_back(q: Any, kv: KVPages, queries: Queries, sinks: Any, do: Any) -> Any:
        def attend(q: Any, kv: KVPages, sinks: Any) -> jax.Array:
            return ops.attention(q, kv, queries, sinks=sinks, **options)

        o, pullback = jax.vjp(attend, q, kv, sinks)
        return o, *pullback(do)

    with detjax.use_backend(backend):
        return pulled_back(jnp.asarray(q), requests.kv, queries, requests.sinks, jnp.asarray(do))


def rectangular_gradients(
    requests: Requests, counts: Sequence[int], backend: str = "hopper"
) -> tuple[list[np.ndarray], Any]:
    """Returns each request's gradients of its last queries in a rectangular call, and the other gradients."""

    def rectangle(rows: list[np.ndarray]) -> np.ndarray:
        return np.stack([np.pad(x, ((0, max(counts) - len(x)), (0, 0), (0, 0))) for x in rows])

    start, length = (jnp.asarray(x, jnp.int32) for x in (np.subtract(requests.lengths, counts), requests.lengths))
    q, do = rectangle(last_queries(requests, counts)), rectangle(output_gradients(requests, counts))
    _, dq, *others = gradients(requests, q, Queries(requests.page_table, start, length), do, backend)
    return [np.asarray(x)[:count] for x, count in zip(dq, counts, strict=True)], others


def packed_gradients(
    requests: Requests, counts: Sequence[int], order: Sequence[int], gaps: Sequence[int], spare: int = 0
) -> tuple[list[np.ndarray], Any]:
    """Returns the same for packed queries, with requests in `order` and each after a gap of NaN rows."""
    first_row, end = np.zeros(len(counts), np.int32), 0
    for request, gap in zip(order, gaps, strict=True):
        first_row[request] = end + gap
        end = first_row[request] + -(-counts[request] // 8) * 8
    q, do = np.full((2, end + spare, *requests.q.shape[2:]), np.nan, requests.q.dtype)
    for target, rows in ((q, last_queries(requests, counts)), (do, output_gradients(requests, counts))):
        for row, x in zip(first_row, rows, strict=True):
            target[row : row + len(x)] = x
    start = np.subtract(requests.lengths, counts)
    numbers = (np.array(x, np.int32) for x in (requests.page_table, start, requests.lengths, counts, first_row))
    table, start, length, count, rows = (jnp.asarray(x[list(order)]) for x in numbers)
    places = Queries(table, start, length, count, rows)
    o, dq, *others = (np.asarray(x) if isinstance(x, jax.Array) else x for x in gradients(requests, q, places, do))
    is_nobodys = np.ones(len(dq), bool)
    for row, count in zip(first_row, counts, strict=True):
        is_nobodys[row : row + count] = False
    for x in (o, dq):
        assert not x[is_nobodys].astype(np.float32).any(), "gradients of weights add over rows of nobody, too"
    return [dq[row : row + count] for row, count in zip(first_row, counts, strict=True)], others
