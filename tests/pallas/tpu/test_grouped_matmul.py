"""The TPU matmul of rows sorted by expert: the bits of one matmul for each expert, whoever the others are."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.bench.deviceless import kernels_of
from detjax.options import Epilogue
from detjax.pallas.tpu import grouped_matmul, matmul
from tests.pallas.tpu.test_matmul import drawn, interpreted, shape
from tests.support.bits import assert_same_bits

GATED = Epilogue("silu", gated=True)
K, N = 640, 200
EXPERTS = 4


@pytest.mark.parametrize(("dtype", "layout", "epilogue"), [("bfloat16", "nk", GATED), ("float32", "kn", Epilogue())])
def test_each_row_has_the_bits_of_its_experts_matmul(dtype: str, layout: str, epilogue: Epilogue) -> None:
    """Groups that end inside tiles and on them, that are empty, and rows of no group; beside NaN."""
    m = 300
    stacked = (2,) if epilogue.gated else ()
    x = drawn(m, K, dtype=dtype)
    w = drawn(EXPERTS, *stacked, *((K, N) if layout == "kn" else (N, K)), dtype=dtype)
    options: dict[str, Any] = {"layout": layout, "epilogue": epilogue, "out_dtype": dtype}
    grouped = interpreted(functools.partial(grouped_matmul.forward, **options))
    single = interpreted(functools.partial(matmul.forward, bias=None, residual=None, **options))
    of_expert = [single(x, w[expert]) for expert in range(EXPERTS)]
    for sizes in ((300, 0, 0, 0), (0, 128, 3, 130), (1, 1, 1, 297), (0, 0, 0, 0), (100, 28, 0, 1)):
        expert = np.repeat(np.arange(EXPERTS), sizes)
        expected = np.zeros((m, N), jnp.dtype(dtype))
        for row, e in enumerate(expert):
            expected[row] = of_expert[e][row]
        poisoned = x.copy()
        poisoned[len(expert) :] = np.nan
        assert_same_bits(grouped(poisoned, w, np.array(sizes, np.int32)), expected)


def texts(m: int) -> list[str]:
    fn = functools.partial(grouped_matmul.forward, layout="nk", epilogue=GATED, out_dtype="bfloat16")
    w, sizes = shape(128, 2, 768, 2048), jax.ShapeDtypeStruct((128,), jnp.int32)
    return kernels_of(fn, shape(m, 2048), w, sizes)


def test_the_kernel_is_one_text_for_every_number_of_rows() -> None:
    expected = texts(8)
    assert len(expected) == 1
    assert all(texts(m) == expected for m in (1, 128, 500, 4096))
