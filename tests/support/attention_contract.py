"""The contract's results of attention, as NumPy computes them, for kernels in Pallas' interpreter."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.contract import emulation
from tests.contract.emulation import AttentionOptions, DeviceFunctions, Products
from tests.support.attention_requests import Requests
from tests.support.bits import assert_same_bits


def elementwise(function: Any) -> emulation.Elementwise:
    compiled = jax.jit(function)
    return lambda x: np.asarray(compiled(np.asarray(x, np.float32)))


exp2 = elementwise(jnp.exp2)
DEVICE = DeviceFunctions(exp2, lambda x, factor: exp2(x * factor), elementwise(jnp.log), elementwise(jax.lax.rsqrt))
PRODUCTS = Products(emulation.matmul, *[emulation.unfused] * 3)
"""Hopper's: the interpreter's matrix unit adds products in ascending order, and the twin of `fma` rounds twice."""


def expected(
    requests: Requests, request: int, token: int, head: int, products: Products = PRODUCTS
) -> tuple[np.ndarray, np.float32]:
    """Returns the contract's result of a query of one head, and its normalizer."""
    masking, length = requests.masking, requests.lengths[request]
    sink = None if requests.sinks is None else float(requests.sinks[head])
    slope = None if masking.alibi_slopes is None else masking.alibi_slopes[head]
    options = AttentionOptions(masking.scale, masking.causal, masking.window, masking.soft_cap, slope, sink)
    length = min(length, token + 1) if masking.causal else length
    kv_head = head // (requests.q.shape[2] // requests.k.shape[2])
    keys, values = (x[request, :length, kv_head] for x in (requests.k, requests.v))
    o, normalizer = emulation.attention(
        requests.q[request, token, head], keys, values, token, options, DEVICE, products
    )
    return o.astype(requests.q.dtype) + requests.q.dtype.type(0), normalizer


def assert_rows_have_the_contracts_bits(
    requests: Requests,
    rows: Sequence[np.ndarray],
    start: Sequence[int],
    tokens: Mapping[int, Sequence[int]],
    products: Products = PRODUCTS,
) -> None:
    """Compares some tokens of each request; `rows` has each request's tokens from `start` on."""
    for request, chosen in tokens.items():
        for token in chosen:
            for head in {0, requests.q.shape[2] - 1}:
                row, _ = expected(requests, request, token, head, products)
                assert_same_bits(rows[request][token - start[request], head], row)


def narrow(requests: Requests, width: int) -> Requests:
    """The requests with the first columns of their values."""
    assert isinstance(requests.v_pages, jax.Array)
    return dataclasses.replace(requests, v=requests.v[..., :width], v_pages=requests.v_pages[..., :width])


def as_read(requests: Requests, kind: str) -> tuple[Requests, Requests]:
    """The requests with quantized pages, and with the numbers that these are read as, in pages and as arrays."""
    quantized, dense = requests.quantized(kind)

    def rows(pages: Any) -> np.ndarray:
        blocks = np.asarray(pages)[np.asarray(dense.page_table)].swapaxes(2, 3)
        return blocks.reshape(len(blocks), -1, *blocks.shape[3:])

    return quantized, dataclasses.replace(dense, k=rows(dense.k_pages), v=rows(dense.v_pages))
