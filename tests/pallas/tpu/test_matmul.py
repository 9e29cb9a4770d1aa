"""The TPU matmul: numbers, bits and gradients in Pallas' interpreter, and one kernel text for every number of tokens.

The interpreter's products are the CPU's. Its bits show that no token meets another and in which order steps of K are
added; the texts show that a TPU is asked for the same work, in the precision of its operands.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.contract import TPU_ROW_TILE
from detjax.operands.options import Epilogue
from detjax.pallas.tpu import matmul
from detjax.pallas.tpu.matmul import TOKEN_STEP, Contraction, Problem, Schedule, StepShape, product
from tests.ops import references
from tests.pallas.tpu.interpreter import assert_products_in_float32, interpreted, matrix_products, normal, shape
from tests.support.bits import assert_same_bits, same_bits
from tests.support.kernel_texts import kernel_texts
from tests.support.products import matmul_call, matmul_gradients

GATED = Epilogue("silu", gated=True)
TOLERANCE = {"float32": 3e-6, "bfloat16": 5e-3}
K, N = 640, 200
"""K has a whole step and a shorter one; N has a whole tile of outputs and a part of one."""
TOKENS_KN = Contraction("mk", "kn", TOKEN_STEP)


def whole_numbers(*sizes: int, dtype: str, seed: int, step: int | None = None) -> np.ndarray:
    """Whole numbers up to 7, whose products have exact sums in any order.

    If there is a step, the numbers of each step along the last axis have a power of two as a factor, so that the sums
    of different steps can't be added without rounding, and the order of steps shows in the bits.
    """
    random = np.random.default_rng([seed, *sizes])
    numbers = random.integers(-7, 8, sizes).astype(np.float32)
    if step is not None:
        numbers *= np.exp2(np.resize([0, 12, -7, 4, -13], sizes[-1] // step + 1).repeat(step)[: sizes[-1]])
    return numbers.astype(jnp.dtype(dtype))


def sum_of_steps(x: np.ndarray, w: np.ndarray, step: int) -> np.ndarray:
    """`x @ w` in float32 on one accumulator that adds steps of K in ascending order. Each step's own sum is exact."""
    accumulator = np.zeros((x.shape[0], w.shape[1]), np.float32)
    for first in range(0, x.shape[1], step):
        exact = x[:, first : first + step].astype(np.float64) @ w[first : first + step].astype(np.float64)
        assert (exact == exact.astype(np.float32)).all()
        accumulator = accumulator + exact.astype(np.float32)
    return accumulator


def relative_error(actual: Any, expected: Any) -> float:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def in_float64(fn: Any, *args: Any) -> Any:
    with jax.enable_x64(True):
        wide = [None if arg is None else jnp.asarray(arg.astype(np.float64)) for arg in args]
        return jax.tree.map(np.asarray, fn(*wide))


# --- forward ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "k", "n", "dtype", "layout", "epilogue"),
    [
        (5, 515, 72, "bfloat16", "kn", Epilogue()),
        (130, 72, 515, "float32", "nk", Epilogue("gelu")),
        (17, 256, 300, "bfloat16", "nk", GATED),
        (1, 300, 130, "float32", "kn", Epilogue("gelu_tanh", gated=True, soft_cap=2.0)),
    ],
)
def test_numbers_are_those_of_float64(m: int, k: int, n: int, dtype: str, layout: str, epilogue: Epilogue) -> None:
    stacked = (2,) if epilogue.gated else ()
    x, residual = normal(m, k, dtype=dtype), normal(m, n, dtype=dtype)
    w = normal(*stacked, *((k, n) if layout == "kn" else (n, k)), dtype=dtype)
    bias = normal(*stacked, n, dtype=dtype)
    fn = matmul_call(matmul.forward, layout=layout, epilogue=epilogue, out_dtype=dtype)

    def expected(x: Any, w: Any, bias: Any, residual: Any) -> Any:
        options = {"layout": layout, "activation": epilogue.activation, "gated": epilogue.gated}
        y = references.matmul(x, w, bias, **options)
        return (y if epilogue.soft_cap is None else epilogue.soft_cap * jnp.tanh(y / epilogue.soft_cap)) + residual

    y = interpreted(fn)(x, w, bias, residual)
    assert y.shape == (m, n) and y.dtype == jnp.dtype(dtype)
    assert relative_error(y, in_float64(expected, x, w, bias, residual)) < TOLERANCE[dtype]


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_bits_are_those_of_the_contract(layout: str, out_dtype: str) -> None:
    """NumPy states the contract: steps of K ascending, bias, activation, residual, one rounding."""
    m, k, n, step = 11, 4 * 512 + 100, 130, 512
    x = whole_numbers(m, k, dtype="bfloat16", seed=0, step=step)
    w = whole_numbers(k, n, dtype="bfloat16", seed=1)
    bias, residual = normal(n, dtype="bfloat16"), 100 * normal(m, n)
    fn = matmul_call(matmul.forward, layout=layout, epilogue=Epilogue("relu"), out_dtype=out_dtype)
    y = interpreted(fn)(x, w if layout == "kn" else w.T.copy(), bias, residual)
    z = sum_of_steps(x, w, step) + bias.astype(np.float32)
    assert_same_bits(y, (np.maximum(z, 0) + residual).astype(jnp.dtype(out_dtype)))


