"""Arrays for calls of attention: queries, keys and values with and without pages, and page tables."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.inputs import normal
from benchmarks.studies.attention.cases import Case
from detjax.contract import KV_BLOCK
from detjax.operands.kv_pages import Queries
from detjax.operands.numerics import ceil_div

type Pair = tuple[jax.Array, jax.Array]
"""Keys and values."""


def keys_and_values(shape: tuple[int, ...], count: int) -> list[Pair]:
    """Returns `count` different pairs of keys and values."""
    return jax.block_until_ready([(_normal(shape, 2 * i), _normal(shape, 2 * i + 1)) for i in range(count)])


def query_array(case: Case) -> jax.Array:
    """Returns queries [B, T, H, K]."""
    return _normal((case.batch, case.queries, case.heads, case.head_dim), 1 << 20)


def output_gradient(case: Case) -> jax.Array:
    """Returns a gradient of the output, with the shape of the queries."""
    return _normal((case.batch, case.queries, case.heads, case.head_dim), 3 << 20)


def _normal(shape: tuple[int, ...], seed: int) -> jax.Array:
    return normal(shape, jnp.asarray(seed))


def contiguous_sets(case: Case) -> list[Pair]:
    """Returns keys and values [B, S, h, K] without pages, as cuDNN, PyTorch and tokamax take them."""
    return keys_and_values((case.batch, case.longest, case.kv_heads, case.head_dim), case.sets)


def paged_sets(case: Case) -> list[Pair]:
    """Returns page pools [P, h, S, K] that are exactly large enough for the requests."""
    return keys_and_values((sum(page_counts(case.lengths)), case.kv_heads, KV_BLOCK, case.head_dim), case.sets)


def page_counts(lengths: Iterable[int]) -> list[int]:
    """Returns the number of pages of each request."""
    return [ceil_div(length, KV_BLOCK) for length in lengths]


def page_table(lengths: Iterable[int], shuffled: bool = False) -> np.ndarray:
    """Returns the page table of requests whose pages are contiguous or in random order."""
    counts = page_counts(lengths)
    pool = np.arange(sum(counts), dtype=np.int32)
    if shuffled:
        pool = np.random.default_rng(2).permutation(pool)
    table = np.zeros((len(counts), max(counts)), np.int32)
    for row, pages in zip(table, np.split(pool, np.cumsum(counts)[:-1]), strict=True):
        row[: len(pages)] = pages
    return table


def queries_of(case: Case, shuffled: bool = False) -> Queries:
    """Returns the `Queries` of a case; `shuffled` as in `page_table`."""
    lengths = np.asarray(case.lengths, np.int32)
    table = page_table(case.lengths, shuffled)
    return Queries(jnp.asarray(table), jnp.asarray(lengths - case.queries), jnp.asarray(lengths))


def key_lengths(case: Case) -> tuple[jax.Array, ...]:
    """Returns the lengths argument of cuDNN and tokamax, which ragged requests need."""
    return (jnp.asarray(case.lengths, jnp.int32),) if case.ragged else ()
