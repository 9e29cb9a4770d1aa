"""Adapters by Hopper's kernels: a row has the bits that it has alone, and the plain weight's without an adapter."""

import jax.numpy as jnp
import numpy as np

import detjax
from detjax import ops
from detjax.operands.adapted_weight import AdaptedWeight
from tests.pallas.hopper.interpreter import interpreted, normal
from tests.support.bits import assert_same_bits, same_bits

K, N, ROWS = 64, 64, [1, -1, 0, 1]


def test_rows_with_different_adapters_have_the_bits_that_they_have_alone() -> None:
    x, w = (jnp.asarray(normal(*shape, dtype="bfloat16")) for shape in ((len(ROWS), K), (N, K)))
    a, b = np.zeros((2, 32, K), jnp.bfloat16), np.zeros((2, N, 32), jnp.bfloat16)
    for slot, rank in enumerate((3, 20)):
        a[slot, :rank], b[slot, :, :rank] = (normal(*shape, dtype="bfloat16") for shape in ((rank, K), (N, rank)))
    scales = jnp.full((2, N), 1 / 3, jnp.float32)

    def multiply(x: jnp.ndarray, w: jnp.ndarray, rows: list[int], ranks: int, slots: slice) -> np.ndarray:
        adapters = jnp.asarray(a[slots, :ranks]), jnp.asarray(b[slots, :, :ranks]), scales[slots]
        weight = AdaptedWeight(w, *adapters, jnp.asarray(rows, jnp.int32))
        with detjax.use_backend("hopper"):
            return interpreted(lambda x: ops.matmul(x, weight, layout="nk"), x)

    mixed = multiply(x, w, ROWS, 32, slice(2))
    assert_same_bits(mixed[2:3], multiply(x[2:3], w, [0], 16, slice(1)))
    assert_same_bits(mixed[3:4], multiply(x[3:4], w, [0], 32, slice(1, 2)))
    with detjax.use_backend("hopper"):
        plain = interpreted(lambda x: ops.matmul(x, w, layout="nk"), x)
    assert_same_bits(mixed[1], plain[1])
    assert not same_bits(mixed[0], plain[0])