def test_gate_and_up_are_the_first_and_the_second_weight() -> None:
    m, k, n = 5, 96, 140
    x, w = whole_numbers(m, k, dtype="bfloat16", seed=0), whole_numbers(2, n, k, dtype="bfloat16", seed=1)
    bias, residual = whole_numbers(2, n, dtype="bfloat16", seed=2), normal(m, n)
    fn = matmul_call(matmul.forward, layout="nk", epilogue=Epilogue("relu", gated=True), out_dtype="float32")
    gate, up = (sum_of_steps(x, part.T, 512) + b.astype(np.float32) for part, b in zip(w, bias, strict=True))
    assert_same_bits(interpreted(fn)(x, w, bias, residual), np.maximum(gate, 0) * up + residual)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_do_not_depend_on_the_number_of_tokens_their_places_or_neighbours(dtype: str) -> None:
    w, bias = normal(2, N, K, dtype=dtype), normal(2, N, dtype=dtype)
    x, residual = normal(300, K, dtype=dtype), normal(300, N, dtype=dtype)
    fn = interpreted(matmul_call(matmul.forward, layout="nk", epilogue=GATED, out_dtype=dtype))
    together = fn(x, w, bias, residual)
    assert_same_bits(fn(x[-1:], w, bias, residual[-1:]), together[-1:])

    poisoned = np.full_like(x, np.nan)
    poisoned[1::2] = np.inf
    places = [0, 1, TPU_ROW_TILE - 1, TPU_ROW_TILE, 255, 299]
    poisoned[places] = x[7]
    repeated = np.broadcast_to(residual[7], residual.shape)
    assert_same_bits(fn(poisoned, w, bias, repeated)[places], np.stack([together[7]] * len(places)))


def test_a_schedule_changes_no_bit_and_another_step_does() -> None:
    """The last slab is a short one, and two cores share the work."""
    k = 1100
    x, w = normal(20, k), normal(k, N)
    fn = functools.partial(product, contraction=TOKENS_KN, out_dtype="float32")
    expected = interpreted(fn)(x, w)
    in_slabs = functools.partial(fn, schedule=Schedule(outputs=256, slab=512))
    assert_same_bits(interpreted(in_slabs, cores=2)(x, w), expected)
    other_step = dataclasses.replace(TOKENS_KN, step=StepShape(TPU_ROW_TILE, 128))
    assert not same_bits(interpreted(functools.partial(fn, contraction=other_step))(x, w), expected)


