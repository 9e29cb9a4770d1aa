"""Requests for the tests of attention: what each attends to, and the same keys and values laid out in several ways."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detjax import ops
from detjax.contract import KV_BLOCK
from tests.ops.cases import in_dtype

HEADS, KV_HEADS, WIDTH = 4, 2, 16

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "not causal": {"causal": False},
    "window": {"window": 50},
    "window of one": {"window": 1},
    "wide window": {"window": 200},
    "scale": {"scale": 0.3},
    "soft cap": {"soft_cap": 3.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi_slopes": (0.5, 0.25, 0.0625, 0.0)},
    "everything": {"window": 150, "soft_cap": 5.0, "sinks": True, "alibi_slopes": (0.5, 0.25, 0.125, 0.0625)},
}
"""Options of `ops.attention`; `sinks` True means some."""


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """Queries `[T, H, K]`, one for each of its keys `[T, h, K]` and values `[T, h, V]`."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @classmethod
    def random(
        cls,
        length: int,
        dtype: str = "float32",
        seed: int = 0,
        heads: tuple[int, int] = (HEADS, KV_HEADS),
        width: int = WIDTH,
    ) -> "Request":
        random = np.random.default_rng([seed, length])
        shapes = (length, heads[0], width), (length, heads[1], width), (length, heads[1], width)
        return cls(*(in_dtype(random.standard_normal(shape), dtype) for shape in shapes))

    def __len__(self) -> int:
        return len(self.k)


@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
    """Pages `[P, h, S, K]` of several requests, or quantized pages, and each request's page table."""

    k_pages: np.ndarray | jax.Array | ops.QuantizedPages
    v_pages: np.ndarray | jax.Array | ops.QuantizedPages
    page_table: np.ndarray | jax.Array

    @property
    def kv(self) -> ops.KVPages:
        """The pages as operations take them."""
        return ops.KVPages(*(jax.tree.map(jnp.asarray, pages) for pages in (self.k_pages, self.v_pages)))

    def queries(self, start: Any, length: Any, **fields: Any) -> ops.Queries:
        """Queries of the requests, from integers."""
        integers = {"start": start, "length": length} | fields
        given = {name: jnp.asarray(np.asarray(x, np.int32)) for name, x in integers.items()}
        return ops.Queries(jnp.asarray(self.page_table), **given)

    def on_device(self) -> "Pool":
        """The pool in JAX's arrays, for many calls."""
        return Pool(*(jnp.asarray(x) for x in (self.k_pages, self.v_pages, self.page_table)))

    def alone(self, row: int) -> "Pool":
        """The pool with one request's page table."""
        return Pool(self.k_pages, self.v_pages, self.page_table[row : row + 1])


def pool(
    requests: list[Request],
    *,
    columns: int | None = None,
    shuffled: bool = False,
    rest: float = 0.0,
    beyond: int = 0,
) -> Pool:
    """The requests' keys and values in pages.

    Args:
        requests: at least one.
        columns: of the page table; default: what the longest request needs.
        shuffled: pages in no order, with pages between them that are nobody's.
        rest: what stands in the pages where no request's token is.
        beyond: entries of the page table after a request's pages.
    """
    needed = [-(-len(request) // KV_BLOCK) for request in requests]
    columns = columns or max(needed)
    count = 2 * sum(needed) + 1 if shuffled else sum(needed)
    free = list(np.random.default_rng(5).permutation(count)) if shuffled else list(range(count))
    first = requests[0]
    k_pages, v_pages = (np.full((count, x.shape[1], KV_BLOCK, x.shape[2]), rest, x.dtype) for x in (first.k, first.v))
    page_table = np.full((len(requests), columns), beyond, np.int32)
    for row, request in enumerate(requests):
        for column in range(needed[row]):
            page = page_table[row, column] = free.pop(0)
            tokens = slice(column * KV_BLOCK, (column + 1) * KV_BLOCK)
            for pages, x in ((k_pages, request.k), (v_pages, request.v)):
                pages[page, :, : len(x[tokens])] = x[tokens].swapaxes(0, 1)
    return Pool(k_pages, v_pages, page_table)


def sinks(heads: int, dtype: str) -> jax.Array:
    return jnp.asarray(np.random.default_rng(3).standard_normal(heads), dtype)


def attend(q: np.ndarray, cached: Pool, q_start: Any, kv_length: Any, **options: Any) -> np.ndarray:
    """`ops.attention` of queries `[B, T, H, K]`."""
    if options.get("sinks") is True:
        options["sinks"] = sinks(q.shape[2], str(q.dtype))
    return np.asarray(ops.attention(jnp.asarray(q), cached.kv, cached.queries(q_start, kv_length), **options))


def whole(request: Request, **options: Any) -> np.ndarray:
    """All queries of a request at once, alone in its batch: `[T, H, V]`."""
    return attend(request.q[None], pool([request]), [0], [len(request)], **options)[0]


def in_chunks(request: Request, size: int, **options: Any) -> np.ndarray:
    """The queries of a request in pieces, each with the keys there are by then: chunked prefill, or decode."""
    cached = pool([request]).on_device()
    outputs = []
    for start in range(0, len(request), size):
        q = request.q[start : start + size]
        missing = size - len(q)
        q = np.pad(q, ((0, missing), (0, 0), (0, 0)))
        end = len(request) if options.get("causal") is False else start + size - missing
        outputs.append(attend(q[None], cached, [start], [end], **options)[0, : size - missing])
    return np.concatenate(outputs)
