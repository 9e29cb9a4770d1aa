"""The TPU matmul: numbers, bits and gradients in Pallas' interpreter, and one kernel text for every number of tokens.

The interpreter's products are a CPU's, so its bits show that no token meets another and that the order of K's steps
holds; the texts show that a device is asked for the same work.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # JAX has no public name for the races it found

from detjax.bench.deviceless import kernels_of
from detjax.contract import TPU_ROW_TILE
from detjax.options import Epilogue
from detjax.pallas.tpu import matmul
from detjax.pallas.tpu.matmul import Schedule, product
from tests.ops import references
from tests.support.bits import assert_same_bits, same_bits

GATED = Epilogue("silu", gated=True)
TOLERANCE = {"float32": 3e-6, "bfloat16": 5e-3}
K, N = 640, 200
"""A whole step and a shorter one; a tile of outputs and a part of one."""


def drawn(*shape: int, dtype: str = "bfloat16", seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(jnp.dtype(dtype))


def interpreted(fn: Callable[..., Any], cores: int = 1) -> Callable[..., Any]:
    """`fn` in the interpreter, where what was never written is NaN and memory must not race."""
    program = jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})  # compiling takes most of the time
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=cores)

    def call(*args: Any) -> Any:
        with pltpu.force_tpu_interpret_mode(params):
            result = jax.tree.map(np.asarray, program(*jax.tree.map(jnp.asarray, args)))
        races = interpret_pallas_call.races
        assert races is not None and not races.races_found
        return result

    return call


def relative_error(actual: Any, expected: Any) -> float:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def in_float64(fn: Callable[..., Any], *args: Any) -> Any:
    with jax.enable_x64(True):
        wide = [None if arg is None else jnp.asarray(arg.astype(np.float64)) for arg in args]
        return jax.tree.map(np.asarray, fn(*wide))


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
    x, residual = drawn(m, k, dtype=dtype), drawn(m, n, dtype=dtype)
    w = drawn(*stacked, *((k, n) if layout == "kn" else (n, k)), dtype=dtype)
    bias = drawn(*stacked, n, dtype=dtype)
    fn = functools.partial(matmul.forward, layout=layout, epilogue=epilogue, out_dtype=dtype)

    def expected(x: Any, w: Any, bias: Any, residual: Any) -> Any:
        options = {"layout": layout, "activation": epilogue.activation, "gated": epilogue.gated}
        y = references.matmul(x, w, bias, **options)
        return (y if epilogue.soft_cap is None else epilogue.soft_cap * jnp.tanh(y / epilogue.soft_cap)) + residual

    y = interpreted(fn)(x, w, bias, residual)
    assert y.shape == (m, n) and y.dtype == jnp.dtype(dtype)
    assert relative_error(y, in_float64(expected, x, w, bias, residual)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_follow_neither_the_number_of_tokens_nor_their_places_nor_neighbours(dtype: str) -> None:
    w, bias = drawn(2, N, K, dtype=dtype), drawn(2, N, dtype=dtype)
    x, residual = drawn(300, K, dtype=dtype), drawn(300, N, dtype=dtype)
    fn = interpreted(functools.partial(matmul.forward, layout="nk", epilogue=GATED, out_dtype=dtype))
    together = fn(x, w, bias, residual)
    assert_same_bits(fn(x[-1:], w, bias, residual[-1:]), together[-1:])

    poisoned = np.full_like(x, np.nan)
    poisoned[1::2] = np.inf
    places = [0, 1, TPU_ROW_TILE - 1, TPU_ROW_TILE, 255, 299]
    poisoned[places] = x[7]
    shifted = np.broadcast_to(residual[7], residual.shape)
    assert_same_bits(fn(poisoned, w, bias, shifted)[places], np.stack([together[7]] * len(places)))


def test_bits_are_those_of_one_accumulator_that_meets_k_step_by_step() -> None:
    """However K is cut into slabs, here with a short last one and two cores; and another step has other bits."""
    k = 1100
    x, w = drawn(20, k, dtype="float32"), drawn(k, N, dtype="float32")
    fn = functools.partial(product, layout="kn", out_dtype="float32")
    whole = interpreted(fn)(x, w)
    cut = functools.partial(fn, schedule=Schedule(outputs=256, slab=512))
    assert_same_bits(interpreted(cut, cores=2)(x, w), whole)
    assert not same_bits(interpreted(functools.partial(fn, k_step=128))(x, w), whole)


def test_infinite_weights_meet_no_padding() -> None:
    """K is filled up with zeros in both operands, and a zero times an infinity would be NaN."""
    x, w = drawn(3, 72), drawn(72, 64)
    w[:, 5] = np.inf
    x[0], x[1] = 1.0, 0.0
    y = interpreted(functools.partial(product, layout="kn", out_dtype="float32"))(x, w)
    assert y[0, 5] == np.inf and np.isnan(y[1, 5])
    assert np.isfinite(np.delete(y, 5, axis=1)).all()


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
    x, dy = drawn(m, k, dtype=dtype), drawn(m, n, dtype=dtype)
    w = (drawn(*stacked, *((k, n) if layout == "kn" else (n, k))) * 0.1).astype(jnp.dtype(dtype))
    bias = drawn(*stacked, n, dtype=dtype)
    fn = interpreted(functools.partial(matmul.backward, layout=layout, epilogue=epilogue))

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


def test_bits_of_gradients_do_not_follow_the_tokens_behind() -> None:
    """Tokens without a gradient add nothing to the weight's, and change no other token's."""
    m, more = 40, 300
    x, w, bias, dy = drawn(more, 192), drawn(136, 192), drawn(136), drawn(more, 136)
    dy[m:] = 0
    fn = interpreted(functools.partial(matmul.backward, layout="nk", epilogue=Epilogue()))
    dx, *others = fn(x[:m], w, bias, dy[:m])
    dx_of_all, *others_of_all = fn(x, w, bias, dy)
    assert_same_bits([dx, *others], [dx_of_all[:m], *others_of_all])


@pytest.mark.parametrize("given", ["x", "residual", "out_dtype"])
def test_float16_is_refused(given: str) -> None:
    half = {given: "float16"}
    x = shape(8, 64, dtype=half.get("x", "bfloat16"))
    residual = shape(8, 32, dtype=half.get("residual", "bfloat16"))
    fn = functools.partial(product, layout="nk", out_dtype=half.get("out_dtype", "bfloat16"))
    with pytest.raises(NotImplementedError, match=r"float16.*accepted by the backend 'tpu': bfloat16, float32"):
        jax.eval_shape(fn, x, shape(32, 64, dtype=x.dtype.name), None, residual)


def shape(*sizes: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def forward_texts(m: int, **options: Any) -> list[str]:
    fn = functools.partial(product, layout="nk", epilogue=GATED, out_dtype="bfloat16", **options)
    return kernels_of(fn, shape(m, 4096), shape(2, 12288, 4096), shape(2, 12288), shape(m, 12288))


def backward_texts(m: int, layout: str) -> list[str]:
    fn = functools.partial(matmul.backward, layout=layout, epilogue=GATED)
    w = shape(2, 4096, 12288) if layout == "kn" else shape(2, 12288, 4096)
    return kernels_of(fn, shape(m, 4096), w, shape(2, 12288), shape(m, 12288))


def test_the_kernel_is_one_text_for_every_number_of_tokens() -> None:
    texts = {m: forward_texts(m) for m in (1, 8, 128, 500, 4096)}
    assert all(len(text) == 1 and text == texts[1] for text in texts.values())
    assert forward_texts(1, k_step=256) != texts[1]
    assert forward_texts(1, schedule=Schedule(outputs=256, slab=4096, rows=64)) != texts[1]


@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_the_kernels_of_gradients_are_one_text_for_every_number_of_tokens(layout: str) -> None:
    texts = {m: backward_texts(m, layout) for m in (1, 8, 128, 500, 4096)}
    assert len(texts[1]) == (5 if layout == "kn" else 4)
    assert all(text == texts[1] for text in texts.values())
