"""Hopper attention kernels in Pallas' interpreter have the bits of the contract as NumPy computes it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax.contract import KV_BLOCK
from detjax.pallas.hopper import attention as hopper_attention
from detjax.pallas.hopper.attention.decode import Schedule
from tests.contract import emulation
from tests.contract.emulation import AttentionOptions, DeviceFunctions, Products
from tests.support.attention_requests import INTERPRETER, OPTIONS, Requests, in_the_interpreter
from tests.support.bits import assert_same_bits

LENGTHS = (140, 9, 260)
ROWS = {0: (0, 17, 63, 64, 127, 128, 139), 1: (0, 8), 2: (1, 200, 256, 259)}
"""Tokens of each request that are compared: the first and last ones of tiles, blocks and requests."""


def elementwise(function: Any) -> emulation.Elementwise:
    compiled = jax.jit(function)
    return lambda x: np.asarray(compiled(np.asarray(x, np.float32)))


exp2 = elementwise(jnp.exp2)
DEVICE = DeviceFunctions(exp2, lambda x, factor: exp2(x * factor), elementwise(jnp.log), elementwise(jax.lax.rsqrt))
PRODUCTS = Products(emulation.matmul, *[emulation.unfused] * 3)
"""The interpreter's matrix unit adds products in ascending order, and the twin of `fma` rounds twice."""


def expected(requests: Requests, request: int, token: int, head: int) -> tuple[np.ndarray, np.float32]:
    """Returns the contract's result of a query of one head, and its normalizer."""
    masking, length = requests.masking, requests.lengths[request]
    sink = None if requests.sinks is None else float(requests.sinks[head])
    slope = None if masking.alibi_slopes is None else masking.alibi_slopes[head]
    options = AttentionOptions(masking.scale, masking.causal, masking.window, masking.soft_cap, slope, sink)
    length = min(length, token + 1) if masking.causal else length
    kv_head = head // (requests.q.shape[2] // requests.k.shape[2])
    keys, values = (x[request, :length, kv_head] for x in (requests.k, requests.v))
    o, normalizer = emulation.attention(
        requests.q[request, token, head], keys, values, token, options, DEVICE, PRODUCTS
    )
    return o.astype(requests.q.dtype) + requests.q.dtype.type(0), normalizer


@pytest.mark.sampled(2)
@in_the_interpreter
@pytest.mark.parametrize("name", ["causal", "window", "everything", "not causal"])
def test_prefill_has_the_bits_of_the_contract(name: str) -> None:
    requests = Requests.random(LENGTHS, 2, 1, 16, **OPTIONS[name])
    start = np.zeros(len(LENGTHS), int)
    forward = detjax.jit(functools.partial(hopper_attention.forward, masking=requests.masking))
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        o, normalizers = map(np.asarray, forward(requests.operands(start, max(LENGTHS))))
    normalizers = normalizers.reshape(2, len(LENGTHS), -1)
    for request, tokens in ROWS.items():
        for token in tokens:
            for head in range(2):
                row, normalizer = expected(requests, request, token, head)
                assert_same_bits(o[request, token, head], row)
                np.testing.assert_allclose(normalizers[head, request, token], normalizer, rtol=1e-6, atol=1e-6)


@pytest.mark.sampled(2)
@in_the_interpreter
@pytest.mark.parametrize("schedule", [Schedule(2, cut=False), Schedule(3, slack=0.0)], ids=["whole", "split"])
@pytest.mark.parametrize("name", ["causal", "everything"])
def test_decode_has_the_bits_of_the_contract(name: str, schedule: Schedule) -> None:
    requests = Requests.random((*LENGTHS, 700), 2, 1, 64, **OPTIONS[name])
    start = requests.last(2)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        rows = requests.decode(start, 2, schedule)
    for request, first in enumerate(start):
        for index, row in enumerate(rows[request]):
            for head in range(2):
                assert_same_bits(row[head], expected(requests, request, first + index, head)[0])


@in_the_interpreter
def test_decode_of_sinks_alone_begins_every_split_sequence_with_them() -> None:
    requests = Requests.random((700,), 2, 1, 64, sinks=True)
    requests = dataclasses.replace(requests, sinks=jnp.asarray([9.0, 11.0], "float16"))
    start = requests.last(1)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        (row,) = requests.decode(start, 1, Schedule(3, slack=0.0))
    for head in range(2):
        assert_same_bits(row[0, head], expected(requests, 0, 699, head)[0])


@in_the_interpreter
def test_decode_merges_a_whole_load_of_blocks_in_ascending_order() -> None:
    blocks = 33  # of each of two CTAs: the second one leaves a whole load of 32 unmerged, and one more
    length = 2 * blocks * KV_BLOCK
    requests = Requests.random((length,), 1, 1, 64)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        (row,) = requests.decode(requests.last(1), 1, Schedule(2, slack=0.0))
    assert_same_bits(row[0, 0], expected(requests, 0, length - 1, 0)[0])