def test_infinite_weights_meet_no_padding() -> None:
    """K is filled up with zeros in both operands, as a zero times an infinity would be NaN."""
    x, w = normal(3, 72, dtype="bfloat16"), normal(72, 64, dtype="bfloat16")
    w[:, 5] = np.inf
    x[0], x[1] = 1.0, 0.0
    y = interpreted(functools.partial(product, contraction=TOKENS_KN, out_dtype="float32"))(x, w)
    assert y[0, 5] == np.inf and np.isnan(y[1, 5])
    assert np.isfinite(np.delete(y, 5, axis=1)).all()


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "layout", "epilogue"),
    [
        ("float32", "kn", Epilogue("gelu", gated=True, soft_cap=3.0)),
        ("bfloat16", "nk", GATED),
    ],
)
def test_gradients_are_those_of_float64(dtype: str, layout: str, epilogue: Epilogue) -> None:
    m, k, n = 37, 192, 136
    stacked = (2,) if epilogue.gated else ()
    x, dy = normal(m, k, dtype=dtype), normal(m, n, dtype=dtype)
    w = (normal(*stacked, *((k, n) if layout == "kn" else (n, k))) * 0.1).astype(jnp.dtype(dtype))
    bias = normal(*stacked, n, dtype=dtype)
    fn = interpreted(matmul_gradients(matmul.backward, layout=layout, epilogue=epilogue))

    def expected(x: Any, w: Any, bias: Any, dy: Any) -> Any:
        def forward(x: Any, w: Any, bias: Any) -> Any:
            options = {"layout": layout, "activation": epilogue.activation, "gated": epilogue.gated}
            y = references.matmul(x, w, bias, **options)
            return y if epilogue.soft_cap is None else epilogue.soft_cap * jnp.tanh(y / epilogue.soft_cap)

        return jax.vjp(forward, x, w, bias)[1](dy)

    gradients = fn(x, w, bias, dy)
    for gradient, reference in zip(gradients, in_float64(expected, x, w, bias, dy), strict=True):
        assert relative_error(gradient, reference) < 2 * TOLERANCE[dtype]
    for gradient, operand in zip(gradients, (x, w, bias), strict=True):
        assert (gradient.shape, gradient.dtype) == (operand.shape, operand.dtype)


@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_gradients_have_the_bits_of_the_contract(layout: str) -> None:
    """NumPy states the contract: `dw` and `dbias` add 16 tokens after the other, `dx` adds N in steps of 512."""
    m, k, n = 300, 40, 1100
    x, w = whole_numbers(m, k, dtype="float32", seed=0), whole_numbers(k, n, dtype="float32", seed=1)
    dy = whole_numbers(n, m, dtype="float32", seed=2, step=16).T.copy()
    fn = interpreted(matmul_gradients(matmul.backward, layout=layout, epilogue=Epilogue()))
    _, dw, dbias = fn(x, w if layout == "kn" else w.T.copy(), np.zeros(n, np.float32), dy)
    assert_same_bits(dw if layout == "kn" else dw.T.copy(), sum_of_steps(dy.T, x, 16).T.copy())
    assert_same_bits(dbias, sum_of_steps(dy.T, np.ones((m, 1), np.float32), 16)[:, 0])
    dy = whole_numbers(m, n, dtype="float32", seed=3, step=512)
    dx, *_ = fn(x, w if layout == "kn" else w.T.copy(), np.zeros(n, np.float32), dy)
    assert_same_bits(dx, sum_of_steps(dy, w.T, 512))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_gradients_of_gate_and_up_are_taken_at_rounded_sums(layout: str, dtype: str) -> None:
    """One token, so that gradients of weights and biases show the sums' gradients. All sums are whole numbers."""
    k, n = 200, 300
    x, dy = whole_numbers(1, k, dtype=dtype, seed=0), normal(1, n, dtype=dtype, seed=1)
    w, bias = whole_numbers(2, n, k, dtype=dtype, seed=2), whole_numbers(2, n, dtype=dtype, seed=3)
    given = w if layout == "nk" else w.swapaxes(1, 2).copy()
    fn = matmul_gradients(matmul.backward, layout=layout, epilogue=Epilogue("relu", gated=True))
    dx, dw, dbias = interpreted(fn)(x, given, bias, dy)

    sums = (x.astype(np.float32) @ w.astype(np.float32).swapaxes(1, 2)).reshape(2, n) + bias.astype(np.float32)
    gate, up = sums.astype(x.dtype).astype(np.float32)
    assert dtype == "float32" or ((gate != sums[0]).any() and (up != sums[1]).any())
    dz = np.stack([np.where(gate > 0, up, 0), np.maximum(gate, 0)]) * dy.astype(np.float32)
    dz = dz.astype(x.dtype)
    # Equal as numbers: a product with zero keeps a sign.
    np.testing.assert_array_equal(dbias.astype(np.float32), dz.astype(np.float32))
    exact = (dz.astype(np.float32)[..., None] * x.astype(np.float32)).astype(x.dtype)
    np.testing.assert_array_equal((dw if layout == "nk" else dw.swapaxes(1, 2)).astype(np.float32), exact.astype("f4"))
    # The outputs of gate come before the outputs of up: a step of 512 has some of both.
    in_one = interpreted(functools.partial(product, contraction=TOKENS_KN, out_dtype=dtype))
    assert_same_bits(dx, in_one(dz.reshape(1, 2 * n), w.reshape(2 * n, k)))
    assert dtype == "bfloat16" or not same_bits(dx, in_one(dz[::-1].reshape(1, 2 * n), w[::-1].reshape(2 * n, k)))


