"""Gradients of packed queries on Hopper, in Pallas' interpreter, have the bits of rectangular ones."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.kv_pages import KVPages, Queries
from tests.support.attention_requests import INTERPRETER, OPTIONS, Requests, in_the_interpreter
from tests.support.bits import assert_same_bits


def output_gradients(requests: Requests, counts: Sequence[int]) -> list[np.ndarray]:
    """Random gradients of the output of each request's last tokens."""
    random = np.random.default_rng(9)
    return [random.standard_normal((count, *requests.q.shape[2:])).astype(requests.q.dtype) for count in counts]


def last_queries(requests: Requests, counts: Sequence[int]) -> list[np.ndarray]:
    return [q[n - count : n] for q, n, count in zip(requests.q, requests.lengths, counts, strict=True)]


def gradients(requests: Requests, q: Any, queries: Queries, do: Any) -> tuple[Any, KVPages, Any]:
    """Gradients of queries, of the pool of pages and of the sinks."""
    masking = requests.masking
    options: Any = {name: getattr(masking, name) for name in ("scale", "causal", "window", "soft_cap", "alibi_slopes")}

    @detjax.jit
    def pulled_back(q: Any, kv: KVPages, queries: Queries, sinks: Any, do: Any) -> Any:
        attend = lambda q, kv, sinks: ops.attention(q, kv, queries, sinks=sinks, **options)  # noqa: E731
        return jax.vjp(attend, q, kv, sinks)[1](do)

    with detjax.use_backend("hopper"):
        dq, *others = pulled_back(jnp.asarray(q), requests.kv, queries, requests.sinks, jnp.asarray(do))
    return dq, *jax.tree.map(np.asarray, others)


def of_rectangular(requests: Requests, counts: Sequence[int]) -> tuple[list[np.ndarray], Any]:
    """Each request's gradients of its last queries, in a call of rectangular ones; and the others."""

    def rectangle(rows: list[np.ndarray]) -> np.ndarray:
        return np.stack([np.pad(x, ((0, max(counts) - len(x)), (0, 0), (0, 0))) for x in rows])

    start, length = (jnp.asarray(x, jnp.int32) for x in (np.subtract(requests.lengths, counts), requests.lengths))
    q, do = rectangle(last_queries(requests, counts)), rectangle(output_gradients(requests, counts))
    dq, *others = gradients(requests, q, Queries(requests.page_table, start, length), do)
    return [np.asarray(x)[:count] for x, count in zip(dq, counts, strict=True)], others


def of_packed(
    requests: Requests, counts: Sequence[int], order: Sequence[int], gaps: Sequence[int], spare: int = 0
) -> tuple[list[np.ndarray], Any]:
    """The same of packed queries, whose requests come in an order, each after a gap of so many rows of NaN."""
    first_row, end = np.zeros(len(counts), np.int32), 0
    for request, gap in zip(order, gaps, strict=True):
        first_row[request] = end + gap
        end = first_row[request] + -(-counts[request] // 8) * 8
    q, do = np.full((2, end + spare, *requests.q.shape[2:]), np.nan, requests.q.dtype)
    for target, rows in ((q, last_queries(requests, counts)), (do, output_gradients(requests, counts))):
        for row, x in zip(first_row, rows, strict=True):
            target[row : row + len(x)] = x
    start = np.subtract(requests.lengths, counts)
    numbers = (jnp.asarray(np.array(x, np.int32)[list(order)]) for x in (start, requests.lengths, counts, first_row))
    dq, *others = gradients(requests, q, Queries(requests.page_table[jnp.asarray(order)], *numbers), do)
    dq, is_nobodys = np.asarray(dq), np.ones(len(dq), bool)
    for row, count in zip(first_row, counts, strict=True):
        is_nobodys[row : row + count] = False
    assert not dq[is_nobodys].astype(np.float32).any()
    return [dq[row : row + count] for row, count in zip(first_row, counts, strict=True)], others


@in_the_interpreter
@pytest.mark.parametrize(("name", "group"), [("causal", 2), ("everything", 1), ("not causal", 1)])
def test_packed_queries_have_the_gradients_of_rectangular_ones(name: str, group: int) -> None:
    counts = 140, 20, 0, 70
    requests = Requests.random((150, 20, 9, 70), 2, 2 // group, 16, dtype="bfloat16", **OPTIONS[name])
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        expected = of_rectangular(requests, counts)
        in_order = of_packed(requests, counts, (0, 1, 2, 3), (0, 0, 0, 8), spare=13)
    assert_same_bits(in_order, expected)
