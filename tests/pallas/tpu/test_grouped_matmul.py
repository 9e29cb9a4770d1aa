"""The TPU matmul of rows sorted by expert: each row has the bits of a matmul with its expert's weight alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.operands.options import Clamp, Epilogue
from detjax.pallas.tpu import grouped_matmul, matmul
from detjax.pallas.tpu.grouped_matmul import Schedule
from tests.pallas.tpu.interpreter import assert_products_in_float32, interpreted, normal, shape
from tests.support.bits import assert_same_bits
from tests.support.kernel_texts import kernel_texts
from tests.support.products import grouped_matmul_call, matmul_call

GATED = Epilogue("silu", gated=True)
K, N = 640, 200
EXPERTS = 4


CLAMPED = Epilogue("silu", gated=True, clamp=Clamp(limit=4.0, slope=1.702))


@pytest.mark.parametrize(
    ("dtype", "layout", "epilogue", "biased"),
    [
        ("bfloat16", "nk", GATED, False),
        ("float32", "kn", Epilogue(), False),
        ("bfloat16", "nk", CLAMPED, True),
        ("float32", "kn", Epilogue(), True),
    ],
)
def test_each_row_has_the_bits_of_its_experts_matmul(dtype: str, layout: str, epilogue: Epilogue, biased: bool) -> None:
    """Groups end inside tiles and between them, or are empty, and rows that belong to no group are NaN."""
    m = 300
    stacked = (2,) if epilogue.gated else ()
    x = normal(m, K, dtype=dtype)
    w = normal(EXPERTS, *stacked, *((K, N) if layout == "kn" else (N, K)), dtype=dtype)
    bias = normal(EXPERTS, *stacked, N, dtype=dtype) if biased else None
    options: dict[str, Any] = {"layout": layout, "epilogue": epilogue, "out_dtype": dtype}
    grouped = interpreted(grouped_matmul_call(grouped_matmul.forward, **options))
    single = interpreted(matmul_call(matmul.forward, **options))
    by_expert = [single(x, w[e], None if bias is None else bias[e], None) for e in range(EXPERTS)]
    for sizes in ((300, 0, 0, 0), (0, 128, 3, 130), (1, 1, 1, 297), (0, 0, 0, 0), (100, 28, 0, 1)):
        experts = np.repeat(np.arange(EXPERTS), sizes)
        expected = np.zeros((m, N), jnp.dtype(dtype))
        for row, expert in enumerate(experts):
            expected[row] = by_expert[expert][row]
        poisoned = x.copy()
        poisoned[len(experts) :] = np.nan
        assert_same_bits(grouped(poisoned, w, bias, np.array(sizes, np.int32)), expected)


def kernel_text(m: int, dtype: str = "bfloat16") -> str:
    fn = grouped_matmul_call(grouped_matmul.forward, layout="nk", epilogue=GATED, out_dtype=dtype)
    w, sizes = shape(128, 2, 768, 2048, dtype=dtype), jax.ShapeDtypeStruct((128,), jnp.int32)
    (text,) = kernel_texts(fn, shape(m, 2048, dtype=dtype), w, None, sizes)
    return text


def test_the_kernel_is_one_text_for_every_number_of_rows() -> None:
    expected = kernel_text(8)
    assert all(kernel_text(m) == expected for m in (1, 128, 500, 4096))


def test_float32_is_multiplied_in_float32() -> None:
    assert_products_in_float32(kernel_text(8, "float32"))


def test_what_does_not_fit_is_refused() -> None:
    fn = grouped_matmul_call(grouped_matmul.forward, layout="nk", epilogue=Epilogue(), out_dtype="float32")
    sizes = jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)
    x, w = shape(8, 53248, dtype="float32"), shape(EXPERTS, 512, 53248, dtype="float32")
    with pytest.raises(
        NotImplementedError, match="grouped_matmul: K is 53248 in float32; accepted: tiles with all of K"
    ):
        jax.eval_shape(fn, x, w, None, sizes)
    narrow = grouped_matmul_call(
        grouped_matmul.forward, layout="nk", epilogue=Epilogue(), out_dtype="float32", schedule=Schedule(100)
    )
    x, w = shape(8, 128, dtype="float32"), shape(EXPERTS, 512, 128, dtype="float32")
    with pytest.raises(ValueError, match="grouped_matmul: the schedule has 100 outputs, with N being 512; accepted"):
        jax.eval_shape(narrow, x, w, None, sizes)