def test_bits_of_gradients_do_not_depend_on_later_tokens_without_a_gradient() -> None:
    m, more = 40, 300
    x, w, bias, dy = (normal(*sizes, dtype="bfloat16") for sizes in ((more, 192), (136, 192), (136,), (more, 136)))
    dy[m:] = 0
    fn = interpreted(matmul_gradients(matmul.backward, layout="nk", epilogue=Epilogue()))
    dx, *weight_gradients = fn(x[:m], w, bias, dy[:m])
    dx_of_all, *weight_gradients_of_all = fn(x, w, bias, dy)
    assert_same_bits([dx, *weight_gradients], [dx_of_all[:m], *weight_gradients_of_all])


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["x", "residual", "out_dtype"])
def test_float16_is_refused(argument: str) -> None:
    half = {argument: "float16"}
    x = shape(8, 64, dtype=half.get("x", "bfloat16"))
    residual = shape(8, 32, dtype=half.get("residual", "bfloat16"))
    out_dtype = half.get("out_dtype", "bfloat16")
    fn = matmul_call(matmul.forward, layout="nk", epilogue=Epilogue(), out_dtype=out_dtype)
    with pytest.raises(NotImplementedError, match=r"float16.*accepted by the backend 'tpu': bfloat16, float32"):
        jax.eval_shape(fn, x, shape(32, 64, dtype=x.dtype.name), None, residual)


def test_schedules_are_checked() -> None:
    problem = Problem(TOKENS_KN, parts=1, n=300, k=640, dtype=jnp.dtype("bfloat16"))
    for schedule in (Schedule(128, 640), Schedule(128, 512), matmul.default_schedule(problem)):
        schedule.check(problem)
    with pytest.raises(ValueError, match="slabs of 256, with K being 640; accepted: all of K, or multiples of 512"):
        Schedule(128, 256).check(problem)
    with pytest.raises(ValueError, match="100 outputs and slabs of 640; accepted: positive multiples of 128"):
        Schedule(100, 640)


# --- kernel texts -----------------------------------------------------------------------------------------------------


def forward_texts(m: int, dtype: str = "bfloat16") -> list[str]:
    fn = matmul_call(matmul.forward, layout="nk", epilogue=GATED, out_dtype=dtype)
    operands = (m, 4096), (2, 12288, 4096), (2, 12288), (m, 12288)
    return kernel_texts(fn, *(shape(*sizes, dtype=dtype) for sizes in operands))


def backward_texts(m: int, layout: str, dtype: str = "bfloat16") -> list[str]:
    fn = matmul_gradients(matmul.backward, layout=layout, epilogue=GATED)
    w = (2, 4096, 12288) if layout == "kn" else (2, 12288, 4096)
    return kernel_texts(fn, *(shape(*sizes, dtype=dtype) for sizes in ((m, 4096), w, (2, 12288), (m, 12288))))


def product_text(contraction: Contraction, schedule: Schedule | None = None) -> str:
    fn = functools.partial(product, contraction=contraction, out_dtype="bfloat16", schedule=schedule)
    (text,) = kernel_texts(fn, shape(8, 4096), shape(4096, 512))
    return text


def test_the_kernel_is_one_text_for_every_number_of_tokens() -> None:
    texts = {m: forward_texts(m) for m in (1, 8, 128, 500, 4096)}
    assert all(len(text) == 1 and text == texts[1] for text in texts.values())


def test_another_step_is_another_text() -> None:
    expected = product_text(TOKENS_KN)
    for step in (StepShape(TOKEN_STEP.rows, 256), StepShape(64, TOKEN_STEP.k)):
        assert product_text(dataclasses.replace(TOKENS_KN, step=step)) != expected


@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_the_kernels_of_gradients_are_one_text_for_every_number_of_tokens(layout: str) -> None:
    texts = {m: backward_texts(m, layout) for m in (1, 8, 128, 500, 4096)}
    assert len(texts[1]) == (5 if layout == "kn" else 4)
    assert all(text == texts[1] for text in texts.values())


def test_float32_is_multiplied_in_float32() -> None:
    for text in (*forward_texts(8, "float32"), *backward_texts(8, "nk", "float32")):
        assert_products_in_float32(text)
    (text,) = forward_texts(8)
    assert all("contract_precision" not in line and "xbf16" in line for line in matrix_products(text))
