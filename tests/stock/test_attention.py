"""Stock attention where cuDNN serves it: by a model of cuDNN, lowered, and on a GPU where there is one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.contract import KV_BLOCK, QUERY_UNIT
from detjax.operands.options import Masking
from detjax.stock import attention as stock

HEADS, KV_HEADS, WIDTH = 8, 2, 64
STARTS = (0, 130, 0, 0, 5, 0, 300)
"""Tokens of each request in the cache before the call."""
COUNTS = (300, 7, 1, 0, 129, 40, 128)
"""Its queries."""


def drawn(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), jnp.bfloat16)


def pool(requests: int, columns: int, more: int = 5) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values in shuffled pages: more of them than requests have, or fewer, so that requests share some."""
    pages = requests * columns + more
    order = np.random.default_rng(1).permutation(requests * columns).reshape(requests, columns) % pages
    k, v = (drawn(seed, pages, KV_HEADS, KV_BLOCK, WIDTH) for seed in (2, 3))
    return k, v, jnp.asarray(order, jnp.int32)


def ragged(backend: str, **options: Any) -> np.ndarray:
    """The concatenated outputs of all requests' queries."""
    first = np.cumsum([0, *(-(-count // QUERY_UNIT) * QUERY_UNIT for count in COUNTS)])
    starts, counts = np.array(STARTS, np.int32), np.array(COUNTS, np.int32)
    k, v, table = pool(len(COUNTS), 5)
    queries = ops.Queries(table, *map(jnp.asarray, (starts, starts + counts, counts, first[:-1].astype(np.int32))))
    with detjax.use_backend(backend):
        attend = detjax.jit(lambda q: ops.attention(q, ops.KVPages(k, v), queries, **options))
        o = np.asarray(attend(drawn(4, int(first[-1]), HEADS, WIDTH)), np.float32)
    return np.concatenate([o[row : row + count] for row, count in zip(first, COUNTS, strict=False)])


def decoded(backend: str, requests: int, more: int = 5, **options: Any) -> np.ndarray:
    lengths = jnp.asarray(np.random.default_rng(5).integers(0, 3 * KV_BLOCK, requests).astype(np.int32).clip(0))
    k, v, table = pool(requests, 3, more)
    queries = ops.Queries(table, lengths - 1, lengths)
    with detjax.use_backend(backend):
        attend = detjax.jit(lambda q: ops.attention(q, ops.KVPages(k, v), queries, **options))
        return np.asarray(attend(drawn(6, requests, 1, HEADS, WIDTH)), np.float32)


def cudnn_in_plain_jax(
    q: jax.Array, kv: ops.KVPages, queries: ops.Queries, masking: Masking, *, causal: bool
) -> jax.Array:
    """The semantics that cuDNN documents, with NaN for queries after the last and for rows without keys."""
    batch, heads, tokens, width = q.shape
    k, v = (
        jnp.repeat(
            pages[queries.page_table].swapaxes(1, 2).reshape(batch, KV_HEADS, -1, width), heads // KV_HEADS, axis=1
        )
        for pages in kv.numbers
    )
    s = masking.scale * jnp.einsum("bntk,bnsk->bnts", q.astype(jnp.float32), k.astype(jnp.float32))
    query, key = jnp.arange(tokens)[None, None, :, None], jnp.arange(k.shape[2])[None, None, None]
    visible = key < queries.length[:, None, None, None]
    if causal:
        visible = visible & (key <= query)
    if masking.window is not None:
        visible = visible & (key > query - masking.window)
    p = jax.nn.softmax(jnp.where(visible, s, -jnp.inf), axis=-1)
    o = jnp.einsum("bnts,bnsk->bntk", p, v.astype(jnp.float32)).astype(q.dtype)
    return jnp.where(query < queries.count[:, None, None, None], o, jnp.array(jnp.nan, o.dtype))


@pytest.fixture
def modelled_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "_has_cudnn", lambda *_: True)
    monkeypatch.setattr(stock, "_cudnn", cudnn_in_plain_jax)


every_option = pytest.mark.parametrize(
    "options", [{}, {"causal": False}, {"window": 100}, {"scale": 0.3}], ids=["causal", "not causal", "window", "scale"]
)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("modelled_cudnn")
@pytest.mark.parametrize("at_once", [1, 3, 100])
@every_option
def test_packed_queries_find_their_way_through_cudnn(
    options: dict[str, Any], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock, "_PADDING", 0)
    monkeypatch.setattr(stock, "_MIN_PADDED_ROWS", at_once * 5 * KV_BLOCK)
    np.testing.assert_allclose(ragged("stock", **options), ragged("portable", **options), atol=0.03)


@pytest.mark.usefixtures("modelled_cudnn")
@every_option
def test_decodes_find_their_way_through_cudnn(options: dict[str, Any]) -> None:
    np.testing.assert_allclose(decoded("stock", 9, **options), decoded("portable", 9, **options), atol=0.03)


def test_decode_and_packed_queries_reach_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "_has_cudnn", lambda *_: True)
    monkeypatch.setattr(stock.cudnn, "check_cudnn_version", lambda: 91900)
    k, v, table = pool(3, 2)
    lengths = jnp.asarray([200, 1, 130], jnp.int32)
    rows = jnp.asarray([0, 200, 208], jnp.int32)

    def decode(q: jax.Array) -> jax.Array:
        return ops.attention(q, ops.KVPages(k, v), ops.Queries(table, lengths - 1, lengths))

    def packed(q: jax.Array) -> jax.Array:
        queries = ops.Queries(table, jnp.zeros_like(lengths), lengths, lengths, rows)
        return ops.attention(q, ops.KVPages(k, v), queries)

    for fn, shape in ((decode, (3, 1, HEADS, WIDTH)), (packed, (400, HEADS, WIDTH))):
        with detjax.use_backend("stock"):
            traced = jax.jit(fn).trace(jax.ShapeDtypeStruct(shape, jnp.bfloat16))
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("__cudnn$fmhaSoftmax") == 1


@pytest.mark.hopper
@every_option
def test_packed_queries_are_right_on_the_device(options: dict[str, Any]) -> None:
    np.testing.assert_allclose(ragged("stock", **options), ragged("portable", **options), atol=0.03)


@pytest.mark.hopper
@pytest.mark.parametrize(("requests", "more"), [(1, 0), (1, 1000), (9, 5), (9, -20), (256, 1000), (256, -500)])
def test_decodes_are_right_on_the_device(requests: int, more: int) -> None:
    np.testing.assert_allclose(decoded("stock", requests, more), decoded("portable", requests, more), atol=0.03)
