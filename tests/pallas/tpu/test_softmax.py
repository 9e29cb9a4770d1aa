"""Softmax, log-softmax and logsumexp on TPUs: numbers and bits in Pallas' interpreter, and the kernels' texts."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from detjax.contract import LOG2_E
from detjax.pallas import softmax_formulas
from detjax.pallas.tpu import softmax
from detjax.pallas.tpu.rows import Schedule
from detjax.portable import softmax as portable_softmax
from tests.pallas.tpu.interpreter import compiled, interpreted, normal, shape
from tests.pallas.tpu.rows_cases import rows_with_one_repeated
from tests.support.bits import assert_same_bits
from tests.support.kernel_texts import kernel_texts

BLOCK = 256


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax cuts rows into blocks so short that a test can afford several."""
    for module in (softmax, portable_softmax):
        monkeypatch.setattr(module, "SOFTMAX_BLOCK", BLOCK)


def exact(x: Any) -> dict[str, np.ndarray]:
    x = np.asarray(x, np.float64)
    m = x.max(axis=-1)
    total = m + np.log(np.exp(x - m[..., None]).sum(axis=-1))
    logprobs = x - total[..., None]
    return {"softmax": np.exp(logprobs), "log_softmax": logprobs, "logsumexp": total}


def test_blocks_are_added_left_to_right(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = 2 * normal(3, 5 * BLOCK + 44)
    sums = np.stack([np.array([row[i : i + BLOCK] for i in range(0, 5 * BLOCK, BLOCK)]) for row in x])
    expected = np.zeros((3, 1), np.float32)
    for block in [*sums.swapaxes(0, 1), np.pad(x[:, 5 * BLOCK :], ((0, 0), (0, BLOCK - 44)))]:
        expected = expected + compiled(portable_softmax.row_sum)(block)
    assert_same_bits(interpreted(softmax.row_sums)(x), expected)
    for module in (softmax_formulas, portable_softmax):
        # The last places of an exponential are the device's own. Steps that have one result each take its place.
        monkeypatch.setattr(module, "exp_difference", lambda x, m: 1 / (1 + (m - x)))
    assert_same_bits(interpreted(softmax.softmax)(x), compiled(portable_softmax.softmax)(x))


def test_rows_of_powers_of_two_have_the_contracts_bits(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All exponentials are powers of two here, and exact, so that NumPy can state the contract's formulas.

    Blocks have maxima far apart, so every addition of blocks rounds, and their order shows.
    """
    count, width = 8, 6 * BLOCK
    random = np.random.default_rng(0)
    exponents = -random.integers(0, 6, (count, width)) - np.repeat([18, 7, 0, 24, 15, 11], BLOCK)
    x = (exponents / np.float64(LOG2_E)).astype(np.float32)
    x[:, 2 * BLOCK] = 0  # the largest element of each row
    exponents[:, 2 * BLOCK] = 0
    assert (np.rint(x * LOG2_E) == exponents).all()

    def exp_difference(x: np.ndarray, m: np.ndarray) -> np.ndarray:
        return np.exp2(np.rint((x - m) * LOG2_E)).astype(np.float32)

    maxima, totals = [], []
    for block in np.split(x, 6, axis=1):
        m = block.max(axis=1, keepdims=True)
        maxima.append(m)
        totals.append(exp_difference(block, m).sum(axis=1, keepdims=True))  # exact in any order
    m, total = np.max(maxima, axis=0), np.zeros((count, 1), np.float32)
    for block_maximum, block_total in zip(maxima, totals, strict=True):
        total = total + block_total * exp_difference(block_maximum, m)
    assert (total != sum(reversed([t * exp_difference(b, m) for b, t in zip(maxima, totals, strict=True)]))).any()
    expected = exp_difference(x, m) * (np.float32(1) / total)
    # The contract leaves the last places of exp2 to the device, so an exact one takes its place.
    monkeypatch.setattr(softmax_formulas, "exp_difference", lambda x, m: exact_power(jnp.round((x - m) * LOG2_E)))
    assert_same_bits(interpreted(softmax.softmax)(x), expected)


def exact_power(exponent: jax.Array) -> jax.Array:
    """2 to the power of whole numbers, from the bits of a float32."""
    return lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)


def test_exponentials_are_powers_of_two_of_a_rounded_product() -> None:
    """`exp2(rn(rn(x - m) * LOG2_E))` and `exp(x - m)` have other last places, which are the device's own."""
    x = shape(8, 300, dtype="float32")
    for fn in (softmax.softmax, softmax.logsumexp):
        (text,) = kernel_texts(lambda x, fn=fn: fn(x), x)
        assert "math.exp2" in text and not re.search(r"math\.exp\b", text)
    jaxpr = str(jax.make_jaxpr(softmax_formulas.exp_difference)(x, x))
    assert re.search(r"sub a b.*mul \S+ 1\.442695.*exp2", jaxpr, re.DOTALL), jaxpr


@pytest.mark.parametrize(
    ("name", "width", "dtype"),
    [("log_softmax", 1, "float32"), *((name, 2 * BLOCK + 44, "bfloat16") for name in exact(np.zeros(1)))],
)
def test_values_are_those_of_float64(small_blocks: None, name: str, width: int, dtype: str) -> None:
    x = 2 * normal(3, width, dtype=dtype)
    y = interpreted(getattr(softmax, name))(x)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, exact(x)[name], rtol=1e-6, atol=4e-6)


def test_blocks_of_the_contracts_size_have_the_values_of_float64() -> None:
    x = 2 * normal(2, softmax.SOFTMAX_BLOCK + 1)
    np.testing.assert_allclose(interpreted(softmax.logsumexp)(x), exact(x)["logsumexp"], rtol=1e-6)


@pytest.mark.parametrize("fn", [softmax.softmax, softmax.log_softmax, softmax.logsumexp, softmax.row_sums])
def test_bits_do_not_depend_on_rows_position_or_neighbours(small_blocks: None, fn: Callable[..., Any]) -> None:
    row = 2 * normal(BLOCK + 44)
    expected = interpreted(fn)(row[None])
    positions = (0, 9, 18)
    together = interpreted(functools.partial(fn, schedule=Schedule(8)), cores=2)
    y = together(rows_with_one_repeated(row, 19, positions))
    for position in positions:
        assert_same_bits(y[position], expected[0])


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_infinities_and_nans_stay_in_their_row(small_blocks: None, name: str) -> None:
    x = 2 * normal(6, BLOCK + 44)
    x[1, BLOCK + 3] = np.nan
    x[2, 7] = np.inf
    x[3] = -np.inf
    x[4, :BLOCK] = -np.inf
    x[5, 1::2] = -np.inf
    y = interpreted(getattr(softmax, name))(x)
    finite = [0, 4, 5]
    np.testing.assert_allclose(y[finite], exact(x[finite])[name], rtol=1e-6, atol=4e-6)
    if name == "logsumexp":
        assert np.isnan(y[1:3]).all() and y[3] == -np.inf
    else:
        assert np.isnan(y[1:4]).all()


def test_gradients_are_those_of_the_portable_backend(small_blocks: None) -> None:
    y, dy = compiled(portable_softmax.softmax)(2 * normal(3, BLOCK + 44)), normal(3, BLOCK + 44, seed=1)
    for name, result in (("softmax_backward", y), ("log_softmax_backward", np.log(y))):
        expected = compiled(getattr(portable_softmax, name))(result, dy)
        np.testing.assert_allclose(interpreted(getattr(softmax, name))(result, dy), expected, atol=1e-5)
    total = exact(y)["logsumexp"].astype(np.float32)
    expected = compiled(portable_softmax.logsumexp_backward)(y, total, dy[:, 0])
    gradient = compiled(softmax.logsumexp_backward)(y, total, dy[:, 0])
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def kernel_text(fn: Callable[..., Any], rows: int) -> str:
    (text,) = kernel_texts(lambda x: fn(x), shape(rows, 2 * BLOCK + 44, dtype="float32"))
    return text


@pytest.mark.parametrize("fn", [softmax.log_softmax, softmax.logsumexp, softmax.row_sums])
def test_the_kernel_is_one_text_for_every_number_of_rows(
    small_blocks: None, monkeypatch: pytest.MonkeyPatch, fn: Callable[..., Any]
) -> None:
    expected = kernel_text(fn, 1)
    for rows in (8, 128, 500, 4096):
        assert kernel_text(fn, rows) == expected
    # A change of bits would show in the text.
    monkeypatch.setattr(softmax, "SOFTMAX_BLOCK", 2 * BLOCK)
    assert kernel_text(fn, 1) != expected


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_float16_is_refused(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{name}: an argument or the result has dtype float16"):
        jax.eval_shape(getattr(softmax, name), shape(8, 64, dtype="float16"))


def test_schedules_are_checked() -> None:
    with pytest.raises(ValueError, match="log_softmax: the schedule has tiles of 9 rows in bfloat16"):
        jax.eval_shape(functools.partial(softmax.log_softmax, schedule=Schedule(9)), shape(8, 64))
