"""Attention on the backend `mma` has the same bits in training and in decode, whatever the batch."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.pallas.hopper import mosaic
from detjax.pallas.hopper.attention.online_softmax import splat
from detjax.pallas.mma.attention import kernel
from tests.support.attention_requests import INTERPRETER
from tests.support.bits import assert_same_bits, same_bits


@pytest.fixture
def mma() -> Iterator[None]:
    with detjax.use_backend("mma"), mosaic.twins(), plgpu.force_gpu_interpret_mode(INTERPRETER):
        yield


def attention_of(requests: int) -> tuple[dict[str, jax.Array], ops.Queries]:
    """The last of 130 tokens of each request, and their keys and values."""
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.standard_normal((3, 130, 2, 16)), "bfloat16")[:requests] for _ in range(3))
    start, length = jnp.full(requests, 129), jnp.full(requests, 130)
    return {"q": q, "k": ops.in_pages(k), "v": ops.in_pages(v)}, ops.Queries(
        ops.contiguous_page_table(requests, 130), start, length
    )


def attended(arrays: dict[str, jax.Array], queries: ops.Queries, tokens: int) -> jax.Array:
    kv = ops.KVPages(arrays["k"], arrays["v"])
    queries = ops.Queries(queries.page_table, queries.length - tokens, queries.length)
    return ops.attention(arrays["q"][:, 130 - tokens :], kv, queries)


@pytest.mark.usefixtures("mma")
def test_the_forward_pass_of_training_has_the_bits_of_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, queries = attention_of(2)
    trained, vjp = jax.vjp(lambda arrays: attended(arrays, queries, 130), arrays)
    assert_same_bits(attended(*attention_of(1), 1), trained[:1, -1:])
    gradients = vjp(jnp.ones_like(trained))[0]
    with detjax.use_backend("portable"):
        expected = jax.vjp(lambda arrays: attended(arrays, queries, 130), arrays)[1](jnp.ones_like(trained))[0]
    for name, x in expected.items():
        actual, x = (np.asarray(y, np.float64) for y in (gradients[name], x))
        assert np.linalg.norm(actual - x) < 1e-2 * np.linalg.norm(x), name

    # The comparison sees an addend that only a decode has.
    def initial_statistics(_: Any) -> tuple[jax.Array, jax.Array]:
        return splat(-1.0, (64,)), splat(1.0, (64,))

    monkeypatch.setattr(kernel, "initial_statistics", initial_statistics)
    # Another number of requests is another program, which is not taken from a cache.
    assert not same_bits(attended(*attention_of(3), 1)[:1], trained[:1, -1:])
