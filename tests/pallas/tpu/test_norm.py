"""RMS norm on TPUs: numbers and bits in Pallas' interpreter, and one kernel text for every number of rows."""

import functools

import jax
import numpy as np
import pytest

from detjax.pallas.tpu import norm
from detjax.pallas.tpu import rows as tpu_rows
from detjax.pallas.tpu.rows import Schedule
from detjax.portable import norm as portable_norm
from tests.pallas.tpu.interpreter import compiled, interpreted, normal, shape
from tests.pallas.tpu.rows_cases import rows_with_one_repeated
from tests.support.bits import assert_same_bits
from tests.support.kernel_texts import kernel_texts

EPS = 1e-5

NORM = functools.partial(norm.forward, eps=EPS, weight_offset=0.5)


@pytest.mark.parametrize(
    ("count", "width", "dtype", "tolerance"),
    [(3, 80, "bfloat16", 1e-2), (9, 640, "float32", 3e-6)],
)
def test_norms_have_the_values_of_float64(count: int, width: int, dtype: str, tolerance: float) -> None:
    x, residual, weight = normal(count, width, dtype=dtype), normal(count, width, dtype=dtype, seed=1), normal(width)
    y, h = interpreted(NORM)(x, weight, residual)
    assert_same_bits(h, (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype))
    exact = h.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + EPS) * (weight.astype(np.float64) + 0.5)
    scale = np.abs(exact).max()
    np.testing.assert_allclose(y.astype(np.float64) / scale, exact / scale, atol=tolerance, rtol=0)
    alone, no_sum = interpreted(NORM)(h, weight, None)
    assert no_sum is None
    assert_same_bits(alone, y)


def test_small_rows_show_where_eps_is_added() -> None:
    """The squares of these rows are as small as eps, which would not show next to larger ones."""
    x, weight = normal(8, 256) * np.float32(3e-3), normal(256)
    exact = x.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + EPS) * (weight.astype(np.float64) + 0.5)
    np.testing.assert_allclose(interpreted(NORM)(x, weight, None)[0], exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_exact_rows_have_the_bits_of_the_portable_backend(dtype: str) -> None:
    """Rows of small whole numbers, whose squares have one sum in every order: all else is done element by element.

    Three tiles, the last of them with one row, are divided among two cores.
    """
    x, residual = (np.round(normal(33, 391, seed=seed) * 3).astype(np.dtype(dtype)) for seed in (0, 1))
    weight = normal(391, dtype=dtype)
    portable = functools.partial(portable_norm.forward, eps=EPS, weight_offset=0.5)
    y, h = interpreted(functools.partial(NORM, schedule=Schedule(16)), cores=2)(x, weight, residual)
    assert_same_bits([y, h], list(compiled(portable)(x, weight, residual)))
    assert_same_bits(h, x + residual)
    assert_same_bits(interpreted(NORM)(h, weight, None)[0], y)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_do_not_depend_on_rows_position_or_neighbours(dtype: str) -> None:
    row, weight = normal(384, dtype=dtype), normal(384)
    expected, _ = interpreted(NORM)(row[None], weight, None)
    positions = (0, 17, 34)
    fn = functools.partial(NORM, schedule=Schedule(16))
    y, _ = interpreted(fn, cores=2)(rows_with_one_repeated(row, 35, positions), weight, None)
    for position in positions:
        assert_same_bits(y[position], expected[0])


def test_gradients_are_the_portable_backends() -> None:
    assert norm.backward is portable_norm.backward


def kernel_text(rows: int) -> str:
    x = shape(rows, 1024)
    (text,) = kernel_texts(lambda *args: NORM(*args), x, shape(1024, dtype="float32"), x)
    return text


def test_the_kernel_is_one_text_for_every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = kernel_text(1)
    for rows in (8, 128, 500, 4096):
        assert kernel_text(rows) == expected
    # A change of bits would show in the text.
    monkeypatch.setattr(tpu_rows, "LANE_GROUP", 2)
    assert kernel_text(1) != expected


@pytest.mark.parametrize("argument", ["x", "weight", "residual"])
def test_float16_is_refused(argument: str) -> None:
    rows = {name: shape(*sizes) for name, sizes in (("x", (8, 64)), ("weight", (64,)), ("residual", (8, 64)))}
    rows[argument] = shape(*rows[argument].shape, dtype="float16")
    with pytest.raises(NotImplementedError, match=r"rms_norm: an argument or the result has dtype float16"):
        jax.eval_shape(NORM, *rows.values())


def test_schedules_are_checked() -> None:
    with pytest.raises(ValueError, match="rms_norm: the schedule has tiles of 9 rows in bfloat16"):
        jax.eval_shape(functools.partial(NORM, schedule=Schedule(9)), shape(8, 64), shape(64), None)
