"""The TPU matmul of rows sorted by expert: each row has the bits of a matmul with its expert's weight alone."""

import functools
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
CLAMPED = Epilogue("silu", gated=True, clamp=Clamp(limit=4.0, slope=1.702))
N = 200
EXPERTS = 4


@pytest.mark.parametrize(
    ("dtype", "layout", "k", "epilogue", "biased", "out_dtype"),
    [
        ("bfloat16", "nk", 600, GATED, False, "float32"),
        ("bfloat16", "kn", 96, GATED, False, "bfloat16"),
        ("float32", "kn", 512, Epilogue(), False, "float32"),
        ("bfloat16", "kn", 600, CLAMPED, True, "bfloat16"),
        ("float32", "nk", 600, Epilogue(), True, "bfloat16"),
    ],
)
def test_each_row_has_the_bits_of_its_experts_matmul(
    dtype: str, layout: str, k: int, epilogue: Epilogue, biased: bool, out_dtype: str
) -> None:
    """Groups end inside tiles and between them, or are empty, and rows that belong to no group are NaN.

    There are two tiles of outputs, and the second is not full.
    """
    m = 300
    stacked = (2,) if epilogue.gated else ()
    x = normal(m, k, dtype=dtype)
    w = normal(EXPERTS, *stacked, *((k, N) if layout == "kn" else (N, k)), dtype=dtype)
    bias = normal(EXPERTS, *stacked, N, dtype=dtype) if biased else None
    options: dict[str, Any] = {"layout": layout, "epilogue": epilogue, "out_dtype": out_dtype}
    two_tiles = functools.partial(grouped_matmul.forward, schedule=Schedule(128))
    grouped = interpreted(grouped_matmul_call(two_tiles, **options))
    single = interpreted(matmul_call(matmul.forward, **options))
    by_expert = [single(x, w[e], None if bias is None else bias[e], None) for e in range(EXPERTS)]
    for sizes in ((300, 0, 0, 0), (0, 128, 3, 130), (1, 1, 1, 297), (0, 0, 0, 0), (100, 28, 0, 1), (127, 2, 0, 127)):
        experts = np.repeat(np.arange(EXPERTS), sizes)
        expected = np.zeros((m, N), jnp.dtype(out_dtype))
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


@pytest.mark.parametrize("argument", ["x", "w", "out_dtype"])
def test_float16_is_refused(argument: str) -> None:
    given = {"x": "bfloat16", "w": "bfloat16", "out_dtype": "bfloat16"} | {argument: "float16"}
    options: dict[str, Any] = {"layout": "nk", "epilogue": Epilogue(), "out_dtype": given["out_dtype"]}
    x, w = shape(8, 64, dtype=given["x"]), shape(EXPERTS, 32, 64, dtype=given["w"])
    with pytest.raises(NotImplementedError, match="grouped_matmul: an argument or the result has dtype float16"):
        jax.eval_shape(
            grouped_matmul_call(grouped_matmul.forward, **options), x, w, None, shape(EXPERTS, dtype="int32")
        )


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
