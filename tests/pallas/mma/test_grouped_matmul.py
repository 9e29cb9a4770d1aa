"""Products of rows sorted by expert on `mma.sync`: a row and its gradients have the bits of its expert's matmul."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.pallas import nvidia
from detjax.pallas.mma import grouped_matmul
from tests.pallas.hopper.interpreter import kernels_interpreted, normal
from tests.support.bits import assert_same_bits

K, N = 48, 40
SIZES = np.array([16, 0, 24], np.int32)
X, W = normal(48, K, dtype="bfloat16"), normal(3, 2, N, K, dtype="bfloat16", seed=1)
OPTIONS: dict[str, Any] = {"layout": "nk", "activation": "silu", "gated": True}


def on_mma(fn: Any, *args: Any, architecture: nvidia.Architecture = (8, 9)) -> Any:
    with detjax.use_backend("mma"), nvidia.tracing_for(architecture), kernels_interpreted():
        return [np.asarray(array) for array in detjax.jit(fn)(*args)]


def weighted(y: Any) -> Any:
    return jnp.sum(y.astype(jnp.float32) * jnp.arange(1.0, N + 1)[None])


@pytest.mark.parametrize("unit", [16, pytest.param(8, marks=pytest.mark.nightly)])
def test_each_row_and_its_gradients_have_the_bits_of_its_experts_matmul(unit: int) -> None:
    sizes = SIZES if unit == 8 else np.array([16, 0, 32], np.int32)

    def grouped(x: Any, w: Any) -> Any:
        return ops.grouped_matmul(x, w, sizes, unit=unit, **OPTIONS)

    (y,) = on_mma(lambda x, w: [grouped(x, w)], X, W)
    dx, dw = on_mma(jax.grad(lambda x, w: weighted(grouped(x, w)[: sizes.sum()]), (0, 1)), X, W)
    first = 0
    for expert, size in enumerate(sizes):
        rows = slice(first, first + size)
        first += size
        if not size:
            assert_same_bits(dw[expert], np.zeros_like(dw[expert]))
            continue

        def dense(x: Any, w: Any) -> Any:
            return ops.matmul(x, w, **OPTIONS)

        new = {"architecture": (9, 0)}
        assert_same_bits(y[rows], on_mma(lambda x, w: [dense(x, w)], X[rows], W[expert], **new)[0])
        gradients = on_mma(jax.grad(lambda x, w: weighted(dense(x, w)), (0, 1)), X[rows], W[expert], **new)
        assert_same_bits((dx[rows], dw[expert]), tuple(gradients))


@pytest.mark.parametrize(("rows", "unit"), [(1, 16), (512, 16), (4096, 64), (65536, 128)])
def test_tiles_have_up_to_twice_the_rows_of_the_mean_group(rows: int, unit: int) -> None:
    assert grouped_matmul.group_unit(rows, 128) == unit
    schedule = grouped_matmul._KERNELS.schedule(unit, 768, "nk")
    assert schedule.tile_m == unit
